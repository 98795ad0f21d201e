"""Learners without Ray: built for a test, trained, saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.batch import TrainStep
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.types import Group, Sample

TINY = TinyModel(num_layers=1, hidden_size=32, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=1)
"""The shape of the checkpoint that the fixture `tiny` creates."""


@contextmanager
def learning(checkpoint: Path, config: RunConfig) -> Iterator[MegatronLearner]:
    """One rank, which computes in one thread and without a compiler, and leaves its process groups at the end.

    A model this small gains nothing from more threads, and loses much where others use the cores too.
    """
    torch.set_num_threads(1)
    with without_compiler():
        try:
            yield MegatronLearner(config, str(checkpoint), 0, 1, "127.0.0.1", free_port())
        finally:
            # A learner that did not start has joined its groups too.
            destroy_process_groups()


def without_compiler() -> AbstractContextManager[None]:
    """Do not compile Megatron's fused functions in this thread, which takes seconds each. Runs without CUDA do not."""
    context: AbstractContextManager[None] = torch._dynamo.config.patch(disable=True)
    return context


def uneven_groups(seed: int) -> list[Group]:
    """Three groups of four samples of uneven lengths, so that ranks carry unequal shares."""
    draw = random.Random(seed)
    return [
        Group(
            Sample(
                index=4 * g + i,
                tokens=[draw.randrange(256) for _ in range(5 + 3 * i + g)],
                response_length=3 + i,
                rollout_log_probs=[-5.5 - draw.random() for _ in range(3 + i)],
                reward=draw.random(),
            )
            for i in range(4)
        )
        for g in range(3)
    ]


def prompted_groups(seed: int) -> list[Group]:
    """Four groups of four trajectories with one prompt each, some with equal responses or beginnings, and odd ones.

    The first group has a trajectory of three segments, of which one departs in the middle of a response and one has
    another prompt. The second group has a sample with another prompt and one without a response, the third samples of
    several turns with masks, and the fourth a sample that a filter removed.
    """
    draw = random.Random(seed)
    groups = []
    for number in range(4):
        prompt = [draw.randrange(256) for _ in range(6 + 4 * number)]
        beginning = [draw.randrange(256) for _ in range(2)]
        responses = [[draw.randrange(256) for _ in range(length)] for length in (5, 3, 9)]
        responses = [beginning + responses[0], beginning + responses[1], responses[2], beginning + responses[0]]
        samples = [
            Sample(
                index=4 * number + i,
                tokens=prompt + response,
                response_length=len(response),
                rollout_log_probs=[-5.5 - draw.random() for _ in response],
                reward=draw.random(),
            )
            for i, response in enumerate(responses)
        ]
        if number == 0:
            departed = [*samples[0].tokens[: len(prompt) + 3], 5, 6, 7]
            samples += [
                replace(samples[0], tokens=departed, loss_mask=[0, 0, 0, 0, 1, 1], response_length=6),
                replace(samples[0], tokens=[4, 3, 2, 1], response_length=2, reward=draw.random()),
            ]
            for one in (samples[0], *samples[4:]):
                one.trajectory, one.rollout_log_probs = 0, [-5.5] * one.response_length
        if number == 1:
            samples[1].tokens = [9, 8, 7, *responses[1]]
            samples[2].tokens, samples[2].response_length, samples[2].rollout_log_probs = list(prompt), 0, []
        if number == 2:
            for sample in samples:
                sample.loss_mask = [int(position not in (2, 3)) for position in range(sample.response_length)]
        if number == 3:
            samples[0].remove_sample = True
        groups.append(Group(samples))
    return groups


def create_experts(path: Path, seed: int) -> Qwen3MoeForCausalLM:
    """A tiny Qwen3-MoE, returned and as a checkpoint; of sizes that SGLang need not pad for two ranks."""
    shape = Qwen3MoeConfig(  # type: ignore[call-arg] # head_dim is read from the keywords
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(shape)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return model


def weights_of(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """A copy, by Hugging Face's names."""
    return {name: tensor.clone() for name, tensor in learner.weights()}


def gradients_of(learner: MegatronLearner, step: TrainStep) -> dict[str, torch.Tensor]:
    """The gradients of a step over all ranks, without taking it. All ranks must call it."""
    learner._policy_gradients(step, *learner._pre_step_values(0, [step]))
    return gradients_now(learner)


def gradients_now(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """The gradients over all ranks that a learner has computed. All ranks must call it."""
    with redirect_cuda_to_cpu():
        finalize_model_grads(learner._model.chunks, force_all_reduce=True)
    return gradients_by_name(learner)


def gradients_by_name(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """A copy of the gradients by Hugging Face's names, in the type of the weights: they travel the way weights do."""
    weights = [(p, p.detach().clone()) for chunk in learner._model.chunks for p in chunk.parameters()]
    with torch.no_grad():
        for parameter, _ in weights:
            parameter.copy_(parameter.main_grad)
        gradients = weights_of(learner)
        for parameter, weight in weights:
            parameter.copy_(weight)
    return gradients


def save_state(learner: MegatronLearner, folder: Path) -> None:
    """Copy, write and finish a checkpoint, on all ranks at once."""
    copy = learner.copy_state(str(folder))
    written: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(written, copy.write())
    if dist.get_rank() == 0:
        copy.finish(written)
    dist.barrier()
