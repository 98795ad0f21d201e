"""Models that plug-ins describe must compute what transformers and SGLang compute, in every parallel layout.

Run as a script this file is the ranks of the layouts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from miles_async.adapters.megatron.model.hf_weights import WeightConverter
from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.sglang.launch import EngineServer, EngineSpec
from miles_async.adapters.system.network_ports import claim_port, free_port
from miles_async.adapters.weights.engine import call_engine
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.models.plugin import MODELS
from tests.configuration import run_config
from tests.plugin_packages import install_plugin
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import learning, uneven_groups
from tests.waiting import PATIENCE_SECONDS
from workers.learner import LearnerRank

SIZES: dict[str, Any] = {
    "vocab_size": 319,  # two tensor-parallel ranks pad it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "tensor and sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
SEQUENCES = [list(sample.tokens) for group in uneven_groups(0) for sample in group]
PLUGIN = "from miles_async.models.plugin import *\n\nclass Mistral(ModelPlugin):\n"


def gemma(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | {"head_dim": 16, "hidden_act": "gelu", "bos_token_id": None, "eos_token_id": 256}
    return GemmaForCausalLM(GemmaConfig(**sizes | changes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | {"tie_word_embeddings": True} | changes))


def experts_that_do_not_add_up_to_one() -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts | {"head_dim": 8}))


def save(model: PreTrainedModel, path: Path) -> Path:
    """Give every weight a random value, also norms and biases, which transformers initializes to constants."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def hf_logprobs(path: Path, sequences: list[list[int]]) -> list[list[float]]:
    model, result = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for tokens in sequences:
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        result.append(logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    return result


def same_files(one: Path, other: Path) -> bool:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def compute(learner: MegatronLearner, run: RunConfig, out: Path, rank: int = 0, ranks: int = 1) -> None:
    """Write the log-probabilities and the checkpoint before and after an optimizer step to `out`."""
    learner.save_hf(str(out / "exported"))
    before = learner.logprobs(SEQUENCES)
    assert learner.train(0, rank_batches(uneven_groups(0), run, ranks)[rank]).finite
    after = learner.logprobs(SEQUENCES)
    learner.save_hf(str(out / "trained"))
    if rank == 0:
        (out / "logprobs.json").write_text(json.dumps({"before": before, "after": after}))


def assert_computed(out: Path, checkpoint: Path) -> None:
    """The results in `out` are those of transformers for the checkpoint and for the trained weights."""
    found = json.loads((out / "logprobs.json").read_text())
    assert same_files(out / "exported", checkpoint)
    assert_close(found["before"], hf_logprobs(checkpoint, SEQUENCES))
    assert not same_files(out / "trained", checkpoint)
    assert_close(found["after"], hf_logprobs(out / "trained", SEQUENCES))


TESTED: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma": gemma,
    "gemma, approximate GELU, untied": partial(gemma, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=False),
    "qwen2": qwen2,
    "qwen2, untied": partial(qwen2, tie_word_embeddings=False),
    "qwen3_moe": experts_that_do_not_add_up_to_one,
}


@pytest.mark.parametrize("name", TESTED)
def test_a_model_agrees_with_transformers_before_and_after_a_step(tmp_path: Path, name: str) -> None:
    checkpoint, run = save(TESTED[name](), tmp_path / "model"), run_config(lr=0.001, max_tokens_per_gpu=60)
    with learning(checkpoint, run) as learner:
        compute(learner, run, tmp_path / "out")
    assert_computed(tmp_path / "out", checkpoint)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plugins")
    for name, model in {"gemma": gemma(), "qwen2": qwen2()}.items():
        save(model, root / name)
    with run_ranks("tests.stack.test_model_plugins", root):
        pass
    return root


@pytest.mark.parametrize("name", ["gemma", "qwen2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_agree_with_transformers_and_export_the_loaded_weights(runs: Path, name: str, layout: str) -> None:
    assert_computed(runs / f"{name}, {layout}", runs / name)


async def test_an_engine_agrees_with_a_gemma_whose_weights_every_transport_updates(tmp_path: Path) -> None:
    # Of sizes that SGLang need not pad.
    checkpoint = save(gemma(vocab_size=320, intermediate_size=64), tmp_path / "model")
    run = run_config(lr=0.01, max_tokens_per_gpu=60, check_weight_update_equal=True)
    engine = EngineServer(EngineSpec(name="e0", model_path=str(checkpoint), log_path=tmp_path / "engine.log"))

    async def difference(tokens: list[int]) -> float:
        """The largest difference between the log-probabilities of engine and learner."""
        request = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        answer = call_engine(info, "/generate", request | {"logprob_start_len": 0}, timeout=PATIENCE_SECONDS)
        engine_logprobs = [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]
        [own] = await rank.logprobs([tokens])
        return max(abs(one - other) for one, other in zip(engine_logprobs, own, strict=True))

    rank = LearnerRank(run, 0, 1, tmp_path)
    try:
        info = engine.start()
        await rank.start(str(checkpoint), "127.0.0.1", free_port())
        assert await difference(SEQUENCES[0]) < 1e-4
        await rank.connect([info], {})
        for version, transport in enumerate(("memory", "broadcast", "disk", "disk_delta"), 1):
            await rank.receive_batch(version, [], rank_batches(uneven_groups(version), run, 1)[0])
            assert (await rank.train(version)).finite
            # No other sequence begins with this token, so that nothing is cached under older weights.
            assert await difference([200 + version, *SEQUENCES[0]]) > 1e-3
            await rank.stage(version, [])
            assert (await rank.send(version, "e0", transport)).error is None
            assert await difference([210 + version, *SEQUENCES[0]]) < 1e-4, transport
    finally:
        engine.stop()
        destroy_process_groups()


def test_parameters_hold_the_same_tensors_under_the_names_of_transformer_engine() -> None:
    config = SIZES | {"head_dim": 8, "tie_word_embeddings": True, "num_experts": 4, "num_experts_per_tok": 2}
    converter = WeightConverter(MODELS.find("qwen3_moe"), config, padded_vocabulary=320, dtype=torch.float32)
    for local, fused in {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }.items():
        assert converter.hf_names(f"decoder.layers.1.{local}") == converter.hf_names(f"decoder.layers.1.{fused}")
    assert converter.hf_names("decoder.layers.1.mlp.experts.linear_fc1.weight3") == [
        "model.layers.1.mlp.experts.3.gate_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ]


def test_a_users_package_adds_a_model_with_its_own_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    def layer_tensors(self, config):
        import torch
        names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        stacked = Custom(names, lambda tensors, config: torch.cat(tensors), lambda whole, config: whole.chunk(2))
        return super().layer_tensors(config) | {"mlp.linear_fc1.weight": stacked}
    """
    install_plugin(tmp_path, monkeypatch, MODELS, "mistral", "users_mistral:Mistral", PLUGIN + body)
    checkpoint, run = save(mistral(), tmp_path / "model"), run_config(lr=0.001, max_tokens_per_gpu=60)
    with learning(checkpoint, run) as learner:
        compute(learner, run, tmp_path / "out")
    assert_computed(tmp_path / "out", checkpoint)


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": None}))


MISTAKES = {
    "raises": (
        """
    def layer_tensors(self, config):
        return config["number_of_wheels"]
        """,
        "mistral:Mistral failed to map the tensors of the model: KeyError: 'number_of_wheels'",
    ),
    "raises in a conversion": (
        """
    def layer_tensors(self, config):
        broken = Custom(("self_attn.o_proj.weight",), lambda tensors, config: 1 / 0, lambda whole, config: [])
        return super().layer_tensors(config) | {"self_attention.linear_proj.weight": broken}
        """,
        "mistral:Mistral failed to convert model.layers.0.self_attn.o_proj.weight to Megatron's "
        "decoder.layers.0.self_attention.linear_proj.weight: ZeroDivisionError: division by zero",
    ),
    "does not map a parameter": (
        """
    def layer_tensors(self, config):
        return {k: v for k, v in super().layer_tensors(config).items() if k != "mlp.linear_fc2.weight"}
        """,
        "mistral:Mistral does not map Megatron's parameter decoder.layers.0.mlp.linear_fc2.weight; "
        "add 'mlp.linear_fc2.weight' to its layer_tensors",
    ),
    "maps a tensor that is not there": (
        """
    def layer_tensors(self, config):
        return super().layer_tensors(config) | {"input_layernorm.weight": Same("norm1.weight")}
        """,
        "has no tensor model.layers.0.norm1.weight, which the model plug-in users_mistral:Mistral maps to Megatron's "
        "decoder.layers.0.input_layernorm.weight",
    ),
    "leaves out a tensor": (
        """
    def outer_tensors(self, config):
        return super().outer_tensors(config) | {"output_layer.weight": Same("model.embed_tokens.weight")}
        """,
        "mistral:Mistral does not map lm_head.weight of .* to any parameter of the model; add it to layer_tensors",
    ),
    "has another shape": (
        """
    def transformer_config(self, config):
        return {"kv_channels": 16}
        """,
        r"mistral:Mistral converts model.layers.0.self_attn.o_proj.weight to the shape \(32, 32\), but Megatron's "
        r"decoder.layers.0.self_attention.linear_proj.weight has the shape \(32, 64\)",
    ),
    "sets what Megatron does not have": (
        """
    def transformer_config(self, config):
        return {"number_of_wheels": 4}
        """,
        "Megatron refuses the configuration of the model plug-in users_mistral:Mistral: .*number_of_wheels",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_plugin_is_one_sentence_that_names_it_and_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    body, sentence = MISTAKES[mistake]
    install_plugin(tmp_path, monkeypatch, MODELS, "mistral", "users_mistral:Mistral", PLUGIN + body)
    checkpoint = save(mistral(), tmp_path / "model")
    try:
        with pytest.raises(UserError, match=sentence):
            MegatronLearner(run_config(), str(checkpoint), 0, 1, "127.0.0.1", free_port())
    finally:
        destroy_process_groups()


def run_layouts(rank: int, root: Path, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    for name in ("gemma", "qwen2"):
        for layout, settings in LAYOUTS.items():
            run = run_config(lr=0.001, max_tokens_per_gpu=60, actor_num_gpus_per_node=2, **settings)
            out = f"{name}, {layout}"
            learner = MegatronLearner(run, str(root / name), rank, 2, "127.0.0.1", ports[out])
            # The ranks share one replica of the model, so both train the whole batch.
            compute(learner, run, root / out, rank, 2)
            learner.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outputs = [f"{name}, {layout}" for name in ("gemma", "qwen2") for layout in LAYOUTS]
    # Other tests must not take the ports before they are used.
    claimed = {out: claim_port() for out in outputs}
    fork_ranks(2, run_layouts, folder, {out: port.number for out, port in claimed.items()})
