"""The reward `ifbench`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn
from miles_async.types import Sample

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig

Constraints = Mapping[str, Callable[[str], Any]]
"""The classes of IFBench's constraints by name."""
_SETUP = "make setup-ifbench IFBENCH=FOLDER"
_IMPORTS = ("absl", "emoji", "immutabledict", "langdetect", "nltk", "syllapy")
"""Modules that IFBench imports."""
_DATA = ("corpora/stopwords", "taggers/averaged_perceptron_tagger_eng", "tokenizers/punkt", "tokenizers/punkt_tab")
"""Data of NLTK that IFBench reads."""


class IfBench(Reward):
    """1 if the response follows all instructions of its row in the strict mode of IFBench (arXiv 2507.02833), and 0
    otherwise. Needs a checkout of AllenAI's IFBench.
    """

    name = "ifbench"
    # Its patterns were not written for hostile text, and some of them may take very long.
    runs_in = RunsIn.CHILD

    def open(self, settings: Any) -> RewardFunction:
        import nltk

        # IFBench downloads what its import does not find.
        nltk.data.path[:] = [str(_data_folder())]
        from ifbench import instructions_util
        from ifbench.instructions_registry import INSTRUCTION_DICT

        # NLTK opens its files with system calls that a confined process may not use, so all of them are read here.
        nltk.word_tokenize("Yes.")
        instructions_util.count_sentences("Yes.")
        nltk.pos_tag = nltk.tag.PerceptronTagger().tag
        stopwords = {"english": nltk.corpus.stopwords.words("english")}
        nltk.corpus.stopwords.words = stopwords.__getitem__
        return partial(_score, INSTRUCTION_DICT)

    def missing(self, config: RunConfig) -> str | None:
        return lacking()


def _data_folder() -> Path:
    return Path(sys.prefix) / "nltk_data"


def lacking() -> str | None:
    """What is not installed, and what to do, as the end of a sentence; None if nothing is missing."""
    if importlib.util.find_spec("ifbench") is None:
        return f"needs AllenAI's IFBench: run `{_SETUP}` with a checkout of it"
    if modules := [name for name in _IMPORTS if importlib.util.find_spec(name) is None]:
        return f"needs {', '.join(modules)}, which IFBench imports: run `{_SETUP}`"
    folder = _data_folder()
    if data := [name for name in _DATA if not (folder / name).is_dir() and not (folder / f"{name}.zip").is_file()]:
        return (
            f"needs the data {', '.join(data)} of NLTK in {folder}: run `{_SETUP}` with access to the Internet, or "
            "copy the data there"
        )
    return None


def _score(constraints: Constraints, args: Any, sample: Sample) -> float:
    """Raises KeyError if the row has no known instructions, and ValueError if `kwargs` has another length."""
    names: Sequence[str] = sample.metadata["instruction_id_list"]
    arguments: Any = sample.metadata.get("kwargs") or {}
    if isinstance(arguments, Mapping):
        arguments = [arguments] * len(names)
    if len(arguments) != len(names):
        raise ValueError(f"metadata has {len(names)} instructions, but {len(arguments)} kwargs")
    prompt = str(sample.metadata.get("prompt_text") or "")
    followed = [
        _follows(constraints[name](name), sample.response, given or {}, prompt)
        for name, given in zip(names, arguments, strict=True)
    ]
    return float(all(followed))


def _follows(constraint: Any, response: str, given: Mapping[str, Any], prompt: str) -> bool:
    """Whether the response follows a constraint. Its arguments are those in `given` that are not None."""
    constraint.build_description(**{name: value for name, value in given.items() if value is not None})
    if "prompt" in (constraint.get_instruction_args() or {}):
        constraint.build_description(prompt=prompt)
    return bool(response.strip()) and bool(constraint.check_following(response))
