"""Devices, layout, adapters, micro-batches, MTP heads and engines of a run of verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.verl.data import is_async
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.translation import Combined

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout", "model"))
_FSDP_LORA = {
    "lora_rank": f"{_MODEL}.lora_rank",
    "lora_alpha": f"{_MODEL}.lora_alpha",
    "lora_target_modules": f"{_MODEL}.target_modules",
    "lora_exclude_modules": f"{_MODEL}.exclude_modules",
    "lora_load": f"{_MODEL}.lora_adapter_path",
}
_MEGATRON_LORA = {
    "lora_rank": f"{_MODEL}.lora.rank",
    "lora_alpha": f"{_MODEL}.lora.alpha",
    "lora_target_modules": f"{_MODEL}.lora.target_modules",
    "lora_exclude_modules": f"{_MODEL}.lora.exclude_modules",
    "lora_load": f"{_MODEL}.lora.adapter_path",
    "lora_dropout": f"{_MODEL}.lora.dropout",
}
"""verl's keys for an adapter by our setting, for each of its engines."""
_DRAFTS: Mapping[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
"""Arguments of SGLang that verl sets for drafts, with verl's defaults."""
_MiB = 1 << 20


def devices(keys: CombinedKeys) -> None:
    """GPUs of the learner and the engines, which share GPUs unless the engines have their own."""
    nodes, gpus = "trainer.nnodes", "trainer.n_gpus_per_node"
    own_nodes, own_gpus, hybrid = "rollout.nnodes", "rollout.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"
    if nodes in keys.values:
        keys.set("learner.actor_num_nodes", keys.whole_number(nodes) or 1, nodes)
    if gpus in keys.values:
        keys.set("learner.actor_num_gpus_per_node", keys.whole_number(gpus) or 1, gpus)
    if keys.given(own_nodes, own_gpus):
        engines = (keys.whole_number(own_nodes) or 1) * (keys.whole_number(own_gpus) or 8)
        keys.set("engine.rollout_num_gpus", engines, own_nodes, own_gpus)
        keys.note("has no effect: the engines have GPUs of their own", hybrid)
    elif keys.given(nodes, gpus) and not is_async(keys):
        keys.set("cluster.colocate", keys.values.get(hybrid, True), hybrid, nodes, gpus)
    else:
        keys.note("has no effect: set rollout_num_gpus for the engines", hybrid)


def layout(keys: CombinedKeys) -> None:
    """verl splits activations among tensor-parallel ranks unless it is told not to."""
    size = f"{_ACTOR}.megatron.tensor_model_parallel_size"
    if f"{_ACTOR}.megatron.sequence_parallel" not in keys.values and keys.values.get(size, 1) != 1:
        keys.set("learner.sequence_parallel", True, size)


def adapters(keys: CombinedKeys) -> None:
    """LoRA. As in verl, the keys for Megatron count if their rank is above 0, and otherwise those for FSDP."""
    chosen, others, alpha = _FSDP_LORA, _MEGATRON_LORA, 16
    if keys.number(_MEGATRON_LORA["lora_rank"]):
        chosen, others, alpha = _MEGATRON_LORA, _FSDP_LORA, 32
    rank_key, alpha_key, load_key = (chosen[name] for name in ("lora_rank", "lora_alpha", "lora_load"))
    if not keys.number(rank_key):
        if load_key in keys.values:
            keys.refuse(f"{load_key} needs {rank_key}: set it to the rank of that adapter")
        else:
            keys.note("has no effect: no adapter is trained", *chosen.values(), *others.values())
        return
    keys.note(f"has no effect beside {rank_key}", *others.values())
    for setting, key in chosen.items():
        if key in keys.values:
            keys.set(f"learner.{setting}", keys.values[key], key)
    if alpha_key not in keys.values:
        keys.set("learner.lora_alpha", alpha, rank_key)


def micro_batches(keys: CombinedKeys) -> None:
    dynamic_key, tokens_key = f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu"
    samples_key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    dynamic = keys.values.get(dynamic_key)
    if dynamic is not None:
        keys.set("learner.use_dynamic_batch_size", dynamic, dynamic_key)
    if dynamic is False:
        keys.note(f"has no effect with {dynamic_key} false", tokens_key)
        if samples_key in keys.values:
            keys.set("learner.micro_batch_size", keys.whole_number(samples_key) or 1, samples_key)
    else:
        keys.note(f"has no effect: tokens limit a micro-batch, unless {dynamic_key} is false", samples_key)
        if tokens_key in keys.values:
            keys.set("learner.max_tokens_per_gpu", keys.whole_number(tokens_key) or 1, tokens_key)


def reference(keys: CombinedKeys) -> None:
    """The learner runs the reference model in its own layout."""
    for key, value in keys.values.items():
        if not key.startswith(f"{_REF}.megatron.") or not isinstance(keys.translator.table.get(key), Combined):
            continue
        actor = key.replace(f"{_REF}.", f"{_ACTOR}.", 1)
        same = keys.values.get(actor, 1 if key.endswith("_parallel_size") else value)
        if value == same:
            keys.note("has no effect: the reference model runs in the layout of the learner", key)
        else:
            keys.refuse(f"{key} {value!r} differs from {actor} {same!r}: set both to the same value")


def engines(keys: CombinedKeys) -> None:
    """Arguments of the engines whose values have other units or signs there."""
    chunked, prefix = f"{_ROLLOUT}.enable_chunked_prefill", "engine.sglang_server_args"
    if keys.values.get(chunked) is False:
        keys.set(f"{prefix}.chunked_prefill_size", -1, chunked)
    else:
        keys.note("has no effect: SGLang computes long prompts in chunks", chunked)
    for name, argument in (("data_parallel_size", "dp_size"), ("expert_parallel_size", "ep_size")):
        if keys.values.get(f"{_ROLLOUT}.{name}", 1) == 1:
            keys.note("has no effect: 1 divides nothing", f"{_ROLLOUT}.{name}")
        else:
            keys.set(f"{prefix}.{argument}", keys.values[f"{_ROLLOUT}.{name}"], f"{_ROLLOUT}.{name}")
    for section in ("override_config", "override_config.model_config"):
        key = f"actor_rollout_ref.model.{section}.max_position_embeddings"
        if key in keys.values:
            keys.set(f"{prefix}.context_length", keys.values[key], key)
            keys.set("engine.engine_env_vars.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1", key)
    bucket = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    if bucket in keys.values:
        keys.set("weights.update_weight_buffer_size", (keys.whole_number(bucket) or 2048) * _MiB, bucket)


def heads(keys: CombinedKeys) -> None:
    """MTP heads, which the learner trains, and from which engines draft tokens."""
    of_heads = {name: f"{_MODEL}.mtp.{name}" for name in ("enable", "enable_train", "enable_rollout", "detach_encoder")}
    factor, drafts = f"{_MODEL}.mtp.mtp_loss_scaling_factor", {name: f"{_MODEL}.mtp.{name}" for name in _DRAFTS}
    on = {name: keys.switch(key) for name, key in of_heads.items()}
    if not on["enable"]:
        keys.note("has no effect: MTP heads are neither trained nor used", *of_heads.values(), factor, *drafts.values())
        return
    if not (on["enable_train"] or on["enable_rollout"]):
        keys.note("has no effect: MTP heads are neither trained nor used", of_heads["enable"])
    if on["enable_train"]:
        trains = [of_heads[name] for name in ("enable", "enable_train", "detach_encoder")]
        keys.set("learner.enable_mtp_training", True, *trains)
        keys.set("learner.mtp_loss_scaling_factor", keys.values.get(factor, 0.1), factor, of_heads["enable_train"])
        if not on["detach_encoder"]:
            keys.refuse(
                f"{of_heads['detach_encoder']} is not true, but the loss of MTP heads changes nothing but the heads "
                "here: set it to true"
            )
    else:
        keys.note(
            "has no effect: MTP heads are not trained", of_heads["enable_train"], of_heads["detach_encoder"], factor
        )
    if not on["enable_rollout"]:
        keys.note("has no effect: engines do not draft tokens", of_heads["enable_rollout"], *drafts.values())
    elif keys.values.get(f"{_ROLLOUT}.top_p", 1) != 1 or keys.values.get(f"{_ROLLOUT}.top_k", -1) > 0:
        keys.note(
            "has no effect: with top_p or top_k the learner needs sampling masks, which SGLang does not return for "
            "drafted tokens; without drafts the responses have the same distribution and take longer",
            *(of_heads["enable_rollout"], *drafts.values()),
        )
    else:
        for name, key in drafts.items():
            value = keys.values.get(key, _DRAFTS[name])
            keys.set(f"engine.sglang_server_args.{name}", value, of_heads["enable_rollout"], key)
