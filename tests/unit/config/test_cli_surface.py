"""The command line is a public interface: any change of a flag or a default must also change cli_surface.txt."""

from __future__ import annotations

from pathlib import Path

from miles_async.config.cli import help_text
from miles_async.config.fields import SECTIONS, SETTINGS

SURFACE = Path(__file__).with_name("cli_surface.txt")

# As the documentation of slime and Miles spells them.
DOCUMENTED_FLAGS = """
--rollout-function-path --rollout-batch-size --sglang-server-concurrency --global-batch-size --num-steps-per-rollout
--max-weight-staleness --over-sampling-batch-size --windowed-fifo-ratio --n-samples-per-prompt
--rollout-max-response-len --hf-checkpoint --prompt-data --input-key --label-key --num-rollout --weight-transfer
--dynamic-sampling-filter-path --rollout-temperature --tensor-model-parallel-size --sequence-parallel
--rollout-num-gpus-per-engine --actor-num-nodes --actor-num-gpus-per-node --eps-clip --eps-clip-high --lr
--advantage-estimator --max-tokens-per-gpu --log-format --rm-type
""".split()


def surface() -> list[str]:
    lines = []
    for setting in SETTINGS.values():
        kinds = setting.choices or sorted(kind.__name__ for kind in setting.kinds)
        lines.append(f"{setting.flag} {'|'.join(kinds)} = {setting.default}")
    return lines


def test_flags_types_and_defaults_are_unchanged() -> None:
    documented = SURFACE.read_text().splitlines()
    assert surface() == documented, f"if the change is intended, run: python {__file__} > {SURFACE}"


def test_the_flags_that_slime_and_miles_document_exist() -> None:
    assert [flag for flag in DOCUMENTED_FLAGS if flag not in {setting.flag for setting in SETTINGS.values()}] == []


def test_the_help_lists_every_flag_once_under_its_section() -> None:
    lines = help_text("python train_async.py").splitlines()
    for section in SECTIONS:
        assert f"{section}:" in lines
    for setting in SETTINGS.values():
        flag = f"--[no-]{setting.flag[2:]}" if bool in setting.kinds else setting.flag
        assert sum(line.split()[:1] == [flag] for line in lines) == 1, flag


def test_the_help_gives_choices_and_defaults() -> None:
    text = " ".join(help_text("miles-async train").split())
    assert "--weight-transfer auto|broadcast|disk|disk_delta|ipc|memory|p2p How weights reach the engines" in text
    assert "(default 1000)" in text
    assert "usage: miles-async train" in text


if __name__ == "__main__":
    print("\n".join(surface()))
