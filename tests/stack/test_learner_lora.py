"""Adapters of the real Megatron learner, in several parallel layouts, against LoRA in plain PyTorch on transformers.

Run as a script this file is the ranks of the layouts.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.dist_checkpointing import load_tensors_metadata
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from miles_async.adapters.megatron.checkpoint.huggingface import replace_adapter
from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port
from miles_async.batching.batch import TrainStep, rank_batches
from miles_async.config.memory import adapter_elements
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.errors import UserError
from miles_async.models.lora import AdapterConfig, read_config, shared_name, tensor_names
from miles_async.models.lora_layers import FEED_FORWARD, HEAD, MODULES, adapted
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.forked_ranks import fork_ranks, layouts_by_process, run_ranks
from tests.stack.learning import create_experts, learning, prompted_groups, save_state, uneven_groups


class Layout(NamedTuple):
    ranks: int
    settings: dict[str, Any]
    model: str = "base"
    """A folder; that of its adapter ends with `adapter`."""


TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
EXPERT = {"expert_model_parallel_size": 2}
DEALT = SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}
"""Experts are dealt to the tensor-parallel ranks, which otherwise share each of them."""
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "one rank": Layout(1, {}),
    "tensor parallel": Layout(2, TENSOR),
    "pipeline": Layout(2, PIPELINE),
    "context parallel": Layout(2, CONTEXT),
    "sequence and context parallel, recomputed": Layout(4, SEQUENCE | CONTEXT | RECOMPUTED),
    "pipeline and data parallel, distributed optimizer": Layout(4, PIPELINE | DISTRIBUTED),
    "sequence and data parallel, distributed optimizer": Layout(4, SEQUENCE | DISTRIBUTED),
    "recomputed, logits in chunks": Layout(1, RECOMPUTED),
    "layers by patterns, one rank": Layout(1, {}, "patterns"),
    "layers by patterns, tensor parallel, pipeline": Layout(4, TENSOR | PIPELINE, "patterns"),
    "experts, one rank": Layout(1, {}, "experts"),
    "experts, expert parallel, distributed optimizer": Layout(2, EXPERT | DISTRIBUTED, "experts"),
    "experts, expert parallel, pipeline": Layout(4, EXPERT | PIPELINE, "experts"),
    "experts, expert and context parallel, recomputed": Layout(4, EXPERT | CONTEXT | RECOMPUTED, "experts"),
    "experts, dealt to tensor-parallel ranks": Layout(2, DEALT, "experts"),
    "shared matrices, one rank": Layout(1, {}, "shared"),
    "shared matrices, expert parallel, distributed optimizer": Layout(2, EXPERT | DISTRIBUTED, "shared"),
    "shared matrices, dealt to tensor-parallel ranks": Layout(2, DEALT, "shared"),
    "shared matrices, expert, sequence and data parallel": Layout(4, SEQUENCE | EXPERT | DISTRIBUTED, "shared"),
    "experts, whole on each tensor-parallel rank": Layout(2, SEQUENCE | {"expert_tensor_parallel_size": 1}, "experts"),
    "experts, shared and dealt, distributed optimizer": Layout(4, SEQUENCE | EXPERT | DISTRIBUTED, "experts"),
}
ALONE = {
    "base": "one rank",
    "patterns": "layers by patterns, one rank",
    "experts": "experts, one rank",
    "shared": "shared matrices, one rank",
}
"""The layout with which the others of a model are compared."""
WHOLE = [ALONE["base"], ALONE["experts"]]
SHAPE = TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128)
ADAPTER = AdapterConfig(rank=4, scale=2.0, modules=(*MODULES, HEAD))
MODULES_OF = {
    "base": ADAPTER.modules,
    "patterns": (*(f"layers.0.self_attn.{name}" for name in MODULES[:3]), *FEED_FORWARD[:2], "layers.1.mlp.down_proj"),
    "experts": ADAPTER.modules,
    "shared": ADAPTER.modules,
}
"""What PEFT calls the target modules of the adapter of a model."""
SETTINGS: dict[str, dict[str, Any]] = {
    "base": {},
    "patterns": {
        "lora_target_modules": ["decoder.layers.0.*.linear_qkv", r"model\.layers\.\d\.mlp\.(gate|up|down)_proj"],
        "lora_exclude_modules": ["layers.0.mlp.down_proj"],
    },
    "experts": {},
    "shared": {"experts_shared_outer_loras": True},
}
LEARNING_RATE = 0.0001


def config(root: Path, layout: Layout, **settings: Any) -> RunConfig:
    return run_config(
        **{
            "loss_type": "sft_loss",
            "loss_aggregation": "token_mean",
            "lr": LEARNING_RATE,
            "lr_decay_style": "constant",
            "max_tokens_per_gpu": 40,
            "actor_num_gpus_per_node": layout.ranks,
            "lora_rank": ADAPTER.rank,
            "lora_alpha": ADAPTER.scale * ADAPTER.rank,
            "lora_target_modules": ["all-linear", HEAD],
            "lora_load": str(root / f"{layout.model} adapter"),
            **SETTINGS[layout.model],
            **layout.settings,
            **settings,
        }
    )


def learn(root: Path, name: str, rank: int, ports: tuple[int, int]) -> None:
    """Takes a step on the adapter in the folder; rank 0 writes the results to files."""
    torch.set_num_threads(1)
    layout, out, base = LAYOUTS[name], root / name, str(root / LAYOUTS[name].model)
    settings = config(root, layout)
    learner = MegatronLearner(settings, base, rank, layout.ranks, "127.0.0.1", ports[0])
    if "chunks" in name:
        assert learner._model.output_layer is not None
        learner._model.output_layer.chunk_entries = 2000
    prompted = rank_batches(prompted_groups(0), settings, layout.ranks, share_prefixes=name not in ALONE.values())[rank]
    steps = rank_batches(uneven_groups(0), settings, layout.ranks)[rank]
    gradients = {batch: gradients_of(learner, one[0]) for batch, one in (("prompted", prompted), ("uneven", steps))}
    norm = torch.tensor(learner.train(0, steps).metrics["grad_norm"])
    trained = learner.adapter()
    # Every rank finds out whether a version changes the model.
    changed = {tensor_name for tensor_name, tensor in learner.engine_weights() if tensor.any()}
    assert changed == load_file(root / f"{layout.model} adapter/adapter_model.safetensors").keys()
    save_state(learner, out / "state")
    learner.close()
    merging = config(root, layout, lora_load=None, lora_merge=True)
    fresh = MegatronLearner(merging, base, rank, layout.ranks, "127.0.0.1", ports[1])
    start = fresh.adapter()
    fresh.load_state(str(out / "state"))
    resumed = fresh.adapter()
    fresh.copy_state(None, str(out / "merged")).write()
    fresh.close()
    if rank == 0:
        for tensors, file in (
            (trained, "trained"),
            (start, "start"),
            (resumed, "resumed"),
            ({"norm": norm}, "norm"),
            *((v, k) for k, v in gradients.items()),
        ):
            save_file(tensors, out / f"{file}.safetensors")


def gradients_of(learner: MegatronLearner, step: TrainStep) -> dict[str, Tensor]:
    """The gradients of the adapter over all ranks, without taking the step. All ranks must call it."""
    learner._policy_gradients(step, *learner._pre_step_values(0, [step]))
    with redirect_cuda_to_cpu():
        finalize_model_grads(learner._model.chunks, force_all_reduce=True)
    parameters = [p for chunk in learner._model.chunks for p in chunk.parameters() if p.requires_grad]
    values = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        gradients = learner.adapter()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return gradients


class PlainLora(torch.nn.Module):
    """A linear layer with an adapter, as in the paper."""

    def __init__(self, linear: torch.nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = linear.weight, scale
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) + self.scale * (x @ self.a.T @ self.b.T)


class PlainExperts(torch.nn.Module):
    """Gives the stacked weights of transformers' experts their adapters; `layers` are those of each expert, in order.

    `gate_up_proj` has the rows of both layers of an expert below each other.
    """

    def __init__(self, layers: list[list[PlainLora]]) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, weights: Tensor) -> Tensor:
        changes = [torch.cat([one.scale * one.b @ one.a for one in expert]) for expert in self.layers]
        return weights + torch.stack(changes)


class Expected(NamedTuple):
    gradients: dict[str, Tensor]
    norm: Tensor
    """Of the gradient of all parameters."""
    merged: dict[str, Tensor]
    logprobs: list[list[float]]
    """Of the base model, of all responses of `uneven_groups`."""


def expected_of(root: Path, base: str) -> Expected:
    """What transformers and torch's Adam compute in the step of `learn`."""
    model = AutoModelForCausalLM.from_pretrained(root / base, dtype=torch.float32, attn_implementation="eager")
    samples = [sample for group in uneven_groups(0) for sample in group]

    def logprobs(sample: Sample) -> Tensor:
        tokens = torch.tensor(sample.tokens)
        logits = model(tokens[None]).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[-sample.response_length :, 0]

    with torch.no_grad():
        of_base = [logprobs(sample).tolist() for sample in samples]
    model.requires_grad_(False)
    adapter = load_file(root / f"{base} adapter/adapter_model.safetensors")
    weights = load_file(root / base / "model.safetensors")
    layers: dict[str, PlainLora] = {}
    shared: dict[str, torch.nn.Parameter] = {}

    def of_expert(experts: str, number: int, *names: str) -> list[PlainLora]:
        for name in names:
            layer = f"{experts}.{number}.{name}"
            of_a, of_b = tensor_names(layer)
            linear = torch.nn.Linear(1, 1)
            linear.weight = torch.nn.Parameter(weights[f"{layer}.weight"], requires_grad=False)
            layers[layer] = made = PlainLora(linear, adapter[of_a], adapter[of_b], ADAPTER.scale)
            if base == "shared":
                made.a = shared.setdefault(shared_name(of_a), made.a)
                made.b = shared.setdefault(shared_name(of_b), made.b)
        return [layers[f"{experts}.{number}.{name}"] for name in names]

    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if adapted([name], MODULES_OF[base]) and last != "experts":
            assert isinstance(module, torch.nn.Linear)
            of_a, of_b = tensor_names(name)
            layers[name] = PlainLora(module, adapter[of_a], adapter[of_b], ADAPTER.scale)
            setattr(model.get_submodule(parent), last, layers[name])
        elif last == "experts":
            for stacked, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                changed = PlainExperts([of_expert(name, number, *names) for number in range(module.num_experts)])
                register_parametrization(module, stacked, changed)
    parameters = list(dict.fromkeys(parameter for layer in layers.values() for parameter in (layer.a, layer.b)))
    total = sum(sample.response_length for sample in samples)
    torch.stack([-logprobs(sample).sum() / total for sample in samples]).sum().backward()
    gradients: dict[str, Tensor] = {}
    for name, layer in layers.items():
        assert layer.a.grad is not None
        assert layer.b.grad is not None
        gradients |= zip(tensor_names(name), (layer.a.grad.clone(), layer.b.grad.clone()), strict=True)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01).step()
    merged = {
        f"{name}.weight": (layer.weight + layer.scale * layer.b @ layer.a).detach() for name, layer in layers.items()
    }
    return Expected(gradients, norm, merged, of_base)


def most_apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((tensor - expected[name]).abs().max().item() for name, tensor in found.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout; the same four processes run all of them."""
    root = tmp_path_factory.mktemp("lora")
    create_tiny_model(SHAPE, root / "base", seed=1)
    create_experts(root / "experts", seed=1)
    shutil.copytree(root / "base", root / "patterns")
    shutil.copytree(root / "experts", root / "shared")
    for base in ALONE:
        draw_adapter(root, base)
    with run_ranks("tests.stack.test_learner_lora", root):
        pass
    return root


def draw_adapter(root: Path, base: str) -> None:
    shapes = {name: tensor.shape for name, tensor in load_file(root / base / "model.safetensors").items()}
    shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
    draw = torch.Generator().manual_seed(0)
    adapter: dict[str, Tensor] = {}
    for module in adapted([name.removesuffix(".weight") for name in shapes], MODULES_OF[base]):
        (of_a, of_b), shape = tensor_names(module), shapes[f"{module}.weight"]
        adapter[of_a] = torch.randn(ADAPTER.rank, shape[1], generator=draw) / 8
        adapter[of_b] = torch.randn(shape[0], ADAPTER.rank, generator=draw) / 32
    if base == "shared":
        first: dict[str, Tensor] = {}
        adapter = {name: first.setdefault(shared_name(name), tensor).clone() for name, tensor in adapter.items()}
    described = replace(ADAPTER, modules=MODULES_OF[base])
    replace_adapter(root / f"{base} adapter", adapter, described, base=root / base)


@pytest.fixture(scope="module")
def expected(runs: Path) -> dict[str, Expected]:
    """By model."""
    return {base: expected_of(runs, base) for base in ALONE}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_get_the_gradients_of_lora_in_plain_pytorch(
    runs: Path, expected: dict[str, Expected], layout: str
) -> None:
    gradients = load_file(runs / layout / "uneven.safetensors")
    assert most_apart(gradients, expected[LAYOUTS[layout].model].gradients) < 1e-5
    assert min(tensor.abs().max().item() for tensor in gradients.values()) > 1e-4, "all of them are large enough to see"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_of_the_gradient_counts_each_parameter_of_the_adapters_once(
    runs: Path, expected: dict[str, Expected], layout: str
) -> None:
    """Steps are clipped by it. The weights that no step changes do not count."""
    [norm] = load_file(runs / layout / "norm.safetensors").values()
    assert norm.item() == pytest.approx(expected[LAYOUTS[layout].model].norm.item(), rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_weights_after_a_step_are_those_of_plain_pytorch(
    runs: Path, expected: dict[str, Expected], layout: str
) -> None:
    model = LAYOUTS[layout].model
    merged, base = (load_file(runs / folder / "model.safetensors") for folder in (f"{layout}/merged", model))
    changed = expected[model].merged
    assert most_apart({name: merged[name] for name in changed}, changed) < 1e-5
    others = base.keys() - changed.keys()
    assert all(torch.equal(merged[name], base[name]) for name in others)
    config = json.loads((runs / layout / "merged/config.json").read_text())
    assert config["tie_word_embeddings"] is (HEAD not in MODULES_OF[model]), "the output layer has its own weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_get_the_same_gradients_if_prompts_are_computed_once(runs: Path, layout: str) -> None:
    found, whole = (
        load_file(runs / folder / "prompted.safetensors") for folder in (layout, ALONE[LAYOUTS[layout].model])
    )
    assert most_apart(found, whole) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_restores_the_adapter_exactly(runs: Path, layout: str) -> None:
    trained, resumed = (load_file(runs / layout / f"{name}.safetensors") for name in ("trained", "resumed"))
    assert most_apart(trained, resumed) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_adapters_are_the_same_in_every_layout(runs: Path, layout: str) -> None:
    folders = (layout, ALONE[LAYOUTS[layout].model])
    start, alone = (load_file(runs / folder / "start.safetensors") for folder in folders)
    assert most_apart(start, alone) == 0


@pytest.mark.parametrize("layout", ALONE.values())
def test_new_adapters_are_those_of_peft(runs: Path, layout: str) -> None:
    """A is uniform with Kaiming's bound for a = sqrt(5), and B is 0."""
    start = load_file(runs / layout / "start.safetensors")
    for name, tensor in start.items():
        bound = 0.0 if "lora_B" in name else tensor.shape[1] ** -0.5
        assert 0.8 * bound <= tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


@pytest.fixture
def groups() -> list[Group]:
    return uneven_groups(0)


@pytest.mark.parametrize("layout", ALONE.values())
def test_only_adapters_have_gradients_moments_and_checkpoints(runs: Path, layout: str) -> None:
    base = runs / LAYOUTS[layout].model
    settings = config(runs, LAYOUTS[layout], hf_checkpoint=str(base))
    with learning(base, settings) as learner:
        adapter = learner.adapter()
        if settings.learner.experts_shared_outer_loras:
            assert adapter_elements(settings, in_files=True) == sum(tensor.numel() for tensor in adapter.values())
            adapter = {shared_name(name): tensor for name, tensor in adapter.items()}
        elements = sum(tensor.numel() for tensor in adapter.values())
        assert adapter_elements(settings) == elements
        assert sum(buffer.numel for chunk in learner._model.chunks for buffer in chunk.buffers) == elements
        learner.copy_state(str(runs / f"{layout} kept"))
        [optimizer] = learner._model.inner_optimizers
        assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == elements
    stored = load_tensors_metadata(str(runs / layout / "state/actor"))
    assert {name for name in stored if not name.startswith(("optimizer.", "random."))} == adapter.keys()


@pytest.mark.parametrize("layout", WHOLE)
def test_the_reference_model_is_the_base_without_adapters(
    runs: Path, expected: dict[str, Expected], groups: list[Group], layout: str
) -> None:
    """It shares their memory."""
    model = LAYOUTS[layout].model
    kl = config(runs, LAYOUTS[layout], loss_type="policy_loss", use_kl_loss=True)
    with learning(runs / model, kl) as learner:
        [[step]] = rank_batches(groups, kl, 1)
        [values] = learner._pre_step_values(0, [step])
        assert values.reference is not None
        found = sorted(torch.cat(values.reference).tolist())
        assert found == pytest.approx(sorted(itertools.chain.from_iterable(expected[model].logprobs)), abs=1e-5)
        assert learner._reference is not None
        assert learner._reference.chunks is learner._model.chunks
        report = learner.train(0, [step])
    assert abs(report.metrics["kl"]) > 1e-3, "the adapter changes the policy"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_continues_exactly(runs: Path, tmp_path: Path, groups: list[Group], precision: str) -> None:
    settings = config(runs, LAYOUTS["one rank"], precision=precision)
    [[step]] = rank_batches(groups, settings, 1)
    with learning(runs / "base", settings) as unbroken:
        unbroken.train(0, [step])
        save_state(unbroken, tmp_path)
        unbroken.train(1, [step])
        expected = unbroken.adapter()
    with learning(runs / "base", config(runs, LAYOUTS["one rank"], lora_load=None, precision=precision)) as resumed:
        resumed.load_state(str(tmp_path))
        resumed.train(1, [step])
        assert most_apart(resumed.adapter(), expected) == 0


def test_a_checkpoint_with_shared_matrices_is_read_in_another_layout(runs: Path) -> None:
    written = runs / "shared matrices, expert, sequence and data parallel"
    with learning(runs / "shared", config(runs, LAYOUTS[ALONE["shared"]], lora_load=None)) as learner:
        learner.load_state(str(written / "state"))
        assert most_apart(learner.adapter(), load_file(written / "trained.safetensors")) == 0


def test_an_adapter_whose_experts_share_nothing_is_refused(runs: Path) -> None:
    settings = config(runs, LAYOUTS[ALONE["shared"]], lora_load=str(runs / "experts adapter"))
    with (
        pytest.raises(UserError, match=r"do not share .* unset experts_shared_outer_loras"),
        learning(runs / "shared", settings),
    ):
        pass


def test_a_batch_that_is_not_finite_leaves_the_adapter_unchanged(runs: Path, groups: list[Group]) -> None:
    settings = config(runs, LAYOUTS["one rank"], loss_type="policy_loss", num_steps_per_rollout=3)
    broken = uneven_groups(0)
    broken[-1][0].reward = float("nan")
    with learning(runs / "base", settings) as learner:
        before = learner.adapter()
        [steps] = rank_batches(broken, settings, 1)
        assert not learner.train(0, steps).finite
        assert most_apart(learner.adapter(), before) == 0


def test_dropout_acts_on_gradients_only(runs: Path, groups: list[Group]) -> None:
    plain, dropping = (config(runs, LAYOUTS["one rank"], lora_dropout=fraction) for fraction in (0.0, 0.5))
    tokens = [sample.tokens for group in groups for sample in group]
    [[step]] = rank_batches(groups, plain, 1)
    found = []
    for settings in (plain, dropping):
        with learning(runs / "base", settings) as learner:
            found.append((learner.logprobs(tokens), gradients_of(learner, step)))
    (logprobs, gradients), (same_logprobs, other_gradients) = found
    assert logprobs == same_logprobs
    assert most_apart(gradients, other_gradients) > 1e-3


def test_dropout_does_not_move_engines_and_learner_apart(tiny: Path, groups: list[Group]) -> None:
    """Engines sample without it, so log-probabilities of the policy before the step are compared without it."""
    gaps = []
    for fraction in (0.0, 0.5):
        settings = run_config(lora_rank=4, lora_dropout=fraction)
        [steps] = rank_batches(groups, settings, 1)
        with learning(tiny, settings) as learner:
            with torch.no_grad():
                for parameter in learner._model.chunks[0].parameters():
                    parameter.add_(0.05 if parameter.requires_grad else 0.0)
            gaps.append(learner.train(0, steps).metrics["logprob_gap_mean"])
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-6)


def test_an_exported_adapter_is_what_a_run_can_start_from(runs: Path, tmp_path: Path) -> None:
    """Also if it replaces an earlier one."""
    rslora = {"lora_type": "rslora", "lora_alpha": ADAPTER.scale * ADAPTER.rank**0.5}
    settings = config(runs, LAYOUTS["one rank"], **rslora)
    with learning(runs / "base", settings) as learner:
        for _ in range(2):
            learner.copy_state(None, str(tmp_path / "exported")).write()
        expected = learner.adapter()
    assert read_config(tmp_path / "exported") == ADAPTER
    again = config(runs, LAYOUTS["one rank"], lora_load=str(tmp_path / "exported"))
    with learning(runs / "base", again) as learner:
        assert most_apart(learner.adapter(), expected) == 0


def test_weights_may_be_bfloat16_and_adapters_float32(runs: Path, groups: list[Group]) -> None:
    settings = config(runs, LAYOUTS["one rank"], precision="bf16", lr=0.001)
    [[step]] = rank_batches(groups, settings, 1)
    with learning(runs / "base", settings) as learner:
        losses = [learner.train(number, [step]).metrics["loss"] for number in range(4)]
        assert {tensor.dtype for tensor in learner.adapter().values()} == {torch.float32}
        assert {tensor.dtype for _, tensor in learner.weights()} == {torch.bfloat16}
    assert losses[-1] < losses[0] - 0.01


def run_layouts(process: int, folder: Path, ports: dict[str, tuple[int, int]]) -> None:
    for name, rank in layouts_by_process({name: layout.ranks for name, layout in LAYOUTS.items()})[process]:
        learn(folder, name, rank, ports[name])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for layout_name in LAYOUTS:
        (folder / layout_name).mkdir()
    claimed = {name: (claim_port(), claim_port()) for name in LAYOUTS}
    fork_ranks(4, run_layouts, folder, {name: (one.number, other.number) for name, (one, other) in claimed.items()})
