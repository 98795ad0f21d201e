"""Versions of a LoRA adapter on a real engine: loaded while it generates, named by requests, dropped when idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.weights.adapters import loaded_versions
from miles_async.adapters.weights.channel import Channel
from miles_async.adapters.weights.engine import call_engine, read_engine_memory, read_logprobs
from miles_async.errors import TrajectoryError
from miles_async.models.lora import TENSORS, write_adapter
from miles_async.models.lora_layers import HEAD, Targets
from miles_async.models.plugin import ModelPlugin
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.transports import ADAPTER
from miles_async.types import Group, SampleStatus
from tests.configuration import run_config
from tests.stack.adapters import CONFIG, RANK, adapter_of, merged
from tests.stack.engine_stack import Stack, group_of, tokens_drawn
from tests.stack.learning import create_experts, learning
from tests.stack.local_sources import LocalSources
from tests.waiting import PATIENCE_SECONDS

pytest_plugins = ["tests.stack.engine_fixtures"]

LONG = SamplingParams(max_new_tokens=300, other={"ignore_eos": True})
SHORT = SamplingParams(max_new_tokens=30, other={"ignore_eos": True})
STALENESS = 2


@dataclass
class Serving:
    """An engine that serves adapters, behind a router."""

    engine: EngineServer
    router: RouterServer
    checkpoint: Path
    folder: Path
    model: PreTrainedModel

    @asynccontextmanager
    async def run(self, name: str, *, rank: int = RANK, colocated: bool = False) -> AsyncIterator[Run]:
        """What a run of this name does with the engine. An adapter of the engine's rank is published first."""
        fleet = SGLangFleet(self.router.url, router_key=self.router.spec.key, adapters=True, colocated=colocated)
        versions = AdapterVersions(STALENESS)
        generator = SGLangGenerator(
            self.router.url,
            CheckpointTokenizer(str(self.checkpoint)),
            LONG,
            limit=lambda: 64,
            engines=fleet.engines,
            router_key=self.router.spec.key,
            adapters=versions,
        )
        sources = LocalSources(
            lambda: adapter_of(self.model, run.staged, rank).items(),
            self.folder / name,
            adapter=replace(CONFIG, rank=rank),
            resident=versions.resident,
            colocated=colocated,
        )
        run = Run(self, fleet, generator, versions, Channel((ADAPTER,), sources, fleet.address))
        fleet.register_engine(self.engine.info())
        try:
            await run.channel.connect(["e0"])
            if rank == RANK:
                await run.publish(1)
                await fleet.admit("e0")
            yield run
        finally:
            await generator.close()
            await fleet.close()

    def error(self, group: Group, version: int) -> float:
        """Largest difference between the engine's log-probabilities and the merged model's."""
        whole = Stack(self.engine.info(), "", "", self.folder, self.checkpoint, merged(self.model, version))
        return max(whole.error(sample) for sample in group)


@dataclass
class Run:
    serving: Serving
    fleet: SGLangFleet
    generator: SGLangGenerator
    versions: AdapterVersions
    channel: Channel
    staged: int = 0

    async def send(self, version: int) -> str | None:
        """The error with which the engine refused the version."""
        self.staged = version
        await self.channel.stage(version)
        return (await self.channel.send(version, "e0")).error

    async def publish(self, version: int) -> None:
        assert await self.send(version) is None
        await self.fleet.commit("e0", version)
        self.versions.publish(version)

    @property
    def live(self) -> int:
        """The newest version that requests name."""
        return max(self.versions.requests())

    def loaded(self) -> set[int]:
        return loaded_versions(self.serving.engine.info(), timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def serving(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_adapters(checkpoint, tmp_path_factory.mktemp("adapters")) as made:
        yield made


@pytest.fixture(scope="module")
def serving_experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    checkpoint = tmp_path_factory.mktemp("experts")
    create_experts(checkpoint, seed=1)
    with serving_adapters(checkpoint, tmp_path_factory.mktemp("adapters")) as made:
        yield made


@contextmanager
def serving_adapters(checkpoint: Path, folder: Path) -> Iterator[Serving]:
    spec = EngineSpec(
        name="e0",
        model_path=str(checkpoint),
        log_path=folder / "engine.log",
        lora_rank=RANK,
        lora_modules=CONFIG.modules,
        lora_versions=AdapterVersions(STALENESS).resident,
    )
    engine, router = EngineServer(spec), RouterServer(RouterSpec(log_path=folder / "router.log"))
    try:
        engine.start()
        router.start()
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        yield Serving(engine, router, checkpoint, folder, model)
    finally:
        router.stop()
        engine.stop()


def versions_of(group: Group) -> set[tuple[int, int, int]]:
    return {(span.version, span.start, span.end) for sample in group for span in sample.spans}


async def test_groups_keep_the_version_that_they_began_with_while_others_are_loaded(serving: Serving) -> None:
    await publish_beside_groups(serving)


async def test_adapters_of_experts_are_loaded_while_groups_keep_theirs(serving_experts: Serving) -> None:
    await publish_beside_groups(serving_experts)


async def test_an_engine_computes_adapters_of_experts_as_the_learner_does(serving_experts: Serving) -> None:
    tokens = list(range(40))
    async with serving_experts.run("learner") as run:
        await run.publish(2)
        found = read_logprobs(serving_experts.engine.info(), tokens, timeout=PATIENCE_SECONDS)
    settings = run_config(
        lora_rank=RANK,
        lora_alpha=CONFIG.scale * RANK,
        lora_target_modules=["all-linear", HEAD],
        lora_load=str(serving_experts.folder / "learner/v2"),
    )
    with learning(serving_experts.checkpoint, settings) as learner:
        [expected] = learner.logprobs([tokens])
    assert found == pytest.approx(expected, abs=1e-4)


async def test_an_engine_computes_an_adapter_of_some_layers_as_the_learner_does(
    serving: Serving, tmp_path: Path
) -> None:
    targets, tokens, engine = ["*.layers.0.*"], list(range(40)), serving.engine.info()
    settings = run_config(
        lora_rank=RANK, lora_alpha=CONFIG.scale * RANK, lora_target_modules=targets, lora_load=str(tmp_path)
    )
    layers = ModelPlugin().shape(serving.model.config.to_dict())
    config = replace(CONFIG, modules=Targets((*targets,)).of_model(layers.linear_layers()))
    tensors = adapter_of(serving.model, 9)
    chosen = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    write_adapter(tmp_path, chosen, config, base=None, hash_of_base=None)
    async with serving.run("some layers"):
        loaded = {"lora_name": "some", "lora_path": str(tmp_path)}
        call_engine(engine, "/load_lora_adapter", loaded, timeout=PATIENCE_SECONDS)
        found = read_logprobs(engine, tokens, adapter="some", timeout=PATIENCE_SECONDS)
        call_engine(engine, "/unload_lora_adapter", {"lora_name": "some"}, timeout=PATIENCE_SECONDS)
        others = read_logprobs(engine, tokens, adapter="v1", timeout=PATIENCE_SECONDS)
    with learning(serving.checkpoint, settings) as learner:
        [expected] = learner.logprobs([tokens])
    assert found == pytest.approx(expected, abs=1e-4)
    assert others != pytest.approx(expected, abs=1e-2)


async def publish_beside_groups(serving: Serving) -> None:
    """Groups begin before, during and after a publish, and are computed in the same batches."""
    async with serving.run("publish") as run:
        before, during, after = (group_of(list(range(start, start + 20)), samples=4) for start in (0, 40, 80))
        running = [asyncio.create_task(run.generator.generate(before, LONG))]
        assert await tokens_drawn(run.fleet, running[0])
        assert await run.send(2) is None
        running.append(asyncio.create_task(run.generator.generate(during, LONG)))
        await asyncio.sleep(0.1)
        await run.fleet.commit("e0", 2)
        run.versions.publish(2)
        running.append(asyncio.create_task(run.generator.generate(after, SHORT)))
        assert not running[0].done(), "the group ended before the publish"
        await asyncio.gather(*running)
        for group, version, tokens in ((before, 1, 300), (during, 1, 300), (after, 2, 30)):
            assert versions_of(group) == {(version, 0, tokens)}
            assert all(sample.status is SampleStatus.TRUNCATED for sample in group)
            assert serving.error(group, version) < 1e-4
            assert serving.error(group, 3 - version) > 1e-2
        assert run.versions.requests() == {1: 0, 2: 0}


async def test_a_group_goes_on_under_its_version_as_long_as_engines_hold_it(serving: Serving) -> None:
    async with serving.run("continued") as run:
        group = group_of(list(range(30)), samples=2)
        await run.generator.generate(group, SHORT)
        for live, expected in ((3, {1}), (4, {1, 4})):
            while run.live < live:
                await run.publish(run.live + 1)
            for sample in group:
                sample.status = SampleStatus.ABORTED
            await run.generator.generate(group, replace(SHORT, max_new_tokens=30 * live))
            assert {span.version for sample in group for span in sample.spans} == expected


async def test_an_engine_drops_the_versions_that_no_request_may_name(serving: Serving) -> None:
    async with serving.run("dropped") as run:
        for version in range(2, 8):
            await run.publish(version)
            await run.channel.drop("e0")
            assert run.loaded() == set(range(max(1, version - STALENESS), version + 1))


async def test_a_publish_drops_the_versions_that_could_not_be_dropped_after_the_last_one(serving: Serving) -> None:
    async with serving.run("dropped late") as run:
        for version in range(2, 8):
            await run.publish(version)
            assert run.loaded() == set(range(max(1, version - STALENESS - 1), version + 1))


async def test_an_engine_refuses_an_adapter_whose_file_was_damaged(serving: Serving) -> None:
    async with serving.run("damaged") as run:
        run.staged = 2
        await run.channel.stage(2)
        path = serving.folder / "damaged" / "v2" / TENSORS
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        error = (await run.channel.send(2, "e0")).error
        assert error is not None
        assert "the adapter differs from what was written" in error
        assert run.loaded() == {1}


async def test_an_adapter_can_be_dropped_although_sglang_has_lost_count_of_its_requests(serving: Serving) -> None:
    async with serving.run("counted") as run:
        too_long = group_of([1] * 5000, samples=1)
        with pytest.raises(TrajectoryError):
            await run.generator.generate(too_long, SHORT)
        for _ in range(3):
            await run.fleet.check("e0")
        for version in range(2, 2 + STALENESS + 2):
            await run.publish(version)
        assert 1 not in run.loaded()


async def test_requests_without_a_name_use_the_version_that_was_committed_last(serving: Serving) -> None:
    async with serving.run("unnamed") as run:
        await run.publish(2)
        tokens = list(range(40))
        found = read_logprobs(serving.engine.info(), tokens, timeout=PATIENCE_SECONDS)
        with torch.no_grad():
            expected = merged(serving.model, 2)(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(tokens[1:])], abs=1e-4)


async def test_an_adapter_of_another_run_is_replaced(serving: Serving) -> None:
    async with serving.run("first") as run:
        await run.publish(2)
    async with serving.run("second") as run:
        assert run.loaded() == {1}
        run.staged = 7  # other numbers under the name of version 1
        await run.channel.stage(1)
        assert (await run.channel.send(1, "e0")).error is None
        group = group_of(list(range(20)), samples=1)
        await run.generator.generate(group, SHORT)
        assert serving.error(group, 7) < 1e-4


async def test_an_engine_that_takes_its_memory_back_has_its_adapters(serving: Serving) -> None:
    async with serving.run("released", colocated=True) as run:
        await run.publish(2)
        for lost in (set(), {1}, {1, 2}):
            group = group_of(list(range(20)), samples=2)
            await run.generator.generate(group, SHORT)
            assert versions_of(group) == {(2, 0, 30)}
            assert serving.error(group, 2) < 1e-4
            await run.fleet.offload()
            unload(serving.engine.info(), lost)
            assert run.loaded() == {1, 2} - lost
            await run.fleet.onload()
            assert (await run.channel.send(2, "e0")).error is None
            assert run.loaded() == {1, 2}
        assert list(run.fleet.routed()) == ["e0"]


async def test_a_base_model_that_an_engine_has_not_restored_is_an_error(serving: Serving) -> None:
    async with serving.run("not restored", colocated=True) as run:
        memory = read_engine_memory(serving.engine.info(), timeout=PATIENCE_SECONDS).ranks[0]
        name = next(name for name in memory.regions if ".1.mlp.down_proj." in name)
        address, size = memory.regions[name].address, 64
        await run.fleet.offload()
        before = exchange(memory.pid, address, bytes(size))
        await run.fleet.onload()
        error = (await run.channel.send(1, "e0")).error
        exchange(memory.pid, address, before)
        assert error == (
            f"engine e0: {name} of rank 0 changed while the learner had the devices, and it is a weight of the base "
            "model"
        )
        assert (await run.channel.send(1, "e0")).error is None


def exchange(process: int, address: int, content: bytes) -> bytes:
    """Write into the memory of an engine's process, and return what was there."""
    with Path(f"/proc/{process}/mem").open("r+b", buffering=0) as file:
        file.seek(address)
        before = file.read(len(content))
        file.seek(address)
        file.write(content)
    return before


def unload(engine: EngineInfo, versions: set[int]) -> None:
    for version in versions:
        call_engine(engine, "/unload_lora_adapter", {"lora_name": f"v{version}"}, timeout=PATIENCE_SECONDS)


async def test_an_adapter_that_the_engine_refuses_is_an_error_that_names_the_engine(serving: Serving) -> None:
    async with serving.run("refused", rank=2 * RANK) as run:
        error = await run.send(2)
        assert error is not None
        assert error.startswith("engine e0:")
        assert f"v2 with rank {2 * RANK} is incompatible" in error
        assert run.loaded() == set()


async def test_a_restarted_engine_gets_all_versions_that_requests_may_name(serving: Serving) -> None:
    async with serving.run("restarted") as run:
        await run.publish(2)
        await run.publish(3)
        await run.fleet.fence("e0", "test")
        await asyncio.to_thread(serving.engine.restart)
        run.fleet.register_engine(serving.engine.info())
        await run.channel.connect(["e0"])
        assert run.loaded() == set()
        assert (await run.channel.send(3, "e0")).error is None
        assert run.loaded() == {1, 2, 3}
