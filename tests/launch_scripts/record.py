"""Records what the launch scripts of other projects pass to training, by running them with stand-ins for commands.

    git clone https://github.com/THUDM/slime /tmp/slime
    python -m tests.launch_scripts.record slime /tmp/slime

writes a file per launch of a model family that this project trains to `tests/launch_scripts/slime`, and prints the
scripts that it leaves out, each with the reason.

A script runs in a copy of the checkout. It has processes, a network and a /tmp of its own, everything else is
read-only, and its time is limited. So it can end no process, reach no machine and change no file. Its PATH has tools
that only compute and print text, and stand-ins, which record how they were called and do nothing else. A script that
calls any other command is refused: `_TOOLS` or `_STAND_INS` needs an entry for the command.

What is recorded are facts about the scripts: flags with their values, and environment variables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SECONDS = 120
"""Time limit of a script. Its waits take no time, because `sleep` is a stand-in."""

_TOOLS = "awk basename bash cat cut dirname env grep head mktemp printf readlink sed seq sh sort tail tee tr wc".split()
"""Commands that scripts use to compute values. They run as they are."""
_STAND_INS: Mapping[str, str] = {
    **dict.fromkeys("apt apt-get cp docker git huggingface-cli hf kill killall ln ls mkdir mv pkill ps".split(), ""),
    **dict.fromkeys("python python3 ray rm rsync sleep ssh sudo torchrun wget".split(), ""),
    **dict.fromkeys(["pip", "pip3"], "megatron-core 0.16.1 /root/Megatron-LM"),
    "curl": "200",
    "date": "DATE",
    "hostname": "127.0.0.1",
    "nvidia-smi": "\n".join(f"GPU {number}: NVIDIA H100 80GB HBM3, NV18" for number in range(8)),
}
"""Commands that are only recorded, and what each prints. The machine has eight GPUs with NVLink."""


@dataclass(frozen=True)
class Project:
    """What has to be known of a project to record its launch scripts."""

    repository: str
    scripts: Sequence[str]
    """Patterns of the paths of launch scripts."""
    programs: Sequence[str]
    """Programs that train, as scripts name them: files, or modules after `-m`."""
    checkpoint: str
    """The flag that names the checkpoint to train."""
    environment: Mapping[str, str]
    """Variables that users are expected to set."""


PROJECTS = {
    "slime": Project(
        repository="THUDM/slime",
        scripts=["scripts/*.sh", "scripts/low_precision/*.sh", "examples/*/*.sh", "examples/*/run*.py"],
        programs=["train.py", "train_async.py"],
        checkpoint="--hf-checkpoint",
        environment={"BASE_DIR": "/root", "BASE_FOLDER": "/root", "MASTER_ADDR": "127.0.0.1", "WANDB_KEY": "WANDB_KEY"},
    ),
}

_FAMILIES = {
    r"Qwen2(\.5)?-(?!VL)": "Qwen2",
    r"Qwen3-\d+B-A\d+B": "Qwen3-MoE",
    r"Qwen3-\d": "Qwen3",
    r"Qwen3-Next": "Qwen3-Next",
    r"Qwen3\.[56]-\d+B-A\d+B": "Qwen3.5-MoE, images",
    r"Qwen3\.[56]-\d": "Qwen3.5, images",
    r"Llama-?3\.[12]": "Llama 3.1",
    r"GLM-(4|Z1)-\d+B-0414": "GLM-4-0414",
    r"GLM-4\.7-Flash": "GLM-4.7-Flash",
    r"GLM-4\.[567]": "GLM-4.5",
    r"Kimi-K2": "Kimi K2",
    r"DeepSeek-(R1|V3)|Moonlight": "DeepSeek-V3",
    r"MiniMax-M2": "MiniMax-M2",
    r"gpt-oss": "gpt-oss",
}
"""Families of `benchmarks/results/models.json`, by how the names of their checkpoints begin."""

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")
_VARIABLES_OF_A_SHELL = ("LC_CTYPE", "OLDPWD", "PWD", "SHLVL", "_")

_STAND_IN = """\
#!{python} -IS
import json, os, sys, time
from pathlib import Path

name = Path(sys.argv[0]).name
words = [name, *sys.argv[1:]]
if name.startswith("python") and words[1:2] in (["-"], ["-c"]):
    os.execv({python!r}, [{python!r}, *words[1:]])  # a few lines that compute a value
paths = [word.rpartition("=")[2] for word in words if word.endswith((".json", ".yaml", ".yml"))]
files = {{path: Path(path).read_text() for path in paths if Path(path).is_file()}}
call = dict(words=words, environment=dict(os.environ), files=files)
Path("/mnt/calls", f"{{time.monotonic_ns():020}}-{{os.getpid()}}").write_text(json.dumps(call))
print({answers!r}[name])
"""
_PRELUDE = """\
enable -n kill
command_not_found_handle() { echo "$1" >> /mnt/unknown; return 127; }
# Scripts expect the checkout at a certain place, such as /root/slime. Their files are looked up in the copy.
cd() { builtin cd "$@" 2> /dev/null || true; }
source() {
    local file=$1
    while [[ ! -e $file && $file == */* ]]; do
        file=${file#*/}
        [[ -e /mnt/checkout/$file ]] && file=/mnt/checkout/$file
    done
    builtin source "$file" "${@:2}"
}
"""
"""Each bash runs these lines before its script."""
_LAUNCHER = """\
import os, runpy, sys
exists = os.path.exists
os.path.exists = lambda path: str(path).startswith(("/root/datasets", "/root/models")) or exists(path)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a launcher in Python, for which data sets and checkpoints exist."""
_JAIL = """\
mount --bind "$1" /mnt && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && mount -o remount,bind,ro / &&
cd /mnt/checkout && exec "${@:2}"
"""


class Refused(Exception):
    """The reason why a script is not recorded."""


@dataclass(frozen=True)
class Call:
    """One call of a stand-in."""

    words: Sequence[str]
    """The command and its arguments."""
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Text of the files of settings that arguments name, by path."""


@dataclass(frozen=True)
class Copy:
    """A folder with a copy of a checkout, in which scripts run."""

    folder: Path
    environment: Mapping[str, str]
    """Environment variables of the scripts."""

    @classmethod
    def of(cls, checkout: Path, folder: Path, environment: Mapping[str, str]) -> Copy:
        """Copy a checkout to an empty folder."""
        shutil.copytree(checkout, folder / "checkout", ignore=shutil.ignore_patterns(".git"), symlinks=True)
        commands = folder / "commands"
        commands.mkdir()
        for name in _TOOLS:
            (commands / name).symlink_to(_path_of(name))
        stand_in = folder / "stand-in"
        stand_in.write_text(_STAND_IN.format(python=os.path.realpath(sys.executable), answers=dict(_STAND_INS)))
        stand_in.chmod(0o755)
        for name in _STAND_INS:
            (commands / name).symlink_to("/mnt/stand-in")
        (folder / "prelude").write_text(_PRELUDE)
        own = {"PATH": "/mnt/commands", "BASH_ENV": "/mnt/prelude", "HOME": "/root", "PYTHONPATH": "/mnt/checkout"}
        return cls(folder, {**own, **environment})

    def jobs(self, script: Path, programs: Sequence[str]) -> list[Job]:
        """The calls of a script that start one of `programs`. `script` is relative to the checkout.

        Raises Refused if the script calls a command without a stand-in, starts no training or does not end in time.
        """
        calls, output = self._run(script)
        found = list(jobs(calls, programs, self.environment))
        if not found:
            raise Refused("it starts no training" + "".join(f": {line}" for line in output.splitlines()[-1:]))
        return found

    def _run(self, script: Path) -> tuple[list[Call], str]:
        """The calls of all stand-ins while a script runs, in order, and what the script writes to stderr."""
        calls, unknown = self.folder / "calls", self.folder / "unknown"
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        unknown.write_text("")
        interpreter = [sys.executable, "-c", _LAUNCHER] if script.suffix == ".py" else [_path_of("bash")]
        namespaces = "--map-root-user --mount --pid --fork --kill-child --mount-proc --net --ipc".split()
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        command = [_path_of("unshare"), *namespaces, _path_of("bash"), "-c", _JAIL, "jail", str(self.folder)]
        command += [_path_of("env"), "-i", *variables, *interpreter, str(script)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"it does not end within {SECONDS} seconds") from None
        # A shell that is not bash does not run the prelude.
        missing = [*unknown.read_text().split(), *re.findall(r"(\S+): not found$", done.stderr, re.MULTILINE)]
        if missing:
            raise Refused(f"there is no stand-in for {', '.join(dict.fromkeys(missing))}")
        return [Call(**json.loads(file.read_text())) for file in sorted(calls.iterdir())], done.stderr


@dataclass(frozen=True)
class Job:
    """A call that starts training."""

    program: str
    arguments: Sequence[Sequence[str]]
    """Each flag with its values, in order."""
    environment: Mapping[str, str]
    files: Mapping[str, Any]
    """Content of the files of settings that arguments name, by path."""

    def value(self, flag: str) -> str | None:
        """The last value of a flag; None without one."""
        return next((values[0] for name, *values in reversed(self.arguments) if name == flag and values), None)


def jobs(calls: Sequence[Call], programs: Sequence[str], environment: Mapping[str, str]) -> Iterator[Job]:
    """The calls that start one of `programs`, directly or as a job of a Ray cluster.

    A job has the environment variables that its script sets, in addition to `environment`, and those of the job.
    """
    for call in calls:
        words = list(call.words)
        others = {**environment, **dict.fromkeys(_VARIABLES_OF_A_SHELL, "")}
        variables = {name: value for name, value in call.environment.items() if name not in others}
        if words[:3] == ["ray", "job", "submit"]:
            options, words = words[: words.index("--")], words[words.index("--") + 1 :]
            variables |= _runtime_variables(options)
        for number, word in enumerate(words if words[0].startswith("python") else ()):
            if word in programs or (word.endswith(".py") and Path(word).name in programs):
                files = {path: yaml.safe_load(text) for path, text in call.files.items()}
                yield Job(Path(word).name, list(_arguments(words[number + 1 :])), variables, files)
                break


def _runtime_variables(options: Sequence[str]) -> Mapping[str, str]:
    """The environment variables in the options of `ray job submit`."""
    for number, option in enumerate(options):
        name, _, value = option.partition("=")
        if name == "--runtime-env-json":
            return json.loads(value or options[number + 1]).get("env_vars", {})
    return {}


def _arguments(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of a command line as flags with their values. An override such as `trainer.nnodes=1` is one, too."""
    argument: list[str] = []
    for word in words:
        is_flag = word.startswith("--")
        # After a flag without a value, the word is the value.
        is_override = _OVERRIDE.match(word) is not None and len(argument) != 1
        if not is_flag and not is_override:
            argument.append(word)
            continue
        if argument:
            yield argument
        name, equals, value = word.partition("=")
        argument = [name, value] if equals else [name]
    if argument:
        yield argument


def family_of(checkpoint: str) -> str | None:
    """The family of a checkpoint by the name of its folder; None for a family that this project does not train."""
    name = Path(checkpoint).name
    return next((family for pattern, family in _FAMILIES.items() if re.match(pattern, name, re.IGNORECASE)), None)


def write(project: str, script: Path, commit: str, recorded: Sequence[Job], folder: Path) -> Iterator[Path]:
    """Write a file for each job of a script. Raises Refused if this project does not train the model."""
    names = [part for part in script.with_suffix("").parts if part not in ("examples", "scripts")]
    for number, job in enumerate(recorded, start=1):
        checkpoint = job.value(PROJECTS[project].checkpoint) or ""
        if (family := family_of(checkpoint)) is None:
            raise Refused(f"its model is {Path(checkpoint).name!r}")
        content: dict[str, Any] = {
            "repository": PROJECTS[project].repository,
            "commit": commit,
            "path": str(script),
            "checkpoint": Path(checkpoint).name,
            "family": family,
            "program": job.program,
            "environment": job.environment,
            "arguments": job.arguments,
            "files": job.files,
        }
        path = folder / ("-".join([*names, *([str(number)] if len(recorded) > 1 else [])]) + ".json")
        path.write_text(_json(content).replace("/mnt/checkout", f"/root/{project}"))
        yield path


def _json(content: Mapping[str, Any]) -> str:
    """JSON with one argument per line."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            value = ",".join(f"\n    {json.dumps(item, ensure_ascii=False)}" for item in value)
            lines.append(f"{json.dumps(key)}: [{value}\n  ]")
        else:
            lines.append(f"{json.dumps(key)}: " + json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n  "))
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("checkout", type=Path, help="folder of a git checkout of the project")
    parser.add_argument("scripts", nargs="*", help="patterns of the paths of scripts, in place of all launch scripts")
    parser.add_argument("--output", type=Path, help="folder of the files")
    options = parser.parse_args()
    project: Project = PROJECTS[options.project]
    output: Path = options.output or HERE / options.project
    output.mkdir(parents=True, exist_ok=True)
    commit = _output_of("git", "-C", str(options.checkout), "rev-parse", "HEAD")
    patterns = options.scripts or project.scripts
    scripts = sorted({path.relative_to(options.checkout) for name in patterns for path in options.checkout.glob(name)})
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy.of(options.checkout, Path(folder), project.environment)
        for script in scripts:
            try:
                recorded = copy.jobs(script, project.programs)
                for path in write(options.project, script, commit, recorded, output):
                    print(f"{script}: {path.name}")
            except Refused as reason:
                print(f"{script}: not recorded: {reason}")


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _path_of(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise SystemExit(f"{command} is missing: install it")
    return path


if __name__ == "__main__":
    main()
