"""What the learner uses of Megatron-Bridge. Only `bridge_source` imports this module, after `local_te.install`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.bridge import AutoBridge as AutoBridge
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask as WeightConversionTask
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global as global_name  # noqa: F401
from megatron.bridge.models.conversion.utils import extract_sort_key as sort_key  # noqa: F401
from megatron.bridge.models.conversion.utils import get_module_and_param_from_name as module_and_parameter  # noqa: F401
from megatron.bridge.models.conversion.utils import persistent_buffers as persistent_buffers
from megatron.bridge.models.gemma.gemma2_provider import Gemma2DotProductAttention as Gemma2DotProductAttention
from megatron.bridge.models.hf_pretrained.state import StateDict as StateDict
from megatron.bridge.models.hf_pretrained.state import StateSource
from torch import Tensor

from miles_async.adapters.megatron.model import glm_bridge  # noqa: F401 # registers conversions


class CheckpointTensors(StateSource):  # type: ignore[misc]
    """The tensors of a checkpoint for the bridge; remembers which it has read.

    Exports ask for names and shapes when the files are closed, and get tensors without contents.
    """

    def __init__(self, files: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """`files` are the open safetensors files by the name of each tensor.

        `names` are the names of tensors that the bridge sees, each with the name in the files.
        """
        self.tensors = {
            name: torch.empty(files[held].get_slice(held).get_shape(), device="meta")
            for name, held in sorted(names.items())
        }
        self._names = names
        self.read: set[str] = set()
        self._files: Mapping[str, Any] | None = files

    def get_all_keys(self) -> Mapping[str, Tensor]:
        """The names; the bridge looks each of them up, which takes too long in a list."""
        return self.tensors

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        if self._files is None:
            return {name: self.tensors[name] for name in keys}
        self.read.update(keys)
        held = {name: self._names[name] for name in keys}
        return {name: self._files[held[name]].get_tensor(held[name]) for name in keys}

    def close(self) -> None:
        """Give shapes in place of contents from now on."""
        self._files = None
