"""Training from Python. A small program takes the place of `miles-async train`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import miles_async
from miles_async import DatasetConfig, HuggingFaceDataset, Qwen3_4B, SlimeRecipe, TrainConfig, TrainResult
from miles_async.compat.tutorial import recipe
from miles_async.config.generation import schedule_of
from miles_async.config.load import load_config
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, UserError
from miles_async.scheduling.bounds import Schedule

FAKE_RUN = """
import json, os, signal, sys
from pathlib import Path

settings = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = Path(settings["run-dir"], settings["run-name"])

def end(reason, code):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"reason": reason, "reward_last": 0.5, "flags": sys.argv[1:]}))
    sys.exit(code)

def press_ctrl_c():
    os.kill(os.getppid(), signal.SIGINT)
    signal.sigwait({signal.SIGINT})

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("batch 1/2")
print("a warning", file=sys.stderr)
"""
DONE = 'end("done", 0)'
DRAINS = 'press_ctrl_c(); end("interrupted", 130)'
ENDS_AT_THE_SECOND = 'press_ctrl_c(); press_ctrl_c(); end("interrupted", 130)'
Train = Callable[..., TrainResult]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with a program instead of a run; `ending` is what it does after its first lines of output."""

    def train(ending: str = DONE, **settings: Any) -> TrainResult:
        monkeypatch.setattr(recipe, "COMMAND", (sys.executable, "-u", "-c", FAKE_RUN + ending))
        task: dict[str, Any] = {
            "reasoning_gym_task": "chain_sum",
            "rm_type": "reasoning_gym",
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 8,
        }
        return TrainConfig(recipe=SlimeRecipe(**task, run_dir=str(tmp_path / "runs"), **settings)).train()

    return train


class Rows(list[dict[str, str]]):
    """What is used of a `datasets.Dataset`."""

    def select(self, indices: Sequence[int]) -> Rows:
        return Rows(self[index] for index in indices)

    def to_json(self, path: str, *, orient: str, lines: bool) -> None:
        assert (orient, lines) == ("records", True)
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in self))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """Replaces the Hub by one with a single data set; returns the list of what was loaded, which grows."""
    loaded: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> Rows:
        loaded.append((name, config, split))
        if name != "zhuzilin/dapo-math-17k":
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub\nTry again.")
        return Rows({"prompt": f"{n}+1", "label": str(n + 1)} for n in range(3000))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return loaded


class MathDataset(HuggingFaceDataset):
    """As the windowed-FIFO tutorial defines it."""

    hf_repo = "zhuzilin/dapo-math-17k"
    input_key = "prompt"
    label_key = "label"
    output_format = "jsonl"
    apply_chat_template = True
    always_prepare = True

    def load(self, split: str = "all") -> Any:
        from datasets import load_dataset

        ds = load_dataset(self.hf_repo, self.hf_config, split=self.hf_split)
        stop = len(ds) if not self.n_rows else min(self.n_rows, len(ds))
        return ds.select(range(stop))


def tutorial(**changed: Any) -> SlimeRecipe:
    """The recipe of the windowed-FIFO tutorial, with some settings changed."""
    settings: dict[str, Any] = {
        "rm_type": "dapo", "gpu_type": "H100", "colocate": True, "actor_num_nodes": 1, "actor_num_gpus_per_node": 8,
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "rollout_num_gpus_per_engine": 1,
        "async_mode": True, "num_rollout": 15, "rollout_batch_size": 16, "over_sampling_batch_size": 32,
        "windowed_fifo_ratio": 0.3, "n_samples_per_prompt": 8, "rollout_max_response_len": 8192,
        "rollout_temperature": 1.0, "global_batch_size": 32, "lr": 1e-6, "advantage_estimator": "grpo",
        "use_kl_loss": False, "kl_coef": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.28, "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 9216, "sglang_mem_fraction_static": 0.75, "save_interval": 10,
        "apply_chat_template_kwargs": '{"enable_thinking": true}',
    }  # fmt: skip
    return SlimeRecipe(**settings | changed)


def resolved(recipe: SlimeRecipe, cache: Path) -> RunConfig:
    recipe.settings["cache_dir"] = str(cache)
    training_run = TrainConfig(model=Qwen3_4B(), dataset=MathDataset(n_rows=2_000), recipe=recipe)
    return load_config(training_run.flags("my-run"), entry="train_async.py")


def test_the_tutorials_recipe_passes_the_check_as_typed(tmp_path: Path, hub: list[tuple[str, str | None, str]]) -> None:
    config = resolved(tutorial(), tmp_path)
    assert config.model.hf_checkpoint == "Qwen/Qwen3-4B"
    assert config.data.prompt_data is not None
    assert len(Path(config.data.prompt_data).read_text().splitlines()) == 2000
    assert (config.data.apply_chat_template, config.data.apply_chat_template_kwargs) == (
        True,
        {"enable_thinking": True},
    )
    assert config.steps_per_rollout == 4
    assert config.engine.rollout_num_gpus == 8
    assert config.engine.sglang_server_args == {"mem_fraction_static": 0.75}
    assert (config.learner.save, config.learner.save_interval) == ("checkpoints/my-run", 10)
    assert config.learner.precision == "bf16"
    assert config.rollout.rollout_function_path == "miles_async.rollout.windowed_fifo_rollout.generate_rollout"
    assert hub == [("zhuzilin/dapo-math-17k", None, "train")]


def test_async_mode_overlaps_generation_and_training_unless_they_share_devices(
    tmp_path: Path, hub: list[tuple[str, str | None, str]]
) -> None:
    def schedule(recipe: SlimeRecipe) -> Schedule:
        return schedule_of(resolved(recipe, tmp_path), "train_async.py")

    assert schedule(tutorial(colocate=False, async_mode=True)) is Schedule.ONE_STEP_OFF
    assert schedule(tutorial(colocate=False, async_mode=False)) is Schedule.SYNCHRONOUS
    assert schedule(tutorial(colocate=True, async_mode=True)) is Schedule.SYNCHRONOUS
    explicit = {"schedule": "fully_async", "rollout_function_path": "fully_async_rollout.generate_rollout_fully_async"}
    assert schedule(tutorial(colocate=False, async_mode=False, **explicit)) is Schedule.FULLY_ASYNC


def test_a_machine_without_the_gpu_is_refused_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, hub: list[tuple[str, str | None, str]]
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    with pytest.raises(
        UserError, match="gpu_type H100 is not available, because this machine has no GPU: set gpu_type"
    ):
        TrainConfig(model=Qwen3_4B(), dataset=MathDataset(n_rows=2_000), recipe=tutorial()).train()
    assert hub == []


def test_the_rows_are_written_once_unless_they_are_always_prepared(
    tmp_path: Path, hub: list[tuple[str, str | None, str]]
) -> None:
    for _ in range(2):
        MathDataset(always_prepare=False, n_rows=3).file(tmp_path)
    assert len(hub) == 1
    for _ in range(2):
        MathDataset(n_rows=3).file(tmp_path)
    assert len(hub) == 3


def test_a_data_set_that_cannot_be_loaded_is_refused_with_one_sentence(
    tmp_path: Path, hub: list[tuple[str, str | None, str]]
) -> None:
    with pytest.raises(UserError) as refused:
        HuggingFaceDataset(hf_repo="nobody/nothing").file(tmp_path)
    assert str(refused.value).startswith(
        "the data set nobody/nothing cannot be loaded (Couldn't reach 'nobody/nothing' on the Hub): check hf_repo"
    )


def test_a_data_set_of_the_users_own_writes_its_rows_itself(tmp_path: Path) -> None:
    class Sums(DatasetConfig):
        name = "sums"

        def prepare(self, path: str) -> None:
            Path(path).write_text('{"prompt": "1+1", "label": "2"}\n')

    assert Sums().file(tmp_path) == tmp_path / "Sums-sums.jsonl"
    with pytest.raises(UserError, match=r"Sums has no attribute 'input_kye'; did you mean input_key\?"):
        Sums(input_kye="question")
    with pytest.raises(UserError, match="DatasetConfig has no rows: define prepare"):
        DatasetConfig().file(tmp_path)


def test_an_interrupted_preparation_leaves_no_file(tmp_path: Path) -> None:
    class Interrupted(DatasetConfig):
        def prepare(self, path: str) -> None:
            Path(path).write_text('{"prompt": "1+1", "la')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted().file(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_function_is_named_by_its_module() -> None:
    with pytest.raises(UserError, match=r"custom_rm_path .* cannot be passed to a run: write a function as"):
        SlimeRecipe(custom_rm_path=print).flags("my-run")


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"SlimeRecipe has no setting 'num_rollouts'; did you mean num_rollout\?"):
        SlimeRecipe(num_rollouts=15)


def test_train_passes_the_output_on_and_returns_the_summary(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(num_rollout=2, save=str(tmp_path / "saved"))
    assert result.summary["reason"] == "done"
    assert result.summary["reward_last"] == 0.5
    assert "--num-rollout=2" in result.summary["flags"]
    assert result.run_folder == tmp_path / "runs" / result.training_run_id
    assert result.checkpoint_dir == tmp_path / "saved"
    assert capsys.readouterr().out.splitlines() == ["batch 1/2", "a warning"]


def test_the_first_ctrl_c_lets_the_run_finish_and_returns_its_summary(train: Train) -> None:
    assert train(DRAINS).summary["reason"] == "interrupted"


def test_the_second_ctrl_c_is_raised_after_the_run_has_ended(train: Train, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(ENDS_AT_THE_SECOND, run_name="twice")
    assert json.loads((tmp_path / "runs" / "twice" / "summary.json").read_text())["reason"] == "interrupted"


def test_ctrl_c_before_the_run_has_written_anything_is_raised(train: Train) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("press_ctrl_c(); sys.exit(130)")


@pytest.mark.parametrize("code, error", [(1, FatalError), (2, UserError)])
def test_a_run_that_fails_is_reported_with_its_last_line(train: Train, code: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"the run ended with exit code {code}: the learner was lost"):
        train(f"print('the learner was lost\\n'); sys.exit({code})")


def test_a_run_that_refuses_its_settings_is_reported_with_all_sentences(train: Train) -> None:
    refusal = "print('a log line\\ntrain_async.py: set one\\ntrain_async.py: set the other'); sys.exit(2)"
    with pytest.raises(UserError, match=r"^the run ended with exit code 2: set one\nset the other$"):
        train(refusal)


def test_invalid_settings_are_refused_before_a_process_is_started(train: Train) -> None:
    with pytest.raises(UserError, match="global_batch_size 100"):
        train("raise AssertionError", global_batch_size=100)


def test_a_name_that_an_earlier_run_has_is_refused(train: Train) -> None:
    train(run_name="mine")
    with pytest.raises(UserError, match="is the folder of an earlier run: set run_name to another name"):
        train(run_name="mine")


def test_importing_the_package_imports_nothing_and_a_recipe_imports_no_torch() -> None:
    program = """
import sys, miles_async
assert not {name for name in sys.modules if name.startswith("miles_async.")}, sys.modules
assert miles_async.TrainConfig.__name__ == "TrainConfig"
assert not {"torch", "ray", "transformers", "datasets", "numpy"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(miles_async.__all__) - {"__version__"} <= vars(recipe).keys()
    with pytest.raises(AttributeError, match="no attribute 'Qwen9'"):
        miles_async.Qwen9  # noqa: B018
