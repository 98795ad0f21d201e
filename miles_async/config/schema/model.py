"""The model that is trained, and the supervised warm start before RL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from miles_async.section import Section

GGUF_PACKAGE_PREFIX = "package:"
"""Begins an `hf_checkpoint` that is a file in an installed Python package."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_DATA_SUFFIXES = (".json", ".jsonl", ".parquet")


def is_gguf(checkpoint: str) -> bool:
    """Whether an `hf_checkpoint` is a GGUF file, which is converted before the run starts."""
    return checkpoint.startswith(GGUF_PACKAGE_PREFIX) or checkpoint.endswith(".gguf")


def hub_name(text: str) -> str | None:
    """The name of a checkpoint or a data set on the Hugging Face Hub, such as `Qwen/Qwen3-4B`; None for anything else.

    A name of a data set may end with a split: `owner/name:test`. A path that exists is not a name.
    """
    named = _HUB_NAME.fullmatch(text) is not None and not text.endswith(_DATA_SUFFIXES) and not is_gguf(text)
    return text if named and not Path(text).exists() else None


class TinyModel(Section):
    """A small Qwen3 with a byte-level tokenizer, created locally in Hugging Face format."""

    flag_prefix: ClassVar[str] = "tiny_"

    num_layers: int = Field(4, ge=1, le=1024)
    """Number of transformer layers of the tiny model."""
    hidden_size: int = Field(128, ge=16, le=65_536)
    """Hidden size of the tiny model. It must be divisible by num_attention_heads."""
    ffn_hidden_size: int = Field(384, ge=16, le=262_144)
    """Width of the feed-forward layers of the tiny model."""
    num_attention_heads: int = Field(4, ge=1, le=65_536)
    """Number of attention heads of the tiny model."""
    num_query_groups: int = Field(2, ge=1)
    """Number of key/value heads of the tiny model (grouped-query attention). It must divide num_attention_heads."""
    max_position_embeddings: int = Field(512, ge=16, le=16_777_216)
    """Maximum sequence length of the tiny model in tokens, prompt and response together."""
    init_std: float = Field(0.05, gt=0)
    """Standard deviation of the tiny model's initial weights. The default is larger than the usual 0.02 because a model
    this narrow learns faster from it."""


class Model(Section):
    """The model to train: a Hugging Face checkpoint, or a tiny model that is created locally."""

    hf_checkpoint: str | None = None
    """Folder of the Hugging Face checkpoint to train, or its name on the Hugging Face Hub, such as Qwen/Qwen3-4B, or a
    GGUF file, which is converted once into cache_dir. `package:NAME/FILE` is a GGUF file in the installed Python
    package NAME. If unset, a tiny model is created locally."""
    megatron_model_flags: dict[str, Any] = {}
    """Megatron's flags that describe the model, under their names with underscores, such as {num_layers: 36}. They are
    compared with config.json of hf_checkpoint, and a difference is refused. Flags such as `--num-layers 36` set single
    entries."""
    tiny_model: TinyModel = TinyModel()
    """Shape of the tiny model that is created if hf_checkpoint is unset."""

    @property
    def title(self) -> str:
        """The name of the model for people: its folder, the name of its GGUF file, or the size of the tiny model."""
        checkpoint, tiny = self.hf_checkpoint, self.tiny_model
        if checkpoint is None:
            return f"tiny Qwen3, {tiny.num_layers} layers of width {tiny.hidden_size}"
        return Path(checkpoint).name if is_gguf(checkpoint) else checkpoint


class WarmStart(Section):
    """Supervised training before RL, so that a model without the task's basics earns some rewards from the start."""

    warm_start_max_steps: int = Field(0, ge=0)
    """Maximum number of supervised optimizer steps before RL. The run stops with an error if the model does not reach
    warm_start_accuracy within them. 0 starts RL from the checkpoint without a warm start."""
    warm_start_accuracy: tuple[float, float] = (0.15, 0.35)
    """Target range [low, high] of the greedy accuracy, between 0 and 1. The warm start ends at the first check inside
    the range; an accuracy above the range stops the run with an error."""
    warm_start_lr: float = Field(2e-3, gt=0)
    """Learning rate of the warm start."""
    warm_start_batch_size: int = Field(128, ge=1)
    """Problems per optimizer step of the warm start."""
    warm_start_check_every: int = Field(20, ge=1)
    """Optimizer steps between two accuracy checks of the warm start. Close to the target range the interval is
    halved."""
    warm_start_template: str = "{prompt}"
    """Template that turns each prompt into the input of the warm start; `{prompt}` is replaced by the prompt. Set it if
    RL wraps the prompt in more text, such as the chat markup of an agent. Prompts that are lists of messages are
    rendered by the chat template instead."""
    warm_start_examples_path: str | None = None
    """Function that turns a problem into the examples of the warm start, as module.function with the signature
    fn(sample) -> pairs of prompt and answer. A prompt is text or a list of messages; the tools of the messages may
    follow the answer. Use this for agents, which send several requests per problem. If unset, each problem is one
    example: warm_start_template and the label."""
    cache_dir: str = "~/.cache/miles_async"
    """Folder of cached files: tiny, warm-started and converted models, each under a hash of everything that determines
    it, and memory-mapped copies of Parquet files."""
