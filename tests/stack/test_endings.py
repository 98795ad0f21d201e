"""How a run ends before its last batch: invalid input, a start that fails, signals."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.launch import ENGINE_MODULE
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.config.schema import TinyModel
from miles_async.events import Event, Pulse, StepEnded, StepStarted
from miles_async.observability.trace.event_log import read_events
from miles_async.scheduling.ledger import GroupState
from tests.stack.job import Job, job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS, wait_until

AT_ONCE = 10.0
"""CPU seconds for what is found before any process starts: two, where starting Ray and an engine takes dozens."""
PLAIN = ("--warm-start-max-steps", "0", "--eval-size", "0")
LONG = (*PLAIN, "--num-rollout", "500")


def cpu_seconds_of_children() -> float:
    """Of all children that have ended: unlike time on the clock, the figure does not grow with the load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def without_notes(text: str) -> list[str]:
    """The lines, without those about defaults and a model that is not saved."""
    return [line for line in text.splitlines() if not line.startswith("train_async.py: note: ")]


def refusal(ended: Job) -> str:
    """The sentence, once it is sure that it is the only one and that nothing else is left of the run."""
    assert ended.left_running() == {}
    assert "Traceback" not in ended.out + ended.err
    (sentence,) = [line for line in without_notes(ended.err) if line.startswith("train_async.py: ")]
    assert ended.err.splitlines()[-1] == sentence
    return sentence


@pytest.fixture
def broken_rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "la\n')
    return str(path)


@pytest.fixture
def cut_checkpoint(tmp_path: Path) -> str:
    folder = tmp_path / "cut"
    create_tiny_model(TinyModel(num_layers=1, hidden_size=32, ffn_hidden_size=32), folder, seed=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    return str(folder)


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield str(holder.getsockname()[1])


@pytest.fixture
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Words in angle brackets stand for the fixture of that name."""
    return tuple(request.getfixturevalue(word[1:-1]) if word[0] == "<" else word for word in request.param.split())


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--hf-checkpoint nowhere", "hf_checkpoint nowhere: no such folder"),
        ("--hf-checkpoint <cut_checkpoint>", "model.safetensors is broken"),
        (
            "--reasoning-gym-task null --rm-type exact --prompt-data <broken_rows> --input-key prompt "
            "--label-key label",
            "rows.jsonl, line 2: not valid JSON",
        ),
        ("--reasoning-gym-task chain_sun", "reasoning_gym_task 'chain_sun' is unknown; did you mean chain_sum?"),
        ("--metrics-port <taken_port>", "(Address already in use): set --metrics-port to a free port, or unset it"),
        ("--queue-capacity 3", "queue_capacity 3 cannot hold a batch"),
        ("--sglang-mem-fraction-statik 0.8", "SGLang's server has no such argument; did you mean mem_fraction_static?"),
        ("--ray-address 127.0.0.1:9", "no Ray cluster answers at ray_address 127.0.0.1:9"),
        (
            "--rollout-function-path nowhere.generate --windowed-fifo-ratio null",
            "rollout_function_path 'nowhere.generate' cannot be imported: ModuleNotFoundError",
        ),
    ],
    ids=["checkpoint", "cut-checkpoint", "jsonl", "task", "port", "impossible", "argument", "ray", "function"],
    indirect=["flags"],
)
def test_invalid_input_is_refused_at_once_with_one_sentence(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    before = cpu_seconds_of_children()
    with job(tmp_path, *PLAIN, *flags) as refused:
        assert refused.ended(within=PATIENCE_SECONDS) == 2
        assert said in refusal(refused)
    assert cpu_seconds_of_children() - before < AT_ONCE


def test_an_engine_that_dies_at_start_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    with job(tmp_path, *PLAIN, "--sglang-attention-backend", "nonsense") as ended:
        ended.runs(ENGINE_MODULE, within=START_SECONDS)
        assert ended.ended(within=START_SECONDS) == 1
        sentence = refusal(ended)
    assert sentence.startswith("train_async.py: engine engine-0 ended at start with code 2: ")
    assert "invalid choice: 'nonsense'" in sentence
    assert "logs/engine-0.log" in sentence


def test_ctrl_c_before_the_start_of_any_process_ends_the_run_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()]))
    with job(tmp_path, *LONG, "--rm-type", "null", "--custom-rm-path", "slow_to_import.grade") as running:
        running.says("importing", START_SECONDS)
        running.press_ctrl_c()
        assert running.ended(within=PATIENCE_SECONDS) == -signal.SIGINT
        assert running.left_running() == {}
    assert without_notes(running.err) == []


def events_of(folder: Path) -> list[Event]:
    return list(read_events(folder / "runs" / "latest" / "events.jsonl"))


def stopped_in_step(folder: Path, learner: int) -> bool:
    """Stop the learner. Returns whether it is in a step now; otherwise the learner goes on."""
    os.kill(learner, signal.SIGSTOP)
    stopped_at = time.time()

    def reported() -> bool:
        """Whether the driver has received all that the learner did before."""
        return any(isinstance(event, Pulse) and event.time > stopped_at + 1.0 for event in events_of(folder))

    wait_until(reported, "events arrive without the learner", every=0.5)
    steps = [event for event in events_of(folder) if isinstance(event, StepStarted | StepEnded)]
    in_step = isinstance(steps[-1], StepStarted)
    if not in_step:
        os.kill(learner, signal.SIGCONT)
    return in_step


def states_in_store(folder: Path) -> dict[int, GroupState]:
    """The states of the groups whose samples are in the run's store, by sequence number."""
    run = (folder / "runs" / "latest").resolve()
    with closing(SqliteRunStore(run / "store", run.name, read_only=True)) as store:
        left = asyncio.run(store.read())
    assert left is not None
    return {group.sequence: group.state for group in left.groups if group.content is not None}


def test_a_second_sigterm_ends_a_run_at_once_and_keeps_the_groups_of_its_step(tmp_path: Path) -> None:
    """The learner hangs in the step, which the run would finish after one signal. The whole process group gets both."""
    with job(tmp_path, *LONG, "--drain-seconds", str(START_SECONDS)) as running:
        running.says("Staleness stats", START_SECONDS)
        learner = running.process("ray::LearnerRank")
        wait_until(lambda: stopped_in_step(tmp_path, learner), "the learner is stopped in a step", within=START_SECONDS)
        os.killpg(running.pid, signal.SIGTERM)
        # Two signals at the same moment are one to Python.
        running.complains("send SIGTERM again to stop immediately", within=PATIENCE_SECONDS)
        os.killpg(running.pid, signal.SIGTERM)
        assert running.ended(within=PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert running.left_running() == {}
    assert "*** SIGTERM received" not in running.err, "native code printed its stack"
    assert "Traceback" not in running.err
    assert json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())["reason"] == "interrupted"
    begun = [event for event in events_of(tmp_path) if isinstance(event, StepStarted)][-1]
    stored = states_in_store(tmp_path)
    assert {stored[sequence] for sequence in begun.groups} == {GroupState.LEASED}
