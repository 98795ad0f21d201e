"""A killed process or a full or read-only disk leaves a run store with exactly the batches up to some number."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.errors import UserError
from tests.disks import run_on_a_small_disk
from tests.stored_batches import check_state

WRITER = """
import asyncio, sys
from pathlib import Path
from miles_async.adapters.storage import run_store
from tests.stored_batches import batch, check_state

run_store.CHECKPOINT_BYTES = 1 << 19  # so that checkpoints of the log are interrupted, too

async def write(folder, mounts):
    store = run_store.SqliteRunStore(folder, "a", mounts=mounts)
    number = await check_state(store, tokens=2000)
    print("open", number, flush=True)
    while True:
        number += 1
        await store.write(batch(number, tokens=2000))
        print(number, flush=True)

asyncio.run(write(*map(Path, sys.argv[1:])))
"""


@pytest.mark.parametrize("file_system", ["ext4", "nfs4"])
def test_a_writer_that_is_killed_at_any_moment_leaves_a_prefix_of_its_batches(file_system: str, tmp_path: Path) -> None:
    folder, mounts = tmp_path / "store", tmp_path / "mounts"
    mounts.write_text(f"21 1 8:1 / / rw - {file_system} disk rw\n")
    draw = random.Random(file_system)
    stored = 0
    for _ in range(6):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(mounts)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            # Each writer continues the store of the killed one.
            opened = next(line for line in writer.stdout if line.startswith("open"))
            assert opened == f"open {stored}\n"
            with pytest.raises(UserError, match=f"process {writer.pid} on host"):
                SqliteRunStore(folder, "a")
            acknowledged = [int(writer.stdout.readline()) for _ in range(2)]
            time.sleep(draw.random() / 4)
            writer.send_signal(signal.SIGKILL)
            # The last line may be incomplete.
            acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
        with closing(SqliteRunStore(folder, "a", mounts=mounts)) as store:
            stored = asyncio.run(check_state(store, tokens=2000))
        # The last transaction may have been stored without an acknowledgement.
        assert stored - acknowledged[-1] in (0, 1)


FILLS_THE_DISK = """
import asyncio
from contextlib import closing
from pathlib import Path
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.errors import StoreError
from tests.stored_batches import batch, check_state

async def fill():
    store = SqliteRunStore(Path("store"), "a")
    await store.write(batch(1))
    with Path("filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1000)) == 1000:
            pass
    try:
        await store.write(batch(2, tokens=2000))
    except StoreError as error:
        print(error)
    assert await check_state(store) == 1
    Path("filler").unlink()
    await store.write(batch(2))
    store.close()
    with closing(SqliteRunStore(Path("store"), "a")) as store:
        print("stored", await check_state(store))

asyncio.run(fill())
"""


def test_a_full_disk_is_reported_and_costs_no_stored_batch(tmp_path: Path) -> None:
    printed = run_on_a_small_disk(tmp_path, FILLS_THE_DISK, "1m")
    assert "cannot be written (database or disk is full): free some disk space" in printed
    assert "stored 2" in printed


READS_ONLY = """
import asyncio, subprocess
from contextlib import closing
from pathlib import Path
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.errors import UserError
from tests.stored_batches import batch

with closing(SqliteRunStore(Path("store"), "a")) as store:
    asyncio.run(store.write(batch(1)))
Path("empty").mkdir()
subprocess.run(["mount", "-o", "remount,ro", "."], check=True)
for folder in "store", "empty", "new":
    try:
        SqliteRunStore(Path(folder), "a")
    except UserError as error:
        print(error)
"""


def test_a_read_only_folder_is_refused_with_advice(tmp_path: Path) -> None:
    printed = run_on_a_small_disk(tmp_path, READS_ONLY, "1m")
    assert printed.count("Read-only file system") == 3
    assert printed.count("make the folder writable and free some disk space, or set --store-dir to another") == 3
