"""slime's names for the rewards of a run."""

from miles_async.compat.slime.rm_hub import async_rm, batched_async_rm, remote_rm

__all__ = ["async_rm", "batched_async_rm", "remote_rm"]
