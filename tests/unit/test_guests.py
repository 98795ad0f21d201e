"""Guests: other projects whose configuration files, names and calling conventions work in a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miles_async.config.load import load_config
from miles_async.config.user_functions import install_guests, load_function
from miles_async.errors import UserError
from miles_async.guests import GUESTS
from miles_async.rollout.contract import flat_args
from tests.configuration import run_config
from tests.plugin_packages import install_plugin

TRAINER = """
import sys
from types import ModuleType

from miles_async.guests import Guest

class Trainer(Guest):
    def recognises(self, content):
        return "trainer_of_users" in content

    def has_key(self, key):
        return key == "trainer_of_users.steps"

    def translate(self, content):
        from miles_async.config.translation import Translator, entries, sets

        translator = Translator("trainer", {"trainer_of_users.steps": sets("rollout.num_rollout")})
        for key, value in entries(content, translator.table):
            translator.apply(key, value)
        return translator.translation, translator.problems

    def advice(self, flag):
        return "set --num-rollout" if flag == "trainer_steps_of_users" else None

    def arguments(self, settings):
        return {"steps_of_users": settings["num_rollout"]}

    def install_modules(self, settings):
        module = sys.modules["names_of_trainer"] = ModuleType("names_of_trainer")
        module.reward = lambda args, sample: 1.0
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a guest."""
    install_plugin(tmp_path, monkeypatch, GUESTS, "trainer", "of_a_user:Trainer", TRAINER)


def test_the_guests_of_the_project_are_found_by_name() -> None:
    assert GUESTS.names == ["ROLL", "slime", "verl"]


@pytest.mark.usefixtures("trainer")
def test_a_package_adds_a_project_whose_files_overrides_and_flags_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "trainer.yaml"
    file.write_text("trainer_of_users: {steps: 7}\n")
    required = ["--reasoning-gym-task", "chain_sum", "--rm-type", "exact", "--rollout-max-response-len", "8"]
    assert load_config(["--config", str(file), *required], entry="train.py").rollout.num_rollout == 7
    assert run_config("trainer_of_users.steps=8").rollout.num_rollout == 8
    file.write_text("trainer_of_users: {step: 7}\n")
    with pytest.raises(
        UserError, match=r"trainer\.yaml: trainer_of_users\.step is not a key of trainer .*did you mean"
    ):
        load_config(["--config", str(file), *required], entry="train.py")
    with pytest.raises(UserError, match="unknown flag --trainer-steps-of-users: set --num-rollout"):
        run_config("--trainer-steps-of-users", "7")


@pytest.mark.usefixtures("trainer")
def test_a_package_adds_attributes_to_args_and_modules_for_users_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    args = flat_args(run_config(num_rollout=9))
    assert (args.steps_of_users, args.rollout_global_dataset) == (9, True)
    monkeypatch.delitem(sys.modules, "names_of_trainer", raising=False)
    install_guests({"slime_imports": False})
    assert load_function("names_of_trainer.reward", setting="custom_rm_path")(None, None) == 1.0
    monkeypatch.delitem(sys.modules, "names_of_trainer")
