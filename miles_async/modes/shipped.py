"""The modes of the shipped rollout functions, of functions with a worker, and of runs on saved batches."""

from __future__ import annotations

from miles_async.modes.mode import RolloutMode
from miles_async.scheduling.bounds import Schedule


class Batch(RolloutMode):
    """Each call collects the groups that finish first."""

    name = "batch"
    summary = "collects the groups that finish first"
    function = "miles_async.rollout.sglang_rollout.generate_rollout"
    collects_only = True


class Windowed(RolloutMode):
    """Each call collects groups in the order of the window."""

    name = "windowed"
    summary = "collects groups in the order of the window"
    function = "miles_async.rollout.windowed_fifo_rollout.generate_rollout"
    uses_window = True
    collects_only = True


class Stream(RolloutMode):
    """The pipeline's producer generates all the time, and the function takes groups from its queue."""

    name = "stream"
    summary = "takes groups from the stream of the producer"
    function = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
    schedule = Schedule.FULLY_ASYNC
    uses_window = True
    collects_only = True


class OwnWorker(RolloutMode):
    """The function has a worker that generates all the time."""

    summary = "has a worker that keeps groups between calls"
    schedule = Schedule.FULLY_ASYNC
    keeps_groups = True


class Supervised(RolloutMode):
    """Each call returns supervised examples, and nothing is generated."""

    name = "supervised"
    summary = "returns supervised examples"
    function = "miles_async.rollout.sft_rollout.generate_rollout"
    needs_engines = False
    scores = False
    renders_chats = False
    loss_type = "sft_loss"


class External(RolloutMode):
    """Each call returns groups that an external program has generated and posted."""

    name = "external"
    summary = "returns groups that an external program posts"
    function = "miles_async.rollout.external_rollout.generate_rollout"
    takes_posted_groups = True
    scores = False


class Saved(RolloutMode):
    """The run trains on saved batches, so the rollout function is not called."""

    summary = "is not called, because the run trains on saved batches"
    schedule = Schedule.SYNCHRONOUS
    needs_engines = False
    renders_chats = False
