"""The wheel contains what an installation needs, and pyproject.toml declares every package that the code imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import miles_async

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / "requirements").glob("cpu-*.lock"))
"""One for each version of Python."""
LIBRARY = ["miles_async/**/*.py", "workers/**/*.py", "train*.py"]
TOOLS = ["tests/**/*.py", "benchmarks/**/*.py", "dashboards/**/*.py", "docs/**/*.py", "examples/*.py"]
OURS = {"miles_async", "workers", "tests", "benchmarks", "dashboards", "examples"}
ENVIRONMENTS = ROOT / "miles_async/adapters/environments"
OF_ANOTHER_ENVIRONMENT = {
    ROOT / "benchmarks/peers/grpo_trainer.py",
    ENVIRONMENTS / "server.py",
    ENVIRONMENTS / "harness/miles_chat.py",
    ROOT / "miles_async/rewards/functions/ifbench.py",
    ROOT / "tests/bridge/test_lora.py",
    ROOT / "tests/stack/miles_functions.py",
}
"""Run in `.venv-peers`, `.venv-bridge`, `.venv-verifiers`, `.venv-openenv` and `.venv-roll`, which have locks or
installations of their packages; after `make setup-ifbench`; or with the names that `--slime-imports` installs."""
OTHER_BUILDS = {"mooncake": ["mooncake_transfer_engine_cuda13"]}
"""Packages whose build for CPU machines, which is installed here, is another distribution than the declared one."""


def normalized(requirement: str) -> str:
    """The name of the distribution in a requirement such as `mkdocstrings[python]>=1.0`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "_", name[0]).lower()


def declared(*extras: str) -> set[str]:
    """The distributions that pyproject.toml requires, with those of the named extras."""
    requirements = [*PROJECT["dependencies"]]
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    return {normalized(requirement) for requirement in requirements}


def imported(patterns: list[str]) -> set[str]:
    """The top-level names of the packages of others that the files import."""
    names: set[str] = set()
    for path in {path for pattern in patterns for path in ROOT.glob(pattern)} - OF_ANOTHER_ENVIRONMENT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module).partition(".")[0])
    return names - set(sys.stdlib_module_names) - OURS


def undeclared(patterns: list[str], *extras: str) -> dict[str, list[str]]:
    """Each imported package that no declared distribution provides, with the distributions that would."""
    providers = {**packages_distributions(), **OTHER_BUILDS}
    found = {name: [normalized(text) for text in providers.get(name, [name])] for name in imported(patterns)}
    return {name: options for name, options in found.items() if not declared(*extras) & set(options)}


def test_every_package_that_the_library_imports_is_declared() -> None:
    assert undeclared(LIBRARY, "gpu", "sinks") == {}


def test_every_package_that_tests_and_tools_import_is_declared() -> None:
    assert undeclared(TOOLS, "gpu", "sinks", "dev") == {}


def test_sglang_mooncake_and_the_sinks_are_extras() -> None:
    assert not {"sglang", "mooncake_transfer_engine_cuda13", "wandb", "tensorboardx"} & declared()
    assert {"sglang", "mooncake_transfer_engine_cuda13", "wandb", "tensorboardx"} <= declared("gpu", "sinks")


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_declared_package_is_in_the_lock_with_hashes(path: Path) -> None:
    lock = path.read_text()
    pins = re.findall(r"^([A-Za-z0-9._-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert len(pins) == len(re.findall("==", lock))
    assert declared("dev", "sinks") - {"miles_async"} - {normalized(pin) for pin in pins} == set()


def test_a_python_without_a_lock_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    interpreter = tmp_path / "python3.13"
    interpreter.write_text("#!/bin/sh\necho 3.13\n")
    interpreter.chmod(0o755)
    command = ["bash", str(tmp_path / "requirements" / "install.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(interpreter)})
    assert done.returncode == 1
    assert done.stderr == f"PYTHON={interpreter} is not the command of a Python with a lock: use Python 3.11 or 3.12\n"
    assert {path.name for path in tmp_path.iterdir()} == {"requirements", "python3.13"}


def test_the_version_is_that_of_the_installed_project() -> None:
    assert miles_async.__version__ == PROJECT["version"]


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import miles_async; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["miles_async"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from a copy of the sources, because setuptools writes into the folder that it builds."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("miles_async", "workers"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(source / "dist"), str(source)], check=True)
    [path] = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_the_library_and_the_workers_under_one_name(wheel: zipfile.ZipFile) -> None:
    def files(folder: str, name: str) -> set[str]:
        paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {f"{name}/{path.relative_to(ROOT / folder)}" for path in paths}

    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == files("miles_async", "miles_async") | files("workers", "miles_async/workers")


def test_the_wheel_names_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    info = {name.partition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "License-Expression: Apache-2.0" in info["METADATA"]
    assert info["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "miles-async = miles_async.workers.main:main" in info["entry_points.txt"]


def test_a_wheel_in_an_empty_folder_checks_a_configuration(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    start = "import sys; from miles_async.workers.main import main; sys.exit(main())"
    config = ROOT / "configs" / "arithmetic-cpu.yaml"
    command = [sys.executable, "-c", start, "train", "--check-config", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "groups in flight" in done.stdout


def test_an_unknown_command_prints_the_usage() -> None:
    done = subprocess.run([sys.executable, "-m", "workers.main", "trian"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "usage: miles-async COMMAND" in done.stderr
