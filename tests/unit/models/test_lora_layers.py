import pytest

from miles_async.errors import UserError
from miles_async.models.lora_layers import FEED_FORWARD, HEAD, MODULES, Targets, adapted, kinds_of, select_modules

QKV, EXPERTS = MODULES[:3], 8
MIDDLE = ("layers.2.self_attn.k_proj", "layers.0.self_attn.o_proj")


def of_layers(*names: str, layers: int = 3, experts: int | None = None, excluded: tuple[str, ...] = ()) -> list[str]:
    return [*Targets(names, excluded).of_model(layers, experts)]


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
        ("lm_tail", "lm_tail is no linear layer that can have an adapter: use all-linear, or some of q_proj"),
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
