"""The state of the pipeline in a checkpoint: small, and written without stopping the event loop."""

from __future__ import annotations

import json
from typing import Any, SupportsIndex

import pytest

from miles_async.adapters.storage.checkpoints import json_pieces
from miles_async.adapters.system.clock import SystemClock
from miles_async.errors import UserError
from miles_async.pipeline.checkpoint import progress_of, resume
from miles_async.pipeline.run_state import RunState
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.sim.world import DirectJournal, Feed, Trace, lifecycle_of

PROMPT, RESPONSE, GROUPS = 3, 1000, 5


class CountedTokens(list[int]):
    """Counts the tokens that anybody reads."""

    read = 0

    def __iter__(self) -> Any:
        CountedTokens.read += len(self)
        return super().__iter__()

    def __getitem__(self, item: SupportsIndex | slice) -> Any:
        found = super().__getitem__(item)
        CountedTokens.read += len(found) if isinstance(found, list) else 1
        return found


def generated_group(number: int) -> Group:
    sample = Sample(
        index=number,
        prompt="1+1=",
        label="2",
        metadata={"feed_index": f"sample_0_{number}", "difficulty": 3},
        tokens=CountedTokens(range(PROMPT + RESPONSE)),
        response="x" * RESPONSE,
        response_length=RESPONSE,
        loss_mask=CountedTokens([1] * RESPONSE),
        rollout_log_probs=[-0.5] * RESPONSE,
        spans=[VersionSpan(4, 0, RESPONSE)],
        reward=1.0,
        status=SampleStatus.COMPLETED,
    )
    return Group([sample], feed_index=f"sample_0_{number}", attempt=2)


def progress_with_owed_groups(*returned: Group) -> dict[str, Any]:
    run_state, feed = RunState(SystemClock(), DirectJournal(Trace())), Feed()
    lifecycle = lifecycle_of(run_state, feed)
    for number in range(GROUPS):
        lifecycle.feed(generated_group(number))
    CountedTokens.read = 0
    return progress_of(7, run_state, lifecycle, lambda: (feed.position(), returned))


def test_the_progress_of_a_run_reads_no_generated_token() -> None:
    progress_with_owed_groups()
    assert CountedTokens.read == 0, "the prompts were copied when the groups were fed"


def test_a_returned_group_is_saved_without_its_generated_tokens() -> None:
    progress, feed = progress_with_owed_groups(generated_group(GROUPS)), Feed()
    assert CountedTokens.read == PROMPT
    resume(json.loads(json.dumps(progress)), feed, DirectJournal(Trace()))
    [[restored]] = feed.get_samples(1)
    assert (restored.index, restored.tokens, restored.response, restored.spans) == (GROUPS, [0, 1, 2], "", [])


def test_a_group_in_the_progress_keeps_prompt_attempts_and_metadata() -> None:
    feed = Feed()
    resume(json.loads(json.dumps(progress_with_owed_groups())), feed, DirectJournal(Trace()))
    [group, *_] = feed.get_samples(GROUPS)
    assert (group.feed_index, group.attempt) == ("sample_0_0", 2)
    assert group[0] == Sample(
        index=0,
        prompt="1+1=",
        label="2",
        metadata={"feed_index": "sample_0_0", "difficulty": 3},
        tokens=[0, 1, 2],
    )


def test_no_call_of_the_encoder_covers_more_than_one_group() -> None:
    progress = progress_with_owed_groups()
    pieces = list(json_pieces(progress))
    assert json.loads("".join(pieces)) == progress
    assert all(piece.count("difficulty") <= 1 for piece in pieces)


@pytest.mark.parametrize(
    "change", [{"owed": [{}]}, {"owed": [3]}, {"data": {}}, {"owed": [{"feed_index": "a", "attempt": 0, "samples": 1}]}]
)
def test_progress_with_missing_fields_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"the progress of the checkpoint is not valid .*: load another checkpoint"):
        resume({**progress_with_owed_groups(), **change}, Feed(), DirectJournal(Trace()))
