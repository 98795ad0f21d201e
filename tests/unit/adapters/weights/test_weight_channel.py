"""Which transport sends the weights: the one that was configured, the fastest one, or the next after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from miles_async.adapters.null import NullEngines, NullLearner
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.channel import Channel, by_preference, find_transports
from miles_async.config.schema import RunConfig
from miles_async.config.untested import weight_transport
from miles_async.errors import FatalError, UserError
from miles_async.pipeline.devices import SharedDevices
from miles_async.scheduling.lineage import Lineage
from miles_async.types import SendOutcome

pytestmark = pytest.mark.virtual_time

ENGINES = [EngineInfo("a", "http://a", 1, 1), EngineInfo("b", "http://b", 2, 1)]
ADDRESS = {engine.name: engine for engine in ENGINES}


class TwoSources:
    """Sends by a transport take the given virtual seconds; a transport that is not given does not work."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.differences: dict[str, float] = {}
        """Mean difference in nats between an engine and the learner."""
        self.staged: list[tuple[int, Sequence[str]]] = []
        self.sent: list[tuple[str, str]] = []
        self.calls: list[str] = []

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append(method)
        return await getattr(self, method)(*arguments)

    async def describe(self) -> None: ...

    async def connect(self, engines: Sequence[EngineInfo], transports: Mapping[str, str]) -> None: ...

    async def compare(self, engine: str) -> list[float | None]:
        return [self.differences.get(engine), None]

    async def stage(
        self, version: int, transports: Sequence[str], adapter: str = "", lineage: Lineage | None = None
    ) -> None:
        self.staged.append((version, transports))

    async def send(self, version: int, engine: str, transport: str) -> list[SendOutcome]:
        self.sent.append((engine, transport))
        await asyncio.sleep(self.seconds.get(transport, 0))
        error = None if transport in self.seconds else f"no {transport} here"
        whole = SendOutcome(engine=engine, seconds=0.1, bytes=30)
        return [whole, SendOutcome(engine=engine, seconds=0.2, bytes=20, error=error)]


async def transports(sources: TwoSources, wanted: str) -> tuple[str, ...]:
    return await find_transports(sources, wanted, ENGINES, SharedDevices(NullLearner(), NullEngines(), colocated=False))


async def test_on_shared_devices_each_of_learner_and_engines_does_its_part_in_its_turn() -> None:
    class Recorded(TwoSources):
        """The learner and the engines at once: both record what they do."""

        async def to_learner(self) -> None:
            self.calls.append("to learner")

        async def to_engines(self) -> None:
            self.calls.append("to engines")

    sources = Recorded(p2p=0.0)
    await find_transports(sources, "p2p", ENGINES[:1], sources)
    assert sources.calls == [
        *("describe", "to engines", "connect", "to learner", "stage"),
        *("to engines", "send", "send", "compare", "to learner"),
    ]


async def test_auto_orders_the_transports_by_speed() -> None:
    assert await transports(TwoSources(memory=0.06, p2p=0.0, broadcast=0.03), "auto") == (
        "p2p",
        "broadcast",
        "memory",
        "disk",
    )


def test_auto_prefers_shared_memory_only_if_it_is_clearly_faster() -> None:
    assert by_preference({"memory": 0.002, "p2p": 0.009, "broadcast": 0.02}) == ["p2p", "memory", "broadcast"]
    assert by_preference({"memory": 0.002, "p2p": 0.050, "broadcast": 0.02}) == ["memory", "broadcast", "p2p"]


def test_auto_prefers_p2p_if_the_difference_is_small() -> None:
    assert by_preference({"p2p": 0.0115, "broadcast": 0.010})[0] == "p2p"
    assert by_preference({"p2p": 0.0125, "broadcast": 0.010})[0] == "broadcast"


async def test_auto_leaves_out_broken_transports_and_always_has_disk() -> None:
    assert await transports(TwoSources(broadcast=0.0, disk=0.0), "auto") == ("broadcast", "disk")
    assert await transports(TwoSources(disk=0.0), "auto") == ("disk",)
    with pytest.raises(
        FatalError, match="no transport can send weights to the engines; disk failed with: no disk here"
    ):
        await transports(TwoSources(), "auto")


async def test_a_configured_transport_is_first_or_is_refused() -> None:
    assert await transports(TwoSources(disk_delta=0.0), "disk_delta") == ("disk_delta", "p2p", "broadcast", "disk")
    with pytest.raises(UserError, match="weight_transfer memory does not work here: no memory here"):
        await transports(TwoSources(p2p=0.0), "memory")


async def test_a_default_run_uses_p2p_even_where_another_transport_is_faster() -> None:
    assert weight_transport(RunConfig(), on_gpus=True) == "p2p"
    assert (await transports(TwoSources(p2p=1.0, broadcast=0.0, memory=0.0), "p2p"))[0] == "p2p"


async def test_a_machine_without_p2p_uses_the_next_transport_and_a_warning_says_why() -> None:
    with capture_logs() as lines:
        assert await transports(TwoSources(disk=0.0), "p2p") == ("disk", "p2p", "broadcast")
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "weight transport p2p does not work here: no p2p here; the run uses disk"),
        ("warning", "weight transport broadcast does not work here: no broadcast here; the run uses disk"),
    ]


async def test_an_engine_that_computes_another_model_is_named_before_the_first_step() -> None:
    sources = TwoSources(p2p=0.0)
    sources.differences = {"a": 0.02, "b": 2.4}
    with capture_logs() as lines:
        await transports(sources, "p2p")
    [warning] = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert warning.startswith("engine b computes other log-probabilities than the learner with the same weights: ")
    assert "2.4 nats per token" in warning


async def test_a_machine_on_which_no_fallback_works_refuses_p2p() -> None:
    with pytest.raises(UserError, match=r"weight_transfer p2p does not work here: no p2p here; broadcast .*; disk "):
        await transports(TwoSources(memory=0.0), "p2p")


async def test_an_engine_falls_back_alone_and_returns_to_the_first_transport_after_a_restart() -> None:
    sources = TwoSources(p2p=0.0, broadcast=0.0)
    address = dict(ADDRESS)
    channel = Channel(("p2p", "broadcast"), sources, address.__getitem__)
    await channel.connect(["a", "b"])
    await channel.stage(1)
    assert await channel.fall_back("b") == "broadcast"
    await channel.send(1, "a")
    await channel.send(1, "b")
    assert sources.sent == [("a", "p2p"), ("b", "broadcast")]
    assert await channel.fall_back("b") is None
    await channel.stage(2)
    assert sources.staged == [(1, ["p2p"]), (2, ["broadcast", "p2p"])]
    address["b"] = EngineInfo("b", "http://b2", 3, 1)
    await channel.connect(["a", "b"])
    await channel.send(2, "b")
    assert sources.sent[-1] == ("b", "p2p")


async def test_a_failed_write_of_one_source_fails_the_send_to_the_engine() -> None:
    channel = Channel(("p2p",), TwoSources(), ADDRESS.__getitem__)
    outcome = await channel.send(1, "a")
    assert outcome == SendOutcome(engine="a", seconds=0.2, bytes=50, error="no p2p here")


async def test_versions_must_increase() -> None:
    channel = Channel(("p2p",), TwoSources(), ADDRESS.__getitem__)
    await channel.stage(3)
    await channel.stage(3)
    with pytest.raises(FatalError, match="weight version 2 was to be staged after version 3; versions only rise"):
        await channel.stage(2)
