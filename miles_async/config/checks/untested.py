"""Arguments of SGLang that were never tried with this project, and with which it could train on wrong tokens unnoticed.

SGLang's server has 500 arguments, and the run passes on those that it does not set itself. Most change only the speed:
schedules, sizes, CUDA graphs, and kernels that compute the same function up to rounding, which `logprob_gap_mean`
shows. The arguments below change what the run relies on: the policy that samples, the memory and the layout of the
weights, or the caches that a publish must drop. A publish compares bytes, so it cannot notice what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miles_async.config.fields import nearest
from miles_async.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Untested:
    """Arguments that are allowed or refused together."""

    assignments: str
    """Regular expression that matches `argument=value`."""
    risk: str
    """What may go wrong, as a clause."""


UNTESTED: Mapping[str, Untested] = {
    "quantization": Untested(
        r"(quantization\w*|quantize_and_serve|modelopt_\w+|torchao_config|rl_quant_profile|kt_\w+"
        r"|enable_quant_communications|enable_w4a4\w*)=.*",
        "engines compute with rounded weights, so their policy is not the one that trains, and a run refuses engines "
        "with quantised parameters when it connects to them",
    ),
    "kv_cache_dtype": Untested(
        r"kv_cache_dtype=.*",
        "rounded keys and values give other log-probabilities than the learner computes",
    ),
    "dtype": Untested(
        r"dtype=(half|float16)",
        "float16 holds neither the small nor the large numbers of a bfloat16 or float32 learner",
    ),
    "speculative_decoding": Untested(
        r"(speculative_\w+|decoupled_spec_\w+|enable_multi_layer_eagle|uno_lora_path)=.*",
        "no publish reaches the draft model, and the log-probabilities of accepted tokens were never compared with the "
        "learner's",
    ),
    "disaggregation": Untested(
        r"(disaggregation_\w+|encoder_\w+|language_only)=.*",
        "keys and values that one server computed under older weights may reach a server with newer ones, and the "
        "router of the run does not pair prefill with decode servers",
    ),
    "lora": Untested(
        r"(enable_lora\w*|lora_\w+|max_lora\w*|max_loaded_loras|experts_shared_outer_loras)=.*",
        "the learner trains and publishes whole weights and knows no adapter, so engines would sample from another "
        "policy",
    ),
    "data_parallelism": Untested(
        r"(dp_size|data_parallel_size|enable_dp_\w+)=.*",
        "the run pauses, writes to and asks one scheduler per engine, and further ones may keep older weights",
    ),
    "model_parallelism": Untested(
        r"(ep|ep_\w+|expert_parallel_size|elastic_ep_\w+|max_ep_size|enable_elastic_expert_backup|enable_eplb|eplb_\w+"
        r"|init_expert_location|moe_a2a_backend|moe_dp_size|moe_data_parallel_size|moe_dense_tp_size|pp_size"
        r"|pipeline_parallel_size|(attn_|d)?cp_size|(attention|decode)_context_parallel_size|dwdp_size)=.*",
        "publishes are computed for tensor parallelism, and layers or experts that are divided in another way, or move "
        "while the engine runs, may get the wrong tensors",
    ),
    "weight_memory": Untested(
        r"(cpu_offload_gb|offload_\w+|ple_offload_\w+|enable_weights_cpu_backup|weight_cache_\w+|custom_weight_loader"
        r"|startup_weight_load_mode)=.*|load_format=(?!safetensors).*|attention_backend=intel_amx",
        "a publish writes to the parameters in place, and a copy elsewhere, a packed form or a shared cache of the "
        "weights would keep, restore or misread older ones",
    ),
    "external_kv_cache": Untested(
        r"(enable_hierarchical_cache|hicache_\w+|enable_lmcache|lmcache_\w+|enable_flexkv|flexkv_\w+"
        r"|enable_unified_cache\w*|unified_cache_\w+|radix_cache_backend|enable_(session_radix_cache|streaming_session))=.*",
        "a publish drops cached prefixes from the engine's own cache only, so prefixes of older weights in another "
        "cache would be used again",
    ),
    "sampling": Untested(
        r"(preferred_sampling_params|enable_custom_logit_processor)=.*",
        "engines would draw tokens from another distribution than the learner computes",
    ),
    "model_override": Untested(
        r"(json_model_override_args|model_config_parser|dllm_\w+|enable_hisparse|hisparse_config"
        r"|hierarchical_sparse_\w+)=.*|model_impl=(?!sglang).*",
        "engines would compute another function than the learner, which follows the config.json of the checkpoint",
    ),
}
"""By the name that `--allow-untested` takes."""
_OFF = (None, False, 0, 1, "", "{}", "auto", "none", "null", "off", "serial")
"""Values with which an argument changes nothing. 1 is a number of ranks."""


def untested_arguments(config: RunConfig) -> dict[str, list[str]]:
    """The flags of SGLang that this run uses and that were never tried, by their name in `UNTESTED`."""
    found: dict[str, list[str]] = {}
    for argument, value in config.engine.sglang_server_args.items():
        if value is not True and value in _OFF:
            continue
        for name, untested in UNTESTED.items():
            if re.fullmatch(untested.assignments, f"{argument}={value}", re.DOTALL):
                found.setdefault(name, []).append(f"--sglang-{argument.replace('_', '-')}")
    return found


def _untested(config: RunConfig) -> Iterator[str]:
    allowed = config.engine.allow_untested
    for name in allowed:
        if name not in UNTESTED:
            yield f"allow_untested {name!r} is unknown{nearest(name, UNTESTED)}; set any of {', '.join(UNTESTED)}"
    used = untested_arguments(config)
    needed = " ".join([*allowed, *(name for name in used if name not in allowed)])
    for name, flags in used.items():
        if name not in allowed:
            yield (
                f"nobody has tried {' '.join(flags)} with miles_async: {UNTESTED[name].risk}; unset this, or add "
                f"--allow-untested {needed}"
            )


CHECKS = (_untested,)
