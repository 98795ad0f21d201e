"""The skip decorator, its roles and their settings, after verl's SkipManager."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import notes
from miles_async.config.flags import parse_flags
from miles_async.errors import UserError
from miles_async.recording import Steps, choose_step, differences, feed_step
from miles_async.rollout.recordings import identity_of, prompt_hash
from miles_async.skip import BaseSkip, SkipAction, SkipContext, SkipManager, SkipManagerConfig, base, register_skip
from miles_async.types import Group, Sample
from tests.configuration import build, read_yaml, run_config

DOCS = Path(__file__).parents[4] / "docs" / "how-to" / "replay.md"


@pytest.fixture
def doubling() -> Iterator[type[BaseSkip]]:
    """A role that remembers in memory; gone after the test."""

    @register_skip("doubling")
    class Doubling(BaseSkip):
        def __init__(self, local_config: Any, global_config: Any) -> None:
            super().__init__(local_config, global_config)
            self.kept: dict[int, Any] = {}

        def meet_precondition(self, step: int, func: Any, *args: Any, **kwargs: Any) -> bool:
            return step in self.kept

        def warp_function(self, step: int, func: Any, *args: Any, **kwargs: Any) -> Any:
            return self.kept[step]

        def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
            self.kept[step] = result

    yield Doubling
    del base.REGISTERED["doubling"]


class Doubler:
    """Something to skip."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    @SkipManager.annotate(role="doubling")
    def double(self, number: int) -> int:
        self.calls.append(number)
        return 2 * number

    @SkipManager.annotate(role="doubling")
    async def double_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.double(number)


ON = ("skip.doubling.enable=True", "skip.doubling.steps=[1-3]")


@pytest.mark.usefixtures("doubling")
def test_a_configured_step_runs_once_and_is_replayed_afterwards() -> None:
    doubler = Doubler()
    with SkipManager.init(run_config(*ON)):
        SkipManager.set_step(1)
        assert [doubler.double(5), doubler.double(6)] == [10, 10]
        SkipManager.set_step(2)
        assert doubler.double(7) == 14
    assert doubler.calls == [5, 7]


@pytest.mark.usefixtures("doubling")
def test_a_step_that_is_not_configured_always_runs() -> None:
    doubler = Doubler()
    with SkipManager.init(run_config(*ON)):
        SkipManager.set_step(4)
        assert [doubler.double(5), doubler.double(6)] == [10, 12]


@pytest.mark.usefixtures("doubling")
@pytest.mark.parametrize("words", [(), ("skip.doubling.steps=[1]",)])
def test_a_missing_or_disabled_role_has_no_effect(words: tuple[str, ...]) -> None:
    doubler = Doubler()
    with SkipManager.init(run_config(*words)):
        SkipManager.set_step(1)
        assert [doubler.double(5), doubler.double(6)] == [10, 12]


@pytest.mark.usefixtures("doubling")
def test_two_runs_in_a_row_share_no_state() -> None:
    doubler = Doubler()
    for _ in range(2):
        with SkipManager.init(run_config(*ON)) as manager:
            assert manager.step == -1
            SkipManager.set_step(1)
            doubler.double(5)
    assert doubler.calls == [5, 5]
    assert doubler.double(6) == 12
    with pytest.raises(UserError, match=r"before SkipManager\.init"):
        SkipManager.set_step(1)


@pytest.mark.usefixtures("doubling")
async def test_two_runs_at_once_share_no_state() -> None:
    async def run(number: int) -> list[int]:
        with SkipManager.init(run_config(*ON)):
            SkipManager.set_step(1)
            doubler = Doubler()
            return [await doubler.double_later(number), await doubler.double_later(0)]

    assert list(await asyncio.gather(run(1), run(2))) == [[2, 2], [4, 4]]


async def test_concurrent_calls_have_separate_steps(doubling: type[BaseSkip]) -> None:
    class Online(doubling):  # type: ignore[valid-type, misc]
        support_online_step = True

        def extract_step(self, *args: Any, **kwargs: Any) -> int | None:
            return args[1]

    base.REGISTERED["doubling"] = Online
    doubler = Doubler()

    with SkipManager.init(run_config(*ON)):
        await asyncio.gather(*(doubler.double_later(number) for number in (1, 2, 3, 4)))
        again = await asyncio.gather(*(doubler.double_later(number) for number in (1, 2, 3, 4)))
    assert again == [2, 4, 6, 8]
    assert sorted(doubler.calls) == [1, 2, 3, 4, 4]


@pytest.mark.usefixtures("doubling")
def test_a_plain_thread_sees_the_manager_of_the_run() -> None:
    doubler = Doubler()
    with SkipManager.init(run_config(*ON)), ThreadPoolExecutor(1) as pool:
        SkipManager.set_step(2)
        assert [pool.submit(doubler.double, number).result() for number in (5, 6)] == [10, 10]


@pytest.mark.usefixtures("doubling")
def test_the_state_of_the_current_run_is_available_from_the_class() -> None:
    with SkipManager.init(run_config(*ON)) as manager:
        SkipManager.set_step(3)
        assert SkipManager.step == manager.step == 3
        assert sorted(SkipManager.skip_instances) == ["async_rollout", "doubling", "rollout"]
        assert SkipManager.skip_instances["doubling"].is_enabled()
        assert not SkipManager.skip_instances["rollout"].is_enabled()
        assert isinstance(SkipManager.config, SkipManagerConfig)
        assert SkipManager.config.roles["doubling"].steps == ["1-3"]
    assert SkipManager.step == -1
    assert not SkipManager.skip_instances
    assert SkipManager.config is None


def test_a_role_may_define_whether_it_is_enabled_as_a_property(doubling: type[BaseSkip]) -> None:
    class Never(doubling):  # type: ignore[valid-type, misc]
        @property
        def is_enabled(self) -> bool:
            return False

    base.REGISTERED["doubling"] = Never
    doubler = Doubler()
    with SkipManager.init(run_config(*ON)):
        SkipManager.set_step(1)
        assert [doubler.double(5), doubler.double(6)] == [10, 12]


@pytest.mark.usefixtures("doubling")
def test_a_role_is_configured_in_yaml_and_extended_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "skip.yaml"
    file.write_text("skip:\n  doubling:\n    enable: true\n    steps: [1]\n")
    loaded = build([*read_yaml(file), *parse_flags(["skip.doubling.steps=[2]"]).assignments])
    assert loaded == run_config("skip.doubling.enable=True", "skip.doubling.steps=[2]")
    with pytest.raises(UserError, match=r"^skip\.doubling\.every: unknown setting: remove it"):
        run_config("skip.doubling.every=2")


def test_a_misspelt_setting_of_a_built_in_role_is_not_a_role() -> None:
    with pytest.raises(UserError, match=r"unknown setting skip\.rollout\.step\b.*skip\.rollout\.steps"):
        run_config("skip.rollout.step=[1]")


@pytest.mark.parametrize("action", [SkipAction.EMPTY, "latest"])
def test_a_role_may_have_actions_of_its_own(doubling: type[BaseSkip], action: str) -> None:
    doubling.support_actions = [SkipAction.CACHE, action]
    with SkipManager.init(run_config(f"skip.doubling.action={action}")) as manager:
        assert manager.skip_instances["doubling"].action == action


def test_an_action_that_a_role_does_not_support_is_refused(doubling: type[BaseSkip]) -> None:
    doubling.support_actions = [SkipAction.CACHE]
    with pytest.raises(UserError, match=r"skip\.doubling\.action: \S*Doubling does not support repeat; set cache"):
        SkipManager.init(run_config("skip.doubling.action=repeat"))


def test_a_role_without_a_registered_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"skip\.nobody: no class is registered .* async_rollout, rollout"):
        SkipManager.init(run_config("skip.nobody.enable=true"))


def test_a_role_can_have_only_one_class() -> None:
    with pytest.raises(UserError, match="'rollout' is served by RolloutSkip already"):
        register_skip("rollout")(BaseSkip)


def test_a_dump_dir_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"skip\.rollout\.dump_dir .*file: .* cannot be created: Not a directory"):
        SkipManager.init(run_config("skip.rollout.enable=True", f"skip.rollout.dump_dir={tmp_path}/file"))


def test_recordings_are_kept_in_the_folders_that_verl_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["skip.rollout.dump_dir=~/dump", "skip.async_rollout.dump_dir=~/dump", "--rollout-max-prompt-len", "64"]
    sizes = ["--rollout-batch-size", "32", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"]
    manager = SkipManager(run_config(*words, *sizes, "--experiment-name", "e", "--project-name", "p"), SkipContext())
    roles: Mapping[str, Any] = manager.skip_instances
    folders = {role: str(skip.recordings.store.folder.relative_to(tmp_path)) for role, skip in roles.items()}
    assert folders == {
        "rollout": "dump/e_p/GBS32_N4_in64_out8",
        "async_rollout": "dump/e_p/GBS1_N4_in64_out8",
    }


def test_a_folder_is_named_by_the_prompts_that_are_generated_for_a_batch(tmp_path: Path) -> None:
    words = [f"skip.rollout.dump_dir={tmp_path}", "data.train_batch_size=32", "data.gen_batch_size=48"]
    skip: Any = SkipManager(run_config(*words), SkipContext()).skip_instances["rollout"]
    assert skip.recordings.store.folder.name.startswith("GBS48_")


def test_the_identity_of_a_recording_names_its_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = identity_of(run_config(), str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"changed")
    after = identity_of(run_config("--rollout-temperature", "0.5", "--rollout-seed", "7"), str(tmp_path))
    assert {name for name in before if before[name] != after[name]} == {"model", "rollout_temperature", "rollout_seed"}


@pytest.mark.parametrize(
    "file, name",
    [
        ("generation_config.json", "model"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer.model", "tokenizer"),
        ("vocab.json", "tokenizer"),
        ("merges.txt", "tokenizer"),
        ("chat_template.jinja", "chat_template"),
        ("tokenizer_config.json", "chat_template"),
    ],
)
def test_each_file_that_affects_a_response_is_part_of_the_identity_of_a_recording(
    tmp_path: Path, file: str, name: str
) -> None:
    (tmp_path / file).write_text("before")
    before = identity_of(run_config(), str(tmp_path))
    assert differences(before, identity_of(run_config(), str(tmp_path))) == {}
    (tmp_path / file).write_text("behind")
    assert [*differences(before, identity_of(run_config(), str(tmp_path)))] == [name]


@pytest.mark.parametrize(
    "function", [{"custom_generate_function_path": "my.own"}, {"rollout_sample_hook_path": ["my.own"]}]
)
def test_arguments_of_functions_that_make_responses_are_part_of_the_identity_of_a_recording(
    function: Mapping[str, Any],
) -> None:
    def identity(**arguments: Any) -> Mapping[str, Any]:
        return identity_of(run_config(**function, custom_args=arguments))

    assert [*differences(identity(), identity(turns=3))] == ["custom_args"]
    assert [*differences(identity(turns=2), identity(turns=3))] == ["custom_args"]
    assert identity(api_key="a" * 20) == identity(api_key="b" * 20), "a secret is not written to a recording"


def test_arguments_of_functions_that_a_replay_calls_again_are_no_part_of_the_identity_of_a_recording() -> None:
    before, after = (
        identity_of(run_config(custom_rm_path="my.reward", custom_args={"penalty": one})) for one in (1, 2)
    )
    assert before == after


@pytest.mark.parametrize(
    "setting, flag, value",
    [
        ("rollout_top_p", "--rollout-top-p", "0.5"),
        ("rollout_top_k", "--rollout-top-k", "5"),
        ("rollout_stop", "--rollout-stop", "END"),
        ("rollout_stop_token_ids", "--rollout-stop-token-ids", "7"),
        ("rollout_skip_special_tokens", "--rollout-skip-special-tokens", None),
        ("custom_generate_function_path", "--custom-generate-function-path", "my.generate"),
        ("rollout_sample_hook_path", "--rollout-sample-hook-path", "my.hook"),
        ("apply_chat_template_kwargs", "--apply-chat-template-kwargs", '{"enable_thinking": true}'),
        ("environment", "--environment", "verifiers:words"),
        ("environment_settings", "--environment-settings", '{"max_turns": 3}'),
        ("tool_max_turns", "--tool-max-turns", "7"),
        ("tool_search_corpus", "--tool-search-corpus", "documents.jsonl"),
        ("tool_call_parser", "--tool-call-parser", "hermes"),
        ("reasoning_parser", "--reasoning-parser", "qwen3"),
        ("lora_load", "--lora-load", "adapter"),
    ],
)
def test_every_setting_that_affects_a_response_is_part_of_the_identity_of_a_recording(
    setting: str, flag: str, value: str | None
) -> None:
    words = [flag] if value is None else [flag, value]
    assert [*differences(identity_of(run_config()), identity_of(run_config(*words)))] == [setting]


def test_limits_and_templates_of_data_sets_are_part_of_the_identity_of_a_recording() -> None:
    def identity(**settings: Any) -> Mapping[str, Any]:
        datasets = {"sums": {"prompt_data": "sums.jsonl", **settings}, "words": {"prompt_data": "words.jsonl"}}
        return identity_of(run_config(datasets=datasets))

    assert differences(identity(weight=2.0), identity_of(run_config())) == {}
    changes: list[dict[str, Any]] = [
        {"max_response_len": 7},
        {"apply_chat_template_kwargs": {"enable_thinking": True}},
    ]
    for settings in changes:
        assert [*differences(identity(), identity(**settings))] == ["datasets"]


def test_a_group_with_other_tools_in_its_chat_is_another_prompt_than_the_recorded_one() -> None:
    chat: Any = [{"role": "user", "content": "1 + 1"}]
    hashes = {prompt_hash(Group([Sample(prompt=chat, metadata={"tools": tools})])) for tools in ([], [{"name": "add"}])}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    "current, available, expected",
    [(5, {3, 5, 9}, 5), (5, {3, 4, 9}, 4), (5, {7, 9}, 7), (5, set(), None)],
)
def test_repeat_prefers_the_same_step_then_the_nearest_below_then_the_nearest_above(
    current: int, available: set[int], expected: int | None
) -> None:
    assert choose_step(SkipAction.REPEAT, current, available) == expected
    assert choose_step(SkipAction.CACHE, current, available) == (5 if 5 in available else None)


def test_steps_are_integers_and_ranges_with_both_ends() -> None:
    steps = Steps.parse([1, "3-5", "9-"])
    assert [step for step in range(12) if step in steps] == [1, 3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize("text", ["[1, x]", "[1.5]", "[true]", "[-1]", "[5-3]", "[1-2-3]"])
def test_an_invalid_step_is_refused_with_its_setting(text: str) -> None:
    with pytest.raises(UserError, match=r"skip\.rollout\.steps: (steps are integers|the range 5-3 ends)"):
        run_config(f"skip.rollout.steps={text}")


def test_the_position_in_the_feed_is_the_last_part_of_a_feed_index() -> None:
    assert [feed_step("sample_0_42"), feed_step("sample_3_7"), feed_step("eval_1"), feed_step("")] == [
        42,
        7,
        None,
        None,
    ]


def test_the_overrides_of_verl_and_the_flags_set_the_same_settings() -> None:
    overrides = run_config(
        "skip.async_rollout.enable=True",
        "skip.async_rollout.dump_dir=/d",
        "skip.async_rollout.steps=[1,2,3]",
        "skip.async_rollout.action=repeat",
    )
    flags = "--skip-async-rollout-enable --skip-async-rollout-dump-dir /d --skip-async-rollout-steps 1 2 3"
    assert overrides == run_config(*flags.split(), "--skip-async-rollout-action", "repeat")


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(UserError, match=r"skip\.rollout\.action: input should be 'cache' or 'repeat', got 'empty'"):
        run_config("skip.rollout.action=empty")


def test_the_legacy_switch_warns_and_the_new_setting_takes_precedence() -> None:
    with pytest.warns(DeprecationWarning, match="--skip-rollout is deprecated and has no effect beside"):
        both = run_config("--skip-rollout", "skip.rollout.enable=True", "skip.rollout.steps=[1]")
    assert both == run_config("skip.rollout.enable=True", "skip.rollout.steps=[1]")


def test_the_legacy_switch_alone_skips_every_step() -> None:
    with pytest.warns(DeprecationWarning, match=r"--skip-rollout is deprecated: set skip\.rollout\.enable"):
        skip = run_config("--skip-rollout").skip
    assert [(role.enable, role.steps) for role in (skip.rollout, skip.async_rollout)] == [(True, ["0-"])] * 2


async def test_the_worked_example_of_the_documentation_skips_the_reward_stage(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    module: dict[str, Any] = {"__name__": "my_rewards"}
    exec(example, module)
    scored: list[Any] = []

    def slow_judge(sample: Sample) -> float:
        scored.append(sample.index)
        return 0.5

    module["slow_judge"] = slow_judge
    words = ("skip.reward.enable=True", "skip.reward.steps=[0-1]", f"skip.reward.dump_dir={tmp_path}")
    samples = [Sample(index=i, metadata={"feed_index": f"sample_0_{i}"}) for i in range(3)]

    async def run() -> list[float]:
        with SkipManager.init(run_config(*words)):
            return await asyncio.gather(*(module["reward"](None, sample) for sample in samples))

    try:
        assert await run() == await run() == [0.5, 0.5, 0.5]
    finally:
        del base.REGISTERED["reward"]
    assert sorted(scored) == [0, 1, 2, 2], "step 2 is not among the steps"


@pytest.mark.parametrize(
    "entry, words, note",
    [
        (
            "train.py",
            ("skip.async_rollout.enable=True",),
            "skip.async_rollout has no effect .*: enable skip.rollout",
        ),
        (
            "train.py",
            ("skip.rollout.enable=True",),
            r'skip.rollout is enabled but skips no step: set skip.rollout.steps, for example to "\[1-',
        ),
        ("train.py", ("skip.rollout.enable=True", "skip.rollout.steps=[1]"), None),
    ],
)
def test_a_role_without_effect_is_noted(entry: str, words: tuple[str, ...], note: str | None) -> None:
    found = notes(run_config(*words), entry)
    assert found == [] if note is None else re.match(note, found[0])
