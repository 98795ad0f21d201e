"""Whole runs on the shared cluster: tools, an agent, supervised examples, posted trajectories, evaluation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.storage.rollout_file import load_groups
from miles_async.adapters.system.network_ports import free_port
from miles_async.events import Evaluated, GroupMoved, StepEnded, StepStarted
from miles_async.types import Sample
from tests.configuration import KEYS
from tests.stack.conftest import Stack
from tests.waiting import START_SECONDS

ROOT = Path(__file__).parents[2]
SMALL = (
    "--rollout-batch-size",
    "4",
    "--over-sampling-batch-size",
    "4",
    "--n-samples-per-prompt",
    "4",
    "--eval-size",
    "0",
)
SHORT = ("--num-rollout", "2", "--rollout-max-response-len", "60", *SMALL)
LONG = 80
OF_MILES = "tests.stack.miles_functions"
BATCH = "miles_async.rollout.sglang_rollout.generate_rollout"


async def calls_tools(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The shipped tool loop; a grammar makes the untrained model call at once."""
    from miles_async.rollout import tool_use

    return await tool_use.generate(args, sample, {**sampling_params, "regex": "<python>[1-9]\\+[1-9]</python>"})


def share_of_calls(args: Any, sample: Sample) -> float:
    """Also checks its input: a mask that leaves out the tool output."""
    mask = sample.loss_mask or []
    assert len(mask) == sample.response_length
    assert "<result>" in sample.response
    assert sample.metadata["tool_calls"] > 0
    return sum(mask) / len(mask)


def test_a_fully_asynchronous_run_trains_on_trajectories_with_tool_calls(stack: Stack) -> None:
    here = "tests.stack.test_generation_modes"
    run = stack.play(
        "train_async.py",
        *SHORT,
        *("--custom-generate-function-path", f"{here}.calls_tools", "--custom-rm-path", f"{here}.share_of_calls"),
    )
    steps = run.of(StepEnded)
    assert len(steps) == 2
    assert all(step.finite and 0 < step.reward < 1 for step in steps)
    # Fewer tokens carry loss than the responses have.
    samples = 4 * run.config.rollout.n_samples_per_prompt
    assert all(step.metrics["loss_tokens"] < step.response_length * samples for step in steps)
    assert run.violations == []


def test_an_agent_of_miles_is_trained_over_the_endpoint(stack: Stack) -> None:
    run = stack.play(
        "train_async.py",
        *SHORT,
        *("--custom-generate-function-path", "miles.rollout.generate_hub.agentic_tool_call.generate"),
        *("--custom-agent-function-path", f"{OF_MILES}.run", "--custom-rm-path", f"{OF_MILES}.reward_func"),
    )
    steps = run.of(StepEnded)
    assert [step.finite for step in steps] == [True, True]
    assert all(0 < step.reward < 1 for step in steps)
    assert run.violations == []


CALL = '<tool_call>\\{"name": "double", "arguments": \\{"x": [1-9]\\}\\}</tool_call>'


async def calls_tools_of_miles(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Miles' generation in several turns; a grammar makes the untrained model call at once."""
    from miles_async.compat.miles import multi_turn

    return await multi_turn.generate(args, sample, {**sampling_params, "regex": CALL})


def share_of_answers(args: Any, sample: Sample) -> float:
    """Also checks its input: each call has a result, which is masked."""
    calls = re.findall(r'"x": (\d)\}\}</tool_call>\D*(\d+)', sample.response)
    assert [int(result) for _, result in calls] == [2 * int(number) for number, _ in calls]
    assert len(calls) == sample.metadata["tool_calls"] == sum(not turn.sampled for turn in sample.turns) == 2
    return sum(sample.loss_mask or []) / sample.response_length


def test_tools_of_miles_are_called_in_several_turns_of_a_trained_sample(stack: Stack) -> None:
    here = "tests.stack.test_generation_modes"
    run = stack.play(
        "train.py",
        *("--num-rollout", "1", "--rollout-max-response-len", "400", *SMALL, "--rollout-function-path", BATCH),
        *("--custom-generate-function-path", f"{here}.calls_tools_of_miles"),
        *("--custom-rm-path", f"{here}.share_of_answers", "--slime-imports", "--tool-call-parser", "hermes"),
        *("--generate-tool-specs-path", f"{OF_MILES}.tool_specs", "--generate-max-turns", "2"),
        *("--generate-execute-tool-function-path", f"{OF_MILES}.execute_tool"),
    )
    [step] = run.of(StepEnded)
    assert step.finite
    assert step.metrics["loss_tokens"] < step.response_length * 4 * run.config.rollout.n_samples_per_prompt


def test_classes_of_miles_generate_the_batches_of_a_run_and_evaluate(stack: Stack) -> None:
    rollout = f"{OF_MILES}.Rollout"
    run = stack.play(
        "train.py",
        *(*SHORT, "--eval-size", "4", "--slime-imports", "--custom-generate-function-path", f"{OF_MILES}.generate"),
        *("--rollout-function-path", rollout, "--eval-function-path", rollout),
    )
    steps = run.of(StepEnded)
    assert [step.finite for step in steps] == [True, True]
    assert all(0 < step.response_length <= 20 for step in steps)
    assert max(step.metrics["logprob_gap_max"] for step in steps) < 1e-4
    assert [(event.rollout, event.problems) for event in run.of(Evaluated)] == [(-1, 4), (1, 4)]
    assert run.violations == []


def test_engine_and_trainer_agree_on_an_agents_tokens(stack: Stack) -> None:
    """In a synchronous run each step starts from the weights that sampled all of its tokens."""
    run = stack.play(
        "train.py",
        *SHORT,
        *("--rollout-function-path", BATCH, "--custom-generate-function-path", "examples.openai_agent.generate"),
    )
    assert {age for step in run.of(StepStarted) for age in step.staleness} == {0}
    assert max(step.metrics["logprob_gap_max"] for step in run.of(StepEnded)) < 1e-4


@pytest.mark.parametrize("function", [None, "examples.openai_agent.generate"], ids=["engine", "agent"])
def test_engine_and_trainer_agree_on_sampling_with_top_p(stack: Stack, function: str | None) -> None:
    run = stack.play(
        "train.py",
        *SHORT,
        *("--rollout-function-path", BATCH, "--rollout-top-p", "0.9"),
        *(("--custom-generate-function-path", function) if function else ()),
    )
    assert [step.finite for step in run.of(StepEnded)] == [True, True]
    assert max(step.metrics["logprob_gap_max"] for step in run.of(StepEnded)) < 1e-4


def test_a_rollout_function_written_for_slime_is_trained(stack: Stack) -> None:
    """It keeps neither log-probabilities nor versions: the engines are asked for the ones, and the others are known."""
    function = "tests.stack.slime_functions.generate_rollout"
    run = stack.play("train.py", *SHORT, "--rollout-function-path", function, "--reward-key", "score")
    assert [step.finite for step in run.of(StepEnded)] == [True, True]
    assert max(step.metrics["logprob_gap_max"] for step in run.of(StepEnded)) < 1e-4
    assert {age for step in run.of(StepStarted) for age in step.staleness} == {0}
    assert run.violations == []


def test_supervised_runs_train_the_assistants_tokens_only_and_start_no_engine(tmp_path: Path) -> None:
    sft_examples = tmp_path / "lessons.jsonl"
    answer = [{"role": "assistant", "content": "3"}]
    chats = [[{"role": "user", "content": f"{n} mod 7?"}, *answer, {"role": "user", "content": "Sure?"}, *answer]
             for n in range(40)]  # fmt: skip
    sft_examples.write_text(
        "".join(json.dumps({"prompt": "", "label": "", "metadata": {"messages": chat}}) + "\n" for chat in chats)
    )
    flags = ("--prompt-data", str(sft_examples), "--num-rollout", "3", "--run-dir", str(tmp_path / "runs"))
    command = [sys.executable, "train.py", "--config", "configs/sft-cpu.yaml", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^learner +starting", done.stderr, re.MULTILINE)
    assert re.search(r"^(engine-0|router) +starting", done.stderr, re.MULTILINE) is None
    lines = (tmp_path / "runs" / "latest" / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["type"] == "StepEnded"]
    assert [step["finite"] for step in steps] == [True] * 3
    # Two turns per lesson: a digit and the end of the turn each.
    assert {step["metrics"]["loss_tokens"] for step in steps} == {16 * 4}
    assert steps[2]["metrics"]["loss"] < steps[0]["metrics"]["loss"]


def test_trajectories_that_an_external_generator_posts_are_trained(stack: Stack) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "examples.external_generator", "--url", url, "--group-size", "4"]
    command += ["--key-file", str(stack.latest / "agent_key")]
    generator = subprocess.Popen(command, cwd=ROOT)
    try:
        function = "miles_async.rollout.external_rollout.generate_rollout"
        run = stack.play(
            "train_async.py", *SHORT, "--rollout-function-path", function, "--agent-port", str(port),
        )  # fmt: skip
    finally:
        generator.terminate()
        generator.wait()
    assert [step.finite for step in run.of(StepEnded)] == [True, True]
    assert [len(step.groups) for step in run.of(StepStarted)] == [4, 4]
    assert run.violations == []


async def short_or_long(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Every second prompt takes so long that the end of a batch aborts it."""
    longest = 8 if (sample.index or 0) // args.n_samples_per_prompt % 2 else LONG
    return await args.turns.sample(sample, {**sampling_params, "max_new_tokens": longest, "ignore_eos": True})


def test_aborted_groups_are_continued_in_a_later_batch(stack: Stack, tmp_path: Path) -> None:
    run = stack.play(
        "train.py",
        *("--rollout-function-path", BATCH, "--windowed-fifo-ratio", "null", "--partial-rollout", "--eval-size", "0"),
        *("--num-rollout", "4", "--rollout-max-response-len", str(LONG), "--n-samples-per-prompt", "4"),
        *("--rollout-batch-size", "4", "--over-sampling-batch-size", "8"),
        *("--custom-generate-function-path", "tests.stack.test_generation_modes.short_or_long"),
        *("--save-debug-rollout-data", str(tmp_path / "{rollout_id}.safetensors")),
    )
    assert "partial" in {event.reason for event in run.of(GroupMoved)}
    trained = [sample for n in range(4) for group in load_groups(tmp_path / f"{n}.safetensors")[1] for sample in group]
    assert {sample.response_length for sample in trained} <= {8, LONG}
    # In turns a batch is of one version: a sample of several was begun for an earlier batch.
    continued = [sample for sample in trained if len({span.version for span in sample.spans}) > 1]
    assert continued
    for sample in continued:
        assert [span.start for span in sample.spans] == [0, *(span.end for span in sample.spans[:-1])]
        assert sample.spans[-1].end == len(sample.rollout_log_probs) == sample.response_length
    assert run.violations == []


def test_each_data_set_is_evaluated_with_its_settings(stack: Stack, tmp_path: Path) -> None:
    sets: dict[str, dict[str, Any]] = {"short": {"path": rows(tmp_path), **KEYS, "max_response_len": 1}}
    sets["many"] = {"path": rows(tmp_path), **KEYS, "size": 2, "n_samples": 4}
    run = stack.play(
        "train_async.py",
        *("--num-rollout", "6", "--eval-interval", "2", *SMALL),
        *("--eval-datasets", json.dumps(sets)),
    )
    found = [(event.rollout, event.name, event.problems) for event in run.of(Evaluated)]
    assert found == [(after, *of) for after in (-1, 1, 3, 5) for of in (("short", 6), ("many", 8))]
    cut_off = [event.truncated for event in run.of(Evaluated) if event.name == "short"]
    assert max(cut_off) > 0, "one token was too little for an answer"


def test_training_steps_continue_while_an_evaluation_runs_at_lower_priority(stack: Stack, tmp_path: Path) -> None:
    sampling = {"n_samples": 4, "temperature": 1.0, "max_response_len": 120}
    long = {"long": {"path": rows(tmp_path), **KEYS, **sampling}}
    before = evaluation_requests(stack)
    run = stack.play(
        "train_async.py",
        *("--num-rollout", "8", "--eval-interval", "4", *SMALL),
        *("--eval-datasets", json.dumps(long)),
    )
    assert [event.rollout for event in run.of(Evaluated)] == [-1, 3, 7]
    [beside] = [event for event in run.of(Evaluated) if event.rollout == 3]
    began = beside.time - beside.seconds
    during = [step for step in run.of(StepEnded) if began < step.time < beside.time]
    assert during, "no step ended while the evaluation ran"
    assert all(step.rollout > 3 for step in during)
    # The producer's last abort may have interrupted some, which were continued.
    assert evaluation_requests(stack) >= before + 3 * 6 * 4
    assert run.violations == []


def rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(6)))
    return str(path)


def evaluation_requests(stack: Stack) -> int:
    """Requests that the engine ever finished at the low priority of evaluations, by its own count."""
    [engine] = stack.cluster.handles.engines
    with urllib.request.urlopen(f"{engine.url}/metrics") as answer:
        text = answer.read().decode()
    counts = re.findall(r'^sglang:num_requests_total\{.*priority="-100".*\} ([\d.e+]+)$', text, re.MULTILINE)
    return int(sum(float(count) for count in counts))
