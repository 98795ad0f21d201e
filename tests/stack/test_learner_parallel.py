"""Two and four ranks of the real Megatron learner, each a process, must learn what one rank learns.

Run as a script this file is those ranks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from miles_async.adapters.megatron.checkpoint import training_state
from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port
from miles_async.batching.batch import TrainStep, policy_steps, rank_batches
from miles_async.config.schema import RunConfig, TinyModel
from miles_async.models.experts import Qwen3Moe
from miles_async.sampling_mask import SamplingMask
from miles_async.types import Group
from tests.configuration import run_config
from tests.stack.forked_ranks import fork_ranks, layouts_by_process, run_ranks
from tests.stack.learning import create_experts, gradients_of, learning, prompted_groups, save_state, uneven_groups
from tests.stack.pretended_device import pretended_gpu

RANKS = 4


class Layout(NamedTuple):
    model: str
    loss: str
    """A key of `LOSSES`."""
    ranks: int
    settings: dict[str, Any]


M2PO = {"policy_objective": "m2po", "off_policy_correction": "none"}
RETURNS = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.5}
ONLY_ADVANTAGES = {"entropy_coef": 0.0, "use_kl_loss": False}
LOSSES: dict[str, dict[str, Any]] = {"usual": {}, "m2po": M2PO, "returns": RETURNS, "skipping": ONLY_ADVANTAGES}
"""m2po has a bound, and returns have a normalization, over the tokens of all ranks. Without terms other than those of
advantages, ranks skip groups without an advantage, which a rank alone computes."""
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
UNEVEN = PIPELINE | {"decoder_first_pipeline_num_layers": 1}
VIRTUAL = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
ENDS = PIPELINE | {
    "virtual_pipeline_model_parallel_size": 3,
    "megatron_args": dict.fromkeys(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True
    ),
}
NAMED = VIRTUAL | {"megatron_args": {"pipeline_model_parallel_layout": "E|(tt|)*2,L"}}
"""With parts of the pipeline that have no layer."""
CONTEXT = {"context_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FRUGAL = DISTRIBUTED | {"distrib_optim_fully_reshardable_mem_efficient": True}
ROWS = {"use_dynamic_batching_in_infer": True, "sequence_length_round_in_infer": 8}
ALL_ROWS = ROWS | {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 4}
DEALT = SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}
"""Experts are dealt to the tensor-parallel ranks, which otherwise share each of them."""
LAYOUTS = {
    "data parallel": Layout("dense", "usual", 2, {"overlap_grad_reduce": True}),
    "tensor parallel": Layout("dense", "usual", 2, TENSOR),
    "tensor parallel beyond the key and value heads": Layout("dense", "usual", 4, {"tensor_model_parallel_size": 4}),
    "virtual pipeline, context parallel": Layout("dense", "usual", 4, VIRTUAL | CONTEXT),
    "virtual pipeline whose ends count as layers": Layout("dense", "usual", 2, ENDS),
    "virtual pipeline by a layout": Layout("dense", "usual", 2, NAMED),
    "m2po, distributed optimizer": Layout("dense", "m2po", 2, DISTRIBUTED),
    "returns, context and data parallel, in rows": Layout("dense", "returns", 4, CONTEXT | ROWS),
    "skipping, virtual pipeline, in rows": Layout("dense", "skipping", 2, VIRTUAL | ALL_ROWS),
    "skipping, tensor, sequence and context parallel": Layout("dense", "skipping", 4, SEQUENCE | CONTEXT),
    "expert parallel, pipeline": Layout("experts", "usual", 4, EXPERT | PIPELINE),
    "experts dealt to tensor-parallel ranks, pipeline": Layout("experts", "usual", 4, DEALT | PIPELINE),
    "experts shared and dealt": Layout("experts", "usual", 4, SEQUENCE | EXPERT),
    "skipping, expert and context parallel": Layout("experts", "skipping", 4, EXPERT | CONTEXT),
}
"""Each two ways to divide the work are in a layout together."""
ALONE = {
    f"{model}, {loss}, one rank": Layout(model, loss, 1, {})
    for model, loss in dict.fromkeys((layout.model, layout.loss) for layout in LAYOUTS.values())
}
"""What the layouts are compared with."""
TOGETHER = {f"{model}, one rank, prefixes shared": Layout(model, "usual", 1, {}) for model in ("dense", "experts")}
BF16 = {"precision": "bf16", "moe_router_dtype": "fp32"}
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
MIXED = {
    "bf16, one rank": Layout("dense", "usual", 1, BF16),
    "bf16, distributed optimizer": Layout("dense", "usual", 2, BF16 | FRUGAL | OVERLAPPED),
    "bf16, offloaded optimizer": Layout("dense", "usual", 2, BF16 | OFFLOADED),
    "bf16, pipeline and context parallel": Layout("dense", "usual", 4, BF16 | UNEVEN | CONTEXT),
    "bf16, experts shared and dealt": Layout("experts", "usual", 4, BF16 | SEQUENCE | EXPERT),
}
"""With weights and activations in bfloat16, which gloo carries too."""
WHOLE = {"share_prefixes": False}
AUXILIARY = {
    "auxiliary loss, one rank": Layout("experts", "usual", 1, WHOLE),
    "auxiliary loss, experts shared and dealt": Layout("experts", "usual", 4, WHOLE | SEQUENCE | EXPERT),
    "auxiliary loss, expert and context parallel, pipeline": Layout(
        "experts", "usual", 4, WHOLE | EXPERT | CONTEXT | PIPELINE
    ),
}
"""With a z-loss of the routers, whose mean over tokens does not depend on how the tokens are divided."""
ALL = LAYOUTS | ALONE | TOGETHER | MIXED | AUXILIARY
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


def config(root: Path, layout: Layout) -> RunConfig:
    # Adam's first step divides each gradient by its own size, rounding errors included: where a gradient is almost
    # nothing the ranks may differ by a share of the learning rate.
    other_terms = {"entropy_coef": 0.01, "use_kl_loss": True, "ref_load": str(root / f"{layout.model} reference")}
    other_terms |= {"kl_loss_coef": 0.001, "kl_loss_type": "k3", "off_policy_correction": "tis"}
    return run_config(
        lr=0.0001,
        max_tokens_per_gpu=40,
        actor_num_gpus_per_node=layout.ranks,
        grpo_std_normalization=False,
        **other_terms | LOSSES[layout.loss] | layout.settings,
    )


def masked_groups() -> list[Group]:
    """`uneven_groups` with up to 40 kept tokens for each response token."""
    groups, draw = uneven_groups(0), random.Random(4)
    for sample in (sample for group in groups for sample in group):
        sample.sampling_mask = SamplingMask.from_rows(
            [[token, *(i for i in draw.sample(range(256), draw.randrange(40)) if i != token)]
             for token in sample.tokens[sample.prompt_length :]]
        )  # fmt: skip
        sample.rollout_log_probs = [-1.5 - draw.random() for _ in sample.rollout_log_probs]
    return groups


def groups_without_advantage(count: int) -> list[Group]:
    """`uneven_groups` in which the last `count` groups have equal rewards."""
    groups = uneven_groups(0)
    for sample in (sample for group in groups[-count:] for sample in group):
        sample.reward = 1.0
    return groups


def even_groups() -> list[Group]:
    """`uneven_groups` with samples of one length, so that no layout needs padding, which routers would process too."""
    groups = uneven_groups(0)
    for sample in (sample for group in groups for sample in group):
        sample.tokens = (list(sample.tokens) * 3)[:8]
        sample.response_length, sample.rollout_log_probs = 3, sample.rollout_log_probs[:3]
    return groups


def steps_of(name: str, settings: RunConfig) -> list[list[TrainStep]]:
    """The optimizer steps of each rank of a layout."""
    layout = ALL[name]
    if name in AUXILIARY:
        return rank_batches(even_groups(), settings, layout.ranks)
    if layout.loss != "skipping":
        return rank_batches(uneven_groups(0), settings, layout.ranks)
    groups = groups_without_advantage(2)
    if layout.ranks == 1:
        return policy_steps(groups, settings, ranks=1, computes_all=True)
    return rank_batches(groups, settings, layout.ranks)


def learn(root: Path, name: str, rank: int, port: int) -> None:
    """Trains batches; rank 0 writes the observable results to files."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if name in AUXILIARY:
            usual = Qwen3Moe.transformer_config
            patch.setattr(Qwen3Moe, "transformer_config", lambda *given: usual(*given) | {"moe_z_loss_coeff": 0.1})
        with pretended_gpu() if ALL[name].settings.keys() & OFFLOADED.keys() else nullcontext():
            _learn(root, name, rank, port)


def _learn(root: Path, name: str, rank: int, port: int) -> None:
    layout, out = ALL[name], root / name
    settings, ranks = config(root, layout), layout.ranks
    learner = MegatronLearner(settings, str(root / layout.model), rank, ranks, "127.0.0.1", port)
    steps = steps_of(name, settings)[rank]
    sequences = [sample.tokens for group in uneven_groups(0) for sample in group]
    before = learner.logprobs(sequences)
    greedy = learner.greedy(PROMPTS, 2, eos=256)
    # Only one rank alone computes every sample as a whole; the others are compared with it.
    prompted = rank_batches(prompted_groups(0), settings, ranks, share_prefixes=name not in ALONE)[rank]
    masked = rank_batches(masked_groups(), settings, ranks)[rank]
    further = {"prompted": prompted, "masked": masked} if name in LAYOUTS | ALONE | TOGETHER else {}
    batches = {"gradients": steps} | further
    gradients = {batch: gradients_of(learner, its_steps[0]) for batch, its_steps in batches.items()}
    with counted_gathers() as gathers:
        report = learner.train(0, steps)
    if layout.loss == "skipping":
        # Nothing changes, not even by the momentum of the step before.
        learner.train(1, rank_batches(groups_without_advantage(3), settings, ranks)[rank])
    states = [state for optimizer in learner._model.optimizer.chained_optimizers for state in optimizer.state.values()]
    moments = sum(state["exp_avg"].numel() for state in states)
    after = learner.logprobs(sequences)
    learner.save_hf(str(out / "saved"))
    save_state(learner, out / "state")
    with redirect_cuda_to_cpu():
        gathered = training_state._sharded_state(learner._model, is_loading=False)[1]
    shards = training_state._flatten_shards("optimizer", gathered).values()
    (out / f"gathered.{rank}").write_text(str(sum(shard.data.nbytes for shard in shards)))
    of_masked = learner.train(2, masked)
    learner.close()
    if rank == 0:
        for batch, its_gradients in gradients.items():
            save_file(its_gradients, out / f"{batch}.safetensors")
        metrics = {"metrics": dict(report.metrics), "of_masked": dict(of_masked.metrics)}
        seen = {"logprobs": before, "after": after, "greedy": greedy, "moments": moments, "gathers": gathers}
        (out / "facts.json").write_text(json.dumps(metrics | seen))


@contextmanager
def counted_gathers() -> Iterator[list[bool]]:
    """Whether each gather of weights went on beside other work."""
    gathers: list[bool] = []
    usual = _ParamAndGradBucketGroup.start_param_sync

    def counted(group: Any, *args: Any, **options: Any) -> None:
        usual(group, *args, **options)
        gathers.append(group.param_gather_handle is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ParamAndGradBucketGroup, "start_param_sync", counted)
        yield gathers


def facts(out: Path) -> dict[str, Any]:
    return json.loads((out / "facts.json").read_text())


def most_apart(found: Path, expected: Path) -> float:
    ours, theirs = load_file(found), load_file(expected)
    assert ours.keys() == theirs.keys()
    return max((tensor - theirs[name]).abs().max().item() for name, tensor in ours.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout; the same four processes run all of them."""
    root = tmp_path_factory.mktemp("parallel")
    for seed, suffix in ((1, ""), (2, " reference")):
        create_tiny_model(
            TinyModel(num_layers=4, hidden_size=64, ffn_hidden_size=128), root / f"dense{suffix}", seed=seed
        )
        create_experts(root / f"experts{suffix}", seed)
    with run_ranks("tests.stack.test_learner_parallel", root):
        pass
    return root


def compared_with(layout: Layout) -> str:
    """The same model and loss on one rank."""
    return f"{layout.model}, {layout.loss}, one rank"


def test_each_two_ways_to_divide_the_work_are_in_a_layout_together() -> None:
    sizes = ("tensor", "pipeline", "context", "expert", "data")
    together = set[tuple[str, str]]()
    for layout in LAYOUTS.values():
        divided = {name for name in sizes[:4] for setting in layout.settings if setting.startswith(f"{name}_")}
        if 2 ** len(divided - {"expert"}) < layout.ranks:
            divided.add("data")
        together |= set(permutations(divided, 2))
    assert together == set(permutations(sizes, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_ranks_compute_the_gradients_and_weights_of_one_rank(runs: Path, layout: str) -> None:
    found, expected = runs / layout, runs / compared_with(LAYOUTS[layout])
    assert most_apart(found / "gradients.safetensors", expected / "gradients.safetensors") < 1e-5
    assert most_apart(found / "saved/model.safetensors", expected / "saved/model.safetensors") < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS | TOGETHER)
def test_gradients_are_the_same_if_prompts_are_computed_once(runs: Path, layout: str) -> None:
    expected = runs / compared_with((LAYOUTS | TOGETHER)[layout]) / "prompted.safetensors"
    largest = max(tensor.abs().max().item() for tensor in load_file(expected).values())
    assert most_apart(runs / layout / "prompted.safetensors", expected) < 1e-5 * largest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_ranks_compute_the_probabilities_and_answers_of_one_rank(runs: Path, layout: str) -> None:
    expected, found = facts(runs / compared_with(LAYOUTS[layout])), facts(runs / layout)
    for logprobs, reference in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert logprobs == pytest.approx(reference, abs=1e-5)
    assert found["greedy"] == expected["greedy"]


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.loss != "skipping"])
def test_parallel_ranks_compute_the_metrics_of_one_rank(runs: Path, layout: str) -> None:
    of_the_layout = {"micro_batches", "micro_batches_lower_bound", "flop_imbalance", "memory_gib", "padding"}
    ours, theirs = (
        {name: value for name, value in facts(runs / folder)["metrics"].items() if name not in of_the_layout}
        for folder in (layout, compared_with(LAYOUTS[layout]))
    )
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_data_parallel_ranks_select_the_tokens_that_one_rank_selects(runs: Path) -> None:
    shared, excluded = (
        facts(runs / folder)["metrics"]["clip_fraction"]
        for folder in ("m2po, distributed optimizer", "dense, m2po, one rank")
    )
    assert 0 < excluded < 1
    assert shared == pytest.approx(excluded)


@pytest.mark.parametrize("layout", AUXILIARY)
def test_parallel_ranks_add_an_auxiliary_loss_at_the_scale_of_one_rank(runs: Path, layout: str) -> None:
    alone = runs / "auxiliary loss, one rank"
    assert most_apart(runs / layout / "gradients.safetensors", alone / "gradients.safetensors") < 1e-5
    router = load_file(alone / "gradients.safetensors")["model.layers.0.mlp.gate.weight"]
    usual = load_file(runs / "experts, usual, one rank/gradients.safetensors")["model.layers.0.mlp.gate.weight"]
    assert (router - usual).abs().max() > 1e-3, "the loss is large enough to be seen"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_ranks_renormalize_over_the_kept_tokens_like_one_rank(runs: Path, layout: str) -> None:
    """With samples that top-p or top-k sampling drew."""
    found, expected = runs / layout, runs / compared_with(LAYOUTS[layout])
    assert most_apart(found / "masked.safetensors", expected / "masked.safetensors") < 1e-5
    ours, theirs = facts(found)["of_masked"], facts(expected)["of_masked"]
    of_reference = [] if LAYOUTS[layout].loss == "skipping" else ["kl"]
    for name in ("loss", "entropy", "logprob_gap_mean", "logprob_gap_max", "grad_norm", *of_reference):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.loss == "skipping"])
def test_parallel_ranks_that_skip_samples_learn_what_one_rank_learns_from_all(runs: Path, layout: str) -> None:
    """Gradients and weights are compared above."""
    ours, theirs = facts(runs / layout)["metrics"], facts(runs / compared_with(LAYOUTS[layout]))["metrics"]
    assert ours["computed_fraction"] < 0.5
    assert theirs["computed_fraction"] == 1
    for name in ("loss", "loss_tokens", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("layout", MIXED)
def test_ranks_in_bfloat16_compute_nearly_the_gradients_of_one_rank_in_float32(runs: Path, layout: str) -> None:
    ours, theirs = (load_file(runs / name / "gradients.safetensors") for name in (layout, compared_with(MIXED[layout])))
    assert ours.keys() == theirs.keys()
    apart = sum((ours[name].float() - tensor).square().sum().item() for name, tensor in theirs.items())
    whole = sum(tensor.square().sum().item() for tensor in theirs.values())
    assert apart < 0.03**2 * whole


def test_a_checkpoint_in_bfloat16_restores_float32_weights_in_another_layout(runs: Path) -> None:
    run = config(runs, MIXED["bf16, one rank"])
    full = load_file(runs / "dense, usual, one rank/saved/model.safetensors")
    for layout in ("bf16, distributed optimizer", "bf16, offloaded optimizer", "bf16, pipeline and context parallel"):
        saved = load_file(runs / layout / "saved/model.safetensors")
        with learning(runs / "dense", run) as learner:
            learner.load_state(str(runs / layout / "state"))
            assert all(torch.equal(tensor, saved[name]) for name, tensor in learner.weights())
            with torch.no_grad():
                for chunk in learner._model.chunks:
                    for parameter in chunk.parameters():
                        assert torch.equal(parameter.main_param.bfloat16(), parameter)
                        # What is exported next is in float32.
                        parameter.data = parameter.main_param
            own = dict(learner.weights())
        # Next to 1 a step of the learning rate, 0.0001, is there in float32 and not in bfloat16.
        norm = "model.norm.weight"
        assert (saved[norm] == 1).all()
        assert (own[norm] - full[norm]).abs().mean() < 2e-5 < (own[norm] - 1).abs().mean()


def test_transformers_agrees_with_a_checkpoint_of_pipeline_stages_and_shared_experts(runs: Path) -> None:
    """Engines load such files in `test_weight_transports.py`, where they agree with transformers."""
    trained, given = runs / "expert parallel, pipeline", runs / "experts"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (trained / "saved", given))
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in one.items()} for one in (ours, theirs)]
    assert shapes[0] == shapes[1]
    model = AutoModelForCausalLM.from_pretrained(trained / "saved", dtype=torch.float32)
    for group, expected in zip(uneven_groups(0), facts(trained)["after"][::4], strict=True):
        tokens = torch.tensor(group[0].tokens)
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        assert logprobs.gather(1, tokens[1:, None])[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_distributed_optimizer_shards_its_moments_over_the_ranks(runs: Path) -> None:
    parts, all_of_them = facts(runs / "m2po, distributed optimizer"), facts(runs / "data parallel")
    assert parts["moments"] == pytest.approx(all_of_them["moments"] / 2, rel=0.05)


def test_weights_are_gathered_beside_the_forward_pass_if_that_is_asked_for(runs: Path) -> None:
    """The first forward pass after a step gathers them, and after the last step they are gathered at once."""
    beside = facts(runs / "bf16, distributed optimizer")["gathers"]
    assert beside[-1] is False
    assert True in beside
    assert not any(facts(runs / "m2po, distributed optimizer")["gathers"])


def test_one_rank_holds_the_optimizer_state_of_a_checkpoint_if_it_is_asked_for(runs: Path) -> None:
    def gathered(layout: str) -> list[int]:
        """Bytes that each rank holds."""
        return [int((runs / layout / f"gathered.{rank}").read_text()) for rank in range(2)]

    on_all, on_one = gathered("m2po, distributed optimizer"), gathered("bf16, distributed optimizer")
    assert on_all == on_one[:1] * 2
    assert on_one[1] == 0


def test_one_rank_resumes_a_checkpoint_of_two_data_parallel_ranks(runs: Path) -> None:
    expected = load_file(runs / "data parallel/saved/model.safetensors")
    run = config(runs, ALONE["dense, usual, one rank"])
    with learning(runs / "dense", run) as learner:
        learner.load_state(str(runs / "data parallel" / "state"))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in learner.weights())
        [steps] = rank_batches(uneven_groups(0), run, 1)
        assert learner.train(1, steps).finite


def run_layouts(process: int, root: Path, ports: dict[str, int]) -> None:
    for name, rank in layouts_by_process({name: layout.ranks for name, layout in ALL.items()})[process]:
        learn(root, name, rank, ports[name])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for layout_name in ALL:
        (folder / layout_name).mkdir()
    # Some of the ports are used a minute later, and other tests must not take them meanwhile.
    claimed = {name: claim_port() for name in ALL}
    fork_ranks(RANKS, run_layouts, folder, {name: port.number for name, port in claimed.items()})
