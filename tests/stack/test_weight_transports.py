"""New weights in a real engine: after a publish, every token is sampled from them, whichever transport wrote them."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.adapters.sglang.engine_weights import RankLayout
from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.weights.engine import TOKENS
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import describe
from miles_async.adapters.weights.transports.memory import MemoryTransport
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import Weights
from miles_async.errors import EngineLostError, FatalError
from miles_async.transports import TRANSPORTS as TRANSPORT_PLUGINS
from tests.broadcast_engine import held_here
from tests.configuration import run_config
from tests.pages import files_of
from tests.plugin_packages import install_plugin
from tests.stack.engine_stack import Stack, group_of, start_generating
from tests.stack.learning import create_experts, learning, uneven_groups
from tests.waiting import PATIENCE_SECONDS, wait_until

pytest_plugins = ["tests.stack.engine_fixtures"]

TRANSPORTS = ["memory", "p2p", "broadcast", "ipc", "disk", "disk_delta"]
PROMPT = [(7 * i) % 250 for i in range(120)]


def source_of(
    serving: Stack,
    folder: Path,
    *,
    rank: int = 0,
    sources: int = 1,
    verify_all: bool = True,
    timeout: float = PATIENCE_SECONDS,
    by_name: str | None = None,
) -> WeightSource:
    named = describe(serving.named_tensors())
    settings = Weights(
        update_weight_buffer_size=1 << 20,
        check_weight_update_equal=verify_all,
        update_weight_timeout_seconds=timeout,
    )
    source = WeightSource(named, folder, settings, rank=rank, sources=sources, by_name=by_name)
    source.connect([serving.engine], {})
    return source


@pytest.fixture
def source(serving: Stack, tmp_path: Path) -> Iterator[WeightSource]:
    made = source_of(serving, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("transport", ["memory", "p2p", "broadcast", "ipc", "disk"])
async def test_after_a_publish_no_token_is_sampled_from_old_weights(
    serving: Stack, source: WeightSource, transport: str, mode: str
) -> None:
    """Cached prompts, requests in flight and new ones; under `in_place` running requests keep a mixed KV cache."""

    async with serving.admitted() as (fleet, generator):
        source.connect([serving.engine], {"e0": transport})
        await generator.generate(group_of(PROMPT), SamplingParams(max_new_tokens=8))
        serving.change_weights()
        version = next(serving.versions)
        source.stage(version, serving.named_tensors(), [transport])
        flying = group_of(PROMPT[:60], samples=16)
        running = await start_generating(fleet, generator, SamplingParams(max_new_tokens=200), flying)
        await fleet.pause(mode)
        outcome = await asyncio.to_thread(source.send, version, "e0", transport)
        assert outcome.error is None
        await fleet.commit("e0", version)
        await fleet.resume()
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


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tensors_may_change_as_soon_as_they_are_staged(
    serving: Stack, source: WeightSource, transport: str
) -> None:
    async with serving.admitted() as (fleet, generator):
        serving.change_weights()
        passing = [(name, tensor.clone()) for name, tensor in serving.named_tensors()]
        version = next(serving.versions)
        source.stage(version, passing, [])
        for _, tensor in passing:
            tensor.fill_(torch.nan)
        assert source.send(version, "e0", transport).error is None
        await fleet.commit("e0", version)
        group = group_of("2 + 2 =")
        await generator.generate(group)
        assert serving.error(group[0]) < 1e-4


def test_the_transport_of_the_documentation_in_a_package_is_verified_as_all_others(
    serving: Stack, source: WeightSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_code = files_of("how-to/write-a-transport.md")["my_transport.py"]
    install_plugin(tmp_path, monkeypatch, TRANSPORT_PLUGINS, "process_file", "my_transport:ProcessFile", source_code)
    serving.change_weights()
    version = next(serving.versions)
    source.stage(version, serving.named_tensors(), ["process_file"])
    outcome = source.send(version, "e0", "process_file")
    assert outcome.error is None
    assert outcome.bytes > 3_000_000
    # No other prompt begins with this token, so that nothing is cached under older weights. Two implementations in
    # float32 differ by about 1e-5 after as many changes of the weights as this module makes.
    assert serving.error_of([220, *PROMPT[:20]]) < 1e-4


def test_an_engine_in_float32_holds_exactly_what_a_learner_in_bfloat16_trains(
    serving: Stack, source: WeightSource
) -> None:
    run = run_config(precision="bf16", lr=0.001)
    with learning(serving.checkpoint, run) as learner:
        for position, transport in enumerate(TRANSPORTS):
            [steps] = rank_batches(uneven_groups(0), run, 1)
            assert learner.train(0, steps).finite
            version = next(serving.versions)
            source.stage(version, learner.weights(), [])
            assert source.send(version, "e0", transport).error is None, transport
            own = dict(learner.weights())
            with torch.no_grad():
                for name, parameter in serving.named_tensors():
                    assert own[name].dtype is torch.bfloat16
                    parameter.copy_(own[name])
            # No other prompt begins with this token, so that nothing is cached under older weights.
            assert serving.error_of([200 + position, *PROMPT[:20]]) < 1e-5, transport


async def test_each_of_several_source_ranks_sends_its_share(serving: Stack, tmp_path: Path) -> None:
    sources = [source_of(serving, tmp_path, rank=rank, sources=2) for rank in range(2)]
    serving.change_weights()
    version = next(serving.versions)
    for transport in TRANSPORTS:
        for one in sources:
            one.stage(version, serving.named_tensors(), [])
        outcomes = [one.send(version, "e0", transport) for one in sources]
        assert [outcome.error for outcome in outcomes] == [None, None]
        shares = [outcome.bytes for outcome in outcomes]
        assert max(shares) < 1.2 * min(shares)
    for one in sources:
        one.close()

    async with serving.admitted() as (_, generator):
        group = group_of("2 + 2 =")
        await generator.generate(group)
        assert serving.error(group[0]) < 1e-4


def test_a_delta_contains_the_changes_or_complete_weights_for_another_base(
    serving: Stack, source: WeightSource
) -> None:
    whole: list[int] = []
    few: list[int] = []
    for version in (1, 2, 3):
        if version > 1:
            with torch.no_grad():
                next(serving.model.parameters())[version].add_(0.1)
        source.stage(version, serving.named_tensors(), [])
        outcome = source.send(version, "e0", "disk_delta")
        assert outcome.error is None
        (whole if version == 1 else few).append(outcome.bytes)
    assert max(few) < whole[0] / 50
    # Something else was written meanwhile: the sums tell, and what is written again is whole.
    other = [(name, tensor + 0.1) for name, tensor in serving.named_tensors()]
    source.stage(4, other, [])
    assert source.send(4, "e0", "memory").error is None
    source.stage(5, serving.named_tensors(), [])
    torn = source.send(5, "e0", "disk_delta")
    assert torn.error is not None
    again = source.send(5, "e0", "disk_delta")
    assert again.error is None
    assert again.bytes == whole[0]


@pytest.mark.parametrize("verify_all", [False, True])
def test_a_torn_write_is_detected(
    serving: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_all: bool
) -> None:
    """A tensor that never arrived is seen in the samples; three bytes of one where everything is compared."""
    source = source_of(serving, tmp_path, verify_all=verify_all)
    serving.change_weights()
    source.stage(1, serving.named_tensors(), [])
    assert source.send(1, "e0", "memory").error is None
    serving.change_weights()
    source.stage(2, serving.named_tensors(), [])
    staging = source._staging
    assert staging is not None
    write = MemoryTransport._copy

    def torn(transport: MemoryTransport, pid: int, copies: list[tuple[int, int, int]]) -> None:
        if verify_all:
            source, target, size = copies[3]
            copies = [*copies[:3], (source + 3, target + 3, size - 3), *copies[4:]]
        else:
            copies = [*copies[:3], *copies[4:]]
        write(transport, pid, copies)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryTransport, "_copy", torn)
        error = source.send(2, "e0", "memory").error
    assert error is not None
    assert staging.plans[3].copies[0].parameter in error
    assert error.endswith("differs from what was sent")
    assert source.send(2, "e0", "memory").error is None
    source.close()


@pytest.mark.parametrize("transport", ["memory", "p2p"])
def test_a_write_to_an_engine_that_hangs_times_out_and_never_resumes(
    serving: Stack, tmp_path: Path, transport: str
) -> None:
    source = source_of(serving, tmp_path, timeout=5.0)
    source.stage(1, serving.named_tensors(), [])
    assert source.send(1, "e0", transport).error is None
    scheduler = source._engines["e0"].ranks[0].pid
    os.kill(scheduler, signal.SIGSTOP)
    try:
        outcome = source.send(1, "e0", transport)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    assert outcome.final
    source.close()


def test_reconnects_by_broadcast_leave_nothing_in_the_learner_and_in_sglang(
    serving: Stack, source: WeightSource
) -> None:
    source.stage(1, serving.named_tensors(), [])
    scheduler = psutil.Process(source._engines["e0"].ranks[0].pid)

    def held() -> list[int]:
        here = held_here()
        return [*here.values(), scheduler.num_threads(), scheduler.num_fds()]

    def reconnect() -> None:
        assert source.send(1, "e0", "broadcast").error is None
        source.connect([], {})
        source.connect([serving.engine], {})

    for _ in range(3):
        reconnect()
    # What the last one used may still be about to end.
    before = held()
    for _ in range(20):
        reconnect()
    wait_until(lambda: all(map(operator.le, held(), before)), f"more is left than {before}")


def test_a_version_that_was_not_staged_is_not_sent(serving: Stack, source: WeightSource) -> None:
    source.stage(3, serving.named_tensors(), [])
    assert source.send(3, "e0", "memory").error is None
    assert source.send(4, "e0", "memory").error == "engine e0: version 4 is not staged (version 3 is)"


def test_an_unusable_engine_is_named_in_the_error(serving: Stack, source: WeightSource, tmp_path: Path) -> None:
    with pytest.raises(EngineLostError, match=r"^http://127\.0\.0\.1:9/weights_checker: .*refused"):
        source.connect([EngineInfo("gone", "http://127.0.0.1:9", 0, 1)], {})
    with pytest.raises(FatalError, match="is there twice; give every engine its own name and port"):
        source.connect([serving.engine, EngineInfo("again", serving.engine.url, 0, 1)], {})
    other = WeightSource([("model.norm.weight", (7,), "float32")], tmp_path, Weights())
    with pytest.raises(FatalError, match=r"^the engine serves another model: SGLang refuses the learner's tensors"):
        other.connect([serving.engine], {})


def test_sglangs_loader_loads_the_weights_of_a_model_whose_layout_is_unknown(
    serving: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> list[RankLayout]:
        return [RankLayout([], [], "SGLang's loader derives its gates from the weights", None)]

    monkeypatch.setattr("miles_async.adapters.weights.source.read_layouts", unknown)
    source = source_of(serving, tmp_path, verify_all=False)
    for position, transport in enumerate(("broadcast", "ipc", "disk")):
        serving.change_weights()
        version = next(serving.versions)
        source.stage(version, serving.named_tensors(), [transport])
        assert source.send(version, "e0", transport).error is None
        # No other prompt begins with this token, so that nothing is cached under older weights.
        assert serving.error_of([230 + position, *PROMPT[:20]]) < 1e-4, transport
    for transport in ("memory", "p2p", "disk_delta"):
        assert source.send(version, "e0", transport).error == (
            "engine e0: it writes into the engine's memory, but SGLang's loader derives its gates from the weights"
        )
    source.close()


@torch.no_grad()
def test_an_engine_that_does_not_hold_the_staged_weights_computes_other_log_probabilities(
    serving: Stack, source: WeightSource
) -> None:
    serving.change_weights()
    version = next(serving.versions)
    source.stage(version, serving.named_tensors(), [])
    tokens = torch.tensor(TOKENS)
    logits = serving.model(tokens[None]).logits[0, :-1]
    staged = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].tolist()
    assert source.compare("e0", staged) > 1e-2
    assert source.send(version, "e0", "memory").error is None
    assert source.compare("e0", staged) < 1e-4


def test_a_tensor_that_reached_the_loader_damaged_is_noticed(
    serving: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [RankLayout([], [], "its layout is unknown", None)]
    monkeypatch.setattr("miles_async.adapters.weights.source.read_layouts", lambda *_, **__: layouts)
    source = source_of(serving, tmp_path)
    version = next(serving.versions)
    source.stage(version, serving.named_tensors(), ["disk"])
    assert source.send(version, "e0", "disk").error is None
    [file, *_] = sorted(tmp_path.glob("source_0/*/model-00000.safetensors"))
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[3] += 0.25
    save_file(tensors, file, metadata={"format": "pt"})
    outcome = source.send(version, "e0", "disk")
    assert outcome.error == f"engine e0: {name} on rank 0 differs from what was sent"
    # Other tests use the engine.
    version = next(serving.versions)
    source.stage(version, serving.named_tensors(), ["disk"])
    assert source.send(version, "e0", "disk").error is None
    source.close()


def test_each_rank_of_an_engine_gets_its_shard_from_each_source(serving: Stack, tmp_path: Path) -> None:
    """Of a model with experts, over gloo; two sources, every way, everything compared."""
    checkpoint = tmp_path / "experts"
    model = create_experts(checkpoint, seed=2)
    engine = EngineServer(
        EngineSpec(name="e1", model_path=str(checkpoint), log_path=tmp_path / "log", tp=2, cpus=(0, 1))
    )
    try:
        info = engine.start()
        two = Stack(info, serving.router_url, serving.router_key, serving.logs, checkpoint, model)
        sources = [source_of(two, tmp_path / "weights", rank=rank, sources=2) for rank in range(2)]
        for version, transport in enumerate(TRANSPORTS, start=1):
            two.change_weights()
            for one in sources:
                one.stage(version, two.named_tensors(), [])
            assert [one.send(version, "e1", transport).error for one in sources] == [None, None], transport
            # A prompt that was not cached under the version before.
            assert two.error_of([version, *PROMPT[:20]]) < 1e-4, transport
        with pytest.raises(EngineLostError, match=r"engine e0 holds its weights in another layout than e1"):
            sources[0].connect([info, serving.engine], {})
        for one in sources:
            one.close()
    finally:
        engine.stop()


@pytest.mark.parametrize(
    "arguments", [{"ep_size": 2}, {"enable_dp_attention": True, "dp_size": 2}], ids=lambda arguments: min(arguments)
)
def test_ranks_that_divide_the_weights_in_another_way_hold_what_sglangs_loader_has_loaded(
    serving: Stack, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """SGLang cannot compute with such engines on a CPU, so this compares the memory of the ranks."""
    checkpoint = tmp_path / "experts"
    model = create_experts(checkpoint, seed=2)
    spec = EngineSpec(name="e1", model_path=str(checkpoint), log_path=tmp_path / "log", tp=2, cpus=(0, 1))
    engine = EngineServer(replace(spec, server_args=arguments))
    try:
        two = Stack(engine.start(), serving.router_url, serving.router_key, serving.logs, checkpoint, model)
        by_name = source_of(two, tmp_path / "by name", by_name="its layout was never tried")
        planned = source_of(two, tmp_path / "planned")
        for version, transport in enumerate(("broadcast", "ipc", "disk"), start=1):
            two.change_weights()
            planned.stage(version, two.named_tensors(), [])
            with pytest.raises(EngineLostError, match="differs from what was sent"):
                planned._verify(planned._engines["e1"])
            by_name.stage(version, two.named_tensors(), [])
            assert by_name.send(version, "e1", transport).error is None, transport
            planned._verify(planned._engines["e1"])
        two.change_weights()
        planned.stage(4, two.named_tensors(), [])
        assert planned.send(4, "e1", "p2p").error is None
        by_name.close()
        planned.close()
    finally:
        engine.stop()
