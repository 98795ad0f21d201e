"""Which keys and values an engine goes on with after a publish, for any order of requests and publishes."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.adapters.sglang import key_versions

PROMPT = 10


class Engine:
    """An engine whose requests have one prompt. The keys of a request are the versions that computed them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.version = 0
        self.cached: dict[str, list[int]] = {}
        """By the key in the prefix cache, of which a request finds the tokens of its prompt except the last one."""
        self.running: list[tuple[Any, list[int]]] = []
        self.ages: set[int] = set()
        """Ages of the oldest keys with which tokens were sampled."""

    def find(self, _: Any, __: Any, extra_key: str) -> int:
        return len(self.cached.get(extra_key, ()))

    def admit(self) -> None:
        self._start(SimpleNamespace(origin_input_ids=[0] * PROMPT, output_ids=[], extra_key="of user", cache_salt=None))

    def _start(self, request: Any) -> None:
        key_versions.enter_queue(None, request)
        keys = list(self.cached.get(request.extra_key, ()))
        self.running.append((request, keys))

    def sample(self) -> None:
        for _, keys in self.running:
            missing = max(PROMPT - len(keys), 1)
            keys += [self.version] * missing
            self.ages.add(self.version - min(keys))

    def end(self) -> None:
        if self.running:
            request, keys = self.running.pop(0)
            self.cached.setdefault(request.extra_key, keys[: PROMPT - 1])

    def publish(self) -> None:
        self.version += 1
        running, self.running = self.running, []
        for request, keys in running:
            if key_versions._is_expired(request, self.version):
                self._start(request)
            else:
                self.running.append((request, keys))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return engine_with(1, monkeypatch)


def engine_with(limit: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(limit)
    monkeypatch.setenv(key_versions.VARIABLE, str(limit))
    monkeypatch.setattr(key_versions, "_live_version", lambda: engine.version)
    monkeypatch.setattr(key_versions, "_cached", engine.find)
    return engine


@given(limit=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_no_token_is_sampled_with_keys_beyond_the_limit(limit: int, seed: int) -> None:
    random = Random(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = engine_with(limit, monkeypatch)
        for _ in range(200):
            random.choice([engine.admit, engine.sample, engine.sample, engine.end, engine.publish])()
        assert max(engine.ages, default=0) <= limit


@pytest.mark.parametrize("limit, oldest", [(1, 1), (3, 3), (key_versions.UNLIMITED, 9)])
def test_a_request_goes_on_with_its_keys_as_long_as_the_limit_allows(
    monkeypatch: pytest.MonkeyPatch, limit: int, oldest: int
) -> None:
    engine = engine_with(limit, monkeypatch)
    engine.admit()
    for _ in range(9):
        engine.sample()
        engine.publish()
    engine.sample()
    assert max(engine.ages) == oldest


def test_a_prompt_that_is_cached_since_the_version_before_is_not_computed_again(engine: Engine) -> None:
    engine.admit()
    engine.sample()
    engine.end()
    engine.publish()
    engine.admit()
    assert engine.running[0][0].extra_key == "of user|keys=0"
    engine.publish()
    engine.admit()
    assert engine.running[-1][0].extra_key == "of user|keys=2"


def test_a_prefix_of_less_than_half_a_request_is_computed_again(engine: Engine) -> None:
    engine.cached = {"of user|keys=0": [0] * (PROMPT // 2 - 1)}
    engine.publish()
    engine.admit()
    assert engine.running[0][0].extra_key == "of user|keys=1"


def test_a_request_before_the_first_version_is_not_marked_and_computed_again(engine: Engine) -> None:
    engine.version = None  # type: ignore[assignment]
    engine.admit()
    request, _ = engine.running[0]
    assert request.extra_key == "of user"
    assert key_versions._is_expired(request, 0)


def test_clients_get_weights_and_oldest_keys_as_two_entries() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5/4", "start": 2, "end": 3}]
    meta_info: dict[str, Any] = {"weight_versions": spans, "weight_version": "5/4"}
    key_versions.report(None, meta_info, [], 3)
    assert meta_info["weight_version"] == "5"
    assert meta_info["weight_versions"] == [
        {"version": "4", "start": 0, "end": 2},
        {"version": "5", "start": 2, "end": 3, "oldest_keys": "4"},
    ]
