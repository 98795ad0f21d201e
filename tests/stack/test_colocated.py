"""Engines and learner that share devices on the real stack. Without CUDA neither has device memory to release."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.gpu_check import job
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import SMALL, Surroundings
from miles_async.events import EngineChanged, Event, PublishEnded, StartupChanged
from miles_async.models.lora import TENSORS, tensor_names


def test_a_colocated_engine_starts_before_the_learner_and_resumes_with_the_right_weights_and_cache(
    tmp_path: Path,
) -> None:
    surroundings = Surroundings(folder=tmp_path, models=tmp_path / "models")
    events = job.play(surroundings, "train.py", *job.COLOCATED, precision="fp32")
    job.judge(Report("job", tmp_path / "job.jsonl"), "run", events, "fp32")
    rows = [json.loads(line)["row"] for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    assert {row["part"]: row["status"] for row in rows} == {
        "run: optimizer steps": "pass",
        "run: engine against learner": "pass",
        "run: longest pause of a publish": "pass",
    }
    starts = [event for event in events if isinstance(event, StartupChanged) and event.part in ("engine-0", "learner")]
    assert [(event.part, event.seconds is None) for event in starts] == [
        ("engine-0", True),
        ("engine-0", False),
        ("learner", True),
        ("learner", False),
    ]
    require_one_engine_to_the_end(events)


def test_a_colocated_run_trains_and_publishes_an_adapter(tmp_path: Path) -> None:
    surroundings = Surroundings(folder=tmp_path, models=tmp_path / "models")
    flags = (*job.COLOCATED_ADAPTER, "--save-hf", str(tmp_path / "adapter"))
    events = job.play(surroundings, "train.py", *flags, precision="fp32")
    job.judge(Report("job", tmp_path / "job.jsonl"), "run", events, "fp32")
    rows = [json.loads(line)["row"] for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    assert {row["part"]: row["status"] for row in rows}["run: engine against learner"] == "pass"
    publishes = [event for event in events if isinstance(event, PublishEnded)]
    assert [(event.version, event.live, event.paused_seconds) for event in publishes] == [
        (version, True, 0.0) for version in range(job.STEPS + 1)
    ]
    size = (tmp_path / "adapter" / TENSORS).stat().st_size
    first, *others = [event.bytes for event in publishes]
    assert first == 0, "the first version was loaded when the engine was connected"
    assert all(0 < loaded <= size for loaded in others), "each publish loads one adapter"
    require_one_engine_to_the_end(events)
    base = surroundings.checkpoint(SMALL)
    assert moved(base, tmp_path / "adapter") > 100 * job.GAP_LIMIT["fp32"], "an engine without it would be noticed"


def require_one_engine_to_the_end(events: Sequence[Event]) -> None:
    """SGLang ends if it is asked to release memory that it has not allocated, or the other way round."""
    changes = [event for event in events if isinstance(event, EngineChanged)]
    assert [event.state for event in changes] == ["routed"], "no engine was lost on the way"


@torch.no_grad()
def moved(base: Path, adapter: Path) -> float:
    """The largest difference in nats that an adapter of scale 1 makes in the log-probabilities of some tokens."""
    model, tensors = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), load_file(adapter / TENSORS)
    tokens = torch.arange(33, 97)
    before = model(tokens[None]).logits.log_softmax(-1)
    for name, weight in model.named_parameters():
        of_a, of_b = tensor_names(name.removesuffix(".weight"))
        if of_a in tensors:
            weight.add_(tensors[of_b] @ tensors[of_a])
    return float((model(tokens[None]).logits.log_softmax(-1) - before).abs().max())
