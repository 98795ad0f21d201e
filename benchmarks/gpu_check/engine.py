"""SGLang's log-probabilities against those that Hugging Face transformers compute in float32."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import (
    DEVICE,
    ON_GPU,
    SMALL,
    TOLERANCE,
    Precision,
    Surroundings,
    generate,
    largest_gap,
    prompts,
)
from miles_async.adapters.sglang.launch import EngineInfo

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = (64, 500, 128) if ON_GPU else (8, 100, 32)


def check(report: Report, surroundings: Surroundings, precision: Precision) -> None:
    checkpoint = surroundings.checkpoint(SMALL)
    with surroundings.engine(checkpoint, precision) as engine:
        compare(report, engine, transformers_model(checkpoint, precision), precision)


def compare(report: Report, engine: EngineInfo, model: PreTrainedModel, precision: Precision) -> None:
    """Report the largest difference over sampled tokens, and the throughput of a second batch."""
    part = "log-probabilities against transformers"
    with report.part(part):
        drawn = generate(engine, prompts(PROMPTS, PROMPT_TOKENS, first=251), NEW_TOKENS)
        gap = largest_gap(drawn, transformers_logprobs(model, [one.tokens for one in drawn]))
        report.figure(part, gap, "nats", at_most=TOLERANCE[precision])
    with report.part("throughput"):
        began = time.perf_counter()
        generate(engine, prompts(PROMPTS, PROMPT_TOKENS, first=252), NEW_TOKENS)
        report.figure("throughput", PROMPTS * NEW_TOKENS / (time.perf_counter() - began), "tokens/s")


def transformers_model(checkpoint: Path, precision: Precision) -> PreTrainedModel:
    """A model that computes in float32. With bf16, its weights are rounded to bfloat16."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).float().to(DEVICE)


@torch.no_grad()
def transformers_logprobs(model: PreTrainedModel, token_lists: Sequence[list[int]]) -> list[list[float]]:
    """Log-probabilities of all tokens but the first."""
    results = []
    for tokens in token_lists:
        ids = torch.tensor([tokens], device=DEVICE)
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        results.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return results
