"""A full disk ends neither a run nor a process of it, and no dead letter and no stored batch is lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.disks import run_on_a_small_disk

OBSERVES_A_RUN = """
    from miles_async.events import QueueChanged, RunEnded
    from miles_async.observability.run_folder import RunFolder
    from miles_async.observability.subscribers import EventSubscribers
    from tests.configuration import run_config
    from tests.unit.example_events import RUN

    config = run_config(run_dir="runs", trace=True, reasoning_gym_task="chain_sum")
    folder = RunFolder.create(config)
    with EventSubscribers(config, folder) as subscribers:
        subscribers.emit(RUN)
        for second in range(100):
            subscribers.emit(*[QueueChanged(time=100.0 + second, depth=n, blocked=0) for n in range(100)])
            subscribers.tick(100.0 + second)
            subscribers.update_scrape_targets({"engine": f"127.0.0.1:{second}"})
        subscribers.emit(RunEnded(time=300.0, reason="done"))
    print("the end")
"""


def test_a_run_on_a_full_file_system_continues_with_one_warning(tmp_path: Path) -> None:
    printed = run_on_a_small_disk(tmp_path, textwrap.dedent(OBSERVES_A_RUN), "256k")
    assert printed.count("cannot be written") == 1
    assert "No space left on device" in printed
    assert "done" in printed
    assert "\nthe end\n" in printed


WRITES_LETTERS = """
    import json
    from pathlib import Path
    from tests.unit.adapters.storage.test_dead_letters import DeadLetterFile, DropReason, Trace, group, letters_in

    path, filler = Path("dead_letters.jsonl"), Path("filler")
    file = DeadLetterFile(path, Trace())
    file.dead_letter(group(0), DropReason.FAILED, "it failed")
    with filler.open("wb", buffering=0) as rest:
        while rest.write(bytes(1000)) == 1000:
            pass
    for number in range(1, 40):
        file.dead_letter(group(number), DropReason.FAILED, "it failed")
    for letter in letters_in(path):
        assert letter["samples"]
    filler.unlink()
    file.retry()
    assert [letter["feed_index"] for letter in letters_in(path)] == [f"sample_0_{number}" for number in range(40)]
    print("nothing is lost")
"""


def test_a_full_file_system_holds_only_whole_letters_and_gets_the_others_later(tmp_path: Path) -> None:
    assert "nothing is lost" in run_on_a_small_disk(tmp_path, textwrap.dedent(WRITES_LETTERS), "64k")


WRITES_A_STORE = """
    import asyncio
    from contextlib import closing
    from pathlib import Path
    from miles_async.adapters.storage.run_store import SqliteRunStore
    from tests.stored_batches import batch, check_state

    async def write():
        with closing(SqliteRunStore(Path("store"), "a")) as store:
            for number in range(1, 101):
                await store.write(batch(number))
        with closing(SqliteRunStore(Path("store"), "a")) as store:
            print("stored", await check_state(store))

    asyncio.run(write())
"""


def test_a_store_on_a_disk_that_is_smaller_than_its_log_stores_all_batches(tmp_path: Path) -> None:
    assert "stored 100" in run_on_a_small_disk(tmp_path, textwrap.dedent(WRITES_A_STORE), "4m")


PRINTS_AND_LOGS = """
import os, sys
from pathlib import Path
import structlog
from miles_async.observability.console.logging import configure_worker_logging
logs, report = Path(sys.argv[1]), os.dup(1)
configure_worker_logging(logs, "rollout", "r")
for number in range(100):
    print("x" * 1000, flush=True)
    print("x" * 1000, flush=True, file=sys.stderr)
    structlog.get_logger("workers").warning("a line")
os.write(report, b"still here")
"""


def test_a_process_whose_log_files_are_on_a_full_disk_prints_and_logs_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "rollout.log").symlink_to("/dev/full")
    (tmp_path / "rollout.jsonl").symlink_to("/dev/full")
    command = [sys.executable, "-c", PRINTS_AND_LOGS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "still here")
