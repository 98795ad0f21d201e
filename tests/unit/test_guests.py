"""Guests: other projects whose configuration files, names and calling conventions work in a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from miles_async.config.cli import parse_or_exit
from miles_async.config.load import load_config
from miles_async.config.user_functions import install_guests, load_function
from miles_async.errors import UserError
from miles_async.guests import GUESTS
from miles_async.rollout.contract import flat_args
from tests.configuration import run_config
from tests.plugin_packages import install_plugin

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "recipes.md"
WORKSHOP = """
import sys
from types import ModuleType

from miles_async.guests import Guest

class Workshop(Guest):
    def flags(self):
        from miles_async.config.translation import Flag, Refused, sets

        refused = Flag(Refused("set --num-rollout"))
        return {"workshop_steps": Flag(sets("rollout.num_rollout")), "workshop_epochs": refused}

    def arguments(self, settings):
        return {"workshop_steps": settings["num_rollout"]}

    def install_modules(self, settings):
        module = sys.modules["names_of_workshop"] = ModuleType("names_of_workshop")
        module.reward = lambda args, sample: 1.0
"""


def test_the_guests_of_the_project_are_found_by_name() -> None:
    assert GUESTS.names == ["Megatron-LM", "ROLL", "miles", "slime", "verl"]


def test_the_worked_example_of_the_documentation_translates_files_and_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [example] = re.findall(r"```python\n(from miles_async\.guests .*?)```", DOCS.read_text(), re.DOTALL)
    install_plugin(tmp_path, monkeypatch, GUESTS, "my_trainer", "my_trainer:Trainer", example)
    file = tmp_path / "trainer.yaml"
    file.write_text("my_trainer: {steps: 7}\n")
    job = ["--config", str(file), "--reasoning-gym-task", "chain_sum", "--rm-type", "exact"]
    job += ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"]
    assert load_config(job, entry="train.py").rollout.num_rollout == 7
    assert run_config("my_trainer.steps=8").rollout.num_rollout == 8
    file.write_text("my_trainer: {step: 7, epochs: 2}\n")
    with pytest.raises(UserError) as refused:
        load_config(job, entry="train.py")
    assert str(refused.value).splitlines() == [
        f"{file}: my_trainer.step is not a key of my_trainer that can be translated; did you mean my_trainer.steps?",
        f"{file}: my_trainer.epochs has no counterpart: set my_trainer.steps",
    ]


def test_a_package_adds_flags_attributes_of_args_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, GUESTS, "workshop", "of_a_workshop:Workshop", WORKSHOP)
    assert run_config("--workshop-steps", "7").rollout.num_rollout == 7
    with pytest.raises(UserError, match="--workshop-epochs has no counterpart: set --num-rollout"):
        run_config("--workshop-epochs", "7")
    args = flat_args(run_config(num_rollout=9))
    assert (args.workshop_steps, args.rollout_global_dataset) == (9, True)
    install_guests({"slime_imports": False})
    monkeypatch.setitem(sys.modules, "names_of_workshop", sys.modules["names_of_workshop"])
    assert load_function("names_of_workshop.reward", setting="custom_rm_path")(None, None) == 1.0
    monkeypatch.delitem(sys.modules, "names_of_workshop")


@pytest.mark.parametrize(
    "method, failure",
    [
        ("def recognises(self, content): return content['steps']", "recognise a configuration file: KeyError: 'steps'"),
        ("def has_key(self, key): raise SystemExit(0)", "recognise a key: SystemExit: 0"),
        ("def recognises(self, content): return True\n    translate = None", "translate settings: TypeError: "),
        (
            "def recognises(self, content): return True\n    def translate(self, content): return {'lr': 1}",
            "translate settings: AttributeError: 'dict' object has no attribute 'translation'",
        ),
        ("def flags(self): return self.steps", "name its flags: AttributeError: "),
        ("def resolve(self, config): pass", "resolve its settings: ValidationError: "),
        ("def install_modules(self, settings): import a_trainer_of_nobody", "install its modules: ModuleNotFoundError"),
    ],
)
def test_a_guest_that_raises_is_named_with_its_distribution_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, failure: str
) -> None:
    source = f"from miles_async.guests import Guest\nclass Trainer(Guest):\n    {method}\n"
    install_plugin(tmp_path, monkeypatch, GUESTS, "trainer", "raising_trainer:Trainer", source)
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {num_rollout: 7}\n")
    typed = ["--check-config", "--config", str(file), "trainer.steps=1", "--trainer-steps", "1"]
    with pytest.raises(SystemExit) as exited:
        parse_or_exit(typed, "train.py")
    assert exited.value.code == 2
    [sentence] = [line for line in capsys.readouterr().err.splitlines() if "raising_trainer" in line]
    named = "train.py: the entry point trainer = raising_trainer:Trainer of the distribution users failed to "
    assert sentence.startswith(named + failure)
    assert sentence.endswith("; correct the plug-in")
