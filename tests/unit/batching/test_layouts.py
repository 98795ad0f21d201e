from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.batching.layout import context_parallel_indices
from miles_async.config.checks.layouts import layout_problems
from miles_async.models.layers import Split, parts_of
from tests.configuration import run_config

DENSE = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 96}  # fmt: skip
EXPERTS = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 30}


ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
LAYOUT = "pipeline_model_parallel_layout"


def problems(folder: Path, shape: dict[str, int], ranks: int = 8, **layout: Any) -> list[str]:
    """The problems of a layout, given by short names, on a model with the `config.json` of `shape`."""
    (folder / "config.json").write_text(json.dumps(shape))
    names = {"tensor": "tensor_model_parallel_size", "stages": "pipeline_model_parallel_size",
             "virtual": "virtual_pipeline_model_parallel_size", "context": "context_parallel_size",
             "first": "decoder_first_pipeline_num_layers", "last": "decoder_last_pipeline_num_layers",
             "experts": "expert_model_parallel_size", "of_expert": "expert_tensor_parallel_size"}  # fmt: skip
    sizes = {names.get(name, name): size for name, size in layout.items()}
    return list(layout_problems(run_config(hf_checkpoint=str(folder), actor_num_gpus_per_node=ranks, **sizes)))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor": 2, "stages": 2, "context": 2},
        {"stages": 2, "virtual": 3},
        {"stages": 4, "first": 1, "last": 1},
        {"stages": 2, "last": 1},
        {"stages": 2, "first": 4, "last": 2},
        {"stages": 2, "virtual": 2, "first": 2},
        {"tensor": 4, "sequence_parallel": True, "stages": 2},
        {"stages": 2, "virtual": 2, "megatron_args": ENDS},
        {"stages": 8, "megatron_args": ENDS},
        {"stages": 2, "virtual": 2, "megatron_args": {LAYOUT: "E|(tt|)*2,ttL"}},
        {"stages": 2, "megatron_args": {LAYOUT: "Et*4|ttL"}},
    ],
)
def test_a_divisible_layout_is_accepted(tmp_path: Path, layout: dict[str, Any]) -> None:
    assert problems(tmp_path, DENSE, **layout) == []


@pytest.mark.parametrize(
    "layout, said",
    [
        ({"tensor": 2, "context": 3}, "8 learner ranks are not divisible by tensor_model_parallel_size 2 * "
         "context_parallel_size 3 = 6; set actor_num_gpus_per_node to a multiple of 6"),
        ({"context": 3}, "8 learner ranks are not divisible by context_parallel_size 3;"),
        ({"stages": 4}, "the model's 6 layers are not divisible by pipeline_model_parallel_size 4;"),
        ({"stages": 2, "virtual": 2}, "layers are not divisible by pipeline_model_parallel_size 2 * "
         "virtual_pipeline_model_parallel_size 2"),
        ({"virtual": 2}, "virtual_pipeline_model_parallel_size 2 needs pipeline parallelism"),
        ({"sequence_parallel": True}, "sequence_parallel needs tensor parallelism"),
        ({"experts": 2}, "this model is dense: set them to 1"),
    ],
)  # fmt: skip
def test_an_indivisible_layout_is_refused(tmp_path: Path, layout: dict[str, Any], said: str) -> None:
    [sentence] = problems(tmp_path, DENSE, **layout)
    assert said in sentence


@pytest.mark.parametrize(
    "layout, said",
    [
        ({"stages": 4, "first": 2}, "decoder_first_pipeline_num_layers 2 of the model's 6 layers leave 4 to 3 other"),
        ({"stages": 2, "first": 6}, "decoder_first_pipeline_num_layers 6 of the model's 6 layers leave 0 to 1 other"),
        ({"stages": 2, "first": 2, "last": 2}, "leave 2 to 0 other pipeline stages"),
        ({"stages": 2, "virtual": 2, "last": 3}, "1 other pipeline stages * virtual_pipeline_model_parallel_size 2"),
        ({"first": 1}, "decoder_first_pipeline_num_layers 1: set pipeline_model_parallel_size to 2 or more"),
        ({"last": 1}, "decoder_last_pipeline_num_layers 1: set pipeline_model_parallel_size to 2 or more"),
    ],
)
def test_uneven_pipelines_that_do_not_divide_are_refused(tmp_path: Path, layout: dict[str, Any], said: str) -> None:
    [sentence] = problems(tmp_path, DENSE, **layout)
    assert said in sentence


@pytest.mark.parametrize(
    "layout, said",
    [
        ({"stages": 2, "virtual": 3, "megatron_args": ENDS}, "the model's 6 layers and 2 of "
         "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split are not divisible by "
         "pipeline_model_parallel_size 2 * virtual_pipeline_model_parallel_size 3; choose sizes whose product divides "
         "8,"),
        ({"stages": 2, "first": 2, "megatron_args": ENDS}, "decoder_first_pipeline_num_layers cannot be combined with "
         "megatron_args account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split: unset one"),
        ({"stages": 2, "megatron_args": ENDS | {LAYOUT: "Ettt|tttL"}}, "cannot be combined with account_for_embedding"),
        ({"stages": 2, "megatron_args": {LAYOUT: "ttt|ttt"}}, "'ttt|ttt' is not a layout: write E for the embedding"),
        ({"stages": 2, "megatron_args": {LAYOUT: "Ettt|tttm|L"}}, "is not a layout"),
        ({"stages": 2, "megatron_args": {LAYOUT: [["embedding"]]}}, "[['embedding']] is not a layout"),
        ({"stages": 2, "megatron_args": {LAYOUT: "Ettt|ttL"}}, "has 5 layers, but the model has 6: write t once for"),
        ({"stages": 2, "megatron_args": {LAYOUT: "Ett|tt|ttL"}}, "has 3 parts, which pipeline_model_parallel_size 2 "
         "does not divide: write 2 parts"),
        ({"stages": 2, "megatron_args": {LAYOUT: "Et|tt|tt|tL"}}, "has 2 parts for each stage: set "
         "virtual_pipeline_model_parallel_size to 2"),
        ({"stages": 2, "virtual": 2, "megatron_args": {LAYOUT: "Ettt|tttL"}}, "has 1 parts for each stage: set "
         "virtual_pipeline_model_parallel_size to null"),
    ],
)  # fmt: skip
def test_layers_that_embedding_and_loss_or_a_layout_distribute_must_fit(
    tmp_path: Path, layout: dict[str, Any], said: str
) -> None:
    [sentence] = problems(tmp_path, DENSE, **layout)
    assert said in sentence


def test_the_layers_of_a_stage_are_those_of_its_parts() -> None:
    ends = Split(embedding=True, loss=True)
    assert ends.layers_of_stages(94, 8) == [11, *[12] * 6, 11]
    assert Split(embedding=True).layers_of_stages(7, 4) == [1, 2, 2, 2]
    named = Split(parts=parts_of("E|(tt|)*30,L"))
    assert named.layers_of_stages(60, 16) == [2, *[4] * 14, 2]
    assert Split(first=4).layers_of_stages(10, 3) == [4, 3, 3]


@pytest.mark.parametrize(
    "layout, layers",
    [
        ("Ett|tt|L", (2, 2, 0)),
        ("E,t*3|(tt|)*2,L", (3, 2, 2, 0)),
        ("EtL", (1,)),
        ("tE|L", None),
        ("", None),
        ("E(t", None),
    ],
)
def test_a_layout_has_the_layers_that_its_notation_repeats(layout: str, layers: tuple[int, ...] | None) -> None:
    assert parts_of(layout) == layers


@pytest.mark.parametrize(
    "layout, said",
    [
        ({"experts": 3, "ranks": 6}, "the model's 8 experts are not divisible by expert_model_parallel_size 3"),
        ({"experts": 8, "stages": 2}, "8 learner ranks are not divisible by expert_model_parallel_size 8 * "
         "pipeline_model_parallel_size 2 = 16"),
        ({"tensor": 2}, "needs sequence_parallel"),
        ({"tensor": 2, "sequence_parallel": True, "of_expert": 4}, "expert_tensor_parallel_size 4 does not divide"),
        ({"tensor": 2, "sequence_parallel": True, "of_expert": 1}, "needs expert parallelism"),
        ({"tensor": 4, "sequence_parallel": True}, "the experts' width 30 is not divisible by"),
    ],
)  # fmt: skip
def test_experts_that_do_not_divide_are_refused(tmp_path: Path, layout: dict[str, Any], said: str) -> None:
    [sentence] = problems(tmp_path, EXPERTS, **layout)
    assert said in sentence
    fitting = {"tensor": 4, "sequence_parallel": True, "of_expert": 1, "experts": 4, "stages": 2}
    assert problems(tmp_path, EXPERTS, **fitting) == []


def test_adapters_of_whole_experts_need_no_expert_parallelism(tmp_path: Path) -> None:
    """The learner adds up their gradients over the tensor-parallel ranks, which Megatron does not do for weights."""
    layout = {"tensor": 4, "sequence_parallel": True}
    assert problems(tmp_path, EXPERTS, **layout, of_expert=1, lora_rank=8) == []
    [sentence] = problems(tmp_path, EXPERTS, **layout, of_expert=2, lora_rank=8)
    assert "needs expert parallelism" in sentence


def test_context_parallel_ranks_take_one_chunk_from_the_front_and_one_from_the_back_of_a_sequence() -> None:
    first, second = context_parallel_indices(np.array([4, 8]), 2).tolist()
    assert first == [0, 3, 4, 5, 10, 11]
    assert second == [1, 2, 6, 7, 8, 9]
    assert context_parallel_indices(np.array([3, 2]), 1).tolist() == [[0, 1, 2, 3, 4]]
