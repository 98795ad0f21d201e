"""Launch scripts of slime and verl run to their end on a CPU, with nothing changed but paths, sizes and the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.events import StepEnded
from miles_async.observability.trace.event_log import read_events
from tests.launch_scripts.replay import scripts
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SIZES = {
    "--rollout-num-gpus": "1",
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "128",
    "--num-attention-heads": "4",
    "--vocab-size": "320",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "2",
    "--global-batch-size": "8",
    "--rollout-max-response-len": "16",
}
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES_OF_VERL = {
    f"{_ROLLOUT}.name": "sglang",
    "trainer.n_gpus_per_node": "1",
    "rollout.n_gpus_per_node": "1",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "1",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": "1",
    f"{_ROLLOUT}.tensor_model_parallel_size": "1",
    f"{_ROLLOUT}.max_model_len": "512",
    f"{_ROLLOUT}.n": "2",
    f"{_ACTOR}.ppo_mini_batch_size": "4",
    "data.max_prompt_length": "64",
    "data.max_response_length": "16",
    "rollout.total_rollout_steps": "12",
    "reward.reward_kwargs.max_resp_len": "16",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "4",
    "trainer.logger": "[console]",
}


def create_qwen2(folder: Path) -> None:
    """A checkpoint with the shape of `SIZES`."""
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_the_fully_asynchronous_example_of_slime_trains(tmp_path: Path) -> None:
    [script] = [one for one in scripts("slime") if one.name == "fully_async-run-qwen2.5-0.5B-fully_async"]
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "label": str(n + 1)} for n in range(64)]
    words = script.command(tmp_path)
    create_qwen2(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for flag, size in SIZES.items():
        words[words.index(flag) + 1] = size
    steps, said = trained(words, tmp_path / "runs")
    assert len(steps) == 3
    assert all(event.metrics["logprob_gap_max"] < 1e-3 for event in steps)
    assert "unlike slime (its value in parentheses): " in said


def test_the_fully_asynchronous_example_of_verl_trains(tmp_path: Path) -> None:
    [script] = [one for one in scripts("verl") if one.name.endswith("grpo_8b_base_math_megatron_4_4_trtllm")]
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 1 ="}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n},
        }
        for n in range(64)
    ]
    words = script.command(tmp_path, SIZES_OF_VERL)
    create_qwen2(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps, said = trained(["--preset", "verl", *words], tmp_path / "runs")
    assert len(steps) == 3
    assert "unlike slime" not in said


def trained(words: Sequence[str], runs: Path) -> tuple[Sequence[StepEnded], str]:
    """The steps of a run of `train_async.py`, and what it writes to stderr."""
    command = [sys.executable, "train_async.py", *words, "--run-dir", str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    steps = [event for event in read_events(runs / "latest" / "events.jsonl") if isinstance(event, StepEnded)]
    return steps, done.stderr
