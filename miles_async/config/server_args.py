"""The argument names of SGLang's server and of sglang-router, so that a misspelt flag is reported before a run starts.

The names are read from the source text because importing SGLang takes ten seconds. SGLang and the router check the
values themselves when they start.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_async.config.fields import nearest
from miles_async.config.guest_flags import shown

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

_ROUTER_SET_BY_THE_RUN = {
    "policy": "set sglang_router_policy",
    "request_timeout_secs": "set sglang_router_request_timeout_secs",
    "api_key": "the run makes a random key",
    "host": "the router listens on the loopback address",
    "port": "the run picks free ports",
    "prometheus_host": "the router listens on the loopback address",
    "prometheus_port": "the run picks free ports",
    "worker_urls": "the run adds its engines",
    "cors_allowed_origins": "no web page may read the answers",
    "disable_retries": "the run itself tries groups again, set max_attempts",
    "disable_circuit_breaker": "the run itself takes engines out of service",
}
"""Arguments of the router that users cannot set, each with an explanation or the setting to use instead."""
_ROUTER_BALANCING = (
    "cache_threshold",
    "balance_",
    "eviction_",
    "max_tree_size",
    "max_idle_secs",
    "max_payload_size",
    "max_concurrent_requests",
    "queue_",
    "rate_limit_",
    "health_",
    "worker_startup_",
    "shutdown_grace_period_secs",
    "request_id_headers",
    "log_",
    "prometheus_duration_buckets",
)
"""Beginnings of the arguments that fit a router in front of the engines of a run."""

_RENAMED = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}
"""Names of arguments in older versions of SGLang."""

# SGLang declares arguments as annotated dataclass fields; their aliases appear only as quoted flags.
_DATACLASS_FIELD = re.compile(r"^    ([a-z]\w*): A\[", re.MULTILINE)
_ROUTER_FIELD = re.compile(r"^    ([a-z]\w*): ", re.MULTILINE)
_QUOTED_FLAG = re.compile(r"\"--([a-z][\w-]*)\"")


def current_name(argument: str) -> str:
    """The name of an SGLang argument in the installed version."""
    return argument if argument in known_arguments() else _RENAMED.get(argument, argument)


def invalid_arguments(arguments: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each argument that SGLang does not have or that users cannot set."""
    for argument, value in arguments.items():
        flag = _flag("sglang", argument)
        if argument == "config":
            yield (
                f"{flag} would pass arguments that the run does not check, or describe engines of several kinds, but "
                "the engines of a run are alike: write the arguments of all engines into sglang_server_args"
            )
        elif isinstance(value, str) and value.lower() in ("yes", "no"):
            yield f"{flag} {value} is a text, not a switch: write true or false"
        elif problem := _set_or_unknown(argument, _SET_BY_THE_RUN, known_arguments(), "SGLang's server"):
            yield f"{flag}{problem}"
        elif argument in _PARSERS and (known := known_parsers(argument)) and value not in (None, *known):
            yield f"{flag} {value} is unknown: set it to one of {', '.join(sorted(known))}{nearest(str(value), known)}"


def invalid_router_arguments(arguments: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each argument that sglang-router does not have or that users cannot set."""
    for argument in arguments:
        if problem := _set_or_unknown(argument, _ROUTER_SET_BY_THE_RUN, known_router_arguments(), "sglang-router"):
            # Both prefixes work, but --sglang-router-policy is a flag of the run itself.
            yield f"{_flag('router', argument)}{problem}"
        elif not argument.startswith(_ROUTER_BALANCING):
            yield (
                f"{_flag('sglang-router', argument)} does not fit the router that the run starts: start a router of "
                "your own, and set sglang_router_ip and sglang_router_port to its address"
            )


def _flag(program: str, argument: str) -> str:
    """The flag that passes an argument to a program."""
    return shown(f"{program}_{argument}")


def _set_or_unknown(
    argument: str, set_by_the_run: Mapping[str, str], known: frozenset[str], program: str
) -> str | None:
    """The rest of a sentence that begins with the flag; None if users may set the argument. No `known` means all."""
    if argument in set_by_the_run:
        return f" is set by the run itself: {set_by_the_run[argument]}"
    if known and argument not in known:
        return f": {program} has no such argument{nearest(argument, sorted(known))}"
    return None


@cache
def known_router_arguments() -> frozenset[str]:
    """The argument names of sglang-router, with underscores; empty if sglang-router is not installed."""
    folder = _package("sglang_router")
    return frozenset() if folder is None else frozenset(_ROUTER_FIELD.findall((folder / "router_args.py").read_text()))


@cache
def known_arguments() -> frozenset[str]:
    """The argument names of the SGLang server, with underscores; empty if SGLang is not installed."""
    folder = _package("sglang")
    if folder is None:
        return frozenset()
    source = folder / "srt"
    files = [source / "server_args.py", *sorted(source.glob("arg_groups/fields/*.py"))]
    text = "".join(file.read_text() for file in files if file.is_file())
    return frozenset(_DATACLASS_FIELD.findall(text)) | {flag.replace("-", "_") for flag in _QUOTED_FLAG.findall(text)}


_PARSERS = {
    "tool_call_parser": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("parser/reasoning_parser.py", "DetectorMap"),
}
"""The file of SGLang, and the dictionary in it, with the parsers that a setting can name."""


@cache
def known_parsers(setting: str) -> frozenset[str]:
    """The names of SGLang's parsers for a setting; empty if they cannot be read."""
    file, name = _PARSERS[setting]
    folder = _package("sglang")
    if folder is None or not (path := folder / "srt" / file).is_file():
        return frozenset()
    table = re.search(rf"^    {name}\b[^\n]*\{{(.*?)^    \}}", path.read_text(), re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^        "([^"]+)":', table[1], re.MULTILINE)) if table else frozenset()


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is found without importing the package."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])
