"""Adapters of models of Megatron-Bridge have the gradients that transformers gives the merged weights.

With W + s B A in place of W, the gradient of B is s G A^T, and that of A is s B^T G, where G is the gradient of the
merged weight. PEFT loads what is exported, and computes the same. Run as a script this file is the ranks of the
parallel layouts.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_async.adapters.megatron.checkpoint.huggingface import replace_adapter
from miles_async.adapters.megatron.model.lora import adapter_config
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port
from miles_async.errors import UserError
from miles_async.models.lora import linear_shapes, read_config, shared_name, tensor_names
from miles_async.models.lora_layers import adapted
from tests.bridge.computing import RESPONSES, SEQUENCES, bridge_config
from tests.bridge.families import (
    EVERYWHERE,
    FAMILIES,
    LAYOUTS,
    TENSOR,
    WHOLE_EXPERTS,
    class_of,
    reference,
    write_checkpoint,
)
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import learning, save_state

RANK, ALPHA = 4, 8
SCALE = ALPHA / RANK
SHARED = {"experts_shared_outer_loras": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CONVERTED = "Qwen3-MoE"
"""A family for which PEFT converts adapters of single experts."""
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("Llama", {}),
    CONVERTED: (CONVERTED, {}),
    "gpt-oss": ("gpt-oss", {"lora_target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "Qwen3.5": ("Qwen3.5", {}),
    "Qwen3.5-MoE": ("Qwen3.5-MoE", {}),
    "Qwen3.5-MoE, images": ("Qwen3.5-MoE, images", {}),
    "Qwen3.5-MoE, shared matrices": ("Qwen3.5-MoE", SHARED),
    "Qwen3.5, images": ("Qwen3.5, images", {}),
}
"""The family and the settings of each adapter."""
LIMITS = {"Llama": 1e-5, CONVERTED: 1e-5, "gpt-oss": 1e-5}
"""Greatest relative error of a gradient, and of logits in PEFT. Linear attention amplifies the rounding of float32."""
IN_PARALLEL = [
    ("Llama", "pipeline"),
    ("gpt-oss", "expert"),
    ("gpt-oss", WHOLE_EXPERTS),
    ("gpt-oss", EVERYWHERE),
    ("Qwen3.5", TENSOR),
    ("Qwen3.5-MoE", WHOLE_EXPERTS),
    ("Qwen3.5-MoE, shared matrices", WHOLE_EXPERTS),
    ("Qwen3.5-MoE, shared matrices", "expert"),
]


def config(folder: Path, case: str, **settings: Any) -> Any:
    own = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_load": str(folder / "adapter")}
    return bridge_config(**own | dict(CASES[case][1]) | settings)


def write_case(case: str, folder: Path) -> None:
    """Write a checkpoint, an adapter for it, and what transformers computes with both."""
    folder.mkdir(parents=True)
    checkpoint = write_checkpoint(CASES[case][0], folder / "checkpoint")
    settings = config(folder, case).learner
    described, draw = adapter_config(settings, checkpoint), torch.Generator().manual_seed(0)
    adapter: dict[str, Tensor] = {}
    first: dict[str, Tensor] = {}
    shapes = linear_shapes(checkpoint)
    for layer in adapted(shapes, described.modules):
        rows, columns = shapes[layer]
        for name, shape in zip(tensor_names(layer), ((RANK, columns), (rows, RANK)), strict=True):
            drawn = torch.randn(shape, generator=draw) / 16
            own = shared_name(name) if settings.experts_shared_outer_loras else name
            adapter[name] = first.setdefault(own, drawn).clone()
    save_file(adapter, folder / "drawn.safetensors")
    replace_adapter(folder / "adapter", adapter, described, base=checkpoint)
    merged = write_checkpoint(CASES[case][0], folder / "merged")
    weights = load_file(merged / "model.safetensors")
    for layer in adapted(shapes, described.modules):
        of_a, of_b = tensor_names(layer)
        view_of(weights, layer).add_(SCALE * adapter[of_b] @ adapter[of_a])
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    logprobs = reference(merged, SEQUENCES, RESPONSES, folder / "gradient")
    (folder / "logprobs.json").write_text(json.dumps(logprobs))
    of_weights = load_file(folder / "gradient" / "model.safetensors")
    gradient: dict[str, Tensor] = {}
    for layer in adapted(shapes, described.modules):
        of_a, of_b = tensor_names(layer)
        whole = SCALE * view_of(of_weights, layer)
        for name, of_layer in ((of_a, adapter[of_b].T @ whole), (of_b, whole @ adapter[of_a].T)):
            key = shared_name(name) if settings.experts_shared_outer_loras else name
            gradient[key] = gradient[key] + of_layer if key in gradient else of_layer
    save_file({name: one.contiguous() for name, one in gradient.items()}, folder / "expected.safetensors")


def view_of(weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """The weight [outputs, inputs] of a layer, which may be a part of a tensor of all experts."""
    if (whole := weights.get(f"{layer}.weight")) is not None:
        return whole
    block, number, kind = layer.rsplit(".", 2)
    if kind == "down_proj":
        of_expert = weights[f"{block}.down_proj"][int(number)]
        return of_expert.T if is_gpt_oss(weights) else of_expert
    of_expert = weights[f"{block}.gate_up_proj"][int(number)]
    if is_gpt_oss(weights):
        return of_expert.T[("gate_proj", "up_proj").index(kind) :: 2]
    return of_expert.chunk(2)[("gate_proj", "up_proj").index(kind)]


def is_gpt_oss(weights: Mapping[str, Tensor]) -> bool:
    return any(name.endswith(".gate_up_proj_bias") for name in weights)


def compute(learner: MegatronLearner, out: Path, rank: int = 0) -> None:
    """Write the adapter, the log-probabilities and the gradient to `out`. All ranks."""
    adapter, logprobs = learner.adapter(), learner.logprobs(SEQUENCES)
    learner.copy_state(None, str(out / "exported")).write()
    prompts = [tokens[: len(tokens) - response] for tokens, response in zip(SEQUENCES, RESPONSES, strict=True)]
    answers = [tokens[len(tokens) - response :] for tokens, response in zip(SEQUENCES, RESPONSES, strict=True)]
    save_state(learner, out / "state")
    learner.supervised_step(prompts, answers, 0.0)
    trained = [
        parameter for chunk in learner._model.chunks for parameter in chunk.parameters() if parameter.requires_grad
    ]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(parameter.main_grad)
    gradient = learner.adapter()
    learner.load_state(str(out / "state"))
    restored = learner.adapter()
    if rank == 0:
        for name, tensors in (("adapter", adapter), ("gradient", gradient), ("restored", restored)):
            save_file({key: one.contiguous().clone() for key, one in tensors.items()}, out / f"{name}.safetensors")
        (out / "logprobs.json").write_text(json.dumps(logprobs))


def check(case: str, folder: Path, out: Path) -> None:
    drawn = load_file(folder / "drawn.safetensors")
    for name in ("adapter", "restored"):
        assert different(load_file(out / f"{name}.safetensors"), drawn) == []
    assert apart(*(json.loads((one / "logprobs.json").read_text()) for one in (out, folder))) < 1e-4
    expected, gradient = load_file(folder / "expected.safetensors"), load_file(out / "gradient.safetensors")
    shares = not expected.keys() >= gradient.keys()
    for name, computed in gradient.items():
        wanted = expected[shared_name(name) if shares else name]
        assert (computed - wanted).norm() < LIMITS.get(case, 1e-4) * wanted.norm() + 1e-6, name


def different(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that differ, or that only one of both has."""
    both = found.keys() & wanted.keys()
    return sorted(
        (found.keys() ^ wanted.keys()) | {name for name in both if not torch.equal(found[name], wanted[name])}
    )


def apart(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The greatest difference between log-probabilities of the same tokens."""
    pairs = (pair for sequences in zip(ours, theirs, strict=True) for pair in zip(*sequences, strict=True))
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for case in CASES:
        write_case(case, root / case)
    return root


@pytest.mark.parametrize("case", CASES)
def test_adapters_get_the_gradients_that_transformers_gives_merged_weights(folders: Path, case: str) -> None:
    folder = folders / case
    with learning(folder / "checkpoint", config(folder, case)) as learner:
        compute(learner, folder / "alone")
    check(case, folder, folder / "alone")
    exported, adapter = (
        load_file(one / "adapter_model.safetensors") for one in (folder / "alone/exported", folder / "adapter")
    )
    assert different(exported, adapter) == []


def in_transformers(case: str, checkpoint: Path) -> Any:
    """The model of a checkpoint."""
    model_class = class_of(FAMILIES[CASES[case][0]].architecture)
    return model_class.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


def in_peft(case: str, folder: Path) -> PeftModel:
    """The model of a case with its adapter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        return PeftModel.from_pretrained(in_transformers(case, folder / "checkpoint"), folder / "adapter")


@pytest.mark.parametrize("case", CASES)
def test_peft_computes_from_an_exported_folder_what_merged_weights_and_the_learner_compute(
    folders: Path, case: str
) -> None:
    folder = folders / case
    model, merged, logprobs = in_peft(case, folder), in_transformers(case, folder / "merged"), []
    for tokens in SEQUENCES:
        with torch.no_grad():
            found, expected = (one(torch.tensor([tokens])).logits[0] for one in (model, merged))
        assert (found - expected).norm() < LIMITS.get(case, 1e-4) * expected.norm()
        logprobs.append(found[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    with learning(folder / "checkpoint", config(folder, case)) as learner:
        ours = torch.cat([torch.tensor(one) for one in learner.logprobs(SEQUENCES)])
    assert (torch.cat(logprobs) - ours).norm() < 1e-5 * ours.norm()
    weights = merged.state_dict()
    for name, weight in model.merge_and_unload().state_dict().items():
        assert (weight - weights[name]).norm() <= 1e-6 * weights[name].norm(), name


@pytest.mark.parametrize("case", [case for case in CASES if case != CONVERTED])
def test_a_folder_that_peft_has_saved_again_is_read_exactly(folders: Path, tmp_path: Path, case: str) -> None:
    in_peft(case, folders / case).save_pretrained(tmp_path)
    with learning(folders / case / "checkpoint", config(folders / case, case, lora_load=str(tmp_path))) as learner:
        assert different(learner.adapter(), load_file(folders / case / "drawn.safetensors")) == []


def test_adapters_of_experts_that_peft_has_converted_are_refused(folders: Path, tmp_path: Path) -> None:
    in_peft(CONVERTED, folders / CONVERTED).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"target_parameters .* is not supported"):
        read_config(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_merged_models_have_the_weights_with_the_adapters(folders: Path, case: str) -> None:
    folder = folders / case
    with learning(folder / "checkpoint", config(folder, case, lora_merge=True)) as learner:
        learner.copy_state(None, str(folder / "exported")).write()
    check_merged(folder, folder / "exported")


def check_merged(folder: Path, exported: Path) -> None:
    found, expected = (load_file(one / "model.safetensors") for one in (exported, folder / "merged"))
    assert found.keys() == expected.keys()
    assert [name for name, one in found.items() if (one - expected[name]).norm() > 1e-6 * expected[name].norm()] == []


@pytest.fixture(scope="module")
def in_parallel(folders: Path) -> Path:
    with run_ranks("tests.bridge.test_lora", folders):
        pass
    return folders


@pytest.mark.parametrize("case, layout", IN_PARALLEL)
def test_two_ranks_get_the_same_gradients(in_parallel: Path, case: str, layout: str) -> None:
    check(case, in_parallel / case, in_parallel / case / layout)


@pytest.mark.parametrize("case, layout", IN_PARALLEL)
def test_two_ranks_merge_the_same_model(in_parallel: Path, case: str, layout: str) -> None:
    check_merged(in_parallel / case, in_parallel / case / layout / "exported")


def test_recomputed_layers_get_the_same_gradients(folders: Path) -> None:
    folder = folders / "Qwen3.5-MoE"
    with learning(folder / "checkpoint", config(folder, "Qwen3.5-MoE", **RECOMPUTED)) as learner:
        compute(learner, folder / "recomputed")
    check("Qwen3.5-MoE", folder, folder / "recomputed")


@pytest.mark.parametrize("case", ["Qwen3.5", "Qwen3.5-MoE, shared matrices"])
def test_a_checkpoint_of_two_ranks_is_read_by_one(in_parallel: Path, case: str) -> None:
    folder = in_parallel / case
    layout = next(layout for name, layout in IN_PARALLEL if name == case)
    with learning(folder / "checkpoint", config(folder, case, lora_load=None)) as learner:
        learner.load_state(str(folder / layout / "state"))
        found = learner.adapter()
    assert different(found, load_file(folder / "drawn.safetensors")) == []


def run_layouts(rank: int, root: Path, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    for case, layout in IN_PARALLEL:
        run = config(root / case, case, actor_num_gpus_per_node=2, lora_merge=True, **LAYOUTS[layout])
        address = (rank, 2, "127.0.0.1", ports[f"{case} {layout}"])
        learner = MegatronLearner(run, str(root / case / "checkpoint"), *address)
        compute(learner, root / case / layout, rank)
        learner.close()


if __name__ == "__main__":
    # Other tests must not take the ports before they are used.
    claimed = {f"{case} {layout}": claim_port() for case, layout in IN_PARALLEL}
    fork_ranks(2, run_layouts, Path(sys.argv[1]), {name: port.number for name, port in claimed.items()})
