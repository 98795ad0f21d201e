"""Which arguments SGLang's server takes: read from the text of its source, for importing it takes ten seconds.

Values are checked by SGLang itself when the engine starts; a name that it does not have is told at once.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_async.config.fields import nearest

OURS = {
    "model_path": "set hf_checkpoint",
    "model": "set hf_checkpoint",
    "tp_size": "set rollout_num_gpus_per_engine",
    "tensor_parallel_size": "set rollout_num_gpus_per_engine",
    "host": "engines answer where the run can reach them",
    "port": "the run takes free ports",
    "nccl_port": "the run takes free ports",
    "engine_info_bootstrap_port": "the run takes free ports",
    "dist_init_addr": "it follows from the placement",
    "nnodes": "it follows from the placement",
    "node_rank": "it follows from the placement",
    "base_gpu_id": "it follows from the placement",
}
"""Arguments that the run sets itself, and what to do instead."""

_FIELD = re.compile(r"^    ([a-z]\w*): A\[", re.MULTILINE)
_WORD = re.compile(r"\"--([a-z][\w-]*)\"")


def misfits(arguments: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each argument that SGLang does not know or that is not the user's to set."""
    known = known_arguments()
    for name in arguments:
        argument = name.replace("-", "_")
        flag = f"--sglang-{argument.replace('_', '-')}"
        if argument in OURS:
            yield f"{flag} is set by the run itself: {OURS[argument]}"
        elif known and argument not in known:
            yield f"{flag}: SGLang's server has no such argument{nearest(argument, sorted(known))}"


@cache
def known_arguments() -> frozenset[str]:
    """Their names with underscores; none where SGLang is not installed, so that nothing can be said."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    source = Path(found.submodule_search_locations[0]) / "srt"
    files = [source / "server_args.py", *sorted(source.glob("arg_groups/fields/*.py"))]
    text = "".join(file.read_text() for file in files if file.is_file())
    return frozenset(_FIELD.findall(text)) | {word.replace("-", "_") for word in _WORD.findall(text)}
