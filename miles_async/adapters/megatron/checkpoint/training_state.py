"""All that is needed to go on training as if it had never stopped, as a Megatron distributed checkpoint.

Every tensor is stored by its name and its place in the whole, so that a run may go on under another tensor, pipeline or
data-parallel size, and with the optimizer sharded over the data-parallel ranks or not. What is not a tensor is a note:
the steps taken, and the layout, under which alone the random states mean anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from miles_async.adapters.megatron.checkpoint.state_copy import StateCopy, copy_to_host, without_dtensor_warnings
from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel
from miles_async.errors import UserError

_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Moments as tensors of their parameter's shape, whichever optimizer they come from."""
_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")
"""Before a parameter's name: its fp32 value in a sharded optimizer, in one that is not, and where it is the weight."""


def copy_state(model: MegatronModel, folder: Path, steps_taken: int) -> StateCopy:
    """Copy this rank's share of weights, optimizer state and random state aside, to be written into `folder`."""
    with redirect_cuda_to_cpu():
        _make_moments(model)
        modules, optimizer = _state(model, is_loading=False)
        parts = _numbered("model", modules) | _numbered("optimizer", optimizer) | _random_states()
        notes = {"steps_taken": steps_taken, "optimizer_steps": _optimizer_steps(model), "layout": _layout()}
        return copy_to_host(parts, notes, folder)


@torch.no_grad()
def load_state(model: MegatronModel, folder: Path) -> int:
    """Put back what was copied by ranks of any layout; returns the optimizer steps taken so far.

    Raises UserError when the files are missing or broken, or of another model.
    """
    if not (folder / "common.pt").is_file():
        raise UserError(f"{folder} is no Megatron distributed checkpoint: it holds no common.pt; load another one")
    with redirect_cuda_to_cpu(), without_dtensor_warnings():
        try:
            return _load(model, str(folder))
        except _BROKEN as error:
            cause = _cause(error)
            if any(words in cause for words in ("shape mismatch", "not in state dict")):
                raise UserError(
                    f"checkpoint {folder} is of another model: {cause.splitlines()[0][:300]}; "
                    "set the model as it was when the checkpoint was written"
                ) from error
            raise UserError(f"checkpoint {folder} cannot be read: {cause[:300]}; load another one") from error


_BROKEN = (CheckpointException, CheckpointingException, OSError, RuntimeError, KeyError, EOFError, pickle.PickleError)


def _load(model: MegatronModel, folder: str) -> int:
    notes = dist_checkpointing.load_content_metadata(folder)
    _make_moments(model)
    modules, optimizer = _state(model, is_loading=True)
    for chunk, own in zip(model.chunks, _loaded(_unrounded(modules, folder), folder), strict=True):
        chunk.module.load_state_dict(own)
    # Apart from the weights, which may be where an optimizer's own copies of them come from.
    filled = _loaded(_with_masters_of(optimizer, folder), folder)
    chained = model.optimizer.chained_optimizers
    for number, one in enumerate(chained):
        _fill(one, filled if len(chained) == 1 else filled[number], notes["optimizer_steps"])
    _set_optimizer_steps(model, notes["optimizer_steps"])
    if notes["layout"] == _layout():
        _set_random_states(_loaded(_random_states(), folder))
    return int(notes["steps_taken"])


def _fill(optimizer: MegatronOptimizer, state: dict[str, Any], steps: int) -> None:
    if not isinstance(optimizer, DistributedOptimizer):
        _add_steps(state, steps)
        optimizer.load_state_dict(state)
        return
    # It looks for each entry of torch's Adam in what was loaded, but the steps are no part of that.
    for moments in optimizer.optimizer.state.values():
        moments.pop("step", None)
    optimizer.load_parameter_state_from_fully_reshardable(state["param_state"])


def _loaded(state: Any, folder: str) -> Any:
    """`state` with what Megatron shards replaced by this rank's part of what the checkpoint holds."""
    parts = _numbered("", state)
    # Ranks that share weights read them all from the same place, so access is not exclusive.
    loaded = dist_checkpointing.load(parts, folder, validate_access_integrity=False)
    names = iter(parts)

    def whole(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        return loaded[next(names)] if isinstance(value, ShardedBase) else value

    return dict_list_map_outplace(whole, state)


def _state(model: MegatronModel, *, is_loading: bool) -> tuple[list[Any], dict[str, Any]]:
    """Of the chunks, and of the optimizer."""
    chunks = [chunk.module.sharded_state_dict() for chunk in model.chunks]
    optimizer = model.optimizer.sharded_state_dict({"chunks": chunks}, is_loading, metadata=_FORMAT)
    return chunks, optimizer


def _numbered(what: str, state: Any) -> dict[str, ShardedBase]:
    """The parts that Megatron shards, without the structure around them, which differs between optimizers."""
    shards = (value for value in nested_values(state) if isinstance(value, ShardedBase))
    return {f"{what} {number}": shard for number, shard in enumerate(shards)}


def _unrounded(state: Any, folder: str) -> Any:
    """`state` with the keys of the fp32 values of weights that are fp32 here, but were rounded where they came from."""
    stored = dist_checkpointing.load_tensors_metadata(folder)

    def found(shard: Any) -> Any:
        if not (isinstance(shard, ShardedBase) and shard.key in stored and shard.data.dtype is torch.float32):
            return shard
        if stored[shard.key].dtype is torch.float32:
            return shard
        known = [prefix + shard.key for prefix in _MASTERS if prefix + shard.key in stored]
        return replace(shard, key=known[0])

    return dict_list_map_outplace(found, state)


def _with_masters_of(state: Any, folder: str) -> Any:
    """`state` with the keys under which this checkpoint keeps the optimizer's own copies of the parameters."""
    stored = dist_checkpointing.load_tensors_metadata(folder)

    def found(shard: Any) -> Any:
        if not isinstance(shard, ShardedBase):
            return shard
        for prefix in _MASTERS[:2]:
            if shard.key.startswith(prefix):
                name = shard.key.removeprefix(prefix)
                known = [other + name for other in _MASTERS if other + name in stored]
                return replace(shard, key=known[0]) if known else shard
        return shard

    return dict_list_map_outplace(found, state)


def _optimizers(model: MegatronModel) -> Iterator[Any]:
    yield from (chained.optimizer for chained in model.optimizer.chained_optimizers)


def _make_moments(model: MegatronModel) -> None:
    """Adam makes its moments at its first step; zeros are the same, and can be stored and filled."""
    for optimizer in _optimizers(model):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    if isinstance(optimizer, torch.optim.Adam):
                        moments["step"] = torch.tensor(0.0)
                    optimizer.state[parameter] = moments


def _optimizer_steps(model: MegatronModel) -> int:
    """Torch's Adam counts its steps in each parameter's state, fused ones in the group, from their first on.

    A group's number means nothing beside torch's Adam: Megatron leaves an old one there when it loads.
    """
    for optimizer in _optimizers(model):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                counts_itself = isinstance(optimizer, torch.optim.Adam)
                return int(optimizer.state[parameter]["step"] if counts_itself else group.get("step", 0))
    return 0


def _add_steps(state: Any, steps: int) -> None:
    """Torch's Adam loads no state without them; they are one number, and so no part of the sharded state."""
    if not isinstance(state, dict):
        return
    if "state" in state and "param_groups" in state:
        state["state"]["common_step"] = torch.tensor(float(steps))
    for value in state.values():
        _add_steps(value, steps)


def _set_optimizer_steps(model: MegatronModel, steps: int) -> None:
    for optimizer in _optimizers(model):
        for group in optimizer.param_groups:
            if not isinstance(optimizer, torch.optim.Adam):
                group["step"] = steps
                continue
            for parameter in group["params"]:
                optimizer.state[parameter]["step"] = torch.tensor(float(steps))


def _layout() -> list[int]:
    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    ]


def _random_states() -> dict[str, ShardedBase]:
    """Each rank's own, side by side along a first dimension of the ranks."""
    states = {"random.cpu": torch.get_rng_state()}
    if not on_cpu():
        states["random.cuda"] = torch.cuda.get_rng_state()
        for name, state in get_cuda_rng_tracker().get_states().items():
            states[f"random.{name}"] = state
    ranks = (0, dist.get_rank(), dist.get_world_size())
    return {name: ShardedTensor.from_rank_offsets(name, state[None].clone(), ranks) for name, state in states.items()}


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    if not states:
        return
    mine = {name.removeprefix("random."): state[0].cpu() for name, state in states.items()}
    torch.set_rng_state(mine.pop("cpu"))
    if not on_cpu():
        torch.cuda.set_rng_state(mine.pop("cuda"))
        get_cuda_rng_tracker().set_states(mine)


def _cause(error: BaseException) -> str:
    """What went wrong, without the tracebacks that torch wraps around it."""
    if isinstance(error, CheckpointException):
        first = next(iter(error.failures.values()))[0]
        return f"{type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"
