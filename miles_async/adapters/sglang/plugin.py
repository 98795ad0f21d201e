"""Hooks that run inside SGLang's processes, registered through SGLang's plugin entry point in `pyproject.toml`:

    [project.entry-points."sglang.srt.plugins"]
    miles_async = "miles_async.adapters.sglang.plugin:register"

On all machines: no prefix that was cached under older weights is used after a publish, unless `--max-kv-staleness`
allows it (`key_versions.py`), answers contain sampling masks and packed log-probabilities, the engine gives access to
its weights and loads delta files (`engine_weights.py`), and it is closed to web pages and to clients without the key
(`lockdown.py`). Without CUDA also: registration of main memory for one-sided writes, a faster start, attention for a
whole batch (`cpu_attention.py`), adapters (`cpu_lora.py`), faster sampling and products (`cpu_generation.py`), and a
paused scheduler that does not occupy a core.

Each version of a LoRA adapter has another name. A request without a name gets the version that was committed
last, and every answer reports the version that its request named.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from miles_async.scheduling.adapters import ADAPTER_PREFIX

Scheduler = Any
"""`sglang.srt.managers.scheduler.Scheduler`, which takes seconds to import."""
EACH_SAMPLE = "_"
"""The end of an abort's id that stands for all samples of a request: SGLang names them `{id}_0`, `{id}_1` and so on."""
PACKED = "packed-"
"""The beginning of the id of a request whose log-probabilities are to be packed."""
HEALTH_CHECK = "HEALTH_CHECK"
"""The beginning of the id of a health check."""
UNLOAD_POLL_SECONDS = 0.02
LISTENING_SECONDS = 30.0
"""Time for the HTTP server to start listening."""


def register() -> None:
    """Register all hooks. SGLang calls this in each of its processes."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from miles_async.adapters.sglang import engine_weights, key_versions, lockdown

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    server = "sglang.srt.entrypoints.http_server"
    HookRegistry.register(f"{server}._freeze_gc_after_server_warmup", await_listening, HookType.BEFORE)
    HookRegistry.register(f"{server}._setup_and_run_http_server", lockdown.protect_server, HookType.BEFORE)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolved_dict", lockdown.hide_keys, HookType.AFTER)
    bootstrap = "sglang.srt.entrypoints.engine_info_bootstrap_server.EngineInfoBootstrapServer"
    HookRegistry.register(f"{bootstrap}.__init__", lockdown.remember_bootstrap_server, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.__init__", lockdown.confine_scheduler, HookType.AROUND)
    if key_versions.staleness_limit():
        key_versions.register()
    else:
        HookRegistry.register(f"{scheduler}.flush_cache", flush_cache, HookType.AROUND)
        HookRegistry.register(f"{scheduler}._add_request_to_queue", tag_prefix, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.utils.weight_checker.WeightChecker.handle", engine_weights.handle_check, HookType.AROUND
    )
    adapters = "sglang.srt.lora.lora_manager.LoRAManager"
    HookRegistry.register(f"{adapters}.__init__", engine_weights.remember_adapters, HookType.AFTER)
    sizes = "sglang.srt.lora.mem_pool.get_hidden_dim"
    HookRegistry.register(sizes, engine_weights.sizes_of_adapter, HookType.AROUND)
    HookRegistry.register(f"{adapters}.load_lora_adapter", engine_weights.load_adapter, HookType.REPLACE)
    HookRegistry.register(f"{adapters}.unload_lora_adapter", engine_weights.unload_adapter, HookType.REPLACE)
    tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{tokenizer}.generate_request", request_sampling_masks, HookType.BEFORE)
    HookRegistry.register(f"{tokenizer}.generate_request", name_adapter, HookType.BEFORE)
    HookRegistry.register(f"{tokenizer}._unload_lora_adapter_locked", unload_adapter, HookType.AROUND)
    HookRegistry.register(f"{tokenizer}.update_weight_version", announce_adapter, HookType.AROUND)
    HookRegistry.register(f"{tokenizer}.add_logprob_to_meta_info", note_adapter, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.add_weight_versions_to_meta_info", report_adapter, HookType.AFTER
    )
    HookRegistry.register(f"{tokenizer}.abort_request", abort_samples, HookType.AROUND)
    HookRegistry.register(f"{tokenizer}.add_logprob_to_meta_info", pack_logprobs, HookType.AROUND)
    manager = "sglang.srt.managers.scheduler_components.weight_updater"
    HookRegistry.register(f"{manager}._get_draft_model_runner", engine_weights.leave_out_draft, HookType.REPLACE)
    resume = f"{manager}.SchedulerWeightUpdaterManager.resume_memory_occupation"
    HookRegistry.register(resume, engine_weights.copy_adapters_again, HookType.AFTER)
    checks = f"{manager}.SchedulerWeightUpdaterManager.check_weights"
    HookRegistry.register(checks, engine_weights.find_own_draft, HookType.AROUND)
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.update_weights_from_disk", engine_weights.load_from_disk, HookType.AROUND)
    worker = "sglang.srt.managers.tp_worker.BaseTpWorker"
    HookRegistry.register(f"{worker}.update_weights_from_tensor", engine_weights.load_from_memory, HookType.AROUND)
    gauges = "sglang.srt.utils.gauge_histogram.GaugeHistogram.set_by_current_observations"
    HookRegistry.register(gauges, set_gauges, HookType.AROUND)
    if not torch.cuda.is_available():
        _register_without_cuda()


def _register_without_cuda() -> None:
    """Register the hooks of machines on which engines compute on the CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from miles_async.adapters.sglang import cpu_attention, cpu_generation, cpu_lora
    from miles_async.adapters.system.matrix_products import has_slow_mkl

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    loader = "sglang.srt.model_loader.remote_instance_weight_loader_utils"
    HookRegistry.register(f"{loader}.register_memory_region_v2", _register_parameters, HookType.REPLACE)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_children, HookType.AFTER)
    HookRegistry.register(f"{scheduler}._record_scheduler_state_for_paused_engine", _yield_core, HookType.BEFORE)
    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{attention}.init_forward_metadata", cpu_attention.forget_plan, HookType.AFTER)
    HookRegistry.register(f"{attention}._run_sdpa_forward_extend", cpu_attention.extend, HookType.AROUND)
    HookRegistry.register(f"{attention}._run_sdpa_forward_decode", cpu_attention.decode, HookType.AROUND)
    HookRegistry.register(f"{scheduler}._get_new_batch_prefill_raw", cpu_generation.share_prompts, HookType.AROUND)
    cpu_lora.unpin()
    lora = "sglang.srt.lora.backend.torch_backend"
    HookRegistry.register(f"{lora}.TorchNativeLoRABackend.prepare_lora_batch", cpu_lora.prepare_batch, HookType.REPLACE)
    HookRegistry.register(f"{lora}.sgemm_lora_a_fwd", cpu_lora.shrink, HookType.REPLACE)
    HookRegistry.register(f"{lora}.sgemm_lora_a_embedding_fwd", cpu_lora.shrink_embedding, HookType.REPLACE)
    HookRegistry.register(f"{lora}.sgemm_lora_b_fwd", cpu_lora.expand, HookType.REPLACE)
    experts = "sglang.srt.lora.layers.FusedMoEWithLoRA.forward"
    HookRegistry.register(experts, cpu_lora.compute_experts, HookType.REPLACE)
    prefill = "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend"
    HookRegistry.register(prefill, cpu_generation.compute_prompts_once, HookType.AROUND)
    layers = "sglang.srt.layers"
    HookRegistry.register(f"{layers}.sampler.sampling_from_probs_torch", cpu_generation.sample_tokens, HookType.AROUND)
    if has_slow_mkl():
        linear = f"{layers}.quantization.unquant.UnquantizedLinearMethod.apply"
        HookRegistry.register(linear, cpu_generation.apply_linear, HookType.AROUND)
        logits = f"{layers}.logits_processor.LogitsProcessor._compute_lm_head"
        HookRegistry.register(logits, cpu_generation.compute_logits, HookType.AROUND)


def flush_cache(original: Callable[..., bool], scheduler: Scheduler, empty_cache: bool = True) -> bool:
    """Wrap `Scheduler.flush_cache`: flush also on a paused engine whose requests wait.

    SGLang refuses to flush while a request is queued. Prefixes cached under the old weights would then be matched under
    the new weights, with log-probabilities that are wrong by whole nats. There are two cases:

    - Retracted requests hold no KV cache, so the cache can be dropped while they wait.
    - Requests that are paused in place hold KV cache, so nothing can be dropped. Instead the scheduler starts a new
      epoch: prefixes are tagged with it, so that older prefixes never match and are evicted when memory is short.

    A paused engine keeps its free device memory (`empty_cache=False`), because it needs the same amount again soon.
    Without CUDA, emptying the cache would be a garbage collection over all of SGLang that takes half a second.
    """
    if not scheduler._engine_paused:
        return original(scheduler, empty_cache)
    if scheduler.is_fully_idle():
        return original(scheduler, False)
    # No batch holds KV cache: all requests were retracted or have not started.
    if scheduler.running_batch.is_empty() and scheduler.last_batch is None and scheduler.chunked_req is None:
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        scheduler.req_to_token_pool.reset_aux_cache_allocator()
        return True
    # Requests that are paused in place hold KV cache. Waiting requests have an older tag, so tag them again.
    scheduler.tree_cache.miles_epoch = vars(scheduler.tree_cache).get("miles_epoch", 0) + 1
    for request in scheduler.waiting_queue:
        tag_prefix(scheduler, request)
    return True


def tag_prefix(scheduler: Scheduler, request: Any, *_: Any, **__: Any) -> None:
    """Tag a request that enters the queue with the current epoch, as part of its prefix cache key."""
    epoch = vars(scheduler.tree_cache).get("miles_epoch", 0)
    if epoch:
        own = (request.extra_key or "").partition("|epoch=")[0]
        request.extra_key = f"{own}|epoch={epoch}"


def request_sampling_masks(tokenizer_manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Have SGLang return sampling masks for a request that is sampled with top-k, alone or with top-p.

    The field `return_sampling_mask` of a request would do the same, but sglang-router 0.3 does not forward it. SGLang
    refuses to return masks for an unlimited or too large top-k and with speculative decoding. Such requests are
    answered without masks.
    """
    arguments, given = tokenizer_manager.server_args, request.sampling_params
    if not hasattr(arguments, "sampling_mask_max_tokens"):
        return  # SGLang up to 0.5.17 lacks the argument, and is not asked for masks
    params = given if isinstance(given, list) else [given or {}]
    top_ks = range(2, arguments.sampling_mask_max_tokens + 1)
    if arguments.speculative_algorithm is None and all(one.get("top_k") in top_ks for one in params):
        request.return_sampling_mask = True


def name_adapter(tokenizer_manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Let a request that names no adapter use the version that was committed last, if adapters are served.

    These are requests that functions of users send. Health checks use the model without an adapter: SGLang forgets them
    before they end, so that an adapter could be dropped while a health check needs it.
    """
    if not tokenizer_manager.enable_lora or request.lora_path or str(request.rid).startswith(HEALTH_CHECK):
        return
    committed = f"{ADAPTER_PREFIX}{tokenizer_manager.config_value('weight_version')}"
    if committed in tokenizer_manager.lora_registry.get_all_adapters():
        request.lora_path = committed


async def unload_adapter(original: Callable[..., Awaitable[Any]], tokenizer_manager: Any, request: Any) -> Any:
    """Wrap `TokenizerManager._unload_lora_adapter_locked`: wait for the requests that there are, not for a counter.

    SGLang counts the requests of each adapter, but never counts down if a request is refused or is aborted while it
    waits. Unloading the adapter would then never end, and neither would any later change of adapters.
    """
    registry = tokenizer_manager.lora_registry
    if (reference := registry.get_all_adapters().get(request.lora_name)) is not None:
        states = tokenizer_manager.rid_to_state
        while any(state.obj.lora_id == reference.lora_id for state in states.values()):  # noqa: ASYNC110
            await asyncio.sleep(UNLOAD_POLL_SECONDS)
        # SGLang counts down in tasks, and those of the last requests may not have begun.
        await asyncio.sleep(UNLOAD_POLL_SECONDS)
        counter = registry._counters[reference.lora_id]
        registry._counters[reference.lora_id] = type(counter)()
    return await original(tokenizer_manager, request)


async def announce_adapter(original: Callable[..., Awaitable[None]], tokenizer_manager: Any, request: Any) -> None:
    """Wrap `TokenizerManager.update_weight_version`: an adapter is announced without waiting for the scheduler.

    The scheduler would tell which version sampled each token, and all tokens of a request have the same adapter.
    """
    if f"{ADAPTER_PREFIX}{request.new_version}" in tokenizer_manager.lora_registry.get_all_adapters():
        tokenizer_manager._update_weight_version_if_provided(request.new_version)
    else:
        await original(tokenizer_manager, request)


def note_adapter(_: None, tokenizer_manager: Any, meta_info: dict[str, Any], state: Any, *__: Any) -> None:
    """Say in an answer which adapter its request has, for `report_adapter`."""
    if state.obj.lora_path:
        meta_info["adapter"] = state.obj.lora_path


def report_adapter(_: None, meta_info: dict[str, Any], *__: Any, **___: Any) -> None:
    """Report the adapter of an answer as the version of all its tokens: it stays the same to the end of a request."""
    version = str(meta_info.get("adapter", "")).removeprefix(ADAPTER_PREFIX)
    if version.isdecimal():
        end = meta_info["weight_versions"][-1]["end"]
        meta_info["weight_versions"] = [{"version": version, "start": 0, "end": end}]
        meta_info["weight_version"] = version


def abort_samples(
    original: Callable[..., None], tokenizer_manager: Any, rid: str = "", abort_all: bool = False
) -> None:
    """Wrap `TokenizerManager.abort_request`: an id that ends with `EACH_SAMPLE` aborts all samples of that request.

    SGLang knows only the ids of samples, so every engine would receive an abort for every sample of a group.
    """
    samples: list[str] = []
    if rid.endswith(EACH_SAMPLE) and not abort_all:
        samples = [known for known in tokenizer_manager.rid_to_state if known.startswith(rid)]
    # Without a sample here: another worker of the server may have them, and the scheduler compares beginnings of ids.
    for known in samples or [rid]:
        original(tokenizer_manager, known, abort_all)


def pack_logprobs(
    original: Callable[..., None], tokenizer_manager: Any, meta_info: dict[str, Any], state: Any, *arguments: Any
) -> None:
    """Wrap `TokenizerManager.add_logprob_to_meta_info`: pack the log-probabilities of requests with a `PACKED` id.

    They are then float32, little-endian, in base64. SGLang's `[log-probability, token id, text]` per token would take
    most of the time of the rollout worker, which decodes the answers of all engines.
    """
    original(tokenizer_manager, meta_info, state, *arguments)
    if meta_info["id"].startswith(PACKED):
        packed = np.asarray(state.output_token_logprobs_val, "<f4")
        meta_info["output_token_logprobs"] = b64encode(packed.tobytes()).decode()


def set_gauges(
    original: Callable[..., None], gauges: Any, labels: dict[str, str], observations: list[int | float]
) -> None:
    """Wrap `GaugeHistogram.set_by_current_observations`: leave the gauges at 0 while there is nothing to count.

    SGLang counts requests by routing key, and sets all forty gauges in every prefill, a twelfth of the scheduler's CPU
    time with a tiny model, even if no request has such a key.
    """
    if observations or vars(gauges).get("miles_counted"):
        gauges.miles_counted = bool(observations)
        original(gauges, labels, observations)


def await_listening(server_args: Any) -> None:
    """Wait until the server listens.

    Without a warm-up, SGLang sends itself a request before it listens, and logs a traceback that looks like a failure.
    """
    deadline = time.monotonic() + LISTENING_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((server_args.host, server_args.port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)


def _register_parameters(model: Any, transfer_engine: Any) -> dict[str, tuple[int, int, int]]:
    """Register the memory of every parameter and buffer with Mooncake; SGLang's own function requires CUDA.

    Returns the address, number of elements and bytes per element of each of them.
    """
    from miles_async.adapters.sglang.engine_weights import tensors_of

    regions = {}
    for name, weight in tensors_of(model).items():
        size = weight.numel() * weight.element_size()
        if size and transfer_engine.register_memory(weight.data_ptr(), size) != 0:
            raise RuntimeError(f"Mooncake could not register the {size} bytes of {name}; raise the memlock limit")
        regions[name] = (weight.data_ptr(), weight.numel(), weight.element_size())
    return regions


def _yield_core(_: Scheduler) -> None:
    """Sleep in each round of a paused scheduler: it busy-waits for messages on a core that the weight send needs."""
    time.sleep(0.0005)


def _fork_children(_: None, *__: Any, **___: Any) -> None:
    """Fork the scheduler and the detokenizer instead of spawning them: half the start time, a third of the memory.

    Spawned processes import torch and SGLang again. SGLang spawns them because CUDA does not survive a fork; without
    CUDA the server process has no state before the fork that its children could not use.
    """
    multiprocessing.set_start_method("fork", force=True)
