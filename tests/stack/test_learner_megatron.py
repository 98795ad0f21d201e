"""One rank of the real Megatron learner, in this process."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from miles_async.adapters.megatron.model.factory import MegatronModel, TrainedModel
from miles_async.adapters.megatron.model.tiny_model import EOS_ID, byte_tokenizer, create_tiny_model
from miles_async.adapters.megatron.training import micro_batches
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import PackedBatch, TrainStep, policy_steps
from miles_async.config.schema import Algorithm, Rollout, TinyModel
from miles_async.types import Group, Sample, VersionSpan
from tests.configuration import run_config
from tests.stack.learning import learning, weights_of

SHAPE = TinyModel(num_layers=2, hidden_size=64, ffn_hidden_size=128)
CONFIG = run_config(
    lr=0.001,
    lr_decay_style="constant",
    weight_decay=0.0,
    max_tokens_per_gpu=400,
    eps_clip=0.01,
    loss_aggregation="token_mean",
    off_policy_correction="tis",
    kl_loss_coef=0.001,
    kl_loss_type="k3",
)
TEMPERATURE = 0.7
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LENGTHS = (5, 17, 40, 16, 300, 9, 3, 1, 31, 270)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    create_tiny_model(SHAPE, path, seed=1)
    return path


@pytest.fixture
def learner(tiny: Path) -> Iterator[MegatronLearner]:
    with learning(tiny, CONFIG) as learner:
        yield learner


def token_lists(seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def batch(*, poison: bool = False) -> list[Group]:
    """Four groups of two samples with made-up rewards; the engines' log-probabilities are made up too."""
    draw = random.Random(3)
    groups = []
    for g in range(4):
        samples = [
            Sample(
                index=2 * g + i,
                tokens=[draw.randrange(256) for _ in range(9 + g)],
                response_length=4,
                rollout_log_probs=[-5.0 - draw.random() for _ in range(4)],
                reward=float("nan") if poison and g == 3 else float(i),
            )
            for i in range(2)
        ]
        groups.append(Group(samples))
    return groups


def shares(groups: list[Group], *, steps: int = 1) -> list[TrainStep]:
    config = run_config(num_steps_per_rollout=steps, max_tokens_per_gpu=64, grpo_std_normalization=False)
    [own] = policy_steps(groups, config, ranks=1)
    return own


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hf_logprobs(path: Path, tokens: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0].tolist()


def test_packed_logprobs_are_those_of_hugging_face_one_sequence_at_a_time(learner: MegatronLearner, tiny: Path) -> None:
    for tokens, logprobs in zip(token_lists(), learner.logprobs(token_lists()), strict=True):
        assert logprobs == pytest.approx(hf_logprobs(tiny, tokens), abs=2e-6)


def test_exported_weights_equal_the_loaded_ones(learner: MegatronLearner, tiny: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    exported = weights_of(learner)
    assert set(state) - set(exported) == {"lm_head.weight"}, "tied to the embedding"
    assert all(torch.equal(tensor, state[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("rope", [PLAIN, LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_a_llama_with_an_untied_output_head_agrees_with_hugging_face(tmp_path: Path, rope: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rope_parameters=rope,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokens = token_lists()[4]
    with learning(tmp_path / "llama", CONFIG) as learner:
        [logprobs] = learner.logprobs([tokens])
        assert "lm_head.weight" in weights_of(learner)
    assert logprobs == pytest.approx(hf_logprobs(tmp_path / "llama", tokens), abs=5e-6)


def test_a_mixtral_agrees_with_hugging_face_before_and_after_a_step(tmp_path: Path) -> None:
    """Llama's layers with experts, whose weights add up to 1."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    byte_tokenizer().save_pretrained(tmp_path / "mixtral")
    tokens = token_lists()[2]
    with learning(tmp_path / "mixtral", CONFIG) as learner:
        before, weights = learner.logprobs([tokens])[0], weights_of(learner)
        assert learner.train(0, shares(batch())).finite
        after, moved = learner.logprobs([tokens])[0], weights_of(learner)
        learner.save_hf(str(tmp_path / "saved"))
    assert before == pytest.approx(hf_logprobs(tmp_path / "mixtral", tokens), abs=2e-6)
    assert after == pytest.approx(hf_logprobs(tmp_path / "saved", tokens), abs=2e-6)
    assert not any(torch.equal(moved[name], tensor) for name, tensor in weights.items() if "experts" in name)


def test_one_step_raises_the_probability_of_what_was_rewarded(learner: MegatronLearner) -> None:
    groups = batch()
    before = learner.logprobs([sample.tokens for group in groups for sample in group])
    report = learner.train(0, shares(groups))
    after = learner.logprobs([sample.tokens for group in groups for sample in group])
    change = [sum(new[-4:]) - sum(old[-4:]) for new, old in zip(after, before, strict=True)]
    assert report.finite
    assert report.seconds > 0
    assert report.tokens == sum(len(sample.tokens) for group in groups for sample in group)
    assert all(rewarded > plain for plain, rewarded in zip(change[::2], change[1::2], strict=True))
    gaps = [
        abs(old - rollout)
        for group, logprobs in zip([s for g in groups for s in g], before, strict=True)
        for old, rollout in zip(logprobs[-4:], group.rollout_log_probs, strict=True)
    ]
    assert report.metrics["logprob_gap_mean"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert report.metrics["logprob_gap_max"] == pytest.approx(max(gaps), abs=1e-5)
    assert report.metrics["clip_fraction"] == 0


def test_three_steps_move_the_weights_as_the_same_loss_and_adamw_do_on_hugging_faces_model(tiny: Path) -> None:
    [step] = shares(batch())
    warmer = CONFIG.model_copy(update={"rollout": Rollout(rollout_temperature=TEMPERATURE)})
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    settings = CONFIG.learner
    betas = settings.adam_beta1, settings.adam_beta2
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=betas, weight_decay=0.0)
    with learning(tiny, warmer) as learner:
        for rollout in range(3):
            report = learner.train(rollout, [step])
            optimizer.zero_grad()
            losses = [reference_loss(model, packed) for packed in step.micro_batches]
            loss = torch.stack(losses).sum() / step.total_tokens
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
            optimizer.step()
            assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert report.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        expected = dict(model.named_parameters())
        # Adam divides a gradient by its own size. Where it is almost 0, rounding moves a weight by a part of the rate.
        differences = [(tensor - expected[name]).abs() for name, tensor in learner.weights()]
        assert max(difference.max().item() for difference in differences) < 0.2 * settings.lr
        assert torch.cat([difference.flatten() for difference in differences]).mean() < 1e-7


@pytest.mark.parametrize("where", ["train", "infer"])
def test_padded_rows_learn_what_packed_sequences_do(tiny: Path, where: str) -> None:
    """Two steps, so that log-probabilities from before the first are laid out for themselves."""

    def learned(**layout: object) -> tuple[dict[str, float], float, list[list[float]]]:
        run = CONFIG.model_copy(
            update={"learner": CONFIG.learner.model_copy(update={"num_steps_per_rollout": 2, **layout})}
        )
        [steps] = policy_steps(batch(), run, ranks=1)
        with learning(tiny, run) as learner:
            report = learner.train(0, steps)
            return dict(report.metrics), report.tokens, learner.logprobs(token_lists()[:4])

    rows = {f"use_dynamic_batching_in_{where}": True, f"max_tokens_per_microbatch_in_{where}": 48}
    packed, tokens, plain = learned()
    padded, same_tokens, same = learned(**rows, **{f"sequence_length_round_in_{where}": 8})
    assert same_tokens == tokens, "padding is not counted"
    assert (padded["padding"] > 1.1) is (where == "train")
    for name in ("loss", "grad_norm", "entropy", "clip_fraction", "logprob_gap_mean"):
        assert padded[name] == pytest.approx(packed[name], rel=1e-4, abs=1e-5)
    for one, other in zip(same, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_the_reference_model_has_separate_micro_batches(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[type[Any], list[int]] = {}
    run_schedule = micro_batches._run_schedule

    def counted(model: MegatronModel, inputs: Sequence[micro_batches.ModelInput], *args: Any, **how: Any) -> None:
        asked[type(model)] = [len(one.tokens) for one in inputs]
        run_schedule(model, inputs, *args, **how)

    monkeypatch.setattr(micro_batches, "_run_schedule", counted)
    algorithm = CONFIG.algorithm.model_copy(update={"use_kl_loss": True})
    rows = {"ref_use_dynamic_batching_in_infer": True, "ref_sequence_length_round_in_infer": 8}
    distances = []
    for limits in ({}, rows | {"ref_max_tokens_per_microbatch_in_infer": 32}):
        learner_settings = CONFIG.learner.model_copy(update=limits)
        with learning(tiny, CONFIG.model_copy(update={"algorithm": algorithm, "learner": learner_settings})) as it:
            distances.append([it.train(rollout, shares(batch())).metrics["kl"] for rollout in range(2)])
        assert (asked[MegatronModel] == asked[TrainedModel]) is not bool(limits)
    assert max(asked[MegatronModel]) <= 32 < max(asked[TrainedModel])
    assert distances[0] == pytest.approx(distances[1], abs=1e-5)


def test_the_reference_model_keeps_the_initial_weights(tiny: Path) -> None:
    algorithm = CONFIG.algorithm.model_copy(update={"use_kl_loss": True})
    with learning(tiny, CONFIG.model_copy(update={"algorithm": algorithm})) as learner:
        distances = [learner.train(rollout, shares(batch())).metrics["kl"] for rollout in range(3)]
    assert distances[0] == pytest.approx(0, abs=1e-6)
    assert distances[0] < distances[1] < distances[2]


def test_metrics_distinguish_tokens_by_their_staleness(learner: MegatronLearner) -> None:
    groups = batch()
    for group in groups[:1]:
        for sample in group:
            sample.spans = [VersionSpan(4, 0, 1), VersionSpan(6, 1, 4)]
    for group in groups[1:]:
        for sample in group:
            sample.spans = [VersionSpan(6, 0, 4)]
    learner.version = 6
    metrics = learner.train(0, shares(groups)).metrics
    assert metrics["token_share_staleness_2"] == pytest.approx(2 / 32)
    assert metrics["token_share_staleness_0"] == pytest.approx(30 / 32)
    assert "ess_staleness_1" not in metrics


def reference_loss(model: torch.nn.Module, packed: PackedBatch) -> torch.Tensor:
    """The policy loss, sequence by sequence and token by token: minus weight times advantage times log-probability."""
    total = torch.zeros(())
    targets = zip(packed.targets, packed.columns["rollout_log_probs"], packed.advantages, strict=True)
    ends = packed.lengths.cumsum()
    for target, rollout, advantage in targets:
        start, end = next((end - length, end) for end, length in zip(ends, packed.lengths, strict=True) if target < end)
        tokens = torch.from_numpy(packed.tokens[start:end])
        logits = model(tokens[None]).logits[0, target - start - 1]
        logprob = (logits / TEMPERATURE).log_softmax(-1)[tokens[target - start]]
        weight = min(2.0, math.exp(logprob.item() - float(rollout)))
        total = total - weight * float(advantage) * (logprob - logprob.detach()).exp()
    return total


def test_later_steps_of_a_batch_measure_their_ratio_from_before_the_first(learner: MegatronLearner) -> None:
    report = learner.train(0, shares(batch()) * 2)
    assert report.metrics["clip_fraction"] > 0, "the second pass over the same samples has moved away"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_second_pass_takes_the_same_optimizer_steps_again(tiny: Path, steps: int) -> None:
    learned = []
    for passes in (1, 2):
        settings = CONFIG.learner.model_copy(update={"passes_per_rollout": passes})
        with learning(tiny, CONFIG.model_copy(update={"learner": settings})) as learner:
            learner.train(0, shares(batch(), steps=steps) * (2 // passes))
            learned.append(weights_of(learner))
    assert same(*learned)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_reward_that_is_not_a_number_leaves_the_weights_unchanged(learner: MegatronLearner, steps: int) -> None:
    before = weights_of(learner)
    poisoned = learner.train(0, shares(batch(poison=True), steps=steps))
    assert not poisoned.finite
    assert same(before, weights_of(learner))
    assert learner.train(1, shares(batch())).finite
    assert not same(before, weights_of(learner))


def test_no_estimator_trains_on_a_reward_that_is_not_finite(learner: MegatronLearner) -> None:
    before = weights_of(learner)
    for estimator in get_args(Algorithm.model_fields["advantage_estimator"].annotation):
        for reward in (math.nan, math.inf, -math.inf):
            groups = batch()
            groups[2][1].reward = reward
            config = run_config(advantage_estimator=estimator)
            [steps] = policy_steps(groups, config, ranks=1)
            assert not learner.train(0, steps).finite, (estimator, reward)
    assert same(before, weights_of(learner))


def test_a_batch_that_fails_in_its_second_step_restores_the_optimizer(tiny: Path) -> None:
    def weights_after(*batches: list[TrainStep]) -> dict[str, torch.Tensor]:
        with learning(tiny, CONFIG) as learner:
            for i, steps in enumerate(batches):
                learner.train(i, steps)
            return weights_of(learner)

    good, failing = shares(batch()), shares(batch(poison=True), steps=2)
    assert same(weights_after(good, failing, good), weights_after(good, good))
    assert same(weights_after(failing, good), weights_after(good))


def test_a_failed_batch_restores_the_step_count_that_fused_optimizers_keep_in_parameter_groups(
    learner: MegatronLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = learner._model.optimizer
    step = optimizer.step
    applied: list[None] = []

    def counted_step() -> Any:
        applied.append(None)
        for group in optimizer.param_groups:
            group["step"] = group.get("step", 0) + 1
        return step()

    monkeypatch.setattr(optimizer, "step", counted_step)
    for batches in (0, 1):
        if batches:
            learner.train(0, shares(batch()))
        learner.train(1, shares(batch(poison=True), steps=2))
        assert {group.get("step", 0) for group in optimizer.param_groups} == {batches}
    assert len(applied) == 3


def test_a_saved_checkpoint_loads_in_transformers_with_its_tokenizer(learner: MegatronLearner, tmp_path: Path) -> None:
    learner.train(0, shares(batch()))
    learner.save_hf(str(tmp_path / "saved"))
    tokens = token_lists()[2]
    assert learner.logprobs([tokens])[0] == pytest.approx(hf_logprobs(tmp_path / "saved", tokens), abs=2e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("1+1") == [49, 43, 49]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"], "no draft is left behind"


def test_greedy_decoding_repeats_what_supervised_steps_taught(learner: MegatronLearner) -> None:
    sft_examples = {b"one": b"1", b"three": b"333"}
    prompts, answers = [list(p) for p in sft_examples], [[*a, EOS_ID] for a in sft_examples.values()]
    losses = [learner.supervised_step(prompts, answers, 5e-3) for _ in range(30)]
    assert losses[-1] < 0.1 < losses[0]
    assert learner.greedy(prompts, 6, EOS_ID) == answers
    assert learner.greedy(prompts, 2, EOS_ID) == [answers[0], answers[1][:2]]


@pytest.mark.parametrize("text", ["12 + 3 =", "  héllo\n\t日本 😀 ", "\x00\x7f", ""])
def test_the_byte_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_seed_makes_the_same_tiny_model(tiny: Path, tmp_path: Path) -> None:
    create_tiny_model(SHAPE, tmp_path / "again", seed=1)
    create_tiny_model(SHAPE, tmp_path / "other", seed=2)
    files = [(path / "model.safetensors").read_bytes() for path in (tiny, tmp_path / "again", tmp_path / "other")]
    assert files[0] == files[1] != files[2]
