"""Errors of calls to Ray actors name the process and what to look at."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from miles_async.adapters.ray.actor_errors import actor_result, describe_death
from miles_async.errors import FatalError


async def test_an_actor_behind_a_broken_link_is_not_reported_as_dead() -> None:
    async def call() -> Any:
        raise ActorUnavailableError("RpcError: recvmsg:Connection timed out rpc_code: 14", b"\1" * 16)

    with pytest.raises(
        FatalError, match=r"could not be reached: .*timed out rpc_code: 14; check the network"
    ) as failure:
        await actor_result(call())
    assert "died" not in str(failure.value)


def test_a_process_on_a_lost_node_is_not_reported_as_crashed() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tname: learner-0\n\tip: 10.0.0.2\n"
        "The actor died because its node has died. Node Id: 8a\n"
        "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
    )
    assert describe_death(RayActorError(error_msg=text)) == (
        "learner-0 was lost with its node 10.0.0.2: health check failed due to missing too many heartbeats; check that "
        "machine and its network"
    )


def test_a_process_that_the_run_ended_is_not_reported_as_crashed() -> None:
    text = "The actor died unexpectedly.\n\tname: rollout\nThe actor is dead because it was killed by `ray.kill`."
    assert describe_death(RayActorError(error_msg=text)) == (
        "rollout was ended by the run, see logs/rollout.log in the run folder"
    )


@pytest.mark.parametrize(
    "reason, sentence",
    [
        ("The actor died because its node has died.", "The actor died because its node has died; see `ray status`"),
        (
            "The actor is dead because all references to the actor were removed.",
            "Ray's head node cannot call the driver; set RAY_AUTH_MODE as for `ray start`, and check the network; "
            "see `ray status`",
        ),
    ],
)
def test_a_process_that_never_ran_has_no_log_to_look_at(reason: str, sentence: str) -> None:
    text = f"The actor died unexpectedly.\n\tname: learner-0-2\n{reason}\nThe actor never ran - it was cancelled."
    assert describe_death(RayActorError(error_msg=text)) == f"learner-0-2 was never started: {sentence}"
