"""Training from Python, for scripts and notebooks: a model, a data set and a recipe, and `train()` runs them.

    from miles_async import HuggingFaceDataset, Qwen3_4B, SlimeRecipe, TrainConfig

    class MathDataset(HuggingFaceDataset):
        hf_repo = "zhuzilin/dapo-math-17k"
        apply_chat_template = True

    result = TrainConfig(
        model=Qwen3_4B(),
        dataset=MathDataset(n_rows=2_000),
        recipe=SlimeRecipe(rm_type="dapo", gpu_type="H100", async_mode=True, num_rollout=15),
    ).train()
    print(result.training_run_id, result.summary["reward_last"])

The names are those of Modal's Training Gym (https://github.com/modal-projects/training-gym). The run is a
separate process, `miles-async train`, so a notebook needs neither torch nor memory for it.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Self

from miles_async.adapters.system.machine import fact, read_gpus
from miles_async.config.fields import SETTINGS, nearest
from miles_async.config.load import load_config
from miles_async.doctor.facts import Unknown
from miles_async.errors import FatalError, UserError
from miles_async.visible_text import visible_text

COMMAND = (sys.executable, "-m", "miles_async.workers.main", "train")
"""The command `miles-async train`, which need not be on the PATH of a notebook."""
_SAID = "train_async.py: "
"""Begins each line in which a run says why it ended."""
LAST_LINES = 20
"""Lines of output that are kept to report why a run failed."""


def _refuse(unknown: Sequence[str], begins: str, known: Iterable[str], otherwise: str) -> None:
    """Raise UserError if there are unknown names. Each sentence suggests a known name, or ends with `otherwise`."""
    if unknown:
        raise UserError("\n".join(f"{begins} {name!r}{nearest(name, known) or otherwise}" for name in unknown))


class ModelConfig:
    """The model to train: a Hugging Face checkpoint."""

    model_name: str = ""
    """Name of the checkpoint on the Hugging Face Hub."""

    def __init__(self, *, model_path: str | Path | None = None) -> None:
        """`model_path` is the folder of the checkpoint. If it is not set, `model_name` is downloaded."""
        self.model_path = None if model_path is None else str(model_path)

    @property
    def hf_checkpoint(self) -> str:
        if not (checkpoint := self.model_path or self.model_name):
            raise UserError(f"{type(self).__name__} names no checkpoint: set model_path, or model_name in a subclass")
        return checkpoint


class Qwen3_0_6B(ModelConfig):
    model_name = "Qwen/Qwen3-0.6B"


class Qwen3_1_7B(ModelConfig):
    model_name = "Qwen/Qwen3-1.7B"


class Qwen3_4B(ModelConfig):
    model_name = "Qwen/Qwen3-4B"


class Qwen3_8B(ModelConfig):
    model_name = "Qwen/Qwen3-8B"


class Qwen3_14B(ModelConfig):
    model_name = "Qwen/Qwen3-14B"


class Qwen3_32B(ModelConfig):
    model_name = "Qwen/Qwen3-32B"


class DatasetConfig:
    """The prompts to train on. A subclass defines `name` and `prepare`, and may set the other attributes.

    An attribute can be set for one object, too: `MathDataset(n_rows=2_000)`.
    """

    name: str = ""
    """Name of the data set, for the name of its file."""
    input_key: str = "prompt"
    """Key of the prompt in a row."""
    label_key: str = "label"
    """Key of the expected answer in a row."""
    apply_chat_template: bool = False
    """Render each prompt with the tokenizer's chat template."""
    output_format: str = "jsonl"
    """Format of the file that `prepare` writes: jsonl or parquet."""
    always_prepare: bool = False
    """Call `prepare` in every run. If off, a file of an earlier run is used again."""

    def __init__(self, **attributes: Any) -> None:
        known = [known for known in dir(type(self)) if not known.startswith("_")]
        unknown, owner = [name for name in attributes if name not in known], type(self).__name__
        _refuse(unknown, f"{owner} has no attribute", known, f"; define it in class {owner}")
        for name, value in attributes.items():
            setattr(self, name, value)

    def prepare(self, path: str) -> None:
        """Write all rows to the file `path`."""
        raise UserError(f"{type(self).__name__} has no rows: define prepare(path), which writes them to a file")

    def file(self, cache: Path) -> Path:
        """The file with the rows, in the folder `cache`; it is written if it does not exist."""
        if self.output_format not in ("jsonl", "parquet"):
            raise UserError(f"output_format {self.output_format!r} is unknown: set it to jsonl or parquet")
        path = cache / f"{'-'.join([type(self).__name__, *self._origin()])}.{self.output_format}"
        if self.always_prepare or not path.exists():
            try:
                cache.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"cache_dir {cache.parent}: {error.strerror}: set it to a folder for cached files"
                ) from error
            # If `prepare` is interrupted, the incomplete file is deleted with its folder.
            with TemporaryDirectory(dir=cache) as folder:
                draft = Path(folder, path.name)
                self.prepare(str(draft))
                if not draft.is_file():
                    raise UserError(f"{type(self).__name__}.prepare wrote no file: write the rows to the given path")
                draft.replace(path)
        return path

    def _origin(self) -> list[str]:
        """What distinguishes the rows from those of other objects of this class, as parts of a file name."""
        return [self.name] if self.name else []


class HuggingFaceDataset(DatasetConfig):
    """A data set of the Hugging Face Hub. A subclass sets `hf_repo`, and may change the rows in `load`."""

    hf_repo: str = ""
    """Name on the Hub, such as zhuzilin/dapo-math-17k."""
    hf_config: str | None = None
    """Configuration of the data set; None if it has only one."""
    hf_split: str = "train"
    """Split of the data set."""
    n_rows: int = 0
    """Number of rows to use, from the first row on. 0 uses all rows."""

    def load(self) -> Any:
        """The rows, as a `datasets.Dataset`."""
        from datasets import load_dataset

        rows = load_dataset(self.hf_repo, self.hf_config, split=self.hf_split)
        return rows.select(range(min(self.n_rows, len(rows)))) if self.n_rows else rows

    def prepare(self, path: str) -> None:
        if self.n_rows < 0:
            raise UserError(f"n_rows {self.n_rows} is not a number of rows: set it to 0 for all rows, or to 1 or more")
        if not self.hf_repo:
            raise UserError(f"{type(self).__name__} names no data set: set hf_repo to its name on the Hub")
        try:
            rows = self.load()
        except Exception as error:
            # `load` may be a user's function, and each format of a data set has a separate reader.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"the data set {self.hf_repo} cannot be loaded ({reason}): check hf_repo, hf_config and hf_split, or "
                "load it where the Hugging Face Hub can be reached"
            ) from error
        if self.output_format == "parquet":
            rows.to_parquet(path)
        else:
            rows.to_json(path, orient="records", lines=True)

    def _origin(self) -> list[str]:
        limit = str(self.n_rows) if self.n_rows else None
        return [part for part in (self.hf_repo.replace("/", "--"), self.hf_config, self.hf_split, limit) if part]


class SlimeRecipe:
    """How to train: any settings of `miles-async train`, under the names that slime uses too.

    Arguments of SGLang begin with `sglang_`, as in `sglang_mem_fraction_static=0.75`.
    """

    def __init__(self, *, gpu_type: str | None = None, async_mode: bool = False, **settings: Any) -> None:
        """Raises UserError if a setting does not exist.

        Args:
            gpu_type: type of GPU that the run needs, such as H100. The run is refused on a machine without it, and
                trains in bfloat16 unless `precision` is set. None trains on whatever the machine has.
            async_mode: generate while the learner trains. It has no effect with `colocate`, because engines and
                learner then take turns.
            settings: settings by name. `save_interval` without `save` writes checkpoints to
                `checkpoints/<training_run_id>`.
        """
        unknown = [name for name in settings if name not in SETTINGS and not name.startswith(("sglang_", "router_"))]
        _refuse(unknown, "SlimeRecipe has no setting", SETTINGS, "; `miles-async train --help` lists all settings")
        if gpu_type is not None and not isinstance(gpu_type, str):
            raise UserError(f"gpu_type {gpu_type!r} is not a text: write the name of a GPU, such as 'H100'")
        self.gpu_type = gpu_type
        self.async_mode = async_mode
        self.settings = settings

    def flags(self, training_run_id: str) -> list[str]:
        """The recipe as flags of `miles-async train`."""
        settings: dict[str, Any] = {"run_name": training_run_id, "eval_size": 0, **self.settings}
        if self.gpu_type is not None:
            settings.setdefault("precision", "bf16")
        if not self.async_mode or settings.get("colocate"):
            settings.setdefault("schedule", "synchronous")
        if settings.get("save_interval") is not None and not {"save", "save_hf"} & settings.keys():
            settings["save"] = f"checkpoints/{training_run_id}"
        return [_flag(name, value) for name, value in settings.items()]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run has left behind."""

    training_run_id: str
    """Name of the run's folder."""
    run_folder: Path
    """Folder with `report.html`, the event log and the logs."""
    checkpoint_dir: Path | None
    """Folder of the checkpoints; None if the recipe sets no `save` and no `save_interval`."""
    summary: dict[str, Any]
    """`summary.json`: accuracy, rewards, rates, staleness, and `reason`, which is `done` or `interrupted`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A model, a data set and a recipe."""

    recipe: SlimeRecipe
    model: ModelConfig | None = None
    """If it is None, a tiny model is created."""
    dataset: DatasetConfig | None = None
    """If it is None, the recipe names the data, such as `reasoning_gym_task="chain_sum"`."""

    def __post_init__(self) -> None:
        """Raises UserError if a part is not an object of its class, such as a class instead of an object."""
        for name, kind, part in (
            ("recipe", SlimeRecipe, self.recipe),
            ("model", ModelConfig, self.model),
            ("dataset", DatasetConfig, self.dataset),
        ):
            if not isinstance(part, kind) and (part is not None or name == "recipe"):
                raise UserError(f"{name} {part!r:.80} is not an object of {kind.__name__}: write {kind.__name__}(...)")

    def train(self) -> TrainResult:
        """Run the training to its end, with its output on this process's stdout, and return what it has left behind.

        Ctrl-C stops the run as in a terminal: groups in flight and the current step are finished, and the result is
        returned. A second Ctrl-C ends the run immediately and raises KeyboardInterrupt. The run goes on if this process
        is killed.

        Raises UserError if a setting, the data or the machine does not fit, and FatalError if the run fails.
        """
        if self.recipe.gpu_type is not None and "ray_address" not in self.recipe.settings:
            require_gpu(self.recipe.gpu_type)
        flags = self.flags(self._new_id())
        config = load_config(flags, entry="train_async.py")
        if self.recipe.async_mode and config.cluster.colocate:
            print("async_mode has no effect with colocate, because engines and learner share devices and take turns")
        run_name = config.observability.run_name
        assert run_name is not None, "flags() sets it"
        folder = Path(config.observability.run_dir).expanduser().absolute() / run_name
        if folder.exists() and config.learner.resume is None:
            raise UserError(f"{folder} is the folder of an earlier run: set run_name to another name, or unset it")
        code, last_lines = _run([*COMMAND, *flags])
        interrupted = code in (-signal.SIGINT, 128 + signal.SIGINT)
        if code and not interrupted:
            error = UserError if code == 2 else FatalError
            raise error(f"the run ended with exit code {code}: {_reason(last_lines)}")
        if not (folder / "summary.json").is_file():
            if interrupted:
                raise KeyboardInterrupt
            raise FatalError(
                f"{folder} has no summary.json: with resume, the summary is in the folder of the earlier run"
            )
        save = config.learner.save
        return TrainResult(
            training_run_id=run_name,
            run_folder=folder,
            checkpoint_dir=None if save is None else Path(save).expanduser().absolute(),
            summary=json.loads((folder / "summary.json").read_text()),
        )

    def flags(self, training_run_id: str) -> list[str]:
        """The flags of `miles-async train`. The rows of the data set are written to a file in the cache."""
        flags = self.recipe.flags(training_run_id)
        if self.model is not None:
            flags.append(_flag("hf_checkpoint", self.model.hf_checkpoint))
        if (dataset := self.dataset) is not None:
            cache = self.recipe.settings.get("cache_dir", SETTINGS["cache_dir"].default)
            flags += [
                _flag("prompt_data", str(dataset.file(Path(cache).expanduser() / "data"))),
                _flag("input_key", dataset.input_key),
                _flag("label_key", dataset.label_key),
                _flag("apply_chat_template", dataset.apply_chat_template),
            ]
        return flags

    def _new_id(self) -> str:
        named = self.recipe.settings.get("run_name")
        if named is not None:
            return str(named)
        data = "run" if self.dataset is None else type(self.dataset).__name__
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{data}-{secrets.token_hex(2)}"


def _reason(last_lines: Sequence[str]) -> str:
    """Why a run ended: the sentences at the end of its output, one per line, or else its last line."""
    lines = [line.strip() for line in reversed(last_lines) if line.strip()]
    sentences = [line.removeprefix(_SAID) for line in takewhile(lambda line: line.startswith(_SAID), lines)]
    return "\n".join(reversed(sentences or lines[:1])) or "it printed nothing"


def require_gpu(gpu_type: str) -> None:
    """Raise UserError if this machine has no GPU whose name contains `gpu_type`."""
    gpus = fact(read_gpus)
    names = () if isinstance(gpus, Unknown) else {gpu.name for gpu in gpus}
    found = " and ".join(sorted(names)) or "no GPU"
    if gpu_type.lower() not in found.lower():
        raise UserError(
            f"gpu_type {gpu_type} is not available, because this machine has {found}: set gpu_type to None to train on "
            "what it has, or set ray_address to a cluster that has such GPUs"
        )


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    try:
        return f"--{flag}={value if isinstance(value, str | Path) else json.dumps(value)}"
    except (TypeError, ValueError, RecursionError) as error:
        if callable(value):
            raise UserError(
                f"{name} {value!r:.80} cannot be passed to a run: write a function as 'module.function'"
            ) from None
        raise UserError(
            f"{name} cannot be passed to a run ({error}): set it to texts, numbers, lists and dictionaries"
        ) from None


class _CtrlC:
    """Sends SIGINT on to a child process instead of raising KeyboardInterrupt, even while the child is being started.

    Python delivers Ctrl-C only to the main thread, so in another thread there is nothing to send on.
    """

    def __init__(self) -> None:
        self.presses = 0
        self._pending: deque[int] = deque()
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)

    def send_to(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self._send()

    def _press(self, number: int, frame: object) -> None:
        self.presses += 1
        self._pending.append(number)
        self._send()

    def _send(self) -> None:
        # A signal may interrupt this loop, and its handler may take what is pending: so each one is sent exactly once.
        with suppress(IndexError):
            while self._child is not None:
                self._child.send_signal(self._pending.popleft())


def _run(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command with its output on stdout. Returns its exit code and the last lines of its output.

    Raises KeyboardInterrupt after the command has ended if Ctrl-C was pressed more than once.
    """
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    with _CtrlC() as ctrl_c:
        # In a separate session, the command gets exactly the signals that are sent to it here: a terminal sends Ctrl-C
        # to the whole process group, a notebook only to the kernel.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        ctrl_c.send_to(child)
        assert child.stdout is not None, "stdout is a pipe"
        output = threading.Thread(target=_copy, args=(child.stdout, last_lines), daemon=True)
        output.start()
        code = child.wait()
        # A process that the run has left behind may keep the pipe open.
        output.join(timeout=30.0)
    if ctrl_c.presses > 1:
        raise KeyboardInterrupt
    return code, list(last_lines)


def _copy(stream: IO[str], last_lines: deque[str]) -> None:
    with stream:
        for line in stream:
            last_lines.append(line)
            print(visible_text(line), end="", flush=True)
