"""The documentation site: the reference pages follow from the code, and the glossary defines each term once."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from miles_async.config.fields import SECTIONS, SETTINGS

DOCS = Path(__file__).parents[2] / "docs"


def hook(path: str) -> ModuleType:
    """A module that MkDocs loads from a file, as its hooks are."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return hook("reference/generate.py")


def test_the_settings_page_has_one_row_per_setting_under_its_section(generate: ModuleType) -> None:
    page = generate.settings_page()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(SECTIONS)
    for table in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        section = table.partition("\n")[0]
        flags = re.findall(r"^\| `--(?:\[no-\])?([^`]+)`", table, re.MULTILINE)
        expected = [setting.flag for setting in SETTINGS.values() if ".".join(setting.path[:-1]) == section]
        assert [f"--{flag}" for flag in flags] == expected


def test_every_row_of_the_settings_page_has_four_cells(generate: ModuleType) -> None:
    rows = [line for line in generate.settings_page().splitlines() if line.startswith("| `--")]
    assert {len(re.split(r"(?<!\\)\|", row)) - 2 for row in rows} == {4}


def test_the_models_page_says_for_each_family_what_was_shown_of_its_engine(generate: ModuleType) -> None:
    rows = [line.split(" | ") for line in generate.models_page().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    unknown = {row[0].removeprefix("| ") for row in rows if row[5].strip(" |") == ""}
    assert unknown == {"GLM-4"}


@pytest.mark.parametrize("name", ["types", "errors", "ports", "pipeline", "rollout", "rewards", "filters", "losses"])
def test_every_public_package_has_a_page_of_its_modules(generate: ModuleType, name: str) -> None:
    assert f"::: miles_async.{name}" in generate.python_page(name)


def test_the_glossary_defines_20_to_40_terms_each_once() -> None:
    text = (DOCS / "glossary.md").read_text()
    terms = [term for term in re.findall(r"^\| ([a-z][^|]*) \|", text, re.MULTILINE) if term != "term"]
    assert 20 <= len(terms) <= 40
    assert len(set(terms)) == len(terms)


def test_the_list_of_pages_for_programs_follows_the_navigation(tmp_path: Path) -> None:
    config = MkDocsConfig()
    config.load_dict(
        {
            "site_name": "a project",
            "site_description": "What it is",
            "use_directory_urls": False,
            "nav": [{"Home": "index.md"}, {"Operate": [{"Stop": "how-to/stop.md"}, {"Resume": "how-to/resume.md"}]}],
        }
    )
    config.validate()
    pages = {
        "index.md": "# A project\n\nIt [trains](stop.md)\nmodels. It stops.\n",
        "how-to/stop.md": "# Stop\n\n```\nkill\n```\n",
        "how-to/resume.md": "# Resume\n\n## Save\n",
    }
    for path, text in pages.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    files = Files([File(path, str(tmp_path), str(tmp_path / "site"), use_directory_urls=False) for path in pages])
    assert hook("llms.py").llms_text(files, config).splitlines() == [
        "# a project",
        "",
        "> What it is",
        "",
        "- [Home](index.html): It trains models.",
        "",
        "## Operate",
        "",
        "- [Stop](how-to/stop.html)",
        "- [Resume](how-to/resume.html)",
    ]


def test_the_page_of_a_notebook_has_its_text_its_code_and_what_it_prints() -> None:
    printed = {"output_type": "stream", "name": "stdout", "text": ["3\n", "4\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Numbers\n", "\n", "Count."]},
        {"cell_type": "code", "source": ["print(3)\n", "print(4)"], "outputs": [printed]},
        {"cell_type": "code", "source": ["x = 1"], "outputs": []},
    ]
    page = "# Numbers\n\nCount.\n\n```python\nprint(3)\nprint(4)\n```\n\n```\n3\n4\n```\n\n```python\nx = 1\n```\n"
    assert hook("notebook.py").page({"cells": cells}) == page


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/choose-staleness.md"])
def test_figures_of_the_study_that_other_pages_repeat_are_those_of_the_study(page: str) -> None:
    repeated = re.findall(r"\d[\d.]* ± [\d.]*\d", (DOCS.parent / page).read_text())
    study = (DOCS / "explanation" / "staleness.md").read_text()
    assert repeated
    assert [figure for figure in repeated if figure not in study] == []
