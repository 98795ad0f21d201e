"""As much of Transformer Engine's Adam (2.11) as Megatron and the learner use, computed by PyTorch on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core import optimizer, utils
from megatron.core.optimizer import distrib_optimizer
from packaging.version import Version
from torch import Tensor

from miles_async.adapters.megatron.model import factory

STATES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(torch.optim.Optimizer):
    """It counts steps in the parameter groups, holds the master weights, and stores states with a factor in fp16."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert (adam_w_mode, capturable, store_param_remainders) == (True, False, False)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._dtypes = dict(zip(STATES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        self._master_weights, self._decoupled = master_weights, use_decoupled_grad
        self._scales: dict[Any, dict[str, Tensor]] = {}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in STATES[: 2 + self._master_weights]:
            self._initialize(param, name)
        if self._master_weights:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def _initialize(self, param: Tensor, name: str) -> None:
        self.state[param][name] = torch.zeros(param.shape, dtype=self._dtypes[name])
        if self._dtypes[name] is not torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        state: Tensor = self.state[param][name]
        if state.dtype is torch.float16:
            return state.float() * self._scales[param][name]
        return state.float()

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        if name not in self.state[param]:
            self._initialize(param, name)
        if self._dtypes[name] is torch.float16:
            scale = self._scales[param][name]
            torch.div(value.abs().max(), torch.finfo(torch.float16).max / 2, out=scale[0])
            value = value * torch.where(scale > 0, 1 / scale, 0.0)
        self.state[param][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for number, param in self._numbered(found):
            found["state"][number] = {name: self.get_unscaled_state(param, name) for name in self.state[param]}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, param in self._numbered(state_dict):
            self.state[param] = {}
            for name, value in state_dict["state"][number].items():
                self.set_scaled_state(param, name, value.float())

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[int, Tensor]]:
        numbers = chain.from_iterable(group["params"] for group in deepcopy(state_dict["param_groups"]))
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return [(n, param) for n, param in zip(numbers, params, strict=True) if n in state_dict["state"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                self._update(group, param)

    def _update(self, group: dict[str, Any], param: Tensor) -> None:
        (first, second), eps, step = group["betas"], group["eps"], group["step"]
        gradient = (param.decoupled_grad if self._decoupled else param.grad).float()  # type: ignore[attr-defined, union-attr]
        states = {name: self.get_unscaled_state(param, name) for name in self.state[param]}
        master = states.get("master_param", param)
        states["exp_avg"].lerp_(gradient, 1 - first)
        states["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (states["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(eps)
        master.mul_(1 - group["lr"] * group["weight_decay"])
        master.addcdiv_(states["exp_avg"], root, value=-group["lr"] / (1 - first**step))
        param.copy_(master)
        for name, value in states.items():
            self.set_scaled_state(param, name, value)


@contextmanager
def transformer_engines_adam() -> Iterator[None]:
    """Within the context, Megatron and the learner find `FusedAdam` where Transformer Engine's is on GPUs."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = [ModuleType(name) for name in names]
    modules[-1].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in zip(names, modules, strict=True):
            patch.setitem(sys.modules, name, module)
        for module in (optimizer, distrib_optimizer):
            patch.setattr(module, "Adam", FusedAdam)
        patch.setattr(utils, "_te_version", Version("2.11"))
        patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
        patch.setattr(factory, "HAVE_TE", True)
        patch.setattr(factory, "on_cpu", lambda: False)
        yield
