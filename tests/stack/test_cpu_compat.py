"""What torchvision and SGLang import without CUDA. Only programs of this project load it; a defect breaks no others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles_async.adapters.sglang.launch import has_cuda
from tests.scoring import scored

ROOT = Path(__file__).parents[2]
WITHOUT_CUDA = pytest.mark.skipif(has_cuda(), reason="there are no stand-ins with CUDA")
NOT_BY_TORCH = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""With it, torch loads no other package when it is imported."""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=variables)


def test_a_broken_installation_of_this_project_does_not_break_torch(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    # An installation, as importlib.metadata sees it, comes first on the path.
    installed = tmp_path / f"miles_async-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: miles_async\nVersion: {project['version']}\n")
    lines = [f"[{group}]\n{name} = {path}" for group, entries in groups.items() for name, path in entries.items()]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "miles_async").mkdir()
    (tmp_path / "miles_async" / "__init__.py").write_text("raise RuntimeError('a defect')\n")
    done = run("import os; os.chdir('/'); import sys; sys.path.pop(0); import torch", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@WITHOUT_CUDA
@pytest.mark.parametrize("module", ["workers", "miles_async.adapters.sglang.engine_process", "benchmarks", "tests"])
def test_programs_of_this_project_can_import_models_and_sglang_without_cuda(module: str) -> None:
    program = f"""
import sys, {module}
assert "torch" not in sys.modules, "it takes seconds to import, and some processes do not need it"
import torchvision
from sgl_kernel import rmsnorm
try:
    rmsnorm()
except NotImplementedError as error:
    print(error)
"""
    done = run(program, **NOT_BY_TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sgl_kernel.rmsnorm needs the CUDA build of sgl_kernel")


@WITHOUT_CUDA
def test_an_isolated_reward_can_import_models_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_with_a_model.py").write_text(
        "import torchvision\n\ndef reward(args, sample):\n    return float(hasattr(torchvision, 'ops'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()]))
    for name, value in NOT_BY_TORCH.items():
        monkeypatch.setenv(name, value)
    rewards = scored("a", "b", custom_rm_path="reward_with_a_model.reward", custom_rm_isolated=True)
    assert asyncio.run(rewards) == [1.0, 1.0]


def test_a_program_that_only_asks_for_torchvision_does_not_import_it() -> None:
    program = """
import sys, workers
from importlib.util import find_spec
assert find_spec("torchvision") is not None
print(*({"torch", "torchvision"} & sys.modules.keys()))
"""
    done = run(program, **NOT_BY_TORCH)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
