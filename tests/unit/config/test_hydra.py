"""Files that include others with Hydra's `defaults`, and references such as `${key}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.config.hydra import References, Unresolved, composed
from miles_async.errors import UserError


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_file_overrides_what_it_includes_section_by_section(tmp_path: Path) -> None:
    write(tmp_path, envs="a: {x: 1, y: 1}\nb: 1")
    content = {"defaults": ["envs@_here_"], "a": {"x": 2}}
    assert composed(content, tmp_path / "main.yaml") == {"a": {"x": 2, "y": 1}, "b": 1}


def test_later_files_override_earlier_ones_and_self_says_where_the_file_comes(tmp_path: Path) -> None:
    write(tmp_path, one="a: 1\nb: 1", two="a: 2")
    content = {"defaults": ["one", "_self_", "two"], "a": 3, "b": 3}
    assert composed(content, tmp_path / "main.yaml") == {"a": 2, "b": 3}


def test_an_included_file_includes_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    write(tmp_path / "config", one="defaults: [two]\na: 1", two="b: 2")
    assert composed({"defaults": ["config/one@_here_"]}, tmp_path / "main.yaml") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "entry, said",
    [
        ("missing", "missing.yaml cannot be read: No such file or directory"),
        ("loop", "defaults loop includes itself: remove it"),
        ("words", "words.yaml has no keys with values: write name: value"),
        ({"db": "mysql"}, "cannot be included: write it as name@_here_"),
        ("group/name", "cannot be included: write it as name@_here_"),
    ],
)
def test_what_cannot_be_included_is_refused(entry: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path, loop="defaults: [loop]", words="only words")
    with pytest.raises(UserError, match=said):
        composed({"defaults": [entry]}, tmp_path / "main.yaml")


def test_references_are_replaced_along_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "7")
    references = References({"a": {"b": "${c}"}, "c": [1, "${d}"], "d": 2})
    assert references.resolved("${a.b}") == [1, 2]
    assert references.resolved({"x": "run-${d}-${oc.env:SIZE}-${oc.env:NONE,text}"}) == {"x": "run-2-7-text"}


@pytest.mark.parametrize(
    "value, said",
    [
        ("${missing}", "which this file does not set"),
        ("${one}", "which refers to itself"),
        ("${oc.env:NO_SUCH_VARIABLE}", "there is no such variable"),
        ("${unknown:1}", "which is unknown"),
        ("${long}", "too long"),
    ],
)
def test_a_reference_that_cannot_be_replaced_is_refused(value: str, said: str) -> None:
    doubled = {f"d{number}": f"${{d{number + 1}}}" * 2 for number in range(20)}
    references = References({"one": "${two}", "two": "${one}", "long": "${d0}", **doubled, "d20": "xx"})
    with pytest.raises(Unresolved, match=said):
        references.resolved(value)
