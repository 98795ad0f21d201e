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

from miles_async.config.adapter_arguments import fits_adapter
from miles_async.config.fields import nearest
from miles_async.config.guest_flags import shown
from miles_async.config.schema import RunConfig
from miles_async.transports import ADAPTER, TRANSPORTS


@dataclass(frozen=True, slots=True)
class Untested:
    """Arguments that are allowed, noted or refused together."""

    assignments: str
    """Regular expression that matches `argument=value`."""
    risk: str
    """What may go wrong, as a clause."""
    needs: str | None = None
    """An argument without which these arguments belong to another group."""
    is_noted: bool = False
    """Whether the run shows what may go wrong, so that a note takes the place of the refusal."""
    by_name: bool = False
    """Whether the engine's ranks divide the weights in a way that was never tried. SGLang's loader then loads what a
    publish sends, and each version is compared by its log-probabilities."""


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
        "a draft model keeps its weights, unless it is MTP heads that enable_mtp_training trains, so engines accept "
        "fewer of its tokens as training goes on, and the log-probabilities of accepted tokens were never compared "
        "with the learner's: watch logprob_gap_mean",
        is_noted=True,
    ),
    "disaggregation": Untested(
        r"(disaggregation_\w+|encoder_\w+|language_only)=.*",
        "keys and values that one server computed under older weights may reach a server with newer ones, and the "
        "router of the run does not pair prefill with decode servers",
    ),
    "lora": Untested(
        r"(enable_lora\w*|lora_\w+|max_lora\w*|max_loaded_loras|experts_shared_outer_loras)=.*",
        "a run that trains an adapter (lora_rank) sets these itself and accepts values that leave room for its own, "
        "and other adapters would sample from another policy than the one that trains",
    ),
    "attention_data_parallelism": Untested(
        r"(dp_size|data_parallel_size|enable_dp_\w+)=.*",
        "each rank of the engine holds other parts of the attention than with tensor parallelism",
        needs="enable_dp_attention",
        is_noted=True,
        by_name=True,
    ),
    "data_parallelism": Untested(
        r"(dp_size|data_parallel_size|enable_dp_\w+)=.*",
        "SGLang changes the weights of engines with several replicas only with --sglang-enable-dp-attention",
    ),
    "expert_parallelism": Untested(
        r"(ep|ep_size|expert_parallel_size|moe_a2a_backend|moe_dense_tp_size)=.*",
        "each rank of the engine holds other experts than with tensor parallelism",
        is_noted=True,
        by_name=True,
    ),
    "model_parallelism": Untested(
        r"(ep_\w+|elastic_ep_\w+|max_ep_size|enable_elastic_expert_backup|enable_eplb|eplb_\w+|init_expert_location"
        r"|moe_dp_size|moe_data_parallel_size|pp_size|pipeline_parallel_size|(attn_|d)?cp_size"
        r"|(attention|decode)_context_parallel_size|dwdp_size)=.*",
        "publishes reach the ranks of tensor parallelism only, and experts that move while the engine runs may get the "
        "wrong tensors",
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
_OF_HEADS = ("EAGLE", "NEXTN")
"""SGLang's algorithms that draft from the model's own MTP heads, unless another draft model is named."""
_OFF = (None, False, 0, 1, "", "{}", "auto", "none", "null", "off", "serial")
"""Values with which an argument changes nothing. 1 is a number of ranks."""


def untested_arguments(config: RunConfig) -> dict[str, list[str]]:
    """The flags of SGLang that this run uses and that were never tried, by their name in `UNTESTED`."""
    found: dict[str, list[str]] = {}
    used = {name: one for name, one in config.engine.sglang_server_args.items() if one is True or one not in _OFF}
    for argument, value in used.items():
        if fits_adapter(config, argument, value):
            continue
        for name, untested in UNTESTED.items():
            if untested.needs is not None and untested.needs not in used:
                continue
            if re.fullmatch(untested.assignments, f"{argument}={value}", re.DOTALL):
                found.setdefault(name, []).append(shown(f"sglang_{argument}"))
                break
    return found


def drafts_from_heads(config: RunConfig) -> bool:
    """Whether engines draft tokens from MTP heads that the learner trains, and get them with each publish."""
    arguments = config.engine.sglang_server_args
    is_own = not arguments.get("speculative_draft_model_path")
    # SGLang takes the name in any case.
    algorithm = str(arguments.get("speculative_algorithm")).upper()
    return config.learner.enable_mtp_training and is_own and algorithm in _OF_HEADS


def loaded_by_name(config: RunConfig) -> str | None:
    """Why SGLang's loader has to load all published weights, as a clause; None if nothing but the model decides it."""
    if drafts_from_heads(config):
        return "only SGLang's loader brings trained MTP heads to the draft model"
    flags = [flag for name, flags in _others(config) if UNTESTED[name].by_name for flag in flags]
    return f"how {' '.join(flags)} divides it was never tried" if flags else None


def weight_transport(config: RunConfig, *, on_gpus: bool) -> str:
    """`weight_transfer`, or the default of a run on GPUs or on CPUs; `ADAPTER` if the run trains an adapter."""
    if config.learner.lora_rank:
        return ADAPTER
    if config.weights.weight_transfer is not None:
        return config.weights.weight_transfer
    colocated = on_gpus and config.cluster.colocate
    if colocated and config.learner.actor_num_nodes == 1:
        return "ipc"  # it does not reach other nodes
    if loaded_by_name(config) is None:
        return "p2p"
    # NCCL, which a broadcast uses, refuses groups with two processes on one GPU.
    return "disk" if colocated else "broadcast"


def noted_arguments(config: RunConfig) -> Iterator[str]:
    """One sentence for each group whose arguments are passed on with a note."""
    for name, flags in _others(config):
        untested = UNTESTED[name]
        if untested.is_noted:
            transport = weight_transport(config, on_gpus=True)
            loader = (
                f"; weight_transfer {transport} lets SGLang's loader load each version, which is then compared with "
                "the learner by its log-probabilities"
            )
            yield f"nobody has tried {' '.join(flags)} with miles_async: {untested.risk}{loader * untested.by_name}"


def _others(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    """The groups that the run uses and that the user has not allowed, with their flags."""
    for name, flags in untested_arguments(config).items():
        if name not in config.engine.allow_untested:
            yield name, flags


def _untested(config: RunConfig) -> Iterator[str]:
    allowed = config.engine.allow_untested
    for name in allowed:
        if name not in UNTESTED:
            yield f"allow_untested {name!r} is unknown{nearest(name, UNTESTED)}; set any of {', '.join(UNTESTED)}"
    refused = {name: flags for name, flags in _others(config) if not UNTESTED[name].is_noted}
    needed = " ".join([*allowed, *refused])
    for name, flags in refused.items():
        yield (
            f"nobody has tried {' '.join(flags)} with miles_async: {UNTESTED[name].risk}; unset this, or add "
            f"--allow-untested {needed}"
        )
    wanted = config.weights.weight_transfer
    if wanted is not None and not TRANSPORTS.find(wanted).uses_loader and (why := loaded_by_name(config)):
        names = " ".join([*allowed, *(name for name, _ in _others(config) if UNTESTED[name].by_name)])
        allow = "" if drafts_from_heads(config) else f", or add --allow-untested {names}"
        yield (
            f"weight_transfer {wanted} writes into the engines' memory, but {why}: set weight_transfer to broadcast or "
            f"disk, or unset it{allow}"
        )


CHECKS = (_untested,)
