import pytest

from miles_async.errors import UserError
from miles_async.models.lora_layers import (
    ATTENTION,
    FEED_FORWARD,
    HEAD,
    LINEAR_ATTENTION,
    MODULES,
    LinearLayers,
    Targets,
    adapted,
    engine_modules,
    kinds_of,
    select_modules,
)

QKV, EXPERTS = MODULES[:3], 8
MIDDLE = ("layers.2.self_attn.k_proj", "layers.0.self_attn.o_proj")


def of_layers(*names: str, layers: int = 3, experts: int | None = None, excluded: tuple[str, ...] = ()) -> list[str]:
    """The layers of a model like Llama, or like Qwen3-MoE if it has experts."""
    block = "mlp" if experts is None else "mlp.experts"
    names_of_layer = [f"self_attn.{one}" for one in ATTENTION] + [f"{block}.{one}" for one in FEED_FORWARD]
    model = LinearLayers(8, 16, (dict.fromkeys(names_of_layer, 8),) * layers, experts or 0)
    return [*Targets(names, excluded).of_model(model)]


def of_hybrid(*names: str, excluded: tuple[str, ...] = ()) -> list[str]:
    """Four layers of Qwen3.5 with experts: only the last one has full attention."""
    feed_forward = [f"{block}.{one}" for block in ("mlp.experts", "mlp.shared_expert") for one in FEED_FORWARD]
    linear, full = (
        dict.fromkeys([*(f"{block}.{one}" for one in kinds), *feed_forward], 8)
        for block, kinds in (("linear_attn", LINEAR_ATTENTION), ("self_attn", ATTENTION))
    )
    return [*Targets(names, excluded).of_model(LinearLayers(8, 16, (linear, linear, linear, full), 2))]


@pytest.mark.parametrize(
    "target, expected",
    [
        ("q_proj", ["q_proj"]),
        ("linear_qkv", [*QKV]),
        ("self_attn.o_proj", ["o_proj"]),
        ("layers.1.mlp.up_proj", ["layers.1.mlp.up_proj"]),
        ("model.layers.*.self_attn.v_proj", ["v_proj"]),
        ("*.layers.0.*.linear_qkv", [f"layers.0.self_attn.{kind}" for kind in QKV]),
        ("language_model.decoder.layers.*.self_attention.linear_proj", ["o_proj"]),
        ("*.linear_fc1*", ["gate_proj", "up_proj"]),
        (
            r"model\.layers\.[02]\.self_attn\.(k|o)_proj",
            ["layers.0.self_attn.k_proj", *MIDDLE, "layers.2.self_attn.o_proj"],
        ),
        (r".*\.(gate|down)_proj", ["gate_proj", "down_proj"]),
        ("output_layer", [HEAD]),
        ("*", [*MODULES, HEAD]),
    ],
)
def test_a_target_is_a_name_or_the_end_of_a_name_or_a_pattern_of_names(target: str, expected: list[str]) -> None:
    assert of_layers(target) == expected


@pytest.mark.parametrize("target", ["model.layers.1.*", "decoder.layers.1.*", "*.layers.1.*"])
def test_a_pattern_of_a_layer_does_not_choose_layers_whose_numbers_begin_like_it(target: str) -> None:
    assert {name.split(".")[1] for name in of_layers(target, layers=12)} == {"1"}
    others = {name.split(".")[1] for name in of_layers("*.self_attn.*", layers=12, excluded=(target,))}
    assert others == {str(number) for number in range(12)} - {"1"}


def test_excluded_layers_are_taken_from_those_of_a_pattern() -> None:
    assert of_layers("*.self_attn.*", excluded=("layers.2.self_attn.o_proj",)) == [
        *QKV,
        "layers.0.self_attn.o_proj",
        "layers.1.self_attn.o_proj",
    ]


@pytest.mark.parametrize(
    "target",
    ["decoder.layers.*.mlp.experts.linear_fc*", "model.layers.*.mlp.experts.*", r".*\.experts\.\d+\.\w+"],
)
def test_a_pattern_of_experts_chooses_their_layers(target: str) -> None:
    assert of_layers(target, experts=EXPERTS) == [*FEED_FORWARD]


@pytest.mark.parametrize(
    "target, sentence",
    [
        ("lm_tail", "lm_tail matches no linear layer of the model: remove it"),
        ("*.experts.linear_fc3", r"linear_fc3 matches no linear layer of the model: remove it"),
        ("layers.3.self_attn.q_proj", "matches no linear layer of the model: remove it"),
        ("*.experts.2.*", "lora_target_modules chooses gate_proj of some of the experts of layer 0"),
        (r".*\.experts\.[0-4]\.up_proj", "lora_target_modules chooses up_proj of some of the experts of layer 0"),
        ("layers.1.mlp.experts.linear_fc2", "down_proj is chosen in 1 of 3: choose all of them, or none"),
    ],
)
def test_what_cannot_have_an_adapter_is_one_sentence(target: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        of_layers("linear_qkv", target, experts=EXPERTS)


@pytest.mark.parametrize(
    "target, sentence",
    [
        ("lm_tail", "lm_tail is not a linear layer that can have an adapter: use all-linear, or some of q_proj"),
        (
            "*.linear_fc3",
            "linear_fc3 matches no linear layer that can have an adapter: use all-linear, or some of q_proj",
        ),
    ],
)
def test_what_no_model_has_is_refused_before_the_model_is_known(target: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        select_modules(["q_proj", target])


def test_entries_of_peft_are_ends_of_names() -> None:
    layers = [f"model.layers.{n}.self_attn.{kind}" for n in (1, 11) for kind in ("q_proj", "o_proj")]
    assert adapted(layers, ("o_proj", "layers.1.self_attn.q_proj")) == [*layers[:2], layers[3]]
    assert kinds_of(("o_proj", "layers.1.self_attn.q_proj")) == ("q_proj", "o_proj")


@pytest.mark.parametrize(
    "target, expected",
    [
        ("all-linear", [*ATTENTION, *LINEAR_ATTENTION, *FEED_FORWARD]),
        ("in_proj", ["in_proj_qkv", "in_proj_z"]),
        ("language_model.decoder.layers.*.self_attention.out_proj", ["out_proj"]),
        ("layers.1.linear_attn.out_proj", ["layers.1.linear_attn.out_proj"]),
        ("linear_qkv", [*QKV]),
        ("linear_fc2", ["down_proj"]),
        ("*.mlp.shared_experts.linear_fc1", ["shared_expert.gate_proj", "shared_expert.up_proj"]),
        ("model.language_model.layers.*.mlp.shared_expert.down_proj", ["shared_expert.down_proj"]),
        ("*.mlp.experts.linear_fc2", ["experts.0.down_proj", "experts.1.down_proj"]),
    ],
)
def test_a_target_chooses_among_the_layers_that_a_hybrid_model_has(target: str, expected: list[str]) -> None:
    assert of_hybrid(target) == expected


def test_adapters_of_experts_without_those_of_the_shared_expert_name_each_expert() -> None:
    layers = ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "mlp.shared_expert.up_proj"]
    names = [f"model.layers.3.{layer}" for layer in layers]
    assert adapted(names, of_hybrid("up_proj", excluded=("*.shared_expert.*",))) == names[:2]
    assert adapted(names, of_hybrid("up_proj", excluded=("*.mlp.experts.*",))) == names[2:]
    assert adapted(names, of_hybrid("up_proj")) == names


def test_a_kind_of_layer_that_the_model_lacks_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="lora_target_modules: in_proj_z matches no linear layer of the model"):
        of_layers("q_proj", "in_proj_z")


def test_engines_have_one_name_for_two_projections_of_linear_attention() -> None:
    assert engine_modules(("q_proj", "layers.1.linear_attn.in_proj_qkv", "in_proj_z")) == (
        "q_proj",
        "layers.1.linear_attn.in_proj_qkvz",
        "in_proj_qkvz",
    )
