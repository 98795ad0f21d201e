"""The SkipManager page of verl, in its order: settings, files, workflow, steps, the API and a module of a user.

`tests/unit/compat/test_translators.py` loads the settings from a file of verl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles_async.errors import UserError
from miles_async.recording import GroupRecord, Recording
from miles_async.skip import (
    AsyncRolloutSkip,
    BaseSkip,
    RolloutSkip,
    SkipAction,
    SkipManager,
    SkipManagerConfig,
    base,
    register_skip,
)
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config


def overrides(role: str, folder: Path, *, steps: str = "[1,2,3,10]", action: str = "cache") -> list[str]:
    """The Hydra overrides of the page."""
    prefix = f"skip.{role}"
    return [
        f"{prefix}.enable=True",
        f"{prefix}.dump_dir={folder}",
        f"{prefix}.steps={steps}",
        f"{prefix}.action={action}",
    ]


SIZES = ["--rollout-batch-size", "1", "--n-samples-per-prompt", "1", "--rollout-max-prompt-len", "8"]


def recording(step: int) -> Recording:
    """What a step generates: one group, whose only token is the step."""
    sample = Sample(
        index=step,
        prompt="p",
        tokens=[1, step],
        response_length=1,
        rollout_log_probs=[-0.5],
        spans=[VersionSpan(0, 0, 1)],
        status=SampleStatus.COMPLETED,
    )
    group = Group([sample], feed_index=f"sample_0_{step}")
    return Recording(groups=[GroupRecord.of(group, prompt="", live_version=0, seconds=1.0)], seconds=1.0)


def run(*words: str, steps: list[int]) -> tuple[list[int], list[int]]:
    """Generate these steps. Returns the steps that ran, and the token that each step returned."""
    ran: list[int] = []

    @SkipManager.annotate(role="rollout")
    def generate_sequences() -> Recording:
        ran.append(SkipManager.step)
        return recording(SkipManager.step)

    tokens = []
    with SkipManager.init(run_config(*SIZES, *words)):
        for step in steps:
            SkipManager.set_step(step)
            tokens.append(generate_sequences().groups[0].samples[0].tokens[1])
    return ran, tokens


# --- 2. Shared configuration ----------------------------------------------------------------------------------------


def test_both_roles_take_the_overrides_of_the_page() -> None:
    for role in ("rollout", "async_rollout"):
        skip = run_config(*overrides(role, Path("/path/to/rollout_dump"))).skip
        settings = {"rollout": skip.rollout, "async_rollout": skip.async_rollout}[role]
        assert (settings.enable, settings.dump_dir) == (True, "/path/to/rollout_dump")
        assert (settings.steps, settings.action) == ([1, 2, 3, 10], "cache")


def test_a_long_list_of_steps_from_the_shell_is_accepted() -> None:
    from_seq = ",".join(map(str, range(1, 129)))
    assert run_config(f"skip.async_rollout.steps=[{from_seq}]").skip.async_rollout.steps == list(range(1, 129))


def test_only_cache_and_repeat_are_valid_actions() -> None:
    with pytest.raises(UserError, match=r"skip\.rollout\.action: input should be 'cache' or 'repeat', got 'random'"):
        run_config("skip.rollout.action=random")


def test_recordings_are_in_the_folders_of_the_page_but_as_safetensors(tmp_path: Path) -> None:
    names = ["--experiment-name", "experiment", "--project-name", "project", "--rollout-max-response-len", "16"]
    run(*overrides("rollout", tmp_path), *names, steps=[1])
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    folder = "experiment_project/GBS1_N1_in8_out16/1"
    assert files == {f"{folder}/gen_batch.safetensors", f"{folder}/meta.json"}


def test_the_second_run_loads_what_the_first_one_wrote_and_generates_what_is_missing(tmp_path: Path) -> None:
    words = overrides("rollout", tmp_path, steps="[1,2,3]")
    assert run(*words, steps=[1, 2]) == ([1, 2], [1, 2])
    assert run(*words, steps=[1, 2]) == ([], [1, 2])
    assert run(*words, steps=[1, 2, 3]) == ([3], [1, 2, 3]), "a partial cache"


def test_a_step_outside_the_list_always_runs(tmp_path: Path) -> None:
    words = overrides("rollout", tmp_path, steps="[1]")
    assert run(*words, steps=[1, 4]) == ([1, 4], [1, 4])
    assert run(*words, steps=[1, 4]) == ([4], [1, 4])


@pytest.mark.parametrize(
    "recorded, current, replayed",
    [([3, 5, 9], 5, 5), ([3, 4, 9], 5, 4), ([7, 9], 5, 7)],
    ids=["the current step", "the largest below", "the smallest above"],
)
def test_repeat_selects_the_step_as_the_page_says(
    tmp_path: Path, recorded: list[int], current: int, replayed: int
) -> None:
    run(*overrides("rollout", tmp_path, steps="[0-9]"), steps=recorded)
    repeating = overrides("rollout", tmp_path, steps="[0-9]", action="repeat")
    assert run(*repeating, steps=[current]) == ([], [replayed])


def test_repeat_without_any_recording_generates_and_records(tmp_path: Path) -> None:
    repeating = overrides("rollout", tmp_path, action="repeat")
    assert run(*repeating, steps=[1, 2]) == ([1], [1, 1])


def test_the_legacy_switch_beside_the_new_one_warns_and_is_ignored() -> None:
    with pytest.warns(DeprecationWarning, match="--skip-rollout is deprecated and has no effect beside"):
        run_config("--skip-rollout", "skip.rollout.enable=True", "skip.rollout.steps=[1]")


# --- 4. Fully async -------------------------------------------------------------------------------------------------


def test_the_step_of_a_group_is_the_last_part_of_its_sample_id() -> None:
    with SkipManager.init(run_config()):
        role = SkipManager.skip_instances["async_rollout"]
        assert role.support_online_step
        assert role.extract_step(Group([Sample()], feed_index="sample_0_42")) == 42


# --- 5. Design ------------------------------------------------------------------------------------------------------


def test_init_makes_one_module_per_role(tmp_path: Path) -> None:
    with SkipManager.init(run_config(*overrides("rollout", tmp_path))):
        assert isinstance(SkipManager.config, SkipManagerConfig)
        rollout, async_rollout = SkipManager.skip_instances["rollout"], SkipManager.skip_instances["async_rollout"]
        assert isinstance(rollout, RolloutSkip)
        assert isinstance(async_rollout, AsyncRolloutSkip)
        assert (rollout.is_enabled(), async_rollout.is_enabled()) == (True, False)
        assert (rollout.support_online_step, async_rollout.support_online_step) == (False, True)
        SkipManager.set_step(7)
        assert SkipManager.step == 7


def test_a_decorated_function_runs_normally_before_init() -> None:
    @SkipManager.annotate(role="rollout")
    def double(number: int) -> int:
        return 2 * number

    with SkipManager.init(run_config()):
        pass
    assert double(4) == 8
    with pytest.raises(UserError, match=r"SkipManager\.set_step was called before SkipManager\.init: call init first"):
        SkipManager.set_step(1)


@pytest.fixture
def scores() -> Iterator[type[BaseSkip]]:
    """A module as a user of verl writes it: the four steps of the page, with `skip.scores` as its field."""

    @register_skip("scores")
    class ScoreSkip(BaseSkip):
        support_actions = [SkipAction.CACHE]
        support_online_step = True

        def __init__(self, local_config, global_config):  # type: ignore[no-untyped-def]
            super().__init__(local_config, global_config)
            self.groups = global_config.rollout.rollout_batch_size
            self.cache: dict[int, Any] = {}

        def extract_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return int(kwargs["sample_id"].split("_")[-1])

        def meet_precondition(self, step, func, *args, **kwargs):  # type: ignore[no-untyped-def]
            assert func.__name__ == "score"
            return step in self.cache

        def warp_function(self, step, func, *args, **kwargs):  # type: ignore[no-untyped-def]
            return self.cache[step]

        def prepare_data(self, step, result, *args, **kwargs):  # type: ignore[no-untyped-def]
            self.cache[step] = result

    yield ScoreSkip
    del base.REGISTERED["scores"]


class Scorer:
    def __init__(self) -> None:
        self.scored: list[str] = []

    @SkipManager.annotate(role="scores", doc="other keyword arguments are accepted")
    def score(self, prompt: str, *, sample_id: str) -> int:
        self.scored.append(sample_id)
        return len(prompt)


class AsyncScorer(Scorer):
    @SkipManager.annotate(role="scores")
    async def score(self, prompt: str, *, sample_id: str) -> int:  # type: ignore[override]
        self.scored.append(sample_id)
        return len(prompt)


SCORES = ("skip.scores.enable=True", "skip.scores.steps=[1,2]", "skip.scores.action=cache")


@pytest.mark.usefixtures("scores")
def test_a_module_of_a_user_skips_a_plain_function_also_in_a_plain_thread() -> None:
    scorer = Scorer()
    with SkipManager.init(run_config(*SCORES)), ThreadPoolExecutor(1) as pool:
        for prompt in ("a", "bb"):
            assert scorer.score(prompt, sample_id="sample_0_1") == 1
            assert pool.submit(scorer.score, prompt, sample_id="sample_0_2").result() == 1
        assert scorer.score("cc", sample_id="sample_0_3") == 2
    assert scorer.scored == ["sample_0_1", "sample_0_2", "sample_0_3"]


@pytest.mark.usefixtures("scores")
async def test_concurrent_calls_of_an_async_function_have_their_own_steps() -> None:
    scorer = AsyncScorer()
    names = [f"sample_0_{step}" for step in (1, 2, 3)]
    with SkipManager.init(run_config(*SCORES)):
        for _ in range(2):
            results = await asyncio.gather(*(scorer.score("a", sample_id=name) for name in names))
            assert results == [1, 1, 1]
    assert sorted(scorer.scored) == ["sample_0_1", "sample_0_2", "sample_0_3", "sample_0_3"]


@pytest.mark.usefixtures("scores")
def test_a_disabled_or_absent_role_has_no_effect() -> None:
    for words in ((), ("skip.scores.steps=[1]",)):
        scorer = Scorer()
        with SkipManager.init(run_config(*words)):
            assert [scorer.score("a", sample_id="sample_0_1"), scorer.score("bb", sample_id="sample_0_1")] == [1, 2]


@pytest.mark.usefixtures("scores")
def test_an_action_that_the_module_does_not_support_is_refused() -> None:
    with pytest.raises(UserError, match=r"skip\.scores\.action: .* does not support repeat; set cache"):
        SkipManager.init(run_config("skip.scores.action=repeat"))


def test_a_role_without_a_module_is_refused_with_what_to_write() -> None:
    with pytest.raises(UserError, match=r'skip\.verifier: no class is registered .*@register_skip\("verifier"\)'):
        SkipManager.init(run_config("skip.verifier.enable=True"))
