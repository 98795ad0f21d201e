"""Parallel layouts that do not divide: the ranks, the layers, the heads, the experts. One sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.derived import learner_ranks
from miles_async.config.model_shape import ModelShape, shape_of
from miles_async.config.schema import Learner, RunConfig


def layout_problems(config: RunConfig) -> Iterator[str]:
    learner, ranks = config.learner, learner_ranks(config)
    yield from _ranks(learner, ranks)
    if learner.sequence_parallel and learner.tensor_model_parallel_size == 1:
        yield "sequence_parallel needs tensor-parallel ranks: set tensor_model_parallel_size above 1, or unset it"
    chunks, stages = learner.virtual_pipeline_model_parallel_size, learner.pipeline_model_parallel_size
    if chunks is not None and stages == 1:
        yield (
            f"virtual_pipeline_model_parallel_size {chunks} needs a pipeline: set pipeline_model_parallel_size above "
            "1, or unset it"
        )
    shape = shape_of(config.model)
    if shape is not None:
        yield from _dense(learner, shape)
        yield from _experts(learner, shape)


def _ranks(learner: Learner, ranks: int) -> Iterator[str]:
    tensor, stages = learner.tensor_model_parallel_size, learner.pipeline_model_parallel_size
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": learner.context_parallel_size,
    }
    of_experts = {
        "expert_tensor_parallel_size": learner.expert_tensor_parallel_size or tensor,
        "expert_model_parallel_size": learner.expert_model_parallel_size,
        "pipeline_model_parallel_size": stages,
    }
    for needed in (sizes, of_experts):
        used = {name: size for name, size in needed.items() if size > 1}
        copy = 1
        for size in used.values():
            copy *= size
        if ranks % copy:
            words = " * ".join(f"{name} {size}" for name, size in used.items())
            product = f" = {copy}" if len(used) > 1 else ""
            yield (
                f"actor_num_nodes * actor_num_gpus_per_node = {ranks} learner ranks are not divisible by "
                f"{words}{product}; set actor_num_gpus_per_node to a multiple of it"
            )
            return


def _dense(learner: Learner, shape: ModelShape) -> Iterator[str]:
    tensor = learner.tensor_model_parallel_size
    for size, what in ((shape.heads, "attention heads"), (shape.query_groups, "key/value heads")):
        if size % tensor:
            yield (
                f"the model's {size} {what} are not divisible by tensor_model_parallel_size {tensor}; set it to a "
                f"divisor of {size}"
            )
            return
    stages, chunks = learner.pipeline_model_parallel_size, learner.virtual_pipeline_model_parallel_size or 1
    if shape.layers % (stages * chunks):
        more = f" * virtual_pipeline_model_parallel_size {chunks}" if chunks > 1 else ""
        yield (
            f"the model's {shape.layers} layers are not divisible by pipeline_model_parallel_size {stages}{more}; "
            f"set them so that they divide {shape.layers}"
        )


def _experts(learner: Learner, shape: ModelShape) -> Iterator[str]:
    ranks, tensor = learner.expert_model_parallel_size, learner.tensor_model_parallel_size
    shared = learner.expert_tensor_parallel_size
    if shape.experts is None:
        if ranks > 1 or shared is not None:
            yield (
                "expert_model_parallel_size and expert_tensor_parallel_size are for mixture-of-experts models, and "
                "this one is dense: unset them"
            )
        return
    if shape.experts % ranks:
        yield (
            f"the model's {shape.experts} experts are not divisible by expert_model_parallel_size {ranks}; set it to a "
            f"divisor of {shape.experts}"
        )
    if shared is not None and tensor % shared:
        yield (
            f"expert_tensor_parallel_size {shared} does not divide tensor_model_parallel_size {tensor}; set it to 1 or "
            f"to {tensor}"
        )
    elif shared is not None and shared < tensor and ranks == 1:
        # Megatron then adds up the experts' gradients over too few ranks.
        yield (
            f"expert_tensor_parallel_size {shared} below tensor_model_parallel_size {tensor} needs experts that are "
            "dealt out: set expert_model_parallel_size above 1, or unset it"
        )
    elif shape.feed_forward % (shared or tensor):
        yield (
            f"the experts' width {shape.feed_forward} is not divisible by expert_tensor_parallel_size "
            f"{shared or tensor}; set it to 1"
        )
    if tensor > 1 and not learner.sequence_parallel:
        yield "a mixture-of-experts model with tensor_model_parallel_size above 1 needs sequence_parallel: set it"
