"""All that a rank needs to go on training as if it had never stopped: a safetensors file and a note beside it.

Ranks that hold the same share one file, so where the optimizer is not sharded the number of data-parallel ranks may be
another when a run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles_async.adapters.megatron.model import Model
from miles_async.errors import UserError

_RNG = "random state"


def save_state(model: Model, folder: Path, steps_taken: int) -> None:
    """Write this rank's weights, optimizer state and random state into `folder`, unless another rank holds the same."""
    if parallel_state.get_data_parallel_rank() and not _sharded(model):
        return
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model)}
    tensors[_RNG] = torch.get_rng_state()
    save_file(tensors, folder / f"{_part(model)}.safetensors")
    note = {"layout": _layout(model), "steps_taken": steps_taken, "optimizer_steps": _optimizer_steps(model)}
    (folder / f"{_part(model)}.json").write_text(json.dumps(note))


@torch.no_grad()
def load_state(model: Model, folder: Path) -> int:
    """Put back what `save_state` wrote; returns the optimizer steps taken so far.

    Raises UserError when the files are missing or broken, or of another model or parallel layout.
    """
    try:
        note = json.loads((folder / f"{_part(model)}.json").read_text())
        with safe_open(folder / f"{_part(model)}.safetensors", framework="pt") as file:
            saved: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"checkpoint {folder}, part {_part(model)}: {error}; load another one") from error
    if note["layout"] != _layout(model):
        raise UserError(
            f"checkpoint {folder} was written with {_words(note['layout'])}, this run has {_words(_layout(model))}; "
            "resume with the same layout, or start from its weights by hf_checkpoint"
        )
    _make_optimizer_state(model, saved)
    here = dict(_tensors(model))
    rng = saved.pop(_RNG)
    for name, tensor in here.items():
        if name not in saved or saved[name].shape != tensor.shape:
            found = tuple(saved[name].shape) if name in saved else "missing"
            raise UserError(
                f"checkpoint {folder} is of another model: {name} is {found}, this one's is {tuple(tensor.shape)}; "
                "set the model as it was when the checkpoint was written"
            )
    for name, tensor in here.items():
        tensor.copy_(saved[name])
    torch.set_rng_state(rng)
    for group, step in zip(model.optimizer.param_groups, note["optimizer_steps"], strict=True):
        if step is not None:
            group["step"] = step
    return int(note["steps_taken"])


def _part(model: Model) -> str:
    part = f"tp{parallel_state.get_tensor_model_parallel_rank()}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        part += f"_pp{parallel_state.get_pipeline_model_parallel_rank()}"
    return f"{part}_dp{parallel_state.get_data_parallel_rank()}" if _sharded(model) else part


def _layout(model: Model) -> dict[str, int]:
    shards = parallel_state.get_data_parallel_world_size() if _sharded(model) else 1
    return {"tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(), "optimizer_shards": shards}


def _sharded(model: Model) -> bool:
    return any(isinstance(optimizer, DistributedOptimizer) for optimizer in model.optimizer.chained_optimizers)


def _words(layout: dict[str, int]) -> str:
    return f"{layout['tensor_parallel']} rank(s) per layer and {layout['optimizer_shards']} optimizer shard(s)"


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, by a name that is the same in every run of the same configuration."""
    for i, chunk in enumerate(model.chunks):
        yield from ((f"model.{i}.{name}", tensor) for name, tensor in chunk.module.named_parameters())
        yield from ((f"buffer.{i}.{name}", tensor) for name, tensor in chunk.module.named_buffers())
    in_model = {id(parameter) for chunk in model.chunks for parameter in chunk.module.parameters()}
    for key, parameter in _optimized(model):
        name = ".".join(map(str, key))
        if id(parameter) not in in_model:
            yield f"master.{name}", parameter  # bf16's own copy in fp32
        for entry, value in (model.optimizer.state[key[0], parameter] or {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{name}.{entry}", value


def _optimized(model: Model) -> Iterator[tuple[tuple[int, int, int], Any]]:
    """The optimizer's parameters by (optimizer, group, place)."""
    for i, optimizer in enumerate(model.optimizer.chained_optimizers):
        for g, group in enumerate(optimizer.param_groups):
            yield from (((i, g, p), parameter) for p, parameter in enumerate(group["params"]))


def _make_optimizer_state(model: Model, saved: dict[str, Tensor]) -> None:
    """Adam makes its moments at its first step; before it there is nothing to copy into."""
    for key, parameter in _optimized(model):
        prefix = f"optimizer.{'.'.join(map(str, key))}."
        entries = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        if entries:
            # The step count stays where it was saved from, on the CPU; moments live with their parameter.
            model.optimizer.state[key[0], parameter] = {
                entry: value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
                for entry, value in entries.items()
            }


def _optimizer_steps(model: Model) -> list[int | None]:
    """Fused Adam counts its steps in the group; torch's counts them in each parameter's state."""
    return [group.get("step") for group in model.optimizer.param_groups]
