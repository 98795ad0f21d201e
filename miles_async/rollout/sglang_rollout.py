"""The batch rollout function, and slime's building blocks for users' rollout functions and workers."""

from miles_async.compat.slime.sglang_rollout import (
    GenerateState,
    abort,
    async_rm,
    batched_async_rm,
    generate,
    generate_abortable_samples,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
    get_rollout_num_engines,
)

__all__ = [
    "GenerateState",
    "abort",
    "async_rm",
    "batched_async_rm",
    "generate",
    "generate_abortable_samples",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_rollout_num_engines",
]
