"""Weights to another process on the same GPU through CUDA IPC; on a CPU, through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import torch
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.gpu_check.measure import ROUNDS, synchronize, timed
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import DEVICE, ON_GPU, Surroundings

LAYERS, HIDDEN = (28, 1024) if ON_GPU else (2, 64)
BUCKET = 2**28 if ON_GPU else 2**16
"""Entries of a bucket, which takes twice as many bytes."""
REPLY_SECONDS = 120.0


def check(report: Report, surroundings: Surroundings) -> None:
    """Report the bandwidth of a bare copy, of single tensors and of buckets."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs,), daemon=True)
    receiver.start()
    theirs.close()
    tensors = weights()
    try:
        with report.part("bare copy"):
            targets = [torch.empty_like(one) for one in tensors]
            figure(report, "bare copy", tensors, [timed(partial(copy, tensors, targets)) for _ in range(ROUNDS)])
        for part, sent in (("tensors", tensors), ("buckets", buckets(tensors))):
            with report.part(part):
                ask(ours, sent)  # the first round opens the handles, and allocates
                if ask(ours, None) != checksum(sent):
                    raise RuntimeError("the receiving process has other weights")
                figure(report, part, sent, [timed(partial(ask, ours, sent)) for _ in range(ROUNDS)])
    finally:
        ours.close()
        receiver.join(REPLY_SECONDS)


def receive(connection: Connection) -> None:
    """The other process: copies tensors that it is sent to its own, and answers; asked, it sums up their bits."""
    targets: list[Tensor] = []
    while True:
        try:
            tensors = connection.recv()
        except EOFError:
            return
        if tensors is None:
            connection.send(checksum(targets))
            continue
        if [one.shape for one in targets] != [one.shape for one in tensors]:
            targets = [torch.empty_like(one) for one in tensors]
        copy(tensors, targets)
        synchronize()
        del tensors
        connection.send(None)


def ask(connection: Connection, message: list[Tensor] | None) -> int | None:
    connection.send(message)
    if not connection.poll(REPLY_SECONDS):
        raise TimeoutError("the receiving process does not answer")
    reply: int | None = connection.recv()
    return reply


def weights() -> list[Tensor]:
    """Matrices and norms of a dense model in bfloat16."""
    shapes = [
        (4 * HIDDEN, HIDDEN),
        (HIDDEN, 2 * HIDDEN),
        (6 * HIDDEN, HIDDEN),
        (HIDDEN, 3 * HIDDEN),
        (HIDDEN,),
        (HIDDEN,),
    ]
    return [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(LAYERS) for shape in shapes]


def buckets(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.cat([one.flatten() for one in tensors]).split(BUCKET))


def copy(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for target, one in zip(targets, tensors, strict=True):
        target.copy_(one)


def checksum(tensors: Sequence[Tensor]) -> int:
    return int(torch.stack([one.view(torch.int16).sum(dtype=torch.int64) for one in tensors]).sum())


def figure(report: Report, part: str, tensors: Sequence[Tensor], seconds: Sequence[float]) -> None:
    report.figure(part, sum(one.nbytes for one in tensors) / median(seconds) / 1e9, "GB/s")
