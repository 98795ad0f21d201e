"""Devices of ROLL's roles, and the hub of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.config.translation import Outcome, translate

TRAINED = {"training_args": {"learning_rate": 1e-6}}


def outcome(train: str | None = None, infer: str | None = None, **others: Any) -> Outcome:
    roles = {
        "actor_train": TRAINED | ({} if train is None else {"device_mapping": train}),
        "actor_infer": {} if infer is None else {"device_mapping": infer},
    }
    return translate({**roles, **others}, "ROLL")


def sizes(found: Outcome) -> tuple[int, int, bool]:
    """Devices of the learner and of the engines, and whether the engines' are among the learner's."""
    assert found.problems == []
    values = {name.rpartition(".")[2]: one.value for name, one in found.translation.items()}
    learner = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
    return learner, values["rollout_num_gpus"], values["colocate"]


@pytest.mark.parametrize(
    "train, infer, expected",
    [
        ("list(range(0,8))", "list(range(8,16))", (8, 8, False)),
        ("list(range(0,8))", "list(range(0,8))", (8, 8, True)),
        ("list(range(0,8))", "list(range(0,4))", (8, 4, True)),
    ],
)
def test_engines_have_devices_of_their_own_or_the_learners(
    train: str, infer: str, expected: tuple[int, int, bool]
) -> None:
    found = outcome(train, infer)
    assert sizes(found) == expected
    assert found.idle == {}


@pytest.mark.parametrize(
    "train, infer, expected, shared",
    [
        ("list(range(0,4))", "list(range(0,8))", (4, 4, False), 4),
        ("list(range(0,8))", "list(range(6,12))", (8, 4, False), 2),
    ],
)
def test_engines_that_have_some_devices_of_the_learner_keep_only_the_others(
    train: str, infer: str, expected: tuple[int, int, bool], shared: int
) -> None:
    found = outcome(train, infer)
    assert sizes(found) == expected
    assert found.idle == {
        f"{shared} devices of actor_infer.device_mapping": (
            "are the learner's alone, because actor_train.device_mapping has them: engines have the other 4"
        )
    }


def test_the_critic_and_the_reference_run_on_the_devices_of_the_learner() -> None:
    others = {role: {"device_mapping": "list(range(4,8))"} for role in ("critic", "reference")}
    found = outcome("list(range(0,4))", "list(range(0,8))", **others)
    assert sizes(found) == (4, 4, False)
    assert "in its own processes" in found.idle["reference.device_mapping"]
    assert "devices of the learner" in found.idle["critic.device_mapping"]


def test_a_file_that_trains_nothing_generates_only() -> None:
    content = {"actor_train": {"model_args": {"dtype": "bf16"}}, "actor_infer": {"device_mapping": "list(range(1,2))"}}
    found = translate({**content, "num_gpus_per_node": 8}, "ROLL")
    assert found.problems == []
    assert found.translation["debug.debug_rollout_only"].value is True
    assert found.idle["num_gpus_per_node"] == "has no effect: actor_train has no devices, so nothing is trained"
    assert "debug.debug_rollout_only" not in outcome(None, "list(range(0,4))").translation


def test_a_model_of_another_hub_is_refused_with_the_command_that_downloads_it(tmp_path: Path) -> None:
    hub = {"model_download_type": "MODELSCOPE"}
    [problem] = outcome(pretrain="Qwen/Qwen2.5-7B", **hub).problems
    assert "run modelscope download --model Qwen/Qwen2.5-7B --local_dir FOLDER and set pretrain to" in problem
    found = outcome(pretrain=str(tmp_path), **hub)
    assert (found.problems, found.idle) == ([], {"model_download_type": "has no effect: pretrain is a folder"})
    assert outcome(pretrain="Qwen/Qwen2.5-7B", model_download_type="HUGGINGFACE_HUB").problems == []


def test_the_checkpoint_of_a_critic_is_a_folder_too_if_the_hub_is_another_one(tmp_path: Path) -> None:
    models = {"pretrain": str(tmp_path), "reward_pretrain": "Qwen/Qwen2.5-7B", "model_download_type": "MODELSCOPE"}
    [problem] = outcome(adv_estimator="gae", **models).problems
    assert "--model Qwen/Qwen2.5-7B" in problem
    assert outcome(adv_estimator="reinforce", **models).problems == []
