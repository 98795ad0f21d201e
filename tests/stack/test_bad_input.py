"""Invalid input ends a run within seconds, with one sentence, a non-zero exit code and no process left."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.launch import ENGINE_MODULE
from miles_async.config.schema import TinyModel
from tests.stack.job import Job, job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

AT_ONCE = 10.0
"""CPU seconds for what is found before any process starts: two, where starting Ray and an engine takes dozens."""
PLAIN = ("--warm-start-max-steps", "0", "--eval-size", "0")


def cpu_seconds_of_children() -> float:
    """Of all children that have ended: unlike time on the clock, the figure does not grow with the load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def refusal(ended: Job) -> str:
    """The sentence, once it is sure that it is the only one and that nothing else is left of the run."""
    assert ended.left_running() == {}
    assert "Traceback" not in ended.out + ended.err
    (sentence,) = [line for line in ended.err.splitlines() if line.startswith("train_async.py: ")]
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
        ("--prompt-data <broken_rows> --reasoning-gym-task null --rm-type exact", "rows.jsonl, line 2: not valid JSON"),
        ("--reasoning-gym-task chain_sun", "reasoning_gym_task 'chain_sun' is unknown; did you mean chain_sum?"),
        ("--metrics-port <taken_port>", "(Address already in use): set --metrics-port to a free port, or to 0"),
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


def test_a_reward_that_fails_for_every_sample_ends_the_run_with_its_exception(tmp_path: Path) -> None:
    reward = "tests.stack.user_functions.reward_of_another_schema"
    with job(tmp_path, *PLAIN, "--rm-type", "null", "--custom-rm-path", reward) as ended:
        ended.says(f"reward {reward} raised KeyError: 'score'", within=START_SECONDS)
        assert ended.ended(within=PATIENCE_SECONDS) == 2
        sentence = refusal(ended)
    assert "attempts to generate a group failed; correct the function or the setting" in sentence
    assert f"reward {reward} raised KeyError: 'score'" in sentence
