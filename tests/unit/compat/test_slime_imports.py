"""Names of slime and Miles come from this project, and all others from a checkout."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_async.compat.slime import filters as filter_hub
from miles_async.compat.slime import http_utils, rm_hub
from miles_async.compat.slime.imports import load_by_path
from miles_async.config.cli import parse_or_exit
from miles_async.errors import UserError
from miles_async.rollout.contract import flat_args
from miles_async.types import Sample, SampleStatus, Verdict
from tests.configuration import run_config
from tests.unit.compat.slime_names import forget, names_of_slime

GENERATION = ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "64"]
JOB = ["--reasoning-gym-task", "chain_sum", *GENERATION, "--rm-type", "exact"]


@pytest.fixture
def modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    forget(before)


def found(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("project", ["slime", "miles"])
def test_names_that_examples_of_slime_and_miles_import_exist_without_a_checkout(project: str) -> None:
    with names_of_slime():
        assert found(f"{project}.utils.http_utils").post is http_utils.post
        assert found(f"{project}.utils.http_utils").get is http_utils.get
        assert found(f"{project}.rollout.rm_hub").remote_rm is rm_hub.remote_rm
        hub = found(f"{project}.rollout.filter_hub.base_types")
        assert hub.DynamicFilterOutput is filter_hub.DynamicFilterOutput
        named = found(f"{project}.rollout.filter_hub.dynamic_sampling_filters")
        assert named.check_reward_nonzero_std_with_fallback is filter_hub.check_reward_nonzero_std_with_fallback
        assert named.check_no_aborted is filter_hub.check_no_aborted
        assert found(f"{project}.rollout.base_types").call_rollout_fn
        assert found(f"{project}.rollout.data_source").DataSource
        assert found(f"{project}.utils.processing_utils").load_tokenizer


def rewarded(*rewards: float) -> list[Sample]:
    return [Sample(reward=reward, status=SampleStatus.COMPLETED) for reward in rewards]


def test_the_filter_with_a_fallback_keeps_equal_rewards_only_if_too_few_groups_are_left() -> None:
    check = filter_hub.check_reward_nonzero_std_with_fallback
    assert check(None, rewarded(1.0, 0.0)).keep
    rejected = check(None, rewarded(1.0, 1.0))
    assert (rejected.keep, rejected.keep_when_insufficient) == (False, True)
    output = filter_hub.call_dynamic_filter(check, None, rewarded(1.0, 1.0))
    assert (output.keep, output.reason) == (False, "all_1.0")
    drops = filter_hub.should_drop_dynamic_filter_output
    assert drops(output, remaining_batch_size=5, target_data_size=4)
    assert not drops(output, remaining_batch_size=4, target_data_size=4)


def test_a_filter_that_returns_the_output_of_slime_is_read_as_a_verdict() -> None:
    assert Verdict.of(filter_hub.DynamicFilterOutput(False, "short", True)) == Verdict(False, "short", True)
    assert filter_hub.call_dynamic_filter(None) == filter_hub.DynamicFilterOutput(True)


def test_rejected_groups_are_counted_by_reason() -> None:
    gatherer = filter_hub.MetricGatherer()
    for reason in ("short", "short", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_short": 2}


def package(folder: Path, **modules: str) -> None:
    """Write modules by path, such as `slime__utils__misc`, with the packages that contain them."""
    for path, source in modules.items():
        file = folder.joinpath(*path.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        for parent in file.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()


@pytest.mark.usefixtures("modules")
def test_other_names_of_a_module_come_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(
        tmp_path,
        slime__rollout__sleep="",
        slime__utils__misc="from slime.utils.http_utils import is_port_available\nport_is_free = is_port_available",
        slime__utils__http_utils="def is_port_available(port): return port\ndef post(url, payload): ...",
        examples__tools__search="from slime.utils.http_utils import post",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with names_of_slime():
        assert found("slime.utils.misc").port_is_free(8) == 8
        assert found("slime.utils.misc").load_function is load_by_path
        assert found("slime.utils.http_utils").post is http_utils.post
        assert found("slime.rollout.sleep")
        assert found("examples.tools.search").post is http_utils.post
        with pytest.raises(AttributeError, match=r"module 'slime\.utils\.misc' has no attribute 'no_such_name'"):
            _ = found("slime.utils.misc").no_such_name


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    "content",
    [{"slime__notes": ""}, {"slime": ""}, {"slime__rollout__sleep": ""}],
    ids=["a package", "a module", "a part of a checkout"],
)
def test_a_folder_of_this_name_that_is_not_a_checkout_is_refused_in_one_sentence(
    content: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package(tmp_path, **content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as exited:
        parse_or_exit([*JOB, "--slime-imports", "--check-config"], "train.py")
    assert exited.value.code == 2
    [sentence] = [line for line in capsys.readouterr().err.splitlines() if "slime_imports" in line]
    assert f"{tmp_path}/slime" in sentence
    assert "is not the package of a checkout of slime" in sentence


async def test_a_remote_reward_is_asked_as_often_as_the_function_says(monkeypatch: pytest.MonkeyPatch) -> None:
    args = flat_args(run_config(rm_type="remote_rm", rm_url="http://127.0.0.1:1/score"))
    monkeypatch.setattr("miles_async.rewards.remote.FIRST_BACKOFF_SECONDS", 0.0)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1/score"):
        await rm_hub.remote_rm(args, Sample(prompt="What?", response="It."), max_retries=2)


def test_no_path_is_no_function() -> None:
    assert load_by_path(None) is None
    with pytest.raises(UserError, match="cannot be imported"):
        load_by_path("no_such_module.f")
