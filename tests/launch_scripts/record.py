"""Records what the launch scripts of other projects pass to training, by running them with stand-ins for commands.

    git clone https://github.com/THUDM/slime /tmp/slime
    python -m tests.launch_scripts.record slime /tmp/slime

writes a file per launch of a model family that this project trains to `tests/launch_scripts/slime`, and prints the
scripts that it leaves out, each with the reason.

A script runs in a copy of the checkout, with separate processes, a separate network and a separate /tmp. Everything
else is read-only, and its time is limited. So it can end no process, reach no machine and change no file. Its PATH has
tools that only compute and print text, and stand-ins, which record how they were called and do nothing else. A script
that calls any other command is refused: `_TOOLS` or `_STAND_INS` needs an entry for the command.

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
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from miles_async.config.yaml_text import parse_yaml

HERE = Path(__file__).parent
SECONDS = 120
"""Time limit of a script. Its waits take no time, because `sleep` is a stand-in."""

_TOOLS = (
    *"awk basename bash cat cut dirname env envsubst grep head mktemp printf".split(),
    *"readlink sed seq sh sort tail tee tr wc".split(),
)
"""Commands that scripts use to compute values. They run as they are."""
_STAND_INS: Mapping[str, str] = {
    **dict.fromkeys("apt apt-get cp docker git huggingface-cli hf ip kill killall ln ls mkdir mv pgrep".split(), ""),
    **dict.fromkeys("pkill ps python python3 ray rm rsync sleep ssh sudo torchrun wget xargs".split(), ""),
    **dict.fromkeys(["pip", "pip3"], "megatron-core 0.16.1 /root/Megatron-LM"),
    "curl": "200",
    "date": "DATE",
    "hostname": "127.0.0.1",
    "nvidia-smi": "\n".join(f"GPU {number}: NVIDIA H100 80GB HBM3, NV18" for number in range(8)),
}
"""Commands that are only recorded, and what each prints. The machine has eight GPUs with NVLink."""
_NODES = 64
"""Nodes of the cluster that scripts see once they have started Ray."""


@dataclass(frozen=True)
class Project:
    """What has to be known of a project to record its launch scripts."""

    repository: str
    folder: str
    """Folder of the files."""
    scripts: Sequence[str]
    """Patterns of the paths of launch scripts, or of YAML files if they have all settings."""
    programs: Sequence[str]
    """Programs that train, as scripts name them: files, or modules after `-m`."""
    checkpoint: str
    """The flag, or the key of a YAML file, that names the checkpoint to train."""
    environment: Mapping[str, str]
    """Variables that users are expected to set."""
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Arguments of launchers by path: one command line per launch, which may begin with environment variables. Other
    scripts are started without arguments."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a script of a model family that this project trains is not recorded, by its path."""


PROJECTS = {
    "slime": Project(
        repository="THUDM/slime",
        folder="slime",
        scripts=["scripts/*.sh", "scripts/low_precision/*.sh", "examples/*/*.sh", "examples/*/run*.py"],
        programs=["train.py", "train_async.py"],
        checkpoint="--hf-checkpoint",
        environment={"BASE_DIR": "/root", "BASE_FOLDER": "/root", "MASTER_ADDR": "127.0.0.1", "WANDB_KEY": "WANDB_KEY"},
    ),
    "miles": Project(
        repository="radixark/miles",
        folder="miles",
        scripts=["scripts/run_*.py", "scripts/amd/run_*.py", "examples/**/*.sh", "examples/**/run*.py"],
        programs=["train.py", "train_async.py"],
        checkpoint="--hf-checkpoint",
        environment={"BASE_DIR": "/root", "BASE_FOLDER": "/root", "MASTER_ADDR": "127.0.0.1", "WANDB_KEY": "WANDB_KEY"},
        arguments={
            "examples/experimental/formal_math/single_round/run_sft.py": ["MILES_DATASET_TRANSFORM_ID=TRANSFORM_ID"],
            "examples/experimental/verifiers/run.py": ["--verifiers-config /tmp/verifiers.toml"],
            "examples/infra_features/fully_async/run_qwen3_30b_a3b_fully_async.py": [
                "",
                "--pause-generation-mode retract --update-weight-transfer-mode p2p",
            ],
            "examples/infra_features/p2p_weight_transfer/run.py": [
                f"run {model} --mode p2p --node-rank 0 --head-ip 127.0.0.1"
                for model in (
                    *("Qwen3-4B", "GLM-4.7-Flash", "Qwen3-30B-A3B", "GLM-4.5-Air"),
                    "Qwen3-235B-A22B-Instruct-2507",
                )
            ],
            **{
                f"examples/infra_features/p2p_weight_transfer/run-{model}-profile.sh": ["p2p 0 127.0.0.1"]
                for model in (
                    *("glm4.5-air-8node", "glm4.7-flash-2node", "kimi-k2-64node"),
                    *("qwen3-235B-A22B-16node", "qwen3-30B-A3B-4node"),
                )
            },
            "examples/lora/run-qwen2.5-3B-megatron-lora-disaggregated-multi-node.sh": ["p2p 0"],
            **{
                f"examples/on_policy_distillation/qwen3_5_35b_selfdistill/{phase}.sh": [
                    "MODEL_DIR=/root/models DATA_DIR=/root/data OUTPUT_DIR=/tmp"
                ]
                for phase in ("phase1_rlvr_teacher", "phase2_gb200", "phase2_opd_selfdistill")
            },
            "examples/swe-agent-harbor-docker/run-glm47-flash-agentic-async.py": ["--num-nodes 8"],
            "scripts/run_deepseek.py": ["train"],
            "scripts/run_glm45_355b_a32b.py": ["train"],
            "scripts/run_nemotron_3_nano.py": [
                f"--model-name NVIDIA-Nemotron-3-Nano-{size}-BF16" for size in ("4B", "30B-A3B")
            ],
            "scripts/run_qwen3_5_35b_a3b_lora.py": ["train"],
            "scripts/run_qwen3_dense.py": [
                f"--model-name {model}" for model in ("Qwen3-4B", "Qwen3-32B", "Qwen3.5-9B", "Qwen3.5-27B")
            ],
            "scripts/run_qwen3_sft.py": [f"--model-name {model}" for model in ("Qwen3-4B-Base", "Qwen3-235B-A22B")],
        },
        left_out={
            "examples/infra_features/p2p_weight_transfer/run.py run Kimi-K2-Instruct": (
                "the launcher refuses this model; `run-kimi-k2-64node-profile.sh` trains it"
            ),
            "examples/multi_lora/run_multi_lora.py": "`train_multi_lora_async.py` trains several adapters in one run",
            "examples/on_policy_distillation/run-qwen3-8B-opd-multi-teacher.sh": (
                "it reads a data set before it trains, by on-policy distillation"
            ),
            "scripts/run_nemotron_3_nano_4b_fsdp.py": "it changes files of the checkpoint before it trains, with FSDP",
            "scripts/run_qwen3_4b_npu.py": "it imports a function that Miles does not have, for NPUs",
        },
    ),
    "verl": Project(
        repository="verl-project/verl",
        folder="verl",
        scripts=["verl/experimental/*/shell/*.sh", "examples/grpo_trainer/*.sh", "examples/gspo_trainer/*.sh"],
        programs=[
            "verl.experimental.fully_async_policy.fully_async_main",
            "verl.experimental.one_step_off_policy.main_ppo",
            "verl.trainer.main_ppo",
        ],
        checkpoint="actor_rollout_ref.model.path",
        environment={"RAY_DATA_HOME": "/root/verl", "VERL_USE_UV": "0"},
    ),
    "verl-recipe": Project(
        repository="verl-project/verl-recipe",
        folder="verl",
        scripts=["dapo/*.sh"],
        programs=["recipe.dapo.main_dapo", "verl.trainer.main_ppo"],
        checkpoint="actor_rollout_ref.model.path",
        environment={"RAY_DATA_HOME": "/root/verl", "VERL_USE_UV": "0"},
    ),
    "roll": Project(
        repository="alibaba/ROLL",
        folder="roll",
        scripts=["examples/*/*.yaml"],
        programs=["start_rlvr_pipeline.py", "start_agentic_pipeline.py"],
        checkpoint="pretrain",
        environment={},
    ),
}

_FAMILIES = {
    r"Qwen2(\.5)?-(?!VL|Omni)": "Qwen2",
    r"Qwen3-\d+B-A\d+B": "Qwen3-MoE",
    r"Qwen3-\d": "Qwen3",
    r"Qwen3-Next": "Qwen3-Next",
    r"Qwen3\.[56]-\d+B-A\d+B": "Qwen3.5-MoE, images",
    r"Qwen3\.[56]-\d": "Qwen3.5, images",
    r"Llama-?3\.[12]": "Llama 3.1",
    r"GLM-(4|Z1)-\d+B-0414": "GLM-4-0414",
    r"GLM-4\.7-Flash": "GLM-4.7-Flash",
    r"GLM-4\.[567]": "GLM-4.5",
    r"Kimi-K2(?!\.)": "Kimi K2",
    r"DeepSeek-(R1|V3)|Moonlight": "DeepSeek-V3",
    r"MiniMax-M2": "MiniMax-M2",
    r"gpt-oss": "gpt-oss",
    r"NVIDIA-Nemotron-3-Nano-4B": "Nemotron-H",
    r"NVIDIA-Nemotron-3-Nano-30B": "Nemotron-H, experts",
}
"""Families of `benchmarks/results/models.json`, by how the names of their checkpoints begin."""

_COMPUTED = ("-", "-c", "model_args_utils.py")
"""How the first argument of `python` ends if it prints values for a script: code, and Miles' flags of a model."""
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")
_VARIABLE = re.compile(r"[A-Z_]+=")
_RUN_ID = re.compile(r"(?<!\d)\d{6}-\d{6}-\d{3}(?!\d)")
"""The name that Miles' launchers give to a run: date, time and a random number."""
_COMMON_FOLDERS = ("examples", "experimental", "infra_features", "scripts", "shell", "verl")
"""Folders of scripts whose names say nothing."""
_OTHER_VARIABLES = ("LC_CTYPE", "OLDPWD", "PWD", "RAY_CLIENT_MODE", "SHLVL", "_")
"""Variables that bash and the import of Ray set."""

_STAND_IN = """\
#!{python} -IS
import json, os, sys, time
from pathlib import Path

name = Path(sys.argv[0]).name
words = [name, *sys.argv[1:]]
if name.startswith("python") and len(words) > 2 and "ray.cluster_resources()" in words[2]:
    print({gpus})
    sys.exit()
if name.startswith("python") and len(words) > 1 and words[1].endswith({computed!r}):
    os.execv({python!r}, [{python!r}, *words[1:]])
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
import importlib.util, os, runpy, sys
exists = os.path.exists
os.path.exists = lambda path: str(path).startswith(("/root/datasets", "/root/models")) or exists(path)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
if importlib.util.find_spec("ray"):
    import ray
    # Commands for every node of a cluster prepare the nodes.
    ray.init = ray.shutdown = lambda *args, **settings: None
    ray.nodes = lambda: [dict(Alive=True, NodeManagerAddress="127.0.0.1", NodeID="1" * 56)] * {nodes}
    ray.get = lambda results: results
    ray.remote_function.RemoteFunction._remote = lambda *args, **settings: None
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
class Job:
    """A call that starts training."""

    program: str
    arguments: Sequence[Sequence[str]]
    """Each flag with its values, in order. An override such as `trainer.nnodes=1` is `["trainer.nnodes", "1"]`."""
    environment: Mapping[str, str]
    """Variables that the script sets."""
    files: Mapping[str, Any]
    """Content of the files of settings that arguments name, by path."""
    checkpoint: str
    """Path or name of the model; empty if there is none."""


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
        values = {"computed": _COMPUTED, "gpus": 8 * _NODES, "answers": dict(_STAND_INS)}
        stand_in.write_text(_STAND_IN.format(python=os.path.realpath(sys.executable), **values))
        stand_in.chmod(0o755)
        for name in _STAND_INS:
            (commands / name).symlink_to("/mnt/stand-in")
        (folder / "prelude").write_text(_PRELUDE)
        own = {"PATH": "/mnt/commands", "BASH_ENV": "/mnt/prelude", "HOME": "/root", "PYTHONPATH": "/mnt/checkout"}
        return cls(folder, {**own, **environment})

    def jobs(self, script: Path, arguments: Sequence[str], project: Project) -> list[Job]:
        """What a script starts. `script` is relative to the checkout; `arguments` may begin with variables.

        Raises Refused if the script calls a command without a stand-in, starts no training or does not end in time.
        """
        variables = dict(word.split("=") for word in takewhile(_VARIABLE.match, arguments))
        environment = {**self.environment, **variables}
        calls, output = self._run(script, arguments[len(variables) :], environment)
        jobs = [job for call in calls if (job := _job(call, project, environment)) is not None]
        if not jobs:
            raise Refused("it starts no training" + "".join(f": {line}" for line in output.splitlines()[-1:]))
        return jobs

    def _run(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[Call], str]:
        """The calls of all stand-ins while a script runs, in order, and what the script writes to stderr."""
        calls, unknown = self.folder / "calls", self.folder / "unknown"
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        unknown.write_text("")
        launcher = _LAUNCHER.format(nodes=_NODES)
        interpreter = [sys.executable, "-c", launcher] if script.suffix == ".py" else [_path_of("bash")]
        namespaces = "--map-root-user --mount --pid --fork --kill-child --mount-proc --net --ipc".split()
        variables = [f"{name}={value}" for name, value in environment.items()]
        command = [_path_of("unshare"), *namespaces, _path_of("bash"), "-c", _JAIL, "jail", str(self.folder)]
        command += [_path_of("env"), "-i", *variables, *interpreter, str(script), *arguments]
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


def _job(call: Call, project: Project, environment: Mapping[str, str]) -> Job | None:
    """The training that a call starts, directly or as a job of a Ray cluster; None if it starts none.

    Variables that differ from `environment` are those of the script.
    """
    words = list(call.words)
    others = {**environment, **dict.fromkeys(_OTHER_VARIABLES, "")}
    variables = {name: value for name, value in call.environment.items() if name not in others}
    if words[:3] == ["ray", "job", "submit"]:
        options, words = words[: words.index("--")], words[words.index("--") + 1 :]
        variables |= _variables_of_job(options)
    if not words[0].startswith("python"):
        return None
    names = [Path(word).name if word.endswith(".py") else word for word in words]
    program = next((number for number, name in enumerate(names) if name in project.programs), None)
    if program is None:
        return None
    arguments = list(_arguments(words[program + 1 :]))
    checkpoints = [values[0] for name, *values in arguments if name == project.checkpoint and values]
    files = {path: parse_yaml(text) for path, text in call.files.items()}
    return Job(names[program], arguments, variables, files, "".join(checkpoints[-1:]))


def _variables_of_job(options: Sequence[str]) -> Mapping[str, str]:
    """The environment variables in the options of `ray job submit`."""
    for number, option in enumerate(options):
        name, _, value = option.partition("=")
        if name == "--runtime-env-json":
            variables: Mapping[str, str] = json.loads(value or options[number + 1]).get("env_vars", {})
            return variables
    return {}


def _arguments(words: Sequence[str]) -> Iterator[list[str]]:
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


def _job_of_settings(file: Path, checkout: Path, project: Project) -> Job:
    """The job that a YAML file of ROLL describes, with the files that its `defaults` include.

    `file` is relative to `checkout`. Raises Refused if the file is one of another pipeline.
    """
    content = parse_yaml((checkout / file).read_text()) or {}
    answers, agents = project.programs
    if "actor_train" not in content or not {"rewards", "train_env_manager"} & content.keys():
        raise Refused("it trains neither on rewards of answers nor with agents")
    program = agents if "train_env_manager" in content else answers
    files = {str(file): content}
    for entry in content.get("defaults", []):
        included = Path(os.path.normpath(file.parent / entry.partition("@")[0])).with_suffix(".yaml")
        if not (checkout / included).is_file():
            raise Refused(f"it includes {included}, which does not exist")
        files[str(included)] = parse_yaml((checkout / included).read_text())
    arguments = [["--config_path", file.parent.name], ["--config_name", file.stem]]
    return Job(program, arguments, {}, files, content.get(project.checkpoint, ""))


def family_of(checkpoint: str) -> str | None:
    """The family of a checkpoint by its name; None for a family that this project does not train."""
    return next((family for name, family in _FAMILIES.items() if re.match(name, checkpoint, re.IGNORECASE)), None)


def _write(name: str, script: Path, commit: str, jobs: Sequence[Job], folder: Path) -> Iterator[Path]:
    """Write a file for each job of a script. Raises Refused if this project does not train the model."""
    names = [part for part in script.with_suffix("").parts if part not in _COMMON_FOLDERS]
    for number, job in enumerate(jobs, start=1):
        checkpoint = Path(job.checkpoint).name
        if (family := family_of(checkpoint)) is None:
            raise Refused(f"its model is {checkpoint!r}")
        content: dict[str, Any] = {
            "repository": PROJECTS[name].repository,
            "commit": commit,
            "path": str(script),
            "checkpoint": checkpoint,
            "family": family,
            "program": job.program,
            "environment": job.environment,
            "arguments": job.arguments,
            "files": job.files,
        }
        path = folder / ("-".join([*names, *([str(number)] if len(jobs) > 1 else [])]) + ".json")
        path.write_text(_RUN_ID.sub("RUN_ID", _json(content).replace("/mnt/checkout", f"/root/{name}")))
        yield path


def _json(content: Mapping[str, Any]) -> str:
    """JSON with one argument per line."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n  ")
        if key == "arguments":
            text = "[" + ",".join(f"\n    {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n  ]"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _path_of(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise SystemExit(f"{command} is missing: install it")
    return path


def main() -> None:
    """Record the launch scripts of a project, or of those that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("checkout", type=Path, help="folder of a git checkout of the project")
    parser.add_argument("scripts", nargs="*", help="patterns of the paths of scripts, in place of all launch scripts")
    parser.add_argument("--output", type=Path, help="folder of the files")
    options = parser.parse_args()
    project: Project = PROJECTS[options.project]
    output: Path = options.output or HERE / project.folder
    output.mkdir(parents=True, exist_ok=True)
    commit = subprocess.check_output(["git", "-C", options.checkout, "rev-parse", "HEAD"], text=True).strip()
    patterns = options.scripts or project.scripts
    scripts = sorted({path.relative_to(options.checkout) for name in patterns for path in options.checkout.glob(name)})
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy.of(options.checkout, Path(folder), project.environment)
        for script in scripts:
            try:
                if script.suffix == ".yaml":
                    jobs = [_job_of_settings(script, options.checkout, project)]
                else:
                    lines = [line.split() for line in project.arguments.get(str(script), [""])]
                    jobs = [job for words in lines for job in copy.jobs(script, words, project)]
                for path in _write(options.project, script, commit, jobs, output):
                    print(f"{script}: {path.name}")
            except Refused as reason:
                print(f"{script}: not recorded: {reason}")


if __name__ == "__main__":
    main()
