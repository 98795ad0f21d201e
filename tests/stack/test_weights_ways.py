"""New weights in a real engine: whatever way they came, every token after the publish is drawn from them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.broadcast import BroadcastWriter
from miles_async.adapters.weights.choose import choose_writer
from miles_async.adapters.weights.disk import DiskWriter
from miles_async.adapters.weights.p2p import P2PWriter
from miles_async.adapters.weights.writer import WeightWriter
from tests.stack.engine_stack import Stack, group_of

pytest_plugins = ["tests.stack.engine_fixtures"]

PROMPT = [(7 * i) % 250 for i in range(120)]


@pytest.fixture(params=["p2p", "broadcast", "disk"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightWriter]:
    ways = {"p2p": P2PWriter, "broadcast": BroadcastWriter, "disk": lambda: DiskWriter(tmp_path / "weights")}
    made: WeightWriter = ways[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_after_a_publish_nothing_is_drawn_from_old_weights(serving: Stack, writer: WeightWriter, mode: str) -> None:
    """Cached prompts, requests in flight and new ones; under `in_place` running requests keep a mixed KV cache."""

    async def story(fleet: SGLangFleet, generator: SGLangGenerator) -> None:
        writer.connect([serving.engine])
        await generator.generate(group_of(PROMPT), SamplingParams(max_new_tokens=8))
        serving.change_weights()
        version = next(serving.versions)
        writer.stage(version, serving.named_tensors())
        flying = group_of(PROMPT[:60], samples=16)
        running = asyncio.create_task(generator.generate(flying, SamplingParams(max_new_tokens=200)))
        await asyncio.sleep(0.2)
        await fleet.pause(mode)
        outcome = await asyncio.to_thread(writer.write, version, "e0")
        await fleet.commit("e0", version)
        await fleet.resume()
        assert outcome.error is None
        assert outcome.bytes > 3_000_000

        cached = group_of(PROMPT, samples=2)
        await generator.generate(cached, SamplingParams(max_new_tokens=20))
        await running
        for sample in cached:
            assert [span.version for span in sample.spans] == [version]
            assert serving.error(sample) < 1e-4
        lived_through = [sample for sample in flying if len(sample.spans) == 2]
        if mode == "abort":
            assert not lived_through
        else:
            assert lived_through, "no request was in flight at the publish"
        if mode == "retract":
            assert max(serving.error(sample, start=sample.spans[1].start) for sample in lived_through) < 1e-4

    serving.run(story)


def test_a_write_to_an_engine_that_is_gone_is_an_outcome_with_an_error(serving: Stack) -> None:
    gone = EngineInfo("gone", "http://127.0.0.1:9", 0, 1)
    writer = DiskWriter(Path("/nonexistent"))
    writer.connect([gone])
    outcome = writer.write(7, "gone")
    assert outcome.error is not None
    assert outcome.error.startswith("engine gone: ")


def test_a_version_that_was_not_staged_is_not_written(serving: Stack) -> None:
    writer = P2PWriter()
    writer.connect([serving.engine])
    writer.stage(3, serving.named_tensors())
    assert writer.write(3, "e0").error is None
    assert writer.write(4, "e0").error == "version 4 is not staged (version 3 is)"
    writer.close()


def test_a_torn_write_is_noticed(serving: Stack) -> None:
    """The staged copy changes between write and check, as if part of it had never arrived."""
    writer = P2PWriter()
    writer.connect([serving.engine])
    writer.stage(5, serving.named_tensors())
    assert writer.write(5, "e0").error is None
    pieces = writer._staging.pieces
    writer._staging.buffer[pieces[3].offset : pieces[3].offset + pieces[3].numel] += 1
    assert writer._differs(writer._peers["e0"][0], pieces) == f"{pieces[3].parameter} differs from what was written"
    writer.close()


def test_auto_takes_one_sided_writes_where_they_work(serving: Stack, tmp_path: Path) -> None:
    writer = choose_writer("auto", [serving.engine], serving.named_tensors, tmp_path)
    assert writer.name == "p2p"
    writer.close()


def test_tensors_may_change_as_soon_as_they_are_staged(serving: Stack, writer: WeightWriter) -> None:
    async def story(fleet: SGLangFleet, generator: SGLangGenerator) -> None:
        writer.connect([serving.engine])
        passing = [(name, tensor.clone()) for name, tensor in serving.named_tensors()]
        version = next(serving.versions)
        writer.stage(version, passing)
        for _, tensor in passing:
            tensor.fill_(torch.nan)
        assert writer.write(version, "e0").error is None
        await fleet.commit("e0", version)
        group = group_of("2 + 2 =")
        await generator.generate(group)
        assert serving.error(group[0]) < 1e-4

    serving.run(story)
