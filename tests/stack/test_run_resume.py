"""A run on the real cluster is saved and resumed from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.events import GroupMoved, StepEnded
from tests.stack.conftest import Stack


def test_a_resumed_run_trains_the_remaining_rollouts_and_prompts(stack: Stack, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    sizes = ("--rollout-batch-size", "8", "--over-sampling-batch-size", "12")
    often = ["--save", str(saved), "--save-interval", "2", "--save-keep", "1"]
    often += ["--save-hf", str(tmp_path / "hf-{rollout_id}")]
    stopped = stack.play("train_async.py", *sizes, *often, "--num-rollout", "5")
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "rollout_0000004"], "older ones are removed"
    loaded = CheckpointFolder(saved).latest()
    newest = loaded.folder
    assert {path.name for path in newest.iterdir()} == {"progress.json", "files.json", "actor"}
    owed = {group["feed_index"] for group in read_progress(newest)["owed"]}
    assert owed, "a producer that runs on has prompts under way whenever a checkpoint is written"

    text = list(b"12 + 34 =")
    assert stack.do(logprobs(stack, text)) == pytest.approx(logprobs_of(tmp_path / "hf-4", text), abs=1e-5)
    assert (tmp_path / "hf-1" / "tokenizer_config.json").is_file(), "SGLang wants the tokenizer beside the weights"

    resumed = stack.play("train_async.py", *sizes, "--num-rollout", "9", "--load", str(saved), began_with=loaded)
    assert [event.rollout for event in resumed.of(StepEnded)] == [5, 6, 7, 8]
    assert stopped.violations == resumed.violations == []
    before, after = ({event.feed_index for event in run.of(GroupMoved) if event.after == "published"}
                     for run in (stopped, resumed))  # fmt: skip
    assert len(before) == 5 * 8
    assert not before & after, "no prompt is trained twice"
    assert owed & after, "prompts that were under way are generated again"


async def logprobs(stack: Stack, tokens: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first under the current weights of the learner."""
    [found] = await stack.cluster.handles.learner_ranks[0].logprobs.remote([tokens])
    return found


def logprobs_of(checkpoint: Path, tokens: list[int]) -> list[float]:
    """The same by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        table = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return table.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
