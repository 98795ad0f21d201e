from __future__ import annotations

import pytest

from miles_async.adapters.megatron.batch import policy_steps, supervised_step
from miles_async.errors import BadTrajectory
from miles_async.types import Group, Sample


def sample(index: int, reward: float | None = 1.0, response: int = 3, mask: list[int] | None = None) -> Sample:
    return Sample(
        index=index,
        tokens=[100 + index, 1, *range(response)],
        response_length=response,
        rollout_log_probs=[-0.1 * (i + 1) for i in range(response)],
        loss_mask=mask,
        reward=reward,
    )


def steps_of(*groups: Group, steps: int = 1, ranks: int = 1) -> list[list]:
    return policy_steps(groups, steps=steps, ranks=ranks, max_tokens=100, std_normalization=False)


def test_each_trained_token_carries_its_place_its_engine_logprob_and_its_samples_advantage() -> None:
    [[step]] = steps_of(Group([sample(0, 1.0, mask=[1, 0, 1]), sample(1, 0.0)]))
    [batch] = step.micro_batches
    assert batch.tokens.tolist() == [100, 1, 0, 1, 2, 101, 1, 0, 1, 2]
    assert batch.lengths.tolist() == [5, 5]
    assert batch.targets.tolist() == [2, 4, 7, 8, 9]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.1, -0.3, -0.1, -0.2, -0.3])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert step.total_tokens == 5


def test_ranks_share_the_samples_and_divide_by_the_tokens_of_all_of_them() -> None:
    [[one], [other]] = steps_of(Group([sample(i, float(i)) for i in range(5)]), ranks=2)
    firsts = sorted(int(b.tokens[0]) for step in (one, other) for b in step.micro_batches)
    assert sum(len(b.lengths) for step in (one, other) for b in step.micro_batches) == 5
    assert one.total_tokens == other.total_tokens == 15
    assert len(firsts) == 2


def test_samples_go_to_the_steps_in_the_order_of_their_index() -> None:
    groups = Group([sample(2), sample(3)]), Group([sample(0), sample(1)])
    [[first, second]] = steps_of(*groups, steps=2)
    assert {100, 101} <= set(first.micro_batches[0].tokens.tolist())
    assert {102, 103} <= set(second.micro_batches[0].tokens.tolist())


def test_samples_that_do_not_divide_into_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps_per_rollout=2"):
        steps_of(Group([sample(0), sample(1), sample(2)]), steps=2)


def test_a_sample_without_a_number_as_reward_is_named() -> None:
    with pytest.raises(BadTrajectory, match="sample 7 has the reward None"):
        steps_of(Group([sample(7, None)]))


def test_a_sample_whose_mask_does_not_fit_is_named() -> None:
    with pytest.raises(BadTrajectory, match=r"sample 4: .* 2 mask entries"):
        steps_of(Group([sample(4, mask=[1, 1])]))


def test_a_supervised_step_trains_every_response_token_and_no_other() -> None:
    step = supervised_step([[1, 2], [3]], [[4], [5, 6]], max_tokens=10)
    [batch] = step.micro_batches
    assert batch.tokens[batch.targets].tolist() == [4, 5, 6]
    assert step.total_tokens == 3
