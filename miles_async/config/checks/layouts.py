"""Checks of the parallel layout: ranks, layers, heads and experts must be divisible by the sizes of their groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from miles_async.config.model_shape import shape_of
from miles_async.config.schema import Learner, RunConfig
from miles_async.models.layers import Experts, ModelShape, parts_of

_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Arguments of Megatron with which embedding and loss take the place of a layer."""
_LAYOUT = "pipeline_model_parallel_layout"


def layout_problems(config: RunConfig) -> Iterator[str]:
    """One sentence for each part of the layout that Megatron would refuse.

    The model's own dimensions are checked only if its `config.json` can be read.
    """
    learner, ranks = config.learner, config.learner.ranks
    yield from _ranks(learner, ranks)
    if learner.sequence_parallel and learner.tensor_model_parallel_size == 1:
        yield "sequence_parallel needs tensor parallelism: set tensor_model_parallel_size above 1, or unset it"
    chunks, stages = learner.virtual_pipeline_model_parallel_size, learner.pipeline_model_parallel_size
    if chunks is not None and stages == 1:
        yield (
            f"virtual_pipeline_model_parallel_size {chunks} needs pipeline parallelism: set "
            "pipeline_model_parallel_size above 1, or unset virtual_pipeline_model_parallel_size"
        )
    shape = shape_of(config.model)
    if shape is not None:
        yield from _heads_and_layers(learner, shape)
        yield from _experts(learner, shape.experts)


def trains_with_layout(config: RunConfig, model: ModelShape) -> bool:
    """Whether Megatron accepts the layout, and each data-parallel rank has a sample in every optimizer step."""
    learner = config.learner
    if config.samples_per_step < learner.data_parallel_ranks(learner.ranks) or _shares_biases(model, learner):
        return False
    return not any(layout_problems(config))


def _shares_biases(model: ModelShape, learner: Learner) -> bool:
    """Whether ranks share experts with biases, which Megatron refuses."""
    has_biases = model.experts is not None and model.experts.has_biases
    return has_biases and (learner.expert_tensor_parallel_size or learner.tensor_model_parallel_size) > 1


def _ranks(learner: Learner, ranks: int) -> Iterator[str]:
    tensor, stages = learner.tensor_model_parallel_size, learner.pipeline_model_parallel_size
    dense_layers = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": learner.context_parallel_size,
    }
    expert_layers = {
        "expert_tensor_parallel_size": learner.expert_tensor_parallel_size or tensor,
        "expert_model_parallel_size": learner.expert_model_parallel_size,
        "pipeline_model_parallel_size": stages,
    }
    for group_sizes in (dense_layers, expert_layers):
        used = {name: size for name, size in group_sizes.items() if size > 1}
        ranks_per_replica = math.prod(used.values())
        if ranks % ranks_per_replica:
            factors = " * ".join(f"{name} {size}" for name, size in used.items())
            product = f" = {ranks_per_replica}" if len(used) > 1 else ""
            yield (
                f"actor_num_nodes * actor_num_gpus_per_node = {ranks} learner ranks are not divisible by "
                f"{factors}{product}; set actor_num_gpus_per_node to a multiple of {ranks_per_replica}"
            )
            return


def _heads_and_layers(learner: Learner, shape: ModelShape) -> Iterator[str]:
    tensor = learner.tensor_model_parallel_size
    for count, name in ((shape.attention.heads, "attention heads"), (shape.attention.groups, "key/value heads")):
        # Ranks beyond the key/value heads share heads.
        shares = name == "key/value heads" and tensor % count == 0
        if count % tensor and not shares:
            yield (
                f"the model's {count} {name} are not divisible by tensor_model_parallel_size {tensor}; set "
                f"tensor_model_parallel_size to a divisor of {count}"
            )
            return
    yield from _stages(learner, len(shape.layers))


def _stages(learner: Learner, layers: int) -> Iterator[str]:
    """The first and the last pipeline stage may have layers of their own number; the others divide the rest evenly."""
    stages, chunks = learner.pipeline_model_parallel_size, learner.virtual_pipeline_model_parallel_size or 1
    virtual = f" * virtual_pipeline_model_parallel_size {chunks}" if chunks > 1 else ""
    own = {
        name: count
        for name, count in (
            ("decoder_first_pipeline_num_layers", learner.decoder_first_pipeline_num_layers),
            ("decoder_last_pipeline_num_layers", learner.decoder_last_pipeline_num_layers),
        )
        if count is not None
    }
    ends = [name for name in _ENDS if learner.megatron_args.get(name)]
    if _LAYOUT in learner.megatron_args:
        yield from _layout(learner, layers, [*own, *ends])
        return
    if own and ends:
        yield f"{' and '.join(own)} cannot be combined with megatron_args {' and '.join(ends)}: unset one of them"
        return
    if not own:
        if (layers + len(ends)) % (stages * chunks):
            counted = f" and {len(ends)} of {' and '.join(ends)}" if ends else ""
            yield (
                f"the model's {layers} layers{counted} are not divisible by pipeline_model_parallel_size {stages}"
                f"{virtual}; choose sizes whose product divides {layers + len(ends)}, or set "
                "decoder_first_pipeline_num_layers or decoder_last_pipeline_num_layers"
            )
        return
    named = " and ".join(f"{name} {count}" for name, count in own.items())
    others, rest = stages - len(own), layers - sum(own.values())
    if others < 0 or stages == 1:
        yield f"{named}: set pipeline_model_parallel_size to {max(2, len(own))} or more, or unset {' and '.join(own)}"
    elif (
        any(count % chunks for count in own.values()) or (rest % (others * chunks) if others else rest) or rest < others
    ):
        yield (
            f"{named} of the model's {layers} layers leave {rest} to {others} other pipeline stages{virtual}, which "
            f"must divide them evenly; change {' or '.join(own)}"
        )


def _layout(learner: Learner, layers: int, others: Sequence[str]) -> Iterator[str]:
    """A layout names the layers of each part of the pipeline. All stages have the same number of parts."""
    layout, stages = learner.megatron_args[_LAYOUT], learner.pipeline_model_parallel_size
    named = f"megatron_args.{_LAYOUT} {layout!r:.80}"
    parts = parts_of(layout) if isinstance(layout, str) else None
    chunks = None if parts is None else len(parts) // stages
    if others:
        yield f"{named} cannot be combined with {' and '.join(others)}: unset one of them"
    elif parts is None:
        yield f"{named} is not a layout: write E for the embedding, t for a layer and L for the loss, as in E|(tt|)*30L"
    elif sum(parts) != layers:
        yield f"{named} has {sum(parts)} layers, but the model has {layers}: write t once for each layer"
    elif len(parts) % stages:
        yield (
            f"{named} has {len(parts)} parts, which pipeline_model_parallel_size {stages} does not divide: write "
            f"{len(parts) // stages * stages or stages} parts"
        )
    elif chunks != (learner.virtual_pipeline_model_parallel_size or 1):
        size = chunks if chunks != 1 else "null"
        yield f"{named} has {chunks} parts for each stage: set virtual_pipeline_model_parallel_size to {size}"


def _experts(learner: Learner, experts: Experts | None) -> Iterator[str]:
    expert_parallel, tensor = learner.expert_model_parallel_size, learner.tensor_model_parallel_size
    expert_tensor = learner.expert_tensor_parallel_size
    # Those of the adapters of whole experts are summed over all ranks.
    adds_up = learner.lora_rank > 0 and expert_tensor == 1
    if experts is None:
        if max(expert_parallel, expert_tensor or 1) > 1:
            yield (
                "expert_model_parallel_size and expert_tensor_parallel_size need a mixture-of-experts model, but this "
                "model is dense: set them to 1, or unset them"
            )
        return
    if experts.count % expert_parallel:
        yield (
            f"the model's {experts.count} experts are not divisible by expert_model_parallel_size {expert_parallel}; "
            f"set expert_model_parallel_size to a divisor of {experts.count}"
        )
    if expert_tensor is not None and tensor % expert_tensor:
        yield (
            f"expert_tensor_parallel_size {expert_tensor} does not divide tensor_model_parallel_size {tensor}; set it "
            f"to 1 or to {tensor}"
        )
    elif expert_tensor is not None and expert_tensor < tensor and expert_parallel == 1 and not adds_up:
        # In this case Megatron sums the experts' gradients over too few ranks.
        yield (
            f"expert_tensor_parallel_size {expert_tensor} below tensor_model_parallel_size {tensor} needs expert "
            "parallelism: set expert_model_parallel_size above 1, or unset expert_tensor_parallel_size"
        )
    elif experts.width % (expert_tensor or tensor):
        yield (
            f"the experts' width {experts.width} is not divisible by expert_tensor_parallel_size "
            f"{expert_tensor or tensor}; set expert_tensor_parallel_size to 1"
        )
    if tensor > 1 and not learner.sequence_parallel:
        yield "a mixture-of-experts model with tensor_model_parallel_size above 1 needs sequence_parallel: set it"


CHECKS = (layout_problems,)
