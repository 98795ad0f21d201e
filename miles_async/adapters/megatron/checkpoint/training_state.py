"""The complete training state as a Megatron distributed checkpoint: a resumed run continues as if never interrupted.

Tensors are stored by name and position in the whole tensor. A run can therefore resume with another tensor, pipeline or
data-parallel size, and with the optimizer state divided among data-parallel ranks or not. The notes of a checkpoint
hold what is not a tensor: the steps taken, and the parallel layout, without which random states have no meaning.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from miles_async.adapters.megatron.checkpoint.state_copy import StateCopy, copy_to_host, without_dtensor_warnings
from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import TrainedModel
from miles_async.adapters.megatron.model.host_memory import HostMemory
from miles_async.adapters.megatron.model.lora import sharded_adapters
from miles_async.errors import UserError

_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Stores moments as tensors of their parameter's shape, so that every kind of optimizer can load them."""
_GATHER_ON_ONE_RANK = "distrib_optim_fully_reshardable_mem_efficient"
_MASTER_PREFIXES = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""Before a parameter's name, the key of its fp32 master copy: in a distributed optimizer, and in an ordinary one."""
_FP32_PREFIXES = (*_MASTER_PREFIXES, "")
"""Before a parameter's name, all keys that may hold its fp32 value. The weight itself is one if it is fp32."""
_LOADING_ERRORS = (
    CheckpointException,
    CheckpointingException,
    OSError,
    RuntimeError,
    KeyError,
    EOFError,
    pickle.PickleError,
    AttributeError,  # Megatron 0.16 raises it for a checkpoint of Megatron 0.19, which has no common.pt
)


def copy_state(model: TrainedModel, folder: Path, memory: HostMemory) -> StateCopy:
    """Copy this rank's part of weights, optimizer state and random state to `memory`, to be written into `folder`.

    This is a collective operation of all ranks.
    """
    with redirect_cuda_to_cpu():
        create_moments(model)
        modules, optimizer = _sharded_state(model, is_loading=False)
        shards = _flatten_shards("model", modules) | _flatten_shards("optimizer", optimizer) | _random_states()
        notes = {"steps_taken": model.steps_taken, "optimizer_steps": _optimizer_steps(model), "layout": _layout()}
        return copy_to_host(shards, notes, folder, memory)


@torch.no_grad()
def load_state(model: TrainedModel, folder: Path) -> None:
    """Load a state that was saved with any parallel layout.

    Raises UserError if files are missing or broken, or belong to another model.
    """
    if not (folder / "metadata.json").is_file():
        raise UserError(f"{folder} is not a Megatron distributed checkpoint: it has no metadata.json; load another one")
    with redirect_cuda_to_cpu(), without_dtensor_warnings():
        try:
            _load(model, str(folder))
        except _LOADING_ERRORS as error:
            cause = _root_cause(error)
            if any(words in cause for words in ("shape mismatch", "not in state dict")):
                raise UserError(
                    f"checkpoint {folder} belongs to another model: {cause.splitlines()[0][:300]}; "
                    "use the model settings with which the checkpoint was written"
                ) from error
            raise UserError(f"checkpoint {folder} cannot be read: {cause[:300]}; load another one") from error


def _load(model: TrainedModel, folder: str) -> None:
    notes = dist_checkpointing.load_content_metadata(folder)
    create_moments(model)
    modules, optimizer = _sharded_state(model, is_loading=True)
    module_states = _load_shards(_prefer_fp32_values(modules, folder), folder)
    for chunk, state in zip(model.chunks, module_states, strict=True):
        chunk.module.load_state_dict(state, strict=not model.settings.lora_rank)
    # The optimizer is loaded separately from the weights: both may need the same stored tensor, because a master copy
    # may have to come from the key of the weight.
    optimizer_state = _load_shards(_find_master_keys(optimizer, folder), folder)
    chained = model.optimizer.chained_optimizers
    for number, one in enumerate(chained):
        _load_optimizer(
            one, optimizer_state if len(chained) == 1 else optimizer_state[number], notes["optimizer_steps"]
        )
    _set_optimizer_steps(model, notes["optimizer_steps"])
    if notes["layout"] == _layout():
        _set_random_states(_load_shards(_random_states(), folder))
    model.steps_taken = int(notes["steps_taken"])


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], steps: int) -> None:
    if not isinstance(optimizer, DistributedOptimizer):
        if isinstance(optimizer.optimizer, torch.optim.Adam):
            _add_step_counts(state, steps)
        optimizer.load_state_dict(state)
        return
    # It expects every entry of torch's Adam state in the loaded state. Step counts are not part of that;
    # `_set_optimizer_steps` sets them afterwards.
    for moments in optimizer.optimizer.state.values():
        moments.pop("step", None)
    optimizer.load_parameter_state_from_fully_reshardable(state["param_state"])
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        _own_loaded_states(optimizer.optimizer)


def _load_shards(state: Any, folder: str) -> Any:
    """`state` with every Megatron shard replaced by this rank's part of the stored tensor."""
    shards = _flatten_shards("", state)
    # Megatron's check that every part has one reader fails if ranks hold replicas of the same weights.
    loaded = dist_checkpointing.load(shards, folder, validate_access_integrity=False)
    names = iter(shards)

    def load_value(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        return loaded[next(names)] if isinstance(value, ShardedBase) else value

    return dict_list_map_outplace(load_value, state)


def _sharded_state(model: TrainedModel, *, is_loading: bool) -> tuple[list[Any], dict[str, Any]]:
    """Megatron's sharded state dicts of the chunks and of the optimizer."""
    has_adapters = model.settings.lora_rank > 0
    chunks = [sharded_adapters(one.module) if has_adapters else one.module.sharded_state_dict() for one in model.chunks]
    form = _FORMAT | {_GATHER_ON_ONE_RANK: model.settings.distrib_optim_fully_reshardable_mem_efficient}
    optimizer = model.optimizer.sharded_state_dict({"chunks": chunks}, is_loading, metadata=form)
    return chunks, optimizer


def _flatten_shards(name: str, state: Any) -> dict[str, ShardedBase]:
    """Numbered shards of `state` without the structure around them, which differs between kinds of optimizers.

    The numbers are local names. The checkpoint identifies tensors by the shards' own keys.
    """
    shards = (value for value in nested_values(state) if isinstance(value, ShardedBase))
    return {f"{name} {number}": shard for number, shard in enumerate(shards)}


def _map_shards(change: Callable[[ShardedBase], ShardedBase], state: Any) -> Any:
    return dict_list_map_outplace(lambda value: change(value) if isinstance(value, ShardedBase) else value, state)


def _prefer_fp32_values(state: Any, folder: str) -> Any:
    """Let fp32 weights load from the fp32 master copies of a checkpoint that was trained in bf16.

    The stored weights themselves were rounded to bf16.
    """
    stored = dist_checkpointing.load_tensors_metadata(folder)

    def change(shard: Any) -> Any:
        if shard.key not in stored or shard.data.dtype is not torch.float32:
            return shard
        if stored[shard.key].dtype is torch.float32:
            return shard
        return replace(shard, key=next(p + shard.key for p in _FP32_PREFIXES if p + shard.key in stored))

    return _map_shards(change, state)


def _find_master_keys(state: Any, folder: str) -> Any:
    """Let the optimizer's master copies load from the key that this checkpoint uses for them.

    The key depends on the kind of optimizer that saved. If that optimizer kept no copy, because it trained in fp32, the
    master copy loads from the weight.
    """
    stored = dist_checkpointing.load_tensors_metadata(folder)

    def change(shard: Any) -> Any:
        for prefix in _MASTER_PREFIXES:
            if shard.key.startswith(prefix):
                name = shard.key.removeprefix(prefix)
                keys = [other + name for other in _FP32_PREFIXES if other + name in stored]
                return replace(shard, key=keys[0]) if keys else shard
        return shard

    return _map_shards(change, state)


def create_moments(model: TrainedModel) -> None:
    """Create the optimizer's state as in its first step, with moments of zero, so that it can be saved or loaded."""
    for optimizer in model.inner_optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    _create_state(model, optimizer, group, parameter)
    for offloaded in _divided_optimizers(model):
        offloaded._sync_sub_optimizers_state_to_hdo()


def _create_state(model: TrainedModel, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> None:
    if model.settings.has_adam_of_transformer_engine:
        optimizer.initialize_state(parameter, store_param_remainders=False)
        return
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    if isinstance(optimizer, torch.optim.Adam):
        moments["step"] = _step_count(0, group, parameter)
    optimizer.state[parameter] = moments


def _step_count(steps: int, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """What torch's Adam counts its steps in, which a fused one expects on the device of the parameter."""
    return torch.tensor(float(steps), device=parameter.device if group["fused"] else "cpu")


def _divided_optimizers(model: TrainedModel) -> list[HybridDeviceOptimizer]:
    """The optimizers whose state is divided between main memory and the GPU."""
    found = (chained.optimizer for chained in model.optimizer.chained_optimizers)
    return [optimizer for optimizer in found if isinstance(optimizer, HybridDeviceOptimizer)]


def _optimizer_steps(model: TrainedModel) -> int:
    """Number of steps that Adam has taken, by which it corrects the bias of its moments.

    torch's Adam counts in the state of each parameter; fused ones count in the parameter group after their first step.
    The group's number must not be read for torch's Adam: Megatron leaves an outdated one there when it loads.
    """
    for optimizer in model.inner_optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_torch_adam = isinstance(optimizer, torch.optim.Adam)
                return int(optimizer.state[parameter]["step"] if is_torch_adam else group.get("step", 0))
    return 0


def _add_step_counts(state: Any, steps: int) -> None:
    """Add the step count that torch's Adam expects. It is one number, so it is not a sharded tensor."""
    if not isinstance(state, dict):
        return
    if "state" in state and "param_groups" in state:
        state["state"]["common_step"] = torch.tensor(float(steps))
    for value in state.values():
        _add_step_counts(value, steps)


def _set_optimizer_steps(model: TrainedModel, steps: int) -> None:
    for optimizer in model.inner_optimizers:
        for group in optimizer.param_groups:
            if not isinstance(optimizer, torch.optim.Adam):
                group["step"] = steps
                continue
            for parameter in group["params"]:
                optimizer.state[parameter]["step"] = _step_count(steps, group, parameter)


def _own_loaded_states(optimizer: HybridDeviceOptimizer) -> None:
    """Copy what Megatron has loaded into an optimizer that is divided between main memory and the GPU.

    Megatron refers to parts of the loaded tensors, which are those of all data-parallel ranks. It leaves the number of
    steps in groups from which the optimizer would take it before each step. Without Transformer Engine it also moves
    the states of weights on the GPU to main memory.
    """
    for inner in optimizer.sub_optimizers:
        for parameter, state in inner.state.items():
            names = ("exp_avg", "exp_avg_sq")
            inner.state[parameter] = {name: torch.empty_like(parameter).copy_(state[name]) for name in names}
    for group in optimizer.param_groups:
        group.pop("step", None)
    optimizer._sync_sub_optimizers_state_to_hdo()


def _layout() -> list[int]:
    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    ]


def _random_states() -> dict[str, ShardedBase]:
    """The states of this rank's random generators, as rows of tensors whose first dimension is the rank."""
    states = {"random.cpu": torch.get_rng_state()}
    if not on_cpu():
        states["random.cuda"] = torch.cuda.get_rng_state()
        for name, state in get_cuda_rng_tracker().get_states().items():
            states[f"random.{name}"] = state
    row = (0, dist.get_rank(), dist.get_world_size())
    return {name: ShardedTensor.from_rank_offsets(name, state[None].clone(), row) for name, state in states.items()}


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    if not states:
        return
    rank_states = {name.removeprefix("random."): state[0].cpu() for name, state in states.items()}
    torch.set_rng_state(rank_states.pop("cpu"))
    if not on_cpu():
        torch.cuda.set_rng_state(rank_states.pop("cuda"))
        get_cuda_rng_tracker().set_states(rank_states)


def _root_cause(error: BaseException) -> str:
    """The original error without the tracebacks that torch wraps around it."""
    if isinstance(error, CheckpointException):
        first = next(iter(error.failures.values()))[0]
        return f"{type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"
