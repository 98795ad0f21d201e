"""Fully asynchronous RL post-training of language models.

Every process that imports torch imports this package too (see `cpu_compat`), so it imports nothing itself.
"""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("miles_async")
