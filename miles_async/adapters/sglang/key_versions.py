"""Hooks for `--max-kv-staleness` K: what an engine goes on with after a publish, and what it computes again.

Each request has an *oldest version* e, which is part of its key in the prefix cache (`|keys=e`). It is chosen when the
request enters the queue, among the versions v - K to v, with v the version of the weights. Requests of different oldest
versions never share keys and values. When a publish makes v live, the requests with e < v - K release their keys and
values and enter the queue again, and those that wait choose again. All others go on where they were.

No token of version v is sampled with keys or values of a version below v - K:

1. All keys and values under `|keys=e` are of version e or newer. A request with the oldest version e finds only such
   prefixes, and adds only what the weights compute while it runs, at version e or later: versions never decrease, and
   e is at most the version at which the request chose it.
2. When a version v is live, no request that runs has e < v - K, because the publish of v removed those before the first
   token of v, and requests that enter the queue later choose e >= v - K.

In a prefix, the first keys are the oldest ones, because later ones are computed from them. So the oldest version of a
request that found no prefix is exactly that of its first key. If a prefix of version e was dropped for lack of memory
between the choice and the first forward pass, e names too old a version, never too new a one.

The weight versions of an answer say `7/5` within SGLang, for tokens that version 7 sampled with keys and values of
which the oldest are of version 5; clients get `"version": "7", "oldest_keys": "5"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Scheduler = Any
"""`sglang.srt.managers.scheduler.Scheduler`, which takes seconds to import."""
Request = Any
"""`sglang.srt.managers.schedule_batch.Req`."""
VARIABLE = "MILES_ASYNC_MAX_KV_STALENESS"
"""The environment variable of an engine with the setting."""
UNLIMITED = -1
LOOKUPS = 64
"""Most older versions in which a request looks for a prefix; each of them takes some microseconds."""
_TAG = "|keys="


def staleness_limit() -> int:
    """K of this engine."""
    return int(os.environ.get(VARIABLE, "0"))


def register() -> None:
    """Register the hooks, in place of those of an engine that computes everything again."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    streamer = "sglang.srt.managers.scheduler_components.output_streamer"
    HookRegistry.register(f"{scheduler}.flush_cache", end_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._add_request_to_queue", enter_queue, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.record_weight_version_change", change_version, HookType.AROUND)
    HookRegistry.register(f"{streamer}._GenerationStreamAccumulator.accept", finish, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.add_weight_versions_to_meta_info", report, HookType.AFTER
    )


def end_batch(original: Callable[..., bool], scheduler: Scheduler, empty_cache: bool = True) -> bool:
    """Wrap `Scheduler.flush_cache`, which every pause and every commit calls: a paused engine keeps its cache.

    Instead, the last batch ends before weights are written: its tokens are counted as those of the weights that sampled
    them, and its requests join those that decode, as at the beginning of SGLang's next batch.
    """
    if not scheduler._engine_paused:
        return original(scheduler, empty_cache)
    last, chunked = scheduler.last_batch, scheduler.chunked_req
    if last is None:
        return True
    if scheduler.enable_overlap:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    if last.forward_mode.is_extend():
        last.filter_batch(chunked_req_to_exclude=[one for one in (chunked, last.chunked_req) if one is not None])
        if scheduler.running_batch.is_empty():
            scheduler.running_batch = last
        elif not last.is_empty():
            scheduler.running_batch.merge_batch(last)
    scheduler.last_batch = None
    return True


def enter_queue(scheduler: Scheduler, request: Request, *_: Any, **__: Any) -> None:
    """Choose the oldest version of a request that enters the queue, or whose version is too old.

    The choice is the newest version under which at least half of the request's tokens are cached, and otherwise the
    version of the weights: a short prefix, such as the beginning of a chat template, is not worth an older version,
    because the request would have to be computed again earlier.
    """
    version = _live_version()
    if version is None:
        return
    _close_span(request)
    back = LOOKUPS if staleness_limit() == UNLIMITED else min(staleness_limit(), LOOKUPS)
    own = (request.extra_key or "").partition(_TAG)[0]
    needed = (len(request.origin_input_ids) + len(request.output_ids)) / 2
    candidates = range(version, max(version - back, 0) - 1, -1)
    chosen = next((one for one in candidates if _cached(scheduler, request, f"{own}{_TAG}{one}") >= needed), version)
    request.extra_key = f"{own}{_TAG}{chosen}"


def change_version(original: Callable[..., None], scheduler: Scheduler, new_version: str | None) -> None:
    """Wrap `Scheduler.record_weight_version_change`: remove the requests whose keys and values are too old."""
    for request in {*scheduler.collect_inflight_reqs(), scheduler.chunked_req} - {None}:
        _close_span(request)
    removed = _remove_expired(scheduler, int(new_version)) if new_version is not None else []
    original(scheduler, new_version)
    for request in scheduler.waiting_queue:
        enter_queue(scheduler, request)
    for request in removed:
        scheduler._add_request_to_queue(request)


def finish(_: Any, *, req: Request) -> None:
    """End the last span of a request that is answered, before SGLang computes its spans."""
    if req.finished():
        _close_span(req)


def report(_: None, meta_info: dict[str, Any], *__: Any, **___: Any) -> None:
    """Turn the versions of an answer that SGLang has computed into two entries: weights and oldest keys."""
    for span in meta_info["weight_versions"]:
        span["version"], _, keys = span["version"].partition("/")
        if keys:
            span["oldest_keys"] = keys
    meta_info["weight_version"] = meta_info["weight_versions"][-1]["version"]


def _live_version() -> int | None:
    """The version of the weights; None before the first one was committed."""
    from sglang.srt.runtime_context import get_serving

    version = str(get_serving().weight_version)
    return int(version) if version.isdecimal() else None


def _oldest_version(request: Request) -> int | None:
    """None for a request that began before the first version was committed."""
    keys = (request.extra_key or "").partition(_TAG)[2]
    return int(keys) if keys else None


def _close_span(request: Request) -> None:
    """Record which keys and values the tokens since the last span were sampled with.

    SGLang ends a span with each event, merges spans of the same version, and leaves out spans without tokens.
    """
    version, oldest = _live_version(), _oldest_version(request)
    if version is not None and oldest is not None and request.output_ids:
        from sglang.srt.utils.weight_versions import WeightVersionEvent

        label = str(version) if oldest == version else f"{version}/{oldest}"
        request.weight_version_events.append(WeightVersionEvent(label, len(request.output_ids)))


def _cached(scheduler: Scheduler, request: Request, extra_key: str) -> int:
    """Number of the request's tokens that are cached under `extra_key`."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(request.origin_input_ids + request.output_ids, extra_key, cache_salt=request.cache_salt)
    return len(scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_indices)


def _remove_expired(scheduler: Scheduler, version: int) -> list[Request]:
    """Release the keys and values of running requests that are too old for `version`, and return the requests."""
    from sglang.srt.managers.schedule_batch import retract_all

    batch, chunked = scheduler.running_batch, scheduler.chunked_req
    expired = [one for one in batch.reqs if not one.finished() and _is_expired(one, version)]
    kept = [index for index, one in enumerate(batch.reqs) if not one.finished() and not _is_expired(one, version)]
    chunked_expired = chunked is not None and not chunked.finished() and _is_expired(chunked, version)
    if chunked_expired:
        expired.append(chunked)
        scheduler.chunked_req = None
    if expired:
        retract_all(
            reqs=expired,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=scheduler.hisparse_coordinator,
        )
        batch.filter_batch(keep_indices=kept)
        batch.batch_is_full = False
    return expired


def _is_expired(request: Request, version: int) -> bool:
    oldest = _oldest_version(request)
    return oldest is None or 0 <= staleness_limit() < version - oldest
