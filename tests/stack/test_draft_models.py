"""Engines with a draft model answer for the weights of the model that is published."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from miles_async.adapters.sglang.engine_weights import find_own_draft, leave_out_draft, watch_loader


class Runner:
    """A model runner of SGLang, which notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check_weights(self, action: str, **_: Any) -> dict[str, Any]:
        self.asked.append(action)
        info = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)
        info |= dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        return {"checksums": {}, "per_gpu_checksum": "", "parallelism_info": info}


def test_a_draft_model_is_not_asked_for_parameters_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = Runner(), Runner()
    manager = SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=target),
        draft_worker=SimpleNamespace(draft_model_runner=draft),
        tp_cpu_group=None,
        memory_saver_adapter=None,
        flush_cache=lambda: True,
        is_fully_idle=lambda: True,
    )
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    request = SimpleNamespace(action="miles_async.sums:[]", allow_quant_error=False)
    manager.check_weights(request)
    assert draft.asked, "without the hook"
    asked = len(draft.asked)
    monkeypatch.setattr(weight_updater, "_get_draft_model_runner", leave_out_draft)
    answer = manager.check_weights(request)
    assert answer.success
    assert len(draft.asked) == asked
    assert len(target.asked) == 2
    assert inspect.getsource(weight_updater).count("_get_draft_model_runner(") == 2, "nothing else uses it"


class Loader(torch.nn.Module):
    """A model that notes the tensors that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def load_weights(self, weights: Any) -> None:
        self.loaded += [name for name, _ in weights]


def manager_of(target: Loader, draft: Loader | None, *, draft_path: str = "model") -> Any:
    def runner(model: Loader, path: str) -> Any:
        config = SimpleNamespace(model_path=path, hf_text_config=SimpleNamespace(num_hidden_layers=2))
        return SimpleNamespace(model=model, model_config=config)

    inner = None if draft is None else SimpleNamespace(draft_runner=runner(draft, draft_path))
    worker = None if inner is None else SimpleNamespace(_draft_worker=inner)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner(target, "model")), draft_worker=worker)


OF_MODEL = ["model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"]
OF_HEADS = ["model.layers.2.eh_proj.weight", "mtp.fc.weight"]


def publish(manager: Any, model: Loader) -> None:
    find_own_draft(lambda _, __: watch_loader(model, whole=True), manager, None)
    model.load_weights([(name, torch.zeros(1)) for name in [*OF_MODEL, *OF_HEADS]])


def test_a_draft_model_of_the_models_own_heads_gets_their_tensors() -> None:
    target, draft = Loader(), Loader()
    publish(manager_of(target, draft), target)
    assert target.loaded == [*OF_MODEL, *OF_HEADS]
    assert draft.loaded == OF_HEADS


def test_another_draft_model_keeps_its_weights() -> None:
    target, draft = Loader(), Loader()
    publish(manager_of(target, draft, draft_path="another"), target)
    assert target.loaded == [*OF_MODEL, *OF_HEADS]
    assert draft.loaded == []


def test_a_model_without_a_draft_model_loads_as_before() -> None:
    target = Loader()
    publish(manager_of(target, None), target)
    assert target.loaded == [*OF_MODEL, *OF_HEADS]
