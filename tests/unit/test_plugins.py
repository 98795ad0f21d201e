"""Plug-ins of this project and of installed packages: how they are found, and what refuses them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import Field

from miles_async.config.plugins import PluginSettings, plugin_problems
from miles_async.errors import UserError
from miles_async.models.gemma import Gemma
from miles_async.models.plugin import MODELS, ModelPlugin
from miles_async.plugins import Kind
from miles_async.section import Section
from tests.plugin_packages import install_plugin

WHEEL = "from miles_async.models.plugin import ModelPlugin\nclass Wheel(ModelPlugin): pass\n"


class Data(Section):
    """A section without plug-ins."""

    rows: int = 0


class Shape(Section):
    """A section to which plug-ins add settings."""

    corners: int = Field(4, ge=3)


def wheels(by_path: bool = True) -> Kind[ModelPlugin]:
    """A kind of plug-in whose packages a test installs."""
    return Kind("wheel", ModelPlugin, "miles_async.models", by_path=by_path)


def test_the_plugins_of_the_project_are_found_by_name() -> None:
    assert isinstance(MODELS.find("gemma"), Gemma)
    assert MODELS.names == ["gemma", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"]


def test_the_plugin_of_an_installed_package_is_found_by_the_name_of_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, MODELS, "wheel", "of_users:Wheel", WHEEL)
    assert type(MODELS.find("wheel")).__module__ == "of_users"
    assert "wheel" in MODELS.names
    assert list(MODELS.problems()) == []


def test_a_plugin_is_found_by_the_path_of_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_a_file.py").write_text(WHEEL)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(wheels().find("in_a_file.Wheel")).__name__ == "Wheel"
    with pytest.raises(UserError, match=r"no wheel is called 'in_a_file\.Wheel'"):
        wheels(by_path=False).find("in_a_file.Wheel")


def test_an_unknown_name_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(UserError, match=r"no model plug-in is called 'wheel': use one of gemma, llama, .*entry point"):
        MODELS.find("wheel")


def test_two_packages_that_declare_a_name_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, MODELS, "wheel", "first:Wheel", WHEEL, package="one")
    install_plugin(tmp_path, monkeypatch, MODELS, "wheel", "second:Wheel", WHEEL, package="two")
    with pytest.raises(
        UserError,
        match=r"wheel = first:Wheel of the distribution one and .* wheel = second:Wheel of the distribution two "
        "declare the same name: uninstall all but one of the packages",
    ):
        MODELS.find("wheel")


def test_a_package_does_not_replace_a_plugin_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, MODELS, "gemma", "other:Wheel", WHEEL, package="other")
    assert isinstance(MODELS.find("gemma"), Gemma)
    assert list(plugin_problems()) == [
        "the entry point gemma = other:Wheel of the distribution other declares the name of a model plug-in of "
        "miles_async, which is used: give it another name"
    ]


@pytest.mark.parametrize(
    "entry_point, source, sentence",
    [
        ("lost_wheel:Wheel", "import wheels_of_nobody", "cannot be imported: ModuleNotFoundError"),
        ("no_wheel:Wheel", "", "cannot be imported: AttributeError"),
        ("raising:Wheel", WHEEL.replace("pass", "__init__ = round"), "cannot be imported: TypeError"),
        ("leaving:Wheel", "raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("a_class:Wheel", "class Wheel: pass", "is not a model plug-in: derive its class from miles_async.models.plu"),
        ("a_function:Wheel", "def Wheel(): pass", "is not a model plug-in: derive its class from"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_point: str, source: str, sentence: str
) -> None:
    install_plugin(tmp_path, monkeypatch, MODELS, "wheel", entry_point, source)
    with pytest.raises(UserError, match=sentence) as refused:
        MODELS.find("wheel")
    assert f"the entry point wheel = {entry_point} of the distribution users" in str(refused.value)
    assert list(plugin_problems()) == [str(refused.value)]


def test_a_plugin_that_imports_a_large_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    install_plugin(tmp_path, monkeypatch, MODELS, "wheel", "heavy:Wheel", f"import megatron\n{WHEEL}")
    [sentence] = plugin_problems()
    assert "heavy:Wheel of the distribution users imports megatron: import large libraries inside the" in sentence
    assert isinstance(MODELS.find("wheel"), ModelPlugin)


def test_the_settings_of_a_plugin_become_a_part_of_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from miles_async.models.plugin import ModelPlugin\n"
        "from miles_async.section import Section\n"
        "class Wheel(ModelPlugin):\n"
        "    class Settings(Section):\n"
        "        spokes: int = 32\n"
    )
    kind = wheels()
    install_plugin(tmp_path, monkeypatch, kind, "wheel", "with_settings:Wheel", source)
    extended = PluginSettings(Data, Shape).added_to(Shape, kind)
    assert list(extended.model_fields) == ["corners", "spokes"]
    settings = kind.find("wheel").Settings
    assert settings is not None
    assert isinstance(extended(), settings)
    with pytest.raises(ValueError, match="spokes"):
        extended.model_validate({"spokes": "many"})


def test_a_plugin_whose_setting_exists_already_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from miles_async.models.plugin import ModelPlugin\n"
        "from miles_async.section import Section\n"
        "class Wheel(ModelPlugin):\n"
        "    class Settings(Section):\n"
        "        rows: int = 32\n"
    )
    kind = wheels()
    install_plugin(tmp_path, monkeypatch, kind, "wheel", "clashing:Wheel", source)
    assert PluginSettings(Data, Shape).added_to(Shape, kind) is Shape
    with pytest.raises(UserError, match="of the distribution users declares the setting rows, which miles_async has"):
        kind.find("wheel")
