"""`--max-kv-staleness 1` on a real engine: keys and values outlive one publish, and not two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineServer, EngineSpec
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.config.schema import TinyModel, Weights
from miles_async.types import Sample, VersionSpan
from tests.stack.engine_stack import Stack, group_of, start_generating
from tests.waiting import PATIENCE_SECONDS

pytest_plugins = ["tests.stack.engine_fixtures"]

EXACT = 1e-4
"""The largest difference of log-probabilities if all keys and values were computed by the weights that sampled."""
PROMPT = [(7 * i) % 250 for i in range(120)]
SHORT = SamplingParams(max_new_tokens=8)
LONG = SamplingParams(max_new_tokens=380, other={"ignore_eos": True})
LONGER = SamplingParams(max_new_tokens=1200, other={"ignore_eos": True})
"""For requests that are in flight at two publishes, also on a busy machine."""
Publish = Callable[[], Awaitable[int]]
"""Makes other weights live, and returns their version."""


@pytest.fixture(scope="module", params=[True, False], ids=["one batch after the other", "overlapping batches"])
def lenient(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine that keeps keys and values of the version before.

    Engines with a GPU launch a batch before they read the tokens of the one before.
    """
    logs, checkpoint = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("models") / "tiny"
    create_tiny_model(TinyModel(max_position_embeddings=2048), checkpoint, seed=1)
    spec = EngineSpec(
        name="e0",
        model_path=str(checkpoint),
        log_path=logs / "engine.log",
        max_kv_staleness=1,
        server_args={"disable_overlap_schedule": request.param},
    )
    engine = EngineServer(spec)
    router = RouterServer(RouterSpec(log_path=logs / "router.log"))
    try:
        router_url = router.start()
        model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        yield Stack(engine.start(), router_url, router.spec.key, logs, checkpoint, model)
    finally:
        router.stop()
        engine.stop()


@asynccontextmanager
async def published(
    stack: Stack, folder: Path, weights: Weights
) -> AsyncIterator[tuple[SGLangFleet, SGLangGenerator, Publish]]:
    source = WeightSource(describe(stack.named_tensors()), folder, Weights())
    source.connect([stack.engine], {"e0": "memory"})
    of_checkpoint = deepcopy(stack.model.state_dict())
    async with stack.admitted() as (fleet, generator):

        async def publish() -> int:
            stack.change_weights()
            return await publish_these()

        async def publish_these() -> int:
            version = next(stack.versions)
            source.stage(version, stack.named_tensors(), ["memory"])
            await fleet.pause(weights.engine_pause)
            outcome = await asyncio.to_thread(source.send, version, "e0", "memory")
            assert outcome.error is None
            await fleet.commit("e0", version)
            await fleet.resume()
            return version

        # The versions before this one belong to other tests.
        await publish()
        await publish()
        yield fleet, generator, publish
        # Other tests compare the engine with the checkpoint.
        stack.model.load_state_dict(of_checkpoint)
        await publish_these()
    source.close()


LENIENT = Weights(max_kv_staleness=1)


async def test_without_a_limit_of_keys_a_request_in_flight_is_computed_again(serving: Stack, tmp_path: Path) -> None:
    async with published(serving, tmp_path, Weights()) as (fleet, generator, publish):
        flying = group_of(PROMPT[:60], samples=8)
        running = await start_generating(fleet, generator, LONG, flying)
        await publish()
        await running
        lived_through = [sample for sample in flying if len(sample.spans) == 2]
        assert lived_through, "no request was in flight at the publish"
        assert max(serving.error(sample, start=sample.spans[1].start) for sample in lived_through) < EXACT
        assert {(span.oldest_keys, span.reused) for sample in flying for span in sample.spans} == {(None, 0)}


async def test_a_request_in_flight_keeps_its_keys_over_one_publish(lenient: Stack, tmp_path: Path) -> None:
    async with published(lenient, tmp_path, LENIENT) as (fleet, generator, publish):
        flying = group_of(PROMPT[:60], samples=8)
        running = await start_generating(fleet, generator, LONGER, flying)
        version = await publish()
        await running
        lived_through = [sample for sample in flying if len(sample.spans) == 2]
        assert lived_through, "no request was in flight at the publish"
        for sample in lived_through:
            first, second = sample.spans
            assert first == VersionSpan(version - 1, 0, second.start)
            assert second == VersionSpan(version, first.end, sample.response_length, version - 1, 60 + first.end)
        assert min(lenient.error(sample, start=sample.spans[1].start) for sample in lived_through) > 10 * EXACT


async def in_flight_at_two_publishes(
    fleet: SGLangFleet, generator: SGLangGenerator, publish: Publish
) -> tuple[list[Sample], list[Sample], int]:
    """The samples that were in flight at both publishes, those at the second one only, and its version.

    On a busy machine the requests may begin after a publish. Others, whose prompts are not cached, are then made.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        attempts = count()
        while True:
            attempt = next(attempts)
            prompt = [(token + attempt) % 250 for token in PROMPT]
            older, younger = group_of(prompt[:60], samples=4), group_of(prompt[60:], samples=4)
            first = await start_generating(fleet, generator, LONGER, older)
            await publish()
            second = await start_generating(fleet, generator, LONGER, younger)
            version = await publish()
            await first
            await second
            recomputed = [sample for sample in older if len(sample.spans) == 3]
            kept = [sample for sample in younger if len(sample.spans) == 2]
            if recomputed and kept:
                return recomputed, kept, version


async def test_the_second_publish_removes_the_older_requests_only(lenient: Stack, tmp_path: Path) -> None:
    async with published(lenient, tmp_path, LENIENT) as (fleet, generator, publish):
        recomputed, kept, version = await in_flight_at_two_publishes(fleet, generator, publish)
        for sample in recomputed:
            assert [(span.version, span.oldest) for span in sample.spans] == [
                (version - 2, version - 2),
                (version - 1, version - 2),
                (version, version),
            ]
            assert lenient.error(sample, start=sample.spans[2].start) < EXACT
        for sample in kept:
            assert [(span.version, span.oldest) for span in sample.spans] == [
                (version - 1, version - 1),
                (version, version - 1),
            ]
            assert lenient.error(sample, start=sample.spans[1].start) > 10 * EXACT


async def test_a_cached_prefix_is_used_after_one_publish_and_not_after_two(lenient: Stack, tmp_path: Path) -> None:
    async with published(lenient, tmp_path, LENIENT) as (_, generator, publish):
        await generator.generate(group_of(PROMPT), SHORT)
        version = await publish()
        await generator.generate(group := group_of(PROMPT), SHORT)
        (reusing,) = group
        assert [(span.version, span.oldest, span.reused) for span in reusing.spans] == [(version, version - 1, 119)]
        assert lenient.error(reusing) > 10 * EXACT

        version = await publish()
        await generator.generate(group := group_of(PROMPT), SHORT)
        (fresh,) = group
        assert fresh.spans == [VersionSpan(version, 0, fresh.response_length)]
        assert lenient.error(fresh) < EXACT


async def test_a_short_common_beginning_does_not_make_a_request_older(lenient: Stack, tmp_path: Path) -> None:
    async with published(lenient, tmp_path, LENIENT) as (_, generator, publish):
        await generator.generate(group_of(PROMPT[:40]), SHORT)
        version = await publish()
        await generator.generate(group := group_of(PROMPT), SHORT)
        (sample,) = group
        assert sample.spans == [VersionSpan(version, 0, sample.response_length)]
        assert lenient.error(sample) < EXACT
