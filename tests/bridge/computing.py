"""What a learner computes from a model of Megatron-Bridge, in the form of `families.reference`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file
from torch import Tensor

from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from tests.bridge.families import reference, tensors_of, write_checkpoint
from tests.configuration import run_config
from tests.stack.learning import uneven_groups, weights_of

SAMPLES = [sample for group in uneven_groups(0) for sample in group]
SEQUENCES = [list(sample.tokens) for sample in SAMPLES]
RESPONSES = [sample.response_length for sample in SAMPLES]
SETTINGS: dict[str, Any] = {
    "megatron_to_hf_mode": "bridge",
    "max_tokens_per_gpu": 60,
    "moe_router_dtype": "fp32",
    # The gradient is read after a step that changes nothing.
    "clip_grad": 1e9,
    "weight_decay": 0.0,
}


def write_reference(name: str, folder: Path) -> Path:
    """Write the checkpoint of a family to `folder`, and what transformers computes from it."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = write_checkpoint(name, folder / "checkpoint")
    logprobs = reference(checkpoint, SEQUENCES, RESPONSES, folder / "gradient")
    (folder / "logprobs.json").write_text(json.dumps(logprobs))
    return folder


def compute(learner: MegatronLearner, out: Path, rank: int = 0) -> None:
    """Write the exported weights, the log-probabilities and the gradient to `out`. All ranks."""
    exported, logprobs, gradient = weights_of(learner), learner.logprobs(SEQUENCES), gradient_of(learner)
    if rank == 0:
        out.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in exported.items()}, out / "exported.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in gradient.items()}, out / "gradient.safetensors")
        (out / "logprobs.json").write_text(json.dumps(logprobs))


def train_step(learner: MegatronLearner, run: RunConfig, number: int) -> dict[str, Tensor]:
    """Train batch `number`, and return the weights."""
    assert learner.train(number, rank_batches(uneven_groups(number), run, 1)[0]).finite
    return weights_of(learner)


def gradient_of(learner: MegatronLearner) -> dict[str, Tensor]:
    """The gradient by the names of the checkpoint. It replaces the learner's weights."""
    prompts = [tokens[: len(tokens) - response] for tokens, response in zip(SEQUENCES, RESPONSES, strict=True)]
    answers = [tokens[len(tokens) - response :] for tokens, response in zip(SEQUENCES, RESPONSES, strict=True)]
    learner.supervised_step(prompts, answers, 0.0)
    return export_gradient(learner)


@torch.no_grad()
def export_gradient(learner: MegatronLearner) -> dict[str, Tensor]:
    """The gradient that a learner has computed, by the names of the checkpoint. It replaces the learner's weights."""
    models = [unwrap_model(chunk) for chunk in learner._model.chunks]
    parameters = [parameter for model in models for parameter in model.parameters()]
    for buffer in (buffer for model in models for name, buffer in model.named_buffers() if "expert_bias" in name):
        buffer.zero_()
    # Some conversions add a constant, which is in the export of zeros too.
    for parameter in parameters:
        parameter.data.zero_()
    constants = weights_of(learner)
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    return {name: tensor - constants[name] for name, tensor in weights_of(learner).items()}


def differences(folder: Path, out: Path) -> dict[str, Sequence[str]]:
    """What in `out` is not what transformers computed: names of tensors, or of log-probabilities, with the error."""
    from safetensors.torch import load_file

    exported, checkpoint = load_file(out / "exported.safetensors"), tensors_of(folder / "checkpoint")
    gradient, expected = load_file(out / "gradient.safetensors"), tensors_of(folder / "gradient")
    logprobs = zip(_flat(out / "logprobs.json"), _flat(folder / "logprobs.json"), strict=True)
    worst = max(abs(one - other) for one, other in logprobs)
    errors = {
        name: float((gradient[name] - expected[name]).norm() / (expected[name].norm() + 1e-6)) for name in expected
    }
    return {
        "names": sorted(exported.keys() ^ checkpoint.keys()),
        "values": [
            name for name in exported.keys() & checkpoint.keys() if not torch.equal(exported[name], checkpoint[name])
        ],
        "logprobs": [] if worst < 1e-4 else [f"{worst:.1e}"],
        "gradient": [f"{name} {error:.1e}" for name, error in errors.items() if not error < 1e-3],
    }


def _flat(path: Path) -> list[float]:
    return [number for row in json.loads(path.read_text()) for number in row]


def bridge_config(**settings: Any) -> Any:
    return run_config(**SETTINGS | settings)
