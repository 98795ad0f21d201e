"""Engines with a draft model answer for the weights of the model that is published."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from miles_async.adapters.sglang.engine_weights import leave_out_draft


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
