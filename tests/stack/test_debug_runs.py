"""One half of a run at a time on the real stack: generate and save batches, then train on them.

`tests/stack/test_pages.py` inspects such batches with the commands of `docs/how-to/debug-rewards.md`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_async.adapters.storage.rollout_file import load_groups
from miles_async.types import SampleStatus
from tests.stack.job import job
from tests.waiting import START_SECONDS

SMALL = (
    *("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "2", "--learner-threads", "1"),
    *("--rollout-batch-size", "4", "--over-sampling-batch-size", "8", "--lr", "1e-3"),
    *("--rm-type", "null", "--custom-rm-path", "tests.stack.user_functions.share_of_even_bytes"),
)
STOPS = range(64, 128)
"""A quarter of the vocabulary, so that an untrained model meets one soon."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two batches that a run without a learner generated."""
    folder = tmp_path_factory.mktemp("debug")
    # Without a learner there is no checkpoint either.
    flags = ["--debug-rollout-only", "--dump-details", str(folder / "dump"), "--save", str(folder / "checkpoints")]
    flags += ["--rollout-stop-token-ids", *map(str, STOPS)]
    with job(folder, *SMALL, *flags) as generating:
        assert generating.ended(within=START_SECONDS) == 0, generating.err
        assert re.search(r"^engine-0 +starting", generating.err, re.MULTILINE)
        assert re.search(r"^learner +starting", generating.err, re.MULTILINE) is None
        assert generating.alarms == []
    assert not (folder / "checkpoints").exists()
    return folder / "dump"


def test_a_run_that_only_generates_saves_its_batches(saved: Path) -> None:
    for rollout in range(2):
        rollout_id, groups = load_groups(saved / "rollout_data" / f"{rollout}.safetensors")
        assert rollout_id == rollout
        assert [len(group) for group in groups] == [4] * 4
        assert all(sample.spans and sample.reward is not None for group in groups for sample in group)
    assert (saved / "tokenizer" / "tokenizer.json").is_file()


def test_stop_tokens_end_a_response_and_are_part_of_it(saved: Path) -> None:
    _, groups = load_groups(saved / "rollout_data" / "0.safetensors")
    responses = [(sample.tokens[sample.prompt_length :], sample.status) for group in groups for sample in group]
    assert not any(token in STOPS for tokens, _ in responses for token in tokens[:-1])
    stopped = [status for tokens, status in responses if tokens[-1] in STOPS]
    assert stopped
    assert set(stopped) == {SampleStatus.COMPLETED}


def test_a_run_that_only_trains_starts_no_engine_and_takes_the_saved_batches(saved: Path, tmp_path: Path) -> None:
    template = str(saved / "rollout_data" / "{rollout_id}.safetensors")
    with job(tmp_path, *SMALL, "--load-debug-rollout-data", template) as training:
        assert training.ended(within=START_SECONDS) == 0, training.err
        assert re.search(r"^learner +starting", training.err, re.MULTILINE)
        assert re.search(r"^engine-0 +starting", training.err, re.MULTILINE) is None
        assert training.alarms == []
    [events] = (tmp_path / "runs").glob("latest/events.jsonl")
    steps = [line for line in events.read_text().splitlines() if '"StepEnded"' in line]
    assert len(steps) == 2
    assert all('"finite":true' in line and '"grad_norm":0.0,' not in line for line in steps)
