"""Fully asynchronous RL post-training of language models.

Every process of a run imports this package, and few of them need its names, so it imports each name when the name is
used.
"""

TYPE_CHECKING = False
"""Type checkers take it for true, like `typing.TYPE_CHECKING`, which would import `typing`."""

if TYPE_CHECKING:
    from typing import Any

    from miles_async.compat.tutorial.recipe import (
        DatasetConfig,
        HuggingFaceDataset,
        ModelConfig,
        Qwen3_0_6B,
        Qwen3_1_7B,
        Qwen3_4B,
        Qwen3_8B,
        Qwen3_14B,
        Qwen3_32B,
        SlimeRecipe,
        TrainConfig,
        TrainResult,
    )

    __version__: str

__all__ = [
    "DatasetConfig",
    "HuggingFaceDataset",
    "ModelConfig",
    "Qwen3_0_6B",
    "Qwen3_1_7B",
    "Qwen3_4B",
    "Qwen3_8B",
    "Qwen3_14B",
    "Qwen3_32B",
    "SlimeRecipe",
    "TrainConfig",
    "TrainResult",
    "__version__",
]


def __getattr__(name: str) -> "Any":
    if name == "__version__":
        from importlib.metadata import version

        return version("miles_async")
    if name in __all__:
        from miles_async.compat.tutorial import recipe

        return getattr(recipe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
