"""Arguments of SGLang about adapters, in a run that trains one (`lora_rank`) and therefore sets most of them itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_async.config.generation import adapter_versions_of
from miles_async.config.guest_flags import shown
from miles_async.config.model_shape import adapted_modules
from miles_async.config.schema import RunConfig
from miles_async.models.lora_layers import engine_modules

_SET_BY_THE_RUN = ("enable_lora", "max_lora_rank", "lora_target_modules", "max_loras_per_batch", "max_loaded_loras")
_PASSED_ON = (
    *("lora_backend", "max_lora_chunk_size", "lora_eviction_policy", "lora_drain_wait_threshold"),
    *("lora_strict_loading", "lora_use_virtual_experts"),
)
"""They choose how engines compute adapters, or what they do when adapters exceed their number, which never happens."""


def needed_room(config: RunConfig) -> Mapping[str, int]:
    """The least values of arguments with which engines have room for the adapters of a run that trains some."""
    versions = adapter_versions_of(config)
    if versions is None:
        return {}
    # SGLang counts the model without an adapter too.
    most = versions.capacity + 1
    return {"max_lora_rank": config.learner.lora_rank, "max_loras_per_batch": most, "max_loaded_loras": most}


def fits_adapter(config: RunConfig, argument: str, value: Any) -> bool:
    """Whether this value of an argument leaves engines enough room for the adapter that the run trains."""
    needed = needed_room(config)
    if not needed:
        return False
    if argument in ("enable_lora", *_PASSED_ON) or (argument in _SET_BY_THE_RUN and value is None):
        return True
    if argument in needed:
        return isinstance(value, int) and value >= needed[argument]
    modules = [value] if isinstance(value, str) else value
    if argument != "lora_target_modules" or not isinstance(modules, list):
        return False
    return "all" in modules or {*engine_modules(adapted_modules(config.learner, config.model))} <= {*map(str, modules)}


def arguments_of_engines(config: RunConfig) -> Mapping[str, Any]:
    """The arguments of users that engines get: the run's own values take the place of fitting ones."""
    given = config.engine.sglang_server_args
    return {name: given[name] for name in given if not (name in _SET_BY_THE_RUN and _fits(config, name))}


def adapter_notes(config: RunConfig) -> Iterator[str]:
    """One sentence for the arguments that have no effect, and one for those that are passed on."""
    fitting = [name for name in config.engine.sglang_server_args if _fits(config, name)]
    if idle := _flags(name for name in fitting if name in _SET_BY_THE_RUN):
        yield f"a run with lora_rank sets {idle} itself, and your values leave room for its own: they have no effect"
    if passed := _flags(name for name in fitting if name in _PASSED_ON):
        yield f"{passed}: engines on GPUs get this; engines on CPUs use lora_backend torch_native"


def _fits(config: RunConfig, name: str) -> bool:
    return fits_adapter(config, name, config.engine.sglang_server_args[name])


def _flags(names: Iterator[str]) -> str:
    return " ".join(shown(f"sglang_{name}") for name in names)
