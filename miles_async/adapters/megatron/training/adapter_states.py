"""The adapters of a run that trains several: the model holds one of them, and main memory the others.

All of them have the same shapes, so an adapter is exchanged in place: its parameters, the optimizer's copies and
moments, and the number of its steps. Each rank exchanges what it holds, so this works in every parallel layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from miles_async.adapters.megatron.checkpoint.training_state import create_moments
from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import TrainedModel
from miles_async.adapters.megatron.model.host_memory import HostMemory, copy_tensors
from miles_async.adapters.megatron.training.optimizer import (
    contents,
    distinct_storages,
    model_tensors,
    set_step_counts,
    step_counts,
)


class AdapterStates:
    """Exchanges the adapter that the model holds. All ranks must call the same methods in the same order."""

    def __init__(self, model: TrainedModel, names: Sequence[str]) -> None:
        """All adapters begin as the one that the model holds."""
        self._model = model
        self._names = list(names)
        self.selected = self._names[0]
        """Name of the adapter that the model holds."""
        self.checkpoint_memory = {name: HostMemory() for name in self._names}
        """For the copy of each adapter that is written as a checkpoint while training goes on."""
        self._kept: dict[str, _State] = {}
        if len(self._names) > 1:
            # Optimizers create their state in their first step, and it could not be exchanged before.
            with redirect_cuda_to_cpu():
                create_moments(model)
            self._kept = {name: _State(model) for name in self._names}

    def __iter__(self) -> Any:
        """Select one adapter after the other, and yield its name."""
        for name in self._names:
            self.select(name)
            yield name

    @property
    def steps_taken(self) -> int:
        """The optimizer steps of all adapters together."""
        others = (state.steps_taken for name, state in self._kept.items() if name != self.selected)
        return self._model.steps_taken + sum(others)

    def select(self, name: str) -> None:
        """Let the model hold another adapter. Raises KeyError if the run has no adapter of this name."""
        if name == self.selected:
            return
        target = self._kept[name]
        self._kept[self.selected].take(self._model)
        target.restore(self._model)
        self.selected = name


class _State:
    """The state of one adapter, in main memory."""

    def __init__(self, model: TrainedModel) -> None:
        self._memory = HostMemory()
        self.take(model)

    def take(self, model: TrainedModel) -> None:
        """Copy the state from the model."""
        self._copies = self._memory.copy(_storages(model))
        self.steps_taken = model.steps_taken
        self._counts = step_counts(model)

    @torch.no_grad()
    def restore(self, model: TrainedModel) -> None:
        """Copy the state into the model."""
        copy_tensors(zip(_storages(model), self._copies, strict=True))
        model.steps_taken = self.steps_taken
        set_step_counts(model, self._counts)


def _storages(model: TrainedModel) -> list[torch.Tensor]:
    """The bytes of all that is trained. They are listed each time, because loading a checkpoint replaces tensors."""
    return list(map(contents, distinct_storages(model_tensors(model, frozen=False)).values()))
