"""What the checks share: models, an engine and a learner on one machine, and generated tokens."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.models.gpt import gpt_layer_specs
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.gpu_check.report import NotPossibleError
from miles_async.adapters.megatron.model.environment import environment
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec
from miles_async.adapters.system import rdma
from miles_async.adapters.weights.engine import call_engine
from miles_async.atomic_files import atomic_folder
from miles_async.config.schema import TinyModel

Precision = Literal["bf16", "fp32"]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE: Mapping[str, float] = {"bf16": 1e-2, "fp32": 1e-4}
"""Largest difference of a log-probability from that of float32, in nats."""
BOTH_ROUND: Mapping[str, float] = {name: 2 * limit for name, limit in TOLERANCE.items()}
"""The same for two programs that round."""
SMALL = TinyModel(
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_query_groups=2,
    max_position_embeddings=2048,
    init_std=0.01,
)
"""Heads of 64, which all attention kernels support. The logits are small (standard deviation 0.16), because bfloat16
rounds large ones by more than the tolerance."""
LARGE = TinyModel(
    num_layers=8,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=16,
    num_query_groups=8,
    max_position_embeddings=2048,
    init_std=0.0035,
)
"""400 million parameters, for bandwidth and memory on a GPU."""
QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Settings of a `Qwen3Config` with the shape of Qwen3-0.6B."""
QWEN3_ON_CPU: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Settings of a `Qwen3MoeConfig` with two layers of Qwen3-30B-A3B."""
QWEN3_MOE_ON_CPU: dict[str, Any] = QWEN3_ON_CPU | {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LONGEST = 40_960
"""Positions of the models of `Surroundings.qwen3` and `Surroundings.experts`, in tokens."""
OF_ALL_SHAPES: dict[str, Any] = {
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
MEMORY_FRACTION = 0.3
"""Part of the GPU's memory that an engine takes. A learner needs room beside it."""
REQUEST_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a check runs."""

    folder: Path
    """For logs and weights."""
    models: Path
    """For checkpoints, which the checks share."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang."""

    def checkpoint(self, shape: TinyModel) -> Path:
        """A model with random weights."""
        path = self.models / f"{shape.hidden_size}x{shape.num_layers}"
        if not path.exists():
            create_tiny_model(shape, path, seed=1)
        return path

    def qwen3(self) -> Path:
        """A model with random weights in bfloat16: the shape of Qwen3-0.6B on a GPU, a small one on a CPU."""
        shape = QWEN3 if ON_GPU else QWEN3_ON_CPU
        return self.random_model("qwen3", Qwen3ForCausalLM, Qwen3Config(**shape, **OF_ALL_SHAPES))

    def experts(self) -> Path:
        """The same with experts: two layers of Qwen3-30B-A3B on a GPU."""
        shape = QWEN3_MOE if ON_GPU else QWEN3_MOE_ON_CPU
        config = Qwen3MoeConfig(**shape, **OF_ALL_SHAPES, norm_topk_prob=True)
        return self.random_model("experts", Qwen3MoeForCausalLM, config)

    def random_model(self, name: str, kind: type[PreTrainedModel], config: PretrainedConfig) -> Path:
        """A model of the class `kind` with random weights in bfloat16."""
        path = self.models / name
        if not path.exists():
            torch.manual_seed(1)
            with torch.device(DEVICE):
                model = kind(config).bfloat16()
            with atomic_folder(path) as draft:
                model.save_pretrained(draft)
            del model
            if ON_GPU:
                torch.cuda.empty_cache()
        return path

    @contextmanager
    def engine(
        self, checkpoint: Path, precision: Precision, *, protocol: str = "tcp", colocated: bool = False
    ) -> Iterator[EngineInfo]:
        """A running engine: on the second GPU if there are several, so that NCCL can connect it to a learner.

        Mooncake uses `protocol` in the engine, and within the context in this process.
        """
        spec = EngineSpec(
            name="e0",
            model_path=str(checkpoint),
            log_path=self.folder / "engine.log",
            concurrency=64,
            dtype="bfloat16" if precision == "bf16" else "float32",
            p2p=can_import("mooncake.engine"),
            devices=(1,) if torch.cuda.device_count() > 1 and not colocated else (),
            colocated=colocated,
            server_args={**_server_args(precision), **self.server_args},
            start_timeout=300.0,
        )
        server = EngineServer(spec)
        with environment({"MOONCAKE_PROTOCOL": protocol}):
            try:
                yield server.start()
            finally:
                server.stop()


def _server_args(precision: Precision) -> dict[str, Any]:
    if not ON_GPU:
        return {"dtype": "bfloat16"} if precision == "bf16" else {}
    arguments: dict[str, Any] = {"mem_fraction_static": MEMORY_FRACTION}
    if precision == "fp32":
        # Flash attention has no kernels for float32, and Triton multiplies float32 in TF32. SGLang uses no CUDA graphs
        # with this backend.
        arguments |= {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
    return arguments


def can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return True


def has_distribution(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def require_gpu(what: str) -> None:
    if not ON_GPU:
        raise NotPossibleError(f"{what} needs a GPU")


def require_transformer_engine() -> None:
    require_gpu("Transformer Engine")
    if not gpt_layer_specs.HAVE_TE:  # Megatron 0.19 can be imported without it, and computes with mocks
        raise NotPossibleError("transformer_engine is not installed")


def require_rdma() -> None:
    if not rdma.has_active_port():
        raise NotPossibleError(f"this machine has no RDMA device with an active port (in {rdma.DEVICES})")


def prompts(count: int, length: int, first: int) -> list[list[int]]:
    """Prompts that no other prompt with another `first` token shares a prefix with, so that no cache has them."""
    return [[first, *((7 * i + number) % 250 for i in range(length - 1))] for number in range(count)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled response."""

    tokens: list[int]
    """Prompt and response."""
    logprobs: list[float]
    """Of the response's tokens, in nats, as the engine reports them."""


def generate(engine: EngineInfo, token_lists: Sequence[list[int]], new_tokens: int) -> list[Drawn]:
    request = {
        "input_ids": list(token_lists),
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    answers: Any = call_engine(engine, "/generate", request, timeout=REQUEST_SECONDS)
    return [
        Drawn(prompt + answer["output_ids"], [one for one, *_ in answer["meta_info"]["output_token_logprobs"]])
        for prompt, answer in zip(token_lists, answers, strict=True)
    ]


def score(engine: EngineInfo, token_lists: Sequence[list[int]]) -> list[list[float]]:
    """The engine's log-probabilities of all tokens but the first."""
    request = {
        "input_ids": list(token_lists),
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answers: Any = call_engine(engine, "/generate", request, timeout=REQUEST_SECONDS)
    return [[one for one, *_ in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]


def largest_gap(drawn: Sequence[Drawn], computed: Sequence[Sequence[float]]) -> float:
    """Largest difference between the engine's log-probabilities and those computed from the same tokens.

    `computed` are those of all tokens but the first.
    """
    gaps = [
        abs(ours - theirs)
        for one, row in zip(drawn, computed, strict=True)
        for ours, theirs in zip(one.logprobs, row[-len(one.logprobs) :], strict=True)
    ]
    return max(gaps)
