"""The command line is a promise to scripts that use it: a changed flag shows up as a changed cli_surface.txt."""

from pathlib import Path

from miles_async.config.cli import help_text
from miles_async.config.fields import SECTIONS, SETTINGS

SURFACE = Path(__file__).with_name("cli_surface.txt")

# As the seeds and the issue write them.
SEED_FLAGS = """
--rollout-function-path --rollout-batch-size --sglang-server-concurrency --global-batch-size --num-steps-per-rollout
--max-weight-staleness --over-sampling-batch-size --windowed-fifo-ratio --n-samples-per-prompt
--rollout-max-response-len --hf-checkpoint --prompt-data --input-key --label-key --num-rollout --weight-transfer
--dynamic-sampling-filter-path --rollout-temperature --tensor-model-parallel-size --sequence-parallel
--rollout-num-gpus-per-engine --actor-num-nodes --actor-num-gpus-per-node --eps-clip --eps-clip-high --lr
--advantage-estimator --max-tokens-per-gpu --log-format --rm-type
""".split()


def surface():
    lines = []
    for setting in SETTINGS.values():
        kinds = setting.choices or sorted(kind.__name__ for kind in setting.kinds)
        lines.append(f"{setting.flag} {'|'.join(kinds)} = {setting.default}")
    return lines


def test_the_flags_and_their_defaults_are_the_promised_ones():
    promised = SURFACE.read_text().splitlines()
    assert surface() == promised, f"if the change is meant: python {__file__} > {SURFACE}"


def test_the_flags_of_the_seeds_exist():
    assert [flag for flag in SEED_FLAGS if flag not in {setting.flag for setting in SETTINGS.values()}] == []


def test_the_help_lists_every_flag_once_under_its_section():
    lines = help_text("train_async.py").splitlines()
    for section in SECTIONS:
        assert f"{section}:" in lines
    for setting in SETTINGS.values():
        flag = f"--[no-]{setting.flag[2:]}" if bool in setting.kinds else setting.flag
        assert sum(line.split()[:1] == [flag] for line in lines) == 1, flag


def test_the_help_gives_choices_and_defaults():
    text = " ".join(help_text("train.py").split())
    assert "--weight-transfer auto|memory|p2p|broadcast|disk|disk_delta How weights reach the engines" in text
    assert "(default 1000)" in text
    assert "usage: python train.py" in text


if __name__ == "__main__":
    print("\n".join(surface()))
