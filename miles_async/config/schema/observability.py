"""What a run reports and where, and settings for debugging."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from miles_async.section import LONGEST_SECONDS, Section

LATEST_LINK, TARGETS_FOLDER = "latest", "targets"
"""Names in run_dir that no run may have: the link to the newest run, and the folder of the scrape targets."""
MAX_NAME_BYTES = 200
"""File systems limit names to 255 bytes, and files of a run have its name with a suffix."""


class Observability(Section):
    """Run folder, metrics, logs, trackers and stall detection."""

    project_name: str = Field("miles_async", pattern=r"^[\w.-]+$")
    """Name of the project. It is part of the path of skip recordings and the default of wandb_project."""
    experiment_name: str = Field("default", pattern=r"^[\w.-]+$")
    """Name of the experiment. It is part of the path of skip recordings and the default of wandb_group."""
    run_dir: str = "runs"
    """Folder that receives one subfolder per run. `latest` in it points to the newest run."""
    run_name: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Name of the folder of the run in run_dir, other than latest and targets. A number is appended if the folder
    exists. If unset, the name consists of the time and the data."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Loopback port of the live page and of /metrics. 0 picks a free port and prints it."""
    sample_interval_seconds: float | None = Field(5.0, gt=0, le=LONGEST_SECONDS)
    """Seconds between two generated samples that the live page and the report show. null shows none."""
    trace: bool = False
    """Write trace.json to the run folder, a timeline of groups, requests, steps and publishes for ui.perfetto.dev."""
    trace_max_bytes: int = Field(64 * 2**20, ge=2**16)
    """Maximum size of trace.json in bytes. Near the limit, groups and requests are left out first."""
    event_log_rotate_bytes: int = Field(64 * 2**20, ge=2**16)
    """Size in bytes at which events.jsonl in the run folder becomes a compressed part of the event log, and a new
    events.jsonl begins. It is never more than an eighth of event_log_max_bytes."""
    event_log_max_bytes: int = Field(10 * 2**30, ge=2**20)
    """Maximum size in bytes of the event log in the run folder, which the report reads. Beyond it, the oldest events
    are deleted, except for the part with the start of the run."""
    log_rotate_bytes: int = Field(64 * 2**20, ge=2**16)
    """Size in bytes at which a log file in the run folder is rotated: its lines move to a file with the suffix .1 and
    replace the lines there. Each log therefore keeps at most about twice this size. The logs of a Ray that the run
    starts have the same limit."""
    log_format: Literal["console", "json"] = "console"
    """Format of the output on stderr: console prints short lines for people, json prints every figure for programs."""
    plain_lines: bool = False
    """Print the lines that scripts search for, such as `Global worker queue size`, on a terminal too. If off, they are
    printed only if the output goes to a file or a pipe."""
    progress_bar: bool = True
    """Show a status line during the start-up and then a progress bar, if stderr is a terminal."""
    use_tensorboard: bool = False
    """Write metrics to the run folder for TensorBoard."""
    use_wandb: bool = False
    """Send metrics to Weights & Biases."""
    wandb_mode: Literal["online", "offline"] = "online"
    """online sends metrics to Weights & Biases during the run; offline stores them in the run folder for a later `wandb
    sync`."""
    wandb_key: str | None = None
    """API key of Weights & Biases. env:NAME reads the key from an environment variable, file:PATH from a file; neither
    shows it on the command line. If unset, wandb finds the key itself, in WANDB_API_KEY or where `wandb login` put
    it."""
    wandb_host: str | None = None
    """Address of a Weights & Biases server of your own. If unset, WANDB_BASE_URL, or the public server."""
    wandb_team: str | None = None
    """Team or user in Weights & Biases to which the run belongs. If unset, WANDB_ENTITY, or the owner of the key."""
    wandb_project: str | None = None
    """Project in Weights & Biases. If unset, project_name is used."""
    wandb_group: str | None = None
    """Group in Weights & Biases. If unset, experiment_name is used."""
    wandb_always_use_train_step: bool = False
    """Plot rollout and evaluation metrics over optimizer steps instead of rollouts, in TensorBoard and Weights &
    Biases."""
    no_progress_warn_seconds: float = Field(30.0, gt=0, le=LONGEST_SECONDS)
    """Seconds without progress after which a warning is logged, and the interval at which it is repeated. A collected
    group, a problem of an evaluation, a training step and a publish are progress. A long step or checkpoint is progress
    while the learner works on it, and a long response while the engines generate tokens. An evaluation is progress for
    generate_timeout_seconds, and then only if one of its problems ends or the engines generate tokens. While the run
    waits for groups, the warning follows no earlier than after the time of a slow group: twice the 99th percentile so
    far."""
    no_progress_abort_seconds: float = Field(600.0, gt=0, le=LONGEST_SECONDS)
    """Seconds without progress (see no_progress_warn_seconds) after which the run is stopped with an error. While the
    run waits for generate functions or rewards, their time limits are added: generate_timeout_seconds, or
    reward_timeout_seconds times n_samples_per_prompt. The time of a slow group is added if it is longer."""

    @field_validator("project_name", "experiment_name", "run_name")
    @classmethod
    def _is_folder_name(cls, name: str | None) -> str | None:
        if name is not None and name.startswith("."):
            raise ValueError("the name begins with a dot: choose one that begins with a letter or a digit")
        if name is not None and len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"the name has {len(name.encode())} bytes: choose one of at most {MAX_NAME_BYTES} bytes")
        return name

    @field_validator("run_name")
    @classmethod
    def _is_no_other_file(cls, name: str | None) -> str | None:
        if name in (LATEST_LINK, TARGETS_FOLDER):
            raise ValueError("run_dir uses this name for another file: choose another name")
        return name


class Debug(Section):
    """Saved batches, partial runs and profiles."""

    save_debug_rollout_data: str | None = None
    """File that each training batch is saved to, such as `debug/{rollout_id}.safetensors`. The format is safetensors,
    whatever the suffix. `make inspect` shows its content. If unset, no batches are saved."""
    load_debug_rollout_data: str | None = None
    """Files of saved batches to train on instead of generating, such as `debug/{rollout_id}.safetensors`. Files that
    slime saved (`debug/{rollout_id}.pt`) work too. No engine is started."""
    debug_rollout_only: bool = False
    """Only generate: start no learner and keep the initial weights."""
    debug_train_only: bool = False
    """Only train, on the batches of load_debug_rollout_data: start no engine and no router."""
    use_pytorch_profiler: bool = False
    """Profile the learner's steps and write one trace per rollout and rank, for Perfetto or chrome://tracing."""
    profile_step_start: int = Field(10, ge=0)
    """First rollout that use_pytorch_profiler profiles, counted from 0."""
    profile_step_end: int = Field(12, ge=1)
    """First rollout after profile_step_start that is not profiled any more, counted from 0."""
    profile_dir: str = "profiles"
    """Folder that use_pytorch_profiler writes traces to."""
    dump_details: str | None = None
    """Folder that receives all training batches and the tokenizer, for a later analysis of the run. If unset, nothing
    is written."""

    @property
    def rollout_file(self) -> str | None:
        """Path template of saved batches, with the placeholder `{rollout_id}`; None if batches are not saved."""
        if self.save_debug_rollout_data is None and self.dump_details is not None:
            return f"{self.dump_details}/rollout_data/{{rollout_id}}.safetensors"
        return self.save_debug_rollout_data
