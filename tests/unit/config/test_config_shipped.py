"""Every configuration in configs/ passes its check."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.config.cli import parse_or_exit
from miles_async.config.load import load_config
from miles_async.rollout.contract import flat_args
from tests.configuration import read_yaml

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def gpu_machine(tmp_path: Path) -> list[str]:
    """Flags with a checkpoint and prompts, which the GPU configurations need."""
    checkpoint = tmp_path / "Qwen3-4B"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1", "label": "2"}\n')
    return ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(prompts)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("entry", ["train_async.py", "train.py"])
def test_a_shipped_configuration_passes_its_check(
    path: Path, entry: str, gpu_machine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    brings_data = any(assignment.path == ("data", "reasoning_gym_task") for assignment in read_yaml(path))
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(["--config", str(path), "--check-config", *([] if brings_data else gpu_machine)], entry)
    assert exited.value.code == 0, capsys.readouterr().err


TUTORIAL_FLAGS = """
    --rm-type dapo --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2
    --sequence-parallel --rollout-num-gpus-per-engine 1 --num-rollout 15 --rollout-batch-size 16
    --over-sampling-batch-size 32 --windowed-fifo-ratio 0.3 --n-samples-per-prompt 8 --rollout-max-response-len 8192
    --rollout-temperature 1.0 --global-batch-size 32 --lr 1e-6 --advantage-estimator grpo --kl-coef 0.0 --eps-clip 0.2
    --eps-clip-high 0.28 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.75
    --save checkpoints --save-interval 10 --apply-chat-template --input-key prompt --label-key label
"""


def test_the_flags_of_the_windowed_fifo_tutorial_pass_as_typed(gpu_machine: list[str]) -> None:
    words = [*TUTORIAL_FLAGS.split(), "--apply-chat-template-kwargs", '{"enable_thinking": true}', *gpu_machine]
    config = load_config(words, entry="train.py")
    assert config.steps_per_rollout == 4
    assert config.rollout.reward_key == "score"
    assert config.engine.rollout_num_gpus == 8
    assert [config.checkpoint_due(rollout) for rollout in (8, 9, 14)] == [False, True, True]


def test_the_tutorial_configuration_matches_the_tutorial(gpu_machine: list[str]) -> None:
    path = ROOT / "configs" / "tutorial-windowed-fifo.yaml"
    args = flat_args(load_config(["--config", str(path), *gpu_machine], entry="train_async.py"))
    assert (args.over_sampling_batch_size, args.rollout_batch_size, args.windowed_fifo_ratio) == (32, 16, 0.3)
    assert (args.n_samples_per_prompt, args.global_batch_size, args.num_rollout, args.lr) == (8, 32, 15, 1e-6)
    assert (args.rm_type, args.reward_key, args.rollout_max_response_len) == ("dapo", "score", 8192)
    assert (args.input_key, args.label_key, args.apply_chat_template) == ("prompt", "label", True)
    assert args.apply_chat_template_kwargs == {"enable_thinking": True}
    assert (args.advantage_estimator, args.eps_clip, args.eps_clip_high) == ("grpo", 0.2, 0.28)
    assert (args.use_dynamic_batch_size, args.max_tokens_per_gpu, args.colocate) == (True, 9216, False)
    assert args.rollout_function_path == "miles_async.rollout.windowed_fifo_rollout.generate_rollout"
