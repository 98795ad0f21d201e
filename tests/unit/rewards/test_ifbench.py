"""The reward of IFBench, with a package of that name whose constraints are simple."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles_async.rewards.functions import ifbench
from miles_async.rewards.functions.ifbench import IfBench
from miles_async.types import Sample
from tests.scoring import scored
from tests.unit.config.test_config_checks import refusal

REGISTRY = """
class Starts:
    def __init__(self, name): self.name = name
    def build_description(self, *, word=None): self.word = word
    def get_instruction_args(self): return {"word": self.word}
    def check_following(self, text): return text.startswith(self.word)

class Repeats:
    def __init__(self, name): self.prompt = None
    def build_description(self, *, prompt=None): self.prompt = prompt
    def get_instruction_args(self): return {"prompt": self.prompt}
    def check_following(self, text): return self.prompt in text

INSTRUCTION_DICT = {"words:starts": Starts, "repeat:prompt": Repeats}
"""


NLTK = """
from types import SimpleNamespace

data = SimpleNamespace(path=[])
corpus = SimpleNamespace(stopwords=SimpleNamespace(words=lambda language: ["the"]))
tag = SimpleNamespace(PerceptronTagger=lambda: SimpleNamespace(tag=lambda words: []))

def word_tokenize(text): return text.split()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package, whose data is complete, on the path of this process and of others."""
    folder = tmp_path / "ifbench"
    for name in ifbench._DATA:
        (tmp_path / "data" / name).mkdir(parents=True)
    monkeypatch.setattr(ifbench, "_data_folder", lambda: tmp_path / "data")
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "instructions_util.py").write_text("def count_sentences(text): return 1\n")
    (folder / "instructions_registry.py").write_text(REGISTRY)
    for name in ifbench._IMPORTS:
        (tmp_path / f"{name}.py").write_text(NLTK if name == "nltk" else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loaded = _forget_modules()
    yield folder
    _forget_modules()
    sys.modules.update(loaded)


def _forget_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in ("ifbench", "nltk")]
    return {name: sys.modules.pop(name) for name in names}


def reward(response: str, **metadata: Any) -> float:
    return float(IfBench().open(None)(None, Sample(response=response, metadata=metadata)))


@pytest.mark.usefixtures("package")
def test_a_response_has_to_follow_all_instructions_of_its_row() -> None:
    row = {
        "instruction_id_list": ["words:starts", "repeat:prompt"],
        "kwargs": [{"word": "Yes", "N": None}, None],
        "prompt_text": "Why?",
    }
    assert [reward(text, **row) for text in ("Yes: Why?", "Yes", "Why?", "")] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.usefixtures("package")
def test_one_object_of_arguments_is_for_all_instructions() -> None:
    row = {"instruction_id_list": ["words:starts", "words:starts"], "kwargs": {"word": "Yes"}}
    assert (reward("Yes", **row), reward("No", **row)) == (1.0, 0.0)


@pytest.mark.usefixtures("package")
def test_an_empty_response_follows_no_instruction() -> None:
    assert reward(" ", instruction_id_list=["words:starts"], kwargs=[{"word": " "}]) == 0.0


@pytest.mark.usefixtures("package")
def test_a_row_that_cannot_be_checked_is_an_error_and_not_a_wrong_answer() -> None:
    for row in ({}, {"instruction_id_list": ["words:ends"]}):
        with pytest.raises(KeyError):
            reward("Yes", **row)
    with pytest.raises(ValueError, match="metadata has 1 instructions, but 2 kwargs"):
        reward("Yes", instruction_id_list=["words:starts"], kwargs=[{}, {}])


@pytest.mark.usefixtures("package")
async def test_responses_are_scored_in_confined_processes() -> None:
    row = {"instruction_id_list": ["words:starts"], "kwargs": [{"word": "Yes"}]}
    assert await scored("Yes.", "No.", metadata=row, rm_type="ifbench") == [1.0, 0.0]


def test_an_installation_that_is_missing_or_incomplete_is_refused_in_one_sentence(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ifbench.lacking() is None
    data = package.parent / "data"
    (data / "tokenizers" / "punkt_tab").rmdir()
    (data / "tokenizers" / "punkt").rmdir()
    (data / "tokenizers" / "punkt.zip").touch()
    assert f"needs the data tokenizers/punkt_tab of NLTK in {data}: run `make setup-" in refusal(rm_type="ifbench")
    monkeypatch.setattr(ifbench, "_IMPORTS", ("nltk", "no_such_module"))
    assert refusal(rm_type="ifbench") == (
        "rm_type ifbench needs no_such_module, which IFBench imports: run `make setup-ifbench IFBENCH=FOLDER`"
    )


def test_without_the_package_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ifbench.lacking() == (
        "needs AllenAI's IFBench: run `make setup-ifbench IFBENCH=FOLDER` with a checkout of it"
    )
