"""The table of derived values that start-up and `--check-config` print."""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.config.disk import checkpoints_written, disk_space
from miles_async.config.generation import bounds_of, generates, reason_of_schedule, rollout_mode, schedule_of
from miles_async.config.losses import described, objective_name
from miles_async.config.memory import (
    MemoryPlan,
    adapter_elements,
    gib_text,
    memory_plan,
    planned_model,
    precision_on_gpus,
)
from miles_async.config.model_shape import adapted_modules, mtp_heads, shape_of
from miles_async.config.schema import Learner, RunConfig
from miles_async.config.user_functions import load_function, takes_logits
from miles_async.models.layers import Split
from miles_async.planning.plan import GIB, GRADIENT
from miles_async.scheduling.bounds import Schedule

TableRow = tuple[str, object, str]
"""A name, its value, and what the value means."""


def table(config: RunConfig, entry: str, read: Sequence[TableRow] = ()) -> str:
    """The table that start-up and `--check-config` print, one derived value per line.

    `read` is what files say, which only `--check-config` prints.
    """
    bounds, rollout, learner = bounds_of(config, entry), config.rollout, config.learner
    schedule, keeps_groups = schedule_of(config, entry), rollout_mode(config).keeps_groups
    reduced = bounds.window < bounds.requested_window
    reason = f"; reduced from {bounds.requested_window} to leave enough slots for a publish" if reduced else ""
    each = f" for each of {bounds.adapters} adapters" if bounds.adapters > 1 else ""
    rows: list[TableRow] = [("schedule", schedule.replace("_", " "), reason_of_schedule(config, entry))]
    if keeps_groups:
        limit = _or_no_limit(rollout.max_weight_staleness)
        rows += [
            ("P", bounds.publish_groups, "groups trained per publish"),
            ("staleness", limit, "maximum age of a trained group, in weight versions; older groups are recycled"),
        ]
    else:
        rows += [
            ("N", bounds.generation_batch, f"maximum number of groups in flight{each}"),
            ("W", bounds.window, f"window size in groups{reason}"),
            ("P", bounds.publish_groups, "groups trained per publish"),
            ("staleness", _or_no_limit(bounds.staleness), "maximum age of a freshly sampled group, in weight versions"),
        ]
    if keeps_groups is not False:
        rows.append(("held", bounds.held, "maximum number of groups that a worker holds or the learner trains"))
    if schedule is Schedule.FULLY_ASYNC and not keeps_groups:
        rows += [
            ("B", _or_no_limit(bounds.slots), "slots for groups between admission and live weights"),
            (
                "queue",
                bounds.room,
                f"maximum number of groups in flight and queued (queue_capacity {rollout.queue_capacity})",
            ),
        ]
    groups = f"{rollout.rollout_batch_size} groups of {rollout.n_samples_per_prompt}"
    steps = f"{config.steps_per_pass} optimizer step(s) of {config.samples_per_step}"
    if config.learner.segments_are_samples:
        steps = f"optimizer steps of at most {config.samples_per_step} segments"
    if config.learner.passes_per_rollout > 1:
        steps += f", {config.learner.passes_per_rollout} times"
    rows += [
        ("batch", config.samples_per_rollout, f"samples: {groups}, trained in {steps}"),
        *_objective_row(config),
        *_heads_row(config),
        ("learner", learner.ranks, f"rank(s): {_sizes(learner)}"),
        ("engines", config.engine.count, f"engine(s) of {config.engine.rollout_num_gpus_per_engine} rank(s)")
        if generates(config)
        else ("engines", 0, "the run generates nothing"),
        *_adapter_row(config),
        *_disk_rows(config, entry),
        *_memory_rows(memory_plan(config), precision_on_gpus(learner)),
        *read,
    ]
    return _lines(rows)


def memory_table(plan: MemoryPlan, precision: str) -> str:
    """The rows of a memory plan, as in `table`."""
    return _lines(_memory_rows(plan, precision))


def _lines(rows: list[TableRow]) -> str:
    return "\n".join(f"{name:<10} {value:>12}  {meaning}" for name, value, meaning in rows)


def _disk_rows(config: RunConfig, entry: str) -> list[TableRow]:
    space, learner = disk_space(config, entry), config.learner
    run = space.events + space.store + space.logs + space.adapters
    adapters = f", adapters {_size(space.adapters)}" if space.adapters else ""
    rows: list[TableRow] = [
        (
            "disk",
            _size(run),
            f"at most: event log {_size(space.events)}, run store {_size(space.store)} (writes "
            f"{_size(space.written)} in all), logs {_size(space.logs)}{adapters}",
        )
    ]
    if learner.save is not None and space.checkpoint is not None:
        count, kept = checkpoints_written(config), "all kept"
        if learner.save_keep is not None:
            count, kept = learner.save_keep + 1, f"{learner.save_keep} kept, and one being written"
        meaning = f"about {_size(space.checkpoint)} for each checkpoint: {kept}"
        rows.append(("save", _size(count * space.checkpoint), meaning))
    return rows


def _memory_rows(plan: MemoryPlan | None, precision: str) -> list[TableRow]:
    """What fills the memory of the fullest learner rank and of each engine rank, if the settings say how much it is."""
    if plan is None:
        return []
    card = f"{gib_text(plan.room)}, which a plan uses of gpu_memory_gib {plan.card / GIB:g}"
    rows: list[TableRow] = []
    if plan.learner is not None and plan.learner_job is not None:
        one, job = plan.learner, plan.learner_job
        stage = f" (pipeline stage {one.stage})" if job.pipeline > 1 else ""
        layers = "Transformer Engine" if job.split.transformer_engine else "the local layers"
        shards = "divided among data-parallel ranks" if job.sharded_optimizer else "whole on each data-parallel rank"
        if job.offloaded:
            shards += f", and {job.offloaded:.0%} of it in main memory"
        rows = [
            ("memory", gib_text(one.peak), f"at most on a learner rank{stage}, of {card}"),
            (" weights", gib_text(one.weights), precision),
            (" gradients", gib_text(one.gradients), "fp32" if job.gradient == GRADIENT else "bf16"),
            (" optimizer", gib_text(one.optimizer), f"{shards}; {gib_text(one.step)} more in a step"),
            *([(" others", gib_text(one.others), "reference model and critic")] if one.others else []),
            *([(" staged", gib_text(one.staged), "weights from which engines read")] if one.staged else []),
            (" layers", gib_text(one.activations), f"activations of {job.tokens} tokens, with {layers}"),
            (" backward", gib_text(one.layer), "in addition, in the backward pass of a layer"),
            (" logits", gib_text(one.logits), "output layer and loss"),
            (" publish", gib_text(one.publish), "while weights are copied"),
            *([(" save", gib_text(one.checkpoint), "while a checkpoint is copied")] if job.checkpoints else []),
            (" host", gib_text(plan.host), "of main memory for the learner ranks of a node"),
        ]
    if plan.engine is not None:
        engine = plan.engine
        tokens = f" for {engine.tokens:,} tokens" if engine.per_token else ""
        adapters = f", adapters {gib_text(engine.adapters)}" if engine.adapters else ""
        parts = f"weights {gib_text(engine.weights)}{adapters}, KV cache {gib_text(engine.cache)}{tokens}"
        whole = engine.weights + engine.adapters + engine.cache
        rows.append(("engine", gib_text(whole), f"on each rank: {parts}"))
    return rows


def _adapter_row(config: RunConfig) -> list[TableRow]:
    learner = config.learner
    if not learner.lora_rank:
        return []
    kind = f"rank {learner.lora_rank}, scale {learner.lora_scale:g}, {' '.join(adapted_modules(learner, config.model))}"
    elements, model = adapter_elements(config), planned_model(config)
    written = adapter_elements(config, in_files=True)
    if elements is None or written is None:
        reason = f"the dimensions of {config.model.hf_checkpoint} are read when the run starts"
        return [("adapters", "unknown", f"trainable parameters ({kind}); {reason}")]
    fraction = "" if model is None else f", {elements / model.weights(Split()).total:.1%} of the model's"
    meaning = f"trainable parameters{fraction}; an adapter of {_size(4 * written)} in float32 ({kind})"
    return [("adapters", f"{elements:,}", meaning)]


def _size(number: int) -> str:
    """Bytes for people, such as `12 MB`, `1.4 GB` or `2,310.0 GB`."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def _objective_row(config: RunConfig) -> list[TableRow]:
    if config.learner.loss_type == "custom_loss":
        return _custom_loss_rows(config)
    if config.learner.loss_type != "policy_loss":
        return []
    return [("objective", objective_name(config.algorithm), described(config.algorithm))]


def _heads_row(config: RunConfig) -> list[TableRow]:
    if not config.learner.enable_mtp_training:
        return []
    factor = config.learner.mtp_loss_scaling_factor
    return [("MTP heads", mtp_heads(config), f"trained beside the policy, with {factor:g} times their loss")]


def _custom_loss_rows(config: RunConfig) -> list[TableRow]:
    path = config.algorithm.custom_loss_function_path
    assert path is not None, "config/checks refuses it"
    rows: list[TableRow] = [("objective", "custom_loss", path)]
    if takes_logits(load_function(path, setting="custom_loss_function_path")):
        shape, tokens = shape_of(config.model), config.learner.micro_batch_tokens
        vocabulary = 0 if shape is None else shape.vocabulary
        size = f"{4 * tokens * vocabulary:,}" if vocabulary else "unknown"
        meaning = f"bytes on each rank for the logits of {tokens} tokens, and as many for their gradient"
        rows.append(("logits", size, meaning))
    return rows


def parallel_layout(learner: Learner) -> str:
    """The layout of the learner in one line. Random states of a checkpoint have a meaning only in the same layout."""
    return f"{learner.ranks} rank(s), {_sizes(learner)}"


def _sizes(learner: Learner) -> str:
    """The sizes of the parallel groups. Tensor parallelism is always listed, the others only if they are in use."""
    sizes = {
        "tensor-parallel": learner.tensor_model_parallel_size,
        "pipeline-parallel": learner.pipeline_model_parallel_size,
        "context-parallel": learner.context_parallel_size,
        "expert-parallel": learner.expert_model_parallel_size,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tensor-parallel")


def _or_no_limit(value: int | None) -> str:
    return "no limit" if value is None else str(value)
