"""Secrets in settings do not reach the files that a run writes."""

from __future__ import annotations

import io
import logging
import stat
from pathlib import Path

import pytest

from miles_async.config.flags import Assignment
from miles_async.config.load import translation_table
from miles_async.config.redaction import REDACTED, is_secret, redact_text, redacted_values
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.run_folder import RunFolder
from tests.configuration import build, read_yaml

SECRETS = ("hunter2", "tok-123", "s3cr3t")


def config_with_secrets(run_dir: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "rollout": {"rm_url": "https://me:hunter2@judge.example/score?api_key=s3cr3t&top_k=3"},
            "engine": {
                "sglang_server_args": {"api_key": "tok-123", "max_total_tokens": 4096, "tokenizer_path": "/t"},
                "engine_env_vars": {"HF_TOKEN": "tok-123", "NCCL_DEBUG": "INFO"},
            },
            "learner": {"train_env_vars": {"AWS_SECRET_ACCESS_KEY": "s3cr3t"}},
            "observability": {"run_dir": str(run_dir)},
        }
    )


def test_what_the_file_of_another_project_means_is_shown_without_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "roll.yaml"
    key = "0123456789abcdef0123456789abcdef01234567"
    path.write_text(
        f"rollout_batch_size: 4\nactor_train: {{}}\ntrack_with: wandb\ntracker_kwargs: {{api_key: {key}}}\n"
    )
    shown = translation_table(path)
    assert shown is not None
    assert f"observability.wandb_key = {REDACTED}" in shown
    assert key not in shown


def test_the_run_folder_holds_no_secret_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(config_with_secrets(tmp_path)).path
    written = (folder / "config.yaml").read_text()
    assert [secret for secret in SECRETS if secret in written] == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "logs").stat().st_mode) == 0o700


def test_values_that_are_no_secrets_are_kept(tmp_path: Path) -> None:
    values = redacted_values(config_with_secrets(tmp_path))
    assert values["engine"]["sglang_server_args"] == {
        "api_key": REDACTED,
        "max_total_tokens": 4096,
        "tokenizer_path": "/t",
    }
    assert values["engine"]["engine_env_vars"] == {"HF_TOKEN": REDACTED, "NCCL_DEBUG": "INFO"}
    assert values["rollout"]["rm_url"] == f"https://{REDACTED}@judge.example/score?api_key={REDACTED}&top_k=3"
    assert values["data"]["input_key"] == "input"


def test_a_configuration_without_secrets_is_written_completely() -> None:
    assert redacted_values(RunConfig()) == RunConfig().model_dump(mode="json")


def test_a_file_whose_secrets_were_left_out_is_refused_until_they_are_set_again(tmp_path: Path) -> None:
    file = RunFolder.create(config_with_secrets(tmp_path)).path / "config.yaml"
    with pytest.raises(UserError, match="rm_url: a secret was left out of this file when it was written"):
        build(read_yaml(file))
    again = {
        ("rollout", "rm_url"): "https://judge.example",
        ("engine", "sglang_server_args"): {},
        ("engine", "engine_env_vars"): {},
        ("learner", "train_env_vars"): {},
    }
    build([*read_yaml(file), *(Assignment(path, value, "a flag") for path, value in again.items())])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("GET http://u:p@host/x failed", f"GET http://{REDACTED}@host/x failed"),
        ("https://host/x?access_token=abc&n=1", f"https://host/x?access_token={REDACTED}&n=1"),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {REDACTED}"),
        ("mail me@example.org about http://host/", "mail me@example.org about http://host/"),
    ],
)
def test_credentials_are_removed_from_any_text(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "WANDB_API_KEY", "db.password", "Auth"])
def test_names_with_a_secret_word_are_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_total_tokens", "tokenizer_path", "keyboard", "author", "chunked_prefill_size"])
def test_other_names_are_not_secrets(name: str) -> None:
    assert not is_secret(name)


def test_a_log_line_that_quotes_a_url_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("json")
        lines = io.StringIO()
        handler = logging.StreamHandler(lines)
        handler.setFormatter(root.handlers[0].formatter)
        root.handlers[:] = [handler]
        logging.getLogger("some.library").warning("no answer from https://me:hunter2@judge.example")
        assert "hunter2" not in lines.getvalue()
        assert REDACTED in lines.getvalue()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
