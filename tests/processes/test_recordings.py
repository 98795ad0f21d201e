"""Recordings on disk are complete even if the process that writes them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from miles_async.adapters.storage.recording_store import RecordingStore

WRITER = """
import sys
from pathlib import Path
from miles_async.adapters.storage.recording_store import RecordingStore
from miles_async.recording import GroupRecord, Recording
from miles_async.types import Sample
samples = [Sample(index=i, tokens=list(range(2000)), response_length=1000, rollout_log_probs=[0.5] * 1000)
           for i in range(4)]
group = GroupRecord(feed_index="sample_0_0", prompt="p", version=0, seconds=1.0, samples=samples)
store = RecordingStore(Path(sys.argv[1]))
for step in range(1_000_000):
    store.save(step, Recording(groups=[group]), {})
    print(step, flush=True)
"""


def test_a_killed_writer_leaves_a_complete_entry_or_none(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer.stdout:
        for _ in range(20):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    store = RecordingStore(tmp_path)
    assert len(store.steps) >= 20
    for step in store.steps:
        [group] = store.load(step).recording.groups
        assert [one.tokens for one in group.samples] == [list(range(2000))] * 4
