"""The state of a run in one SQLite file, which another rollout worker continues after a crash.

    <store-dir>/run.sqlite        the stored state; `run.sqlite-wal` and `run.sqlite-shm` belong to it
    <store-dir>/.lock             locked by the process that writes

Each batch is one transaction. The store of a killed process therefore holds exactly the batches up to some number.

On a local disk, SQLite appends each transaction to a write-ahead log (https://sqlite.org/wal.html) without `fsync`. A
transaction survives the death of the process at any moment. A power failure or a crash of the operating system may undo
the last transactions, those since the previous checkpoint of the log, but never a part of one. On a network file
system, a write-ahead log does not work, because the processes share its index through memory. SQLite then uses a
rollback journal and calls `fsync` for each transaction.

SQLite does not detect changed bytes in a file. Every row therefore carries a checksum of its values, and every
transaction stores the sum of the checksums of all rows, so that a damaged file is refused and never read as a different
state.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import structlog

from miles_async.adapters.storage.checksum import checksum
from miles_async.adapters.storage.encoding import (
    SampleValues,
    decode,
    encode,
    pack,
    pack_samples,
    parts_of,
    response_tokens,
    sample_values,
    unpack,
    unpack_samples,
    versions,
)
from miles_async.adapters.storage.folder_lock import lock_folder
from miles_async.adapters.system.file_systems import MOUNTS, file_system, is_network_file_system
from miles_async.atomic_files import atomic_file
from miles_async.errors import FatalError, StoreError, UserError
from miles_async.events import AnyEvent
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import Changes, StoredContent, StoredGroup, StoredRun
from miles_async.types import Group, Sample

FILE = "run.sqlite"
FORMAT = 6
"""Version of the schema and of the encoding. SQLite keeps it as `user_version`."""
PAGE_BYTES = 4 << 10
"""A page of the file. A batch writes each page that it changes, so that large pages cost small groups many bytes."""
CACHE_BYTES = 16 << 20
"""Changed pages that a transaction keeps in memory; it writes further ones to the log early."""
CHECKPOINT_BYTES = 16 << 20
"""The write-ahead log is copied into the file when it has reached this size."""
SHRINK_BYTES = 8 << 20
"""The file shrinks by so much after a batch, as long as more than this and more than half of the file is unused."""
BUSY_SECONDS = 60.0
"""How long a transaction waits for a process that lists the store."""

_MISSING = object()
_decode_events = msgspec.msgpack.Decoder(GenericAlias(list, (AnyEvent,))).decode
T = TypeVar("T")
log = structlog.get_logger(__name__)


class SqliteRunStore:
    """Implements `RunStore` with SQLite.

    All work with the file, including the encoding of groups, takes place in one thread, so the event loop never waits
    for the disk. The store keeps the folder locked until `close` or the end of the process.
    """

    def __init__(self, folder: Path, run_id: str, *, read_only: bool = False, mounts: Path = MOUNTS) -> None:
        """Open the store of run `run_id`, or create it if `folder` has none. Blocks until the file is open.

        With `read_only`, the store must exist, `write` fails, and the folder is not locked: another process may write
        meanwhile. `mounts` lists the mounted file systems (`file_system`).

        Raises UserError if another process has locked the folder, if the file belongs to another run or another
        version of the format, or if it cannot be created or opened, and FatalError if it is damaged.
        """
        self._path = folder / FILE
        with ExitStack() as stack:
            if not read_only:
                try:
                    stack.enter_context(lock_folder(folder, "--store-dir"))
                    folder.chmod(0o700)  # prompts and samples are for the user alone
                except OSError as error:
                    raise _unusable(folder, error) from error
            self._thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="run store"))
            self._file = self._thread.submit(_open, self._path, run_id, read_only, mounts).result()
            stack.callback(lambda: self._thread.submit(self._file.close).result())
            self._resources = stack.pop_all()

    async def write(self, changes: Changes) -> None:
        """Store one batch in one transaction; see `RunStore.write`. Batches are stored in the order of the calls.

        The content of a group may be changed again as soon as this call has begun: `Sample.reset` and assignments to
        fields do not change what is stored.

        A prompt that is stored again keeps its position among the prompts.
        """
        # The pipeline may recycle a group while the thread works, so the thread gets the values of the fields.
        contents = {
            sequence: [sample_values(sample) for sample in change.content]
            for sequence, change in changes.groups.items()
            if change is not None and change.content is not None
        }
        posted = {name: [sample_values(sample) for sample in group] for name, group in changes.posted.items()}
        await self._in_thread(self._file.write, changes, contents, posted)

    async def read(self) -> StoredRun | None:
        """Return the stored state; see `RunStore.read`. Needs memory for the result and one encoded group.

        The samples of finished and posted groups are verified, but not decoded: objects for all their tokens would need
        gigabytes, and the time to allocate them. `load` and `load_posted` decode one group.
        """
        return await self._in_thread(self._file.read)

    async def load(self, sequence: int) -> list[Sample]:
        """Return the samples of a stored group; see `RunStore.load`."""
        return await self._in_thread(self._file.load, f"group {sequence}")

    async def load_posted(self, feed_index: str) -> list[Sample]:
        """Return the samples of a posted group; see `RunStore.load_posted`."""
        return await self._in_thread(self._file.load, f"posted {feed_index}")

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def progress(self) -> dict[str, Any]:
        """Return only `StoredRun.progress`; empty if nothing has been stored. Blocks. Raises FatalError for damage."""
        return self._thread.submit(self._file.progress).result()

    def close(self) -> None:
        """Wait for the batches that are being written, close the file and unlock the folder."""
        self._resources.close()


def _unusable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"the run store {path} cannot be used ({error}): make the folder writable and free some disk space, or set "
        "--store-dir to another folder"
    )


def _damaged(path: Path, detail: object) -> FatalError:
    # The errors of SQLite quote bytes of the file.
    text = "".join(character if character.isprintable() else "?" for character in str(detail)[:100])
    return FatalError(
        f"the run store {path} is damaged ({text}): set --store-dir to an empty folder and resume from a checkpoint"
    )


@contextmanager
def _reported_for(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the decoders into a UserError or FatalError that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        # The lowest byte is the kind of error. A file that ends too early is damaged, although it is an I/O error.
        outer_cause = code & 0xFF in _OUTER_CAUSES and code != sqlite3.SQLITE_IOERR_SHORT_READ
        raise (_unusable if outer_cause else _damaged)(path, error) from error
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from error


_OUTER_CAUSES = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
"""Errors whose cause is the disk, the permissions or another process, not the contents of the file."""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A table whose first column is the key. Each row has a checksum of its columns."""

    name: str
    columns: Mapping[str, str]
    """Types by name."""
    order: str

    @property
    def key(self) -> str:
        return next(iter(self.columns))

    @property
    def create(self) -> str:
        key, *others = (f"{name} {kind}" for name, kind in self.columns.items())
        # SQLite reads a row from its beginning, and the last column may be large.
        return f"CREATE TABLE {self.name} ({', '.join([key, 'checksum TEXT', *others])})"

    @property
    def put(self) -> str:
        return f"REPLACE INTO {self.name} ({self._names}) VALUES ({'?, ' * len(self.columns)}?)"

    @property
    def delete(self) -> str:
        return f"DELETE FROM {self.name} WHERE {self.key} = ?"

    @property
    def select(self) -> str:
        return f"SELECT {self._names} FROM {self.name} ORDER BY {self.order}"

    @property
    def select_row(self) -> str:
        return f"SELECT {self._names} FROM {self.name} WHERE {self.key} = ?"

    @property
    def _names(self) -> str:
        return f"{', '.join(self.columns)}, checksum"


_GROUPS = _Table(
    "groups",
    {
        "sequence": "INTEGER PRIMARY KEY",
        "feed_index": "TEXT",
        "attempt": "INTEGER",
        "state": "TEXT",
        "position": "INTEGER",
        "adopted": "INTEGER",
        "rollout": "INTEGER",
    },
    "position",
)
# A separate table, because SQLite writes a whole row again if one of its columns changes.
_CONTENTS = _Table(
    "contents",
    {"sequence": "INTEGER PRIMARY KEY", "versions": "BLOB", "response_tokens": "INTEGER"},
    "sequence",
)
_SAMPLES = _Table("samples", {"part": "TEXT PRIMARY KEY", "parts": "INTEGER", "data": "BLOB"}, "rowid")
"""The samples of groups, in parts, so that writing and reading a group of long samples takes little memory. The key is
`KIND NAME/NUMBER`: `group` and a sequence number, or `posted` and a feed index, and the number of the part."""
# These two tables are in the order in which their rows were inserted.
_POSTED = _Table("posted", {"feed_index": "TEXT PRIMARY KEY"}, "rowid")
_KEYS = _Table("keys", {"key": "TEXT PRIMARY KEY", "feed_index": "TEXT"}, "rowid")
_OWED = _Table("owed", {"feed_index": "TEXT PRIMARY KEY", "position": "INTEGER", "data": "BLOB"}, "position")
_PROGRESS = _Table("progress", {"name": "TEXT PRIMARY KEY", "data": "BLOB"}, "name")
_EVENTS = _Table("events", {"number": "INTEGER PRIMARY KEY", "data": "BLOB"}, "number")
_TABLES = (_GROUPS, _CONTENTS, _SAMPLES, _POSTED, _KEYS, _OWED, _PROGRESS, _EVENTS)
_RUN = _Table("run", {"id": "TEXT PRIMARY KEY", "number": "INTEGER", "rows_checksum": "TEXT"}, "id")
"""One row: the run, its last batch, and the sum of the checksums of all rows of the other tables."""


def _open(path: Path, run_id: str, read_only: bool, mounts: Path) -> _RunFile:
    """Open or create the file. Called in the thread of the store, because a connection belongs to one thread."""
    if read_only and not path.exists():
        raise UserError(f"there is no run store {path}: set --store-dir to the folder that the run writes to")
    try:
        if not read_only:
            _create_if_missing(path, run_id)
        # SQLite takes an empty file for an empty database.
        if path.stat().st_size == 0:
            raise _damaged(path, "the file is empty")
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from error
    with _reported_for(path), ExitStack() as stack:
        # SQLite itself must not create the file.
        uri = f"file:{quote(str(path.resolve()))}?mode={'ro' if read_only else 'rw'}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        stack.callback(connection.close)
        file = _RunFile(path, connection)
        file.check(run_id)
        if not read_only:
            _set_durability(connection, path, mounts)
            file.load_checksums()
        stack.pop_all()
        return file


def _create_if_missing(path: Path, run_id: str) -> None:
    """Create a store without batches. A process that is killed meanwhile leaves no file."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp*"):
        leftover.unlink()
    if path.exists():
        return
    if logs := [log.name for log in path.parent.glob(f"{path.name}-*")]:
        raise _damaged(path, f"the file is missing, but {', '.join(logs)} exists")
    with atomic_file(path) as temporary:
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            for table in (*_TABLES, _RUN):
                connection.execute(table.create)
            row = (run_id, 0, _sum_text(0))
            connection.execute(_RUN.put, (*row, _row_checksum(_RUN, row)))
        finally:
            connection.close()


def _set_durability(connection: sqlite3.Connection, path: Path, mounts: Path) -> None:
    """Choose how SQLite makes transactions durable; see the description of the module."""
    kind = file_system(path, mounts)
    if network := is_network_file_system(kind):
        log.warning(
            f"--store-dir {path.parent} is on a network file system ({kind}), where each batch waits for the disk; "
            "a folder on a local disk is faster"
        )
    [mode] = connection.execute(f"PRAGMA journal_mode = {'DELETE' if network else 'WAL'}").fetchone()
    connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
    connection.execute(f"PRAGMA cache_size = {-CACHE_BYTES // 1024}")  # SQLite reads a negative size as KiB
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // PAGE_BYTES}")
    # Some builds of SQLite, such as Debian's, write zeros over everything that is deleted.
    connection.execute("PRAGMA secure_delete = OFF")
    # A log that one large batch has extended is truncated afterwards.
    connection.execute(f"PRAGMA journal_size_limit = {2 * CHECKPOINT_BYTES}")


class _RunFile:
    """The open file. All calls come from one thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._run_id = ""
        self._checksums: dict[_Table, dict[Any, int]] = {}
        """Checksum of each row, by table and key, so that a row is replaced without being read. Empty if unknown."""
        self._sum = 0
        self._owed_positions: dict[str, int] = {}
        self._progress: Mapping[str, Any] = {}
        """The values of `progress` that were written last."""

    def check(self, run_id: str) -> None:
        """Raises UserError if the file has another format or belongs to another run, and FatalError for damage."""
        [version] = self._connection.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise UserError(
                f"the run store {self._path} has format version {version}, and this version of miles_async reads "
                f"format version {FORMAT}: set --store-dir to another folder, or continue the run with the version "
                "that wrote the store"
            )
        stored, _, _ = self._run_row()
        if stored != run_id:
            raise UserError(
                f"the run store {self._path} belongs to run {stored}, not to run {run_id}: set --store-dir to another "
                f"folder, or continue run {stored}"
            )
        self._run_id = run_id

    def load_checksums(self) -> None:
        """Load what `write` needs. Raises FatalError if the checksums do not add up to the stored sum."""
        _, _, rows_checksum = self._run_row()
        select = self._connection.execute
        self._checksums = {
            table: {key: int(text, 16) for key, text in select(f"SELECT {table.key}, checksum FROM {table.name}")}
            for table in _TABLES
        }
        self._sum = sum(number for rows in self._checksums.values() for number in rows.values())
        self._owed_positions = dict(select("SELECT feed_index, position FROM owed ORDER BY position"))
        if _sum_text(self._sum) != rows_checksum:
            self._checksums = {}
            raise _damaged(self._path, "rows are missing or belong to different batches")

    def write(self, changes: Changes, contents: Mapping[int, SampleValues], posted: Mapping[str, SampleValues]) -> None:
        """Store a batch.

        `contents` and `posted` hold the fields of the samples of finished groups, by sequence number, and of posted
        groups, by feed index.
        """
        try:
            try:
                self._transact(changes, contents, posted)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                # On a small disk, the log may need more space than is left, although the state itself is small.
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._transact(changes, contents, posted)
        except sqlite3.Error as error:
            raise StoreError(f"the run store {self._path} cannot be written ({error}): free some disk space") from error
        # The batch is stored. If the disk is too full to shrink the file, the next batch tries again.
        with suppress(sqlite3.Error):
            self._shrink()

    def _shrink(self) -> None:
        """Return unused pages to the file system if there are many. The next checkpoint of the log cuts the file."""
        pages, unused = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        step = SHRINK_BYTES // PAGE_BYTES
        if unused > max(step, pages // 2):
            # SQLite frees one page per step of this statement, and `execute` takes only one step.
            self._connection.executescript(f"PRAGMA incremental_vacuum({step})")

    def _transact(
        self, changes: Changes, contents: Mapping[int, SampleValues], posted: Mapping[str, SampleValues]
    ) -> None:
        """Store a batch in one transaction. If this raises an error, nothing of the batch is stored."""
        execute = self._connection.execute
        try:
            if not self._checksums:
                self.load_checksums()
            execute("BEGIN IMMEDIATE")
            self._apply(changes, contents, posted)
            execute("COMMIT")
            self._progress = changes.progress
        except BaseException:
            self._checksums = {}  # they include rows that are not stored
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise

    def _apply(
        self, changes: Changes, contents: Mapping[int, SampleValues], posted: Mapping[str, SampleValues]
    ) -> None:
        # `executemany` takes row by row from these generators, and SQLite releases the interpreter lock for each row.
        groups = (
            (
                sequence,
                change.feed_index,
                change.attempt,
                change.state.value,
                change.order,
                int(change.adopted),
                change.rollout,
            )
            for sequence, change in changes.groups.items()
            if change is not None
        )
        self._put(_GROUPS, groups)
        self._put(
            _CONTENTS,
            ((sequence, encode(versions(samples)), response_tokens(samples)) for sequence, samples in contents.items()),
        )
        self._put(_POSTED, ((name,) for name in posted))
        for sequence, samples in contents.items():
            self._put_samples(f"group {sequence}", samples)
        for feed_index, samples in posted.items():
            self._put_samples(f"posted {feed_index}", samples)
        self._put(_KEYS, _kept(changes.keys))
        prompts = ((name, self._owed_position(name), pack(prompt)) for name, prompt in _kept(changes.prompts))
        self._put(_OWED, prompts)
        # The same object has the same contents, and may be too large to be encoded several times a second.
        changed = (item for item in changes.progress.items() if item[1] is not self._progress.get(item[0], _MISSING))
        self._put(_PROGRESS, ((name, pack(value)) for name, value in changed))
        if changes.events:
            self._put(_EVENTS, [(changes.number, pack(changes.events))])
        ended, forgotten = _removed(changes.groups), _removed(changes.prompts)
        self._delete(_GROUPS, ended)
        self._delete(_CONTENTS, ended)
        self._delete(_SAMPLES, [part for sequence in ended for part in self._parts(f"group {sequence}")])
        self._delete(_OWED, forgotten)
        self._delete(_POSTED, forgotten)
        self._delete(_SAMPLES, [part for name in forgotten for part in self._parts(f"posted {name}")])
        self._delete(_KEYS, _removed(changes.keys))
        for name in forgotten:
            self._owed_positions.pop(name, None)
        self._delete(_EVENTS, [number for number in self._checksums[_EVENTS] if number <= changes.delivered])
        row = (self._run_id, changes.number, _sum_text(self._sum))
        self._connection.execute(_RUN.put, (*row, _row_checksum(_RUN, row)))

    def _put_samples(self, name: str, samples: SampleValues) -> None:
        """Store the samples of a group in place of those that it had; see `_SAMPLES`."""
        self._delete(_SAMPLES, self._parts(name))
        parts = list(parts_of(samples))
        self._put(_SAMPLES, ((f"{name}/{i}", len(parts), pack_samples(part)) for i, part in enumerate(parts)))

    def _parts(self, name: str) -> list[str]:
        """The keys of the stored parts of a group's samples."""
        return list(takewhile(self._checksums[_SAMPLES].__contains__, (f"{name}/{i}" for i in count())))

    def _owed_position(self, feed_index: str) -> int:
        last = next(reversed(self._owed_positions.values()), 0)
        return self._owed_positions.setdefault(feed_index, last + 1)

    def _put(self, table: _Table, rows: Iterable[tuple[Any, ...]]) -> None:
        known = self._checksums[table]

        def with_checksum(row: tuple[Any, ...]) -> tuple[Any, ...]:
            text = _row_checksum(table, row)
            number = int(text, 16)
            self._sum += number - known.get(row[0], 0)
            known[row[0]] = number
            return (*row, text)

        self._connection.executemany(table.put, map(with_checksum, rows))

    def _delete(self, table: _Table, keys: Iterable[Any]) -> None:
        known = self._checksums[table]
        stored = [key for key in keys if key in known]
        self._connection.executemany(table.delete, ((key,) for key in stored))
        self._sum -= sum(known.pop(key) for key in stored)

    def read(self) -> StoredRun | None:
        with _reported_for(self._path):
            # One transaction, so that a process that lists the store reads the state of one batch.
            self._connection.execute("BEGIN")
            try:
                return self._stored_run()
            finally:
                if self._connection.in_transaction:  # SQLite ends it itself after some errors
                    self._connection.execute("ROLLBACK")

    def progress(self) -> dict[str, Any]:
        with _reported_for(self._path):
            return {name: unpack(data) for (name, data), _ in self._checked_rows(_PROGRESS)}

    def _stored_run(self) -> StoredRun | None:
        _, number, rows_checksum = self._run_row()
        total = 0

        def rows(table: _Table) -> Iterator[Any]:
            nonlocal total
            for row, row_sum in self._checked_rows(table):
                total += row_sum
                yield row

        contents = {sequence: StoredContent(decode(data), tokens) for sequence, data, tokens in rows(_CONTENTS)}
        # Only to verify them.
        for _ in rows(_SAMPLES):
            pass
        groups = []
        for sequence, feed_index, attempt, state, _, adopted, rollout in rows(_GROUPS):
            groups.append(
                StoredGroup(
                    sequence=sequence,
                    feed_index=feed_index,
                    attempt=attempt,
                    state=GroupState(state),
                    adopted=bool(adopted),
                    rollout=rollout,
                    content=contents.pop(sequence, None),
                )
            )
        stored = StoredRun(
            number=number,
            groups=groups,
            prompts=[Group.from_prompt_dict(unpack(data)) for _, _, data in rows(_OWED)],
            posted=[name for (name,) in rows(_POSTED)],
            keys=dict(rows(_KEYS)),
            progress={name: unpack(data) for name, data in rows(_PROGRESS)},
            events=[(batch, unpack(data, _decode_events)) for batch, data in rows(_EVENTS)],
        )
        if contents or _sum_text(total) != rows_checksum:
            raise _damaged(self._path, "rows are missing or belong to different batches")
        return stored if number else None

    def load(self, name: str) -> list[Sample]:
        """The samples of a group; `name` begins the keys of their parts. Raises FatalError if a part is damaged or
        missing."""
        samples: list[Sample] = []
        number, parts = 0, 1
        with _reported_for(self._path):
            while number < parts:
                found = self._connection.execute(_SAMPLES.select_row, (f"{name}/{number}",)).fetchone()
                if found is None:
                    raise _damaged(self._path, f"{name} is missing")
                [((_, parts, data), _)] = self._checked(_SAMPLES, [found])
                samples += unpack_samples(data)
                number += 1
        return samples

    def _run_row(self) -> tuple[str, int, str]:
        rows = [row for row, _ in self._checked_rows(_RUN)]
        if len(rows) != 1:
            raise _damaged(self._path, f"it has {len(rows)} rows that name its run")
        return rows[0]

    def _checked_rows(self, table: _Table) -> Iterator[tuple[tuple[Any, ...], int]]:
        """All rows of a table; see `_checked`."""
        return self._checked(table, self._connection.execute(table.select))

    def _checked(self, table: _Table, rows: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], int]]:
        """The rows without their checksums, and the checksums. Raises FatalError for a wrong one."""
        for *values, stored in rows:
            row = tuple(values)
            if _row_checksum(table, row) != stored:
                raise _damaged(self._path, f"a row of {table.name} does not match its checksum")
            yield row, int(stored, 16)

    def close(self) -> None:
        self._connection.close()


def _kept(entries: Mapping[str, T | None]) -> Iterator[tuple[str, T]]:
    return ((key, value) for key, value in entries.items() if value is not None)


def _removed(entries: Mapping[T, object]) -> list[T]:
    return [key for key, value in entries.items() if value is None]


def _row_checksum(table: _Table, row: tuple[Any, ...]) -> str:
    *values, last = row
    # The last value may be large, and a combined encoding would copy it.
    return checksum([encode((table.name, *values)), last if isinstance(last, bytes) else encode(last)])


def _sum_text(total: int) -> str:
    """A sum of checksums as 32 hexadecimal digits."""
    return f"{total % (1 << 128):032x}"
