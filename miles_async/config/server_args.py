"""The argument names of the SGLang server, so that a misspelt `--sglang-…` flag is reported before anything starts.

The names are read from SGLang's source text because importing SGLang takes ten seconds. SGLang itself checks the values
when an engine starts.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_async.config.fields import nearest

_SET_BY_THE_RUN = {
    "model_path": "set hf_checkpoint",
    "model": "set hf_checkpoint",
    "tp_size": "set rollout_num_gpus_per_engine",
    "tensor_parallel_size": "set rollout_num_gpus_per_engine",
    "host": "the run chooses the address",
    "port": "the run picks free ports",
    "nccl_port": "the run picks free ports",
    "engine_info_bootstrap_port": "the run picks free ports",
    "dist_init_addr": "the run derives it from the placement of the engines",
    "nnodes": "the run derives it from the placement of the engines",
    "node_rank": "the run derives it from the placement of the engines",
    "api_key": "the run makes a random key",
    "admin_api_key": "the run makes a random key",
    "tokenizer_worker_num": "SGLang checks keys only with one tokenizer process",
    "grpc_port": "SGLang checks no keys on this port",
    "grpc_mode": "SGLang checks no keys in this mode",
    "smg_grpc_mode": "SGLang checks no keys in this mode",
    "base_gpu_id": "the run derives it from the placement of the engines",
}
"""Arguments that users cannot set, each with an explanation or the setting to use instead."""

# SGLang declares arguments as annotated dataclass fields; their aliases appear only as quoted flags.
_DATACLASS_FIELD = re.compile(r"^    ([a-z]\w*): A\[", re.MULTILINE)
_QUOTED_FLAG = re.compile(r"\"--([a-z][\w-]*)\"")


def invalid_arguments(arguments: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each argument that SGLang does not have or that users cannot set."""
    known = known_arguments()
    for name in arguments:
        argument = name.replace("-", "_")
        flag = f"--sglang-{argument.replace('_', '-')}"
        if argument in _SET_BY_THE_RUN:
            yield f"{flag} is set by the run itself: {_SET_BY_THE_RUN[argument]}"
        elif known and argument not in known:
            yield f"{flag}: SGLang's server has no such argument{nearest(argument, sorted(known))}"


@cache
def known_arguments() -> frozenset[str]:
    """The argument names of the SGLang server, with underscores; empty if SGLang is not installed."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    source = Path(found.submodule_search_locations[0]) / "srt"
    files = [source / "server_args.py", *sorted(source.glob("arg_groups/fields/*.py"))]
    text = "".join(file.read_text() for file in files if file.is_file())
    return frozenset(_DATACLASS_FIELD.findall(text)) | {flag.replace("-", "_") for flag in _QUOTED_FLAG.findall(text)}
