"""The memory plan of the settings must agree with Megatron's modules, at the sizes of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.models.plugin import MODELS as PLUGINS
from tests.configuration import KEY_FLAGS
from tests.plan_agreement import differences_of_plans
from tests.planned_models import MODELS, PLANNED, checkpoint
from workers.memory_plan import main


@pytest.mark.parametrize("name", [name for name in PLANNED if PLUGINS.has(MODELS[name]["model_type"])])
def test_settings_and_modules_give_the_same_plan(name: str, tmp_path: Path) -> None:
    differences = differences_of_plans(name, tmp_path)
    assert differences == pytest.approx(PLANNED[name].differences, abs=0.06)
    assert max(map(abs, differences)) < 3


def test_make_plan_prints_the_plan_of_the_settings_and_that_of_the_modules(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    flags = ["--hf-checkpoint", checkpoint("Qwen3-0.6B", tmp_path), "--gpu-memory-gib", "80", "--rm-type", "math"]
    flags += ["--prompt-data", str(tmp_path / "prompts.jsonl"), *KEY_FLAGS, "--n-samples-per-prompt", "8"]
    assert main([*flags, "--transformer-impl", "local"]) == 0
    from_settings, from_modules = capfd.readouterr().out.split("with the weights and activations of Megatron's modules")
    for plan in (from_settings, from_modules):
        assert "weights        1.1 GiB  bf16" in plan
