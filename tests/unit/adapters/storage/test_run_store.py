"""The run store returns what was written, stays small, and refuses files that are damaged, foreign or in use."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import sqlite3
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from miles_async.adapters.storage import run_store
from miles_async.adapters.storage.run_store import FILE, SqliteRunStore
from miles_async.adapters.system.file_systems import file_system, is_network_file_system
from miles_async.errors import FatalError, MilesError, StoreError, UserError
from miles_async.sampling_mask import SamplingMask
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, GroupChange, StoredContent
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.disks import files_at_most
from tests.stored_batches import batch, check_state, finished_group


def last_batch(folder: Path, *, read_only: bool = False) -> int:
    """Number of the batch whose state the store in `folder` has. Fails for any other state."""
    with closing(SqliteRunStore(folder, "a", read_only=read_only)) as store:
        return asyncio.run(check_state(store))


def write_batches(store: SqliteRunStore, numbers: range, tokens: int = 20) -> None:
    async def write() -> None:
        for number in numbers:
            await store.write(batch(number, tokens))

    asyncio.run(write())


def a_finished(group: Group, order: int = 0) -> GroupChange:
    return GroupChange(feed_index=group.feed_index, attempt=0, state=GroupState.FINISHED, order=order, content=group)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteRunStore]:
    with closing(SqliteRunStore(tmp_path / "store", "a")) as opened:
        yield opened


async def test_nothing_is_stored_before_the_first_batch(store: SqliteRunStore) -> None:
    assert await store.read() is None


def test_another_process_reads_the_state_of_the_last_batch(tmp_path: Path) -> None:
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        write_batches(store, range(1, 8))
    assert last_batch(tmp_path) == 7
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        write_batches(store, range(8, 11))
        assert last_batch(tmp_path, read_only=True) == 10
    assert last_batch(tmp_path) == 10


def test_other_users_cannot_read_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "stores" / "a"
    SqliteRunStore(folder, "a").close()
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_groups_return_in_the_order_of_their_last_transitions(store: SqliteRunStore) -> None:
    group = finished_group(5)
    fed = GroupChange(feed_index="sample_0_6", attempt=1, state=GroupState.FED, order=3, adopted=True)
    await store.write(Changes(number=1, groups={5: a_finished(group, order=7), 6: fed}))
    leased = GroupChange(feed_index=group.feed_index, attempt=0, state=GroupState.LEASED, order=2)
    await store.write(Changes(number=2, groups={5: leased}))
    stored = await store.read()
    assert stored is not None
    leased_group, fed_group = stored.groups
    assert (leased_group.sequence, leased_group.state) == (5, GroupState.LEASED)
    assert leased_group.content == StoredContent([5], 40)
    assert await store.load(5) == group
    assert (fed_group.attempt, fed_group.state, fed_group.adopted, fed_group.content) == (1, GroupState.FED, True, None)


async def test_a_prompt_that_is_stored_again_keeps_its_place_and_has_no_tokens(store: SqliteRunStore) -> None:
    for number, names in enumerate([["a", "b", "c"], ["b"], ["d"]], 1):
        prompts = {name: Group([Sample(prompt=f"{name}{number}")], feed_index=name) for name in names}
        tracked = {name: prompt.prompt_dict() for name, prompt in prompts.items()}
        await store.write(Changes(number=number, prompts={**tracked, "c" if number == 3 else "unknown": None}))
    stored = await store.read()
    assert stored is not None
    assert [prompt[0].prompt for prompt in stored.prompts] == ["a1", "b2", "d3"]


async def test_a_group_that_is_recycled_while_it_is_written_is_stored_as_it_finished(store: SqliteRunStore) -> None:
    group = finished_group(1)
    writing = asyncio.ensure_future(store.write(Changes(number=1, groups={1: a_finished(group)})))
    await asyncio.sleep(0)
    group.reset()
    await writing
    assert await store.load(1) == finished_group(1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
MASKS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3), max_size=4).map(SamplingMask.from_rows)
SAMPLES = st.builds(
    Sample,
    index=st.none() | st.integers(0, 2**40),
    prompt=st.text(max_size=5) | st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=2), max_size=2),
    label=JSON,
    metadata=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    response=st.text(max_size=10),
    response_length=st.integers(0, 6),
    loss_mask=st.none() | st.lists(st.integers(0, 1), max_size=6),
    rollout_log_probs=st.lists(st.floats(allow_nan=False), max_size=6),
    sampling_mask=st.none() | MASKS,
    spans=st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=3),
    reward=st.none() | st.floats(allow_nan=False) | st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    reward_key=st.none() | st.text(max_size=3),
    remove_sample=st.booleans(),
    status=st.sampled_from(SampleStatus),
)


def test_any_sample_returns_as_it_was_written(tmp_path: Path) -> None:
    with closing(SqliteRunStore(tmp_path, "a")) as store:

        @settings(max_examples=50)
        @given(st.lists(SAMPLES, max_size=2))
        def returns(samples: list[Sample]) -> None:
            changes = Changes(number=1, groups={1: a_finished(Group(samples, feed_index="é"))})
            asyncio.run(store.write(changes))
            assert asyncio.run(store.load(1)) == samples

        returns()


def test_the_state_is_read_without_the_tokens_of_its_groups(tmp_path: Path) -> None:
    groups = {number: finished_group(number, tokens=5000) for number in range(1, 41)}
    changes = Changes(number=1, groups={number: a_finished(group) for number, group in groups.items()})
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        asyncio.run(store.write(changes))
        tracemalloc.start()
        try:
            stored = asyncio.run(store.read())
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert stored is not None
        assert [group.content for group in stored.groups] == [StoredContent([number], 10_000) for number in groups]
        assert most_bytes < (tmp_path / f"{FILE}-wal").stat().st_size / 4
        assert asyncio.run(store.load(40)) == groups[40]


async def test_a_group_that_is_not_stored_cannot_be_loaded(store: SqliteRunStore) -> None:
    with pytest.raises(FatalError, match="group 7 is missing"):
        await store.load(7)


def test_the_file_does_not_grow_while_groups_come_and_go(tmp_path: Path) -> None:
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        write_batches(store, range(1, 11), tokens=2000)
    small = (tmp_path / FILE).stat().st_size
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        write_batches(store, range(11, 111), tokens=2000)
    assert (tmp_path / FILE).stat().st_size <= 2 * small


def test_the_file_is_small_again_after_its_groups_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "SHRINK_BYTES", 1 << 18)
    groups = {number: finished_group(number, tokens=200) for number in range(1, 1001)}
    changes = Changes(number=1, groups={number: a_finished(group) for number, group in groups.items()})
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        asyncio.run(store.write(changes))
    large = (tmp_path / FILE).stat().st_size
    with closing(SqliteRunStore(tmp_path, "a")) as store:
        asyncio.run(store.write(Changes(number=2, groups=dict.fromkeys(range(1, 1000)))))
        for number in range(3, 3 + large // run_store.SHRINK_BYTES):
            asyncio.run(store.write(Changes(number=number)))
        assert asyncio.run(store.load(1000)) == groups[1000]
    assert large > 2 << 20
    assert (tmp_path / FILE).stat().st_size < 2 * run_store.SHRINK_BYTES


def test_a_second_writer_is_refused_with_process_and_host_of_the_first(tmp_path: Path) -> None:
    with closing(SqliteRunStore(tmp_path, "a")):
        with pytest.raises(UserError, match=f"--store-dir .*process {os.getpid()} on host {socket.gethostname()}"):
            SqliteRunStore(tmp_path, "a")
        assert last_batch(tmp_path, read_only=True) == 0
    SqliteRunStore(tmp_path, "a").close()


def test_the_store_of_another_run_or_another_format_is_refused_by_name(tmp_path: Path) -> None:
    SqliteRunStore(tmp_path, "a").close()
    with pytest.raises(UserError, match="belongs to run a, not to run b: set --store-dir to another folder"):
        SqliteRunStore(tmp_path, "b")
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute("PRAGMA user_version = 5")
    with pytest.raises(UserError, match="has format version 5, and this version of miles_async reads format version 6"):
        SqliteRunStore(tmp_path, "a")


def test_a_reader_without_a_store_and_a_store_without_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run store"):
        SqliteRunStore(tmp_path, "a", read_only=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be used .*set --store-dir to another folder"):
        SqliteRunStore(tmp_path / "file", "a")


async def test_a_reader_cannot_write(store: SqliteRunStore, tmp_path: Path) -> None:
    with (
        closing(SqliteRunStore(tmp_path / "store", "a", read_only=True)) as reader,
        pytest.raises(StoreError, match="readonly"),
    ):
        await reader.write(batch(1))


async def test_a_batch_that_does_not_fit_on_the_disk_is_an_error_and_can_be_written_later(
    store: SqliteRunStore,
) -> None:
    await store.write(batch(1))
    with files_at_most(100_000), pytest.raises(StoreError, match=r"cannot be written .*free some disk space"):
        await store.write(batch(2, tokens=50_000))
    assert await check_state(store) == 1
    await store.write(batch(2))
    assert await check_state(store) == 2


MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 21 0:50 / /data rw - nfs4 server:/data rw
41 40 0:51 / /data/local\040disk rw shared:2 master:1 - xfs /dev/sdb rw
42 21 0:52 / /mnt/s3 rw - fuse.s3fs s3fs rw
43 21 0:53 / /tmp/hidden rw - nfs server:/tmp rw
44 21 0:54 / /tmp/hidden rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    "path, kind, network",
    [
        ("/home/user", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/runs/1", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/local disk/runs", "xfs", False),
        ("/mnt/s3/runs", "fuse.s3fs", True),
        ("/tmp/hidden/runs", "tmpfs", False),
    ],
)
def test_network_file_systems_are_recognized(path: str, kind: str, network: bool, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert file_system(Path(path), tmp_path / "mounts") == kind
    assert is_network_file_system(kind) == network
    assert file_system(Path(path), tmp_path / "missing") == ""


def test_on_a_network_file_system_a_store_uses_a_rollback_journal(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"40 21 0:50 / {tmp_path} rw - lustre server:/data rw\n")
    with closing(SqliteRunStore(tmp_path / "store", "a")) as store:
        write_batches(store, range(1, 3))
        assert (tmp_path / "store" / f"{FILE}-wal").exists()
    with capture_logs() as logs, closing(SqliteRunStore(tmp_path / "store", "a", mounts=mounts)) as store:
        write_batches(store, range(3, 5))
        assert not (tmp_path / "store" / f"{FILE}-wal").exists()
    assert "network file system (lustre)" in logs[0]["event"]
    assert last_batch(tmp_path / "store") == 4


def state_or_error(folder: Path) -> int | str:
    """Number of the batch that a damaged store holds, or the error that refuses it."""
    try:
        return last_batch(folder)
    except MilesError as error:
        return str(error)


def is_one_sentence(result: int | str) -> bool:
    return isinstance(result, str) and "run store" in result and "--store-dir" in result and "\n" not in result


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 6 batches without a write-ahead log."""
    folder = tmp_path_factory.mktemp("closed")
    with closing(SqliteRunStore(folder, "a")) as store:
        write_batches(store, range(1, 7))
    return folder


def test_a_file_that_was_cut_is_refused(closed: Path, tmp_path: Path) -> None:
    whole = (closed / FILE).read_bytes()
    for size in [0, 1, 15, 16, 60, 99, 100, 511, 512, *range(1000, len(whole), 9973), len(whole) - 1]:
        (tmp_path / FILE).write_bytes(whole[:size])
        assert is_one_sentence(state_or_error(tmp_path)), size


def test_noise_in_the_file_never_changes_what_is_read(closed: Path, tmp_path: Path) -> None:
    whole = (closed / FILE).read_bytes()
    used = [offset for offset, byte in enumerate(whole) if byte]
    draw = random.Random(0)
    results = []
    for _ in range(40):
        start, length = draw.choice(used), draw.choice([1, 30, 5000])
        (tmp_path / FILE).write_bytes(whole[:start] + draw.randbytes(length) + whole[start + length :])
        results.append(state_or_error(tmp_path))
    # Pages that are no longer in use still hold bytes, and noise there has no effect.
    assert [result for result in results if result != 6 and not is_one_sentence(result)] == []
    assert results.count(6) < 20


def test_a_log_without_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}-wal").write_bytes(b"log")
    with pytest.raises(FatalError, match=r"the file is missing, but run.sqlite-wal exists"):
        SqliteRunStore(tmp_path, "a")


def test_a_log_that_was_cut_gives_an_earlier_batch(tmp_path: Path) -> None:
    original, cut = tmp_path / "original", tmp_path / "cut"
    with closing(SqliteRunStore(original, "a")) as store:
        write_batches(store, range(1, 7))
        shutil.copytree(original, cut)
    log = cut / f"{FILE}-wal"
    file, whole = (cut / FILE).read_bytes(), log.read_bytes()
    numbers = []
    for size in [0, 1, 31, 32, 33, *range(100, len(whole), len(whole) // 25), len(whole)]:
        (cut / FILE).write_bytes(file)
        log.write_bytes(whole[:size])
        (cut / f"{FILE}-shm").unlink(missing_ok=True)
        numbers.append(state_or_error(cut))
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(7))
