"""Hooks inside SGLang's own processes, through its plugin entry point. Declared in `pyproject.toml`:

    [project.entry-points."sglang.srt.plugins"]
    miles_async = "miles_async.adapters.sglang.plugin:register"

Active everywhere: cached prefixes are kept honest after a weight publish, the engine tells what its weights are, and
takes changes to them from disk (`engine_weights.py`). Only without CUDA: memory open to one-sided writes, a fast start,
decoding attention in batches, a pause that leaves the core alone.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from typing import Any

Scheduler = Any
"""`sglang.srt.managers.scheduler.Scheduler`: named only here, because importing it takes seconds."""


LISTENING_SECONDS = 30.0


def register() -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from miles_async.adapters.sglang import cpu_attention, engine_weights

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    server = "sglang.srt.entrypoints.http_server"
    HookRegistry.register(f"{server}._freeze_gc_after_server_warmup", await_listening, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.flush_cache", flush_cache, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._add_request_to_queue", name_prefix, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.utils.weight_checker.WeightChecker.handle", engine_weights.answer, HookType.AROUND
    )
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.update_weights_from_disk", engine_weights.load_changes, HookType.AROUND)
    if not torch.cuda.is_available():
        loader = "sglang.srt.model_loader.remote_instance_weight_loader_utils"
        HookRegistry.register(f"{loader}.register_memory_region_v2", _register_parameters, HookType.REPLACE)
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_workers, HookType.AFTER)
        HookRegistry.register(f"{scheduler}._record_scheduler_state_for_paused_engine", _rest, HookType.BEFORE)
        attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
        HookRegistry.register(f"{attention}._run_sdpa_forward_decode", cpu_attention.decode, HookType.AROUND)


def flush_cache(original: Callable[..., bool], scheduler: Scheduler, empty_cache: bool = True) -> bool:
    """Let `/flush_cache` succeed on a paused engine whose requests are merely waiting.

    SGLang refuses to flush while any request is queued, so after a pause every prefix cached under the old weights
    stays and is matched under the new ones, wrong by whole nats. Retracted requests hold no KV: the cache may go and
    they stay. Requests paused in place do hold KV, so there the old prefixes are put out of reach instead: from now on
    prefixes carry the name of a new epoch, and the old ones are evicted when room is needed.

    While paused, memory is not handed back to the device: the same amount is needed again in a moment, and without
    CUDA "emptying the cache" is a garbage collection over everything SGLang ever imported, half a second long.
    """
    if not scheduler._engine_paused:
        return original(scheduler, empty_cache)
    if scheduler.is_fully_idle():
        return original(scheduler, False)
    if scheduler.running_batch.is_empty() and scheduler.last_batch is None and scheduler.chunked_req is None:
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        scheduler.req_to_token_pool.reset_aux_cache_allocator()
        return True
    scheduler.tree_cache.miles_epoch = vars(scheduler.tree_cache).get("miles_epoch", 0) + 1
    for request in scheduler.waiting_queue:
        name_prefix(scheduler, request)
    return True


def name_prefix(scheduler: Scheduler, request: Any, *_: Any, **__: Any) -> None:
    """Put a request that enters the queue into the present epoch's part of the prefix cache."""
    epoch = vars(scheduler.tree_cache).get("miles_epoch", 0)
    if epoch:
        own = (request.extra_key or "").partition("|epoch=")[0]
        request.extra_key = f"{own}|epoch={epoch}"


def await_listening(server_args: Any) -> None:
    """Without a warm-up SGLang posts to itself before it listens, and logs a traceback that looks like a failure."""
    deadline = time.monotonic() + LISTENING_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((server_args.host, server_args.port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)


def _register_parameters(model: Any, transfer_engine: Any) -> dict[str, tuple[int, int, int]]:
    """Open every parameter to one-sided writes; SGLang's own version walks CUDA's memory segments.

    Returns, by parameter name, its address, number of elements and bytes per element.
    """
    regions = {}
    for name, weight in model.named_parameters():
        size = weight.numel() * weight.element_size()
        if transfer_engine.register_memory(weight.data_ptr(), size) != 0:
            raise RuntimeError(f"Mooncake could not register the {size} bytes of {name}; raise the memlock limit")
        regions[name] = (weight.data_ptr(), weight.numel(), weight.element_size())
    return regions


def _rest(_: Scheduler) -> None:
    """A paused scheduler asks for messages without pause; the write that it waits for needs the core."""
    time.sleep(0.0005)


def _fork_workers(_: None, *__: Any, **___: Any) -> None:
    """Fork the scheduler and the detokenizer instead of spawning them: half the start-up, a third of the memory.

    Spawned processes import torch and SGLang all over again. SGLang spawns because CUDA does not survive a fork;
    without CUDA nothing in the server process happens before the fork that its children could not go on with.
    """
    multiprocessing.set_start_method("fork", force=True)
