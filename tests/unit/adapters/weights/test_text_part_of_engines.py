"""The learner publishes the text part of a model; the engine's other parameters stay as the engine loaded them."""

from __future__ import annotations

import pytest

from miles_async.adapters.sglang.engine_weights import Placement, RankLayout
from miles_async.adapters.weights.layout import plan_tensors
from miles_async.errors import FatalError

NORM = ("language_model.model.norm.weight", (4,), "float32")
PLACED = Placement(0, 0, (4,), (1,), NORM[0], 0, (1,), 0.0)


def test_an_engine_keeps_its_vision_tower_and_its_projector() -> None:
    unfilled = ["vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"]
    [plan] = plan_tensors([NORM], [RankLayout(placements=[PLACED], unfilled=unfilled)], {NORM[0]: "float32"})
    assert plan.name == NORM[0]
    assert {copy.parameter for copy in plan.copies} == {NORM[0]}


def test_a_parameter_of_the_text_part_that_the_learner_does_not_fill_is_named() -> None:
    unfilled = ["visual.merger.norm.weight", "model.layers.3.input_layernorm.weight"]
    with pytest.raises(FatalError, match=r"does not fill its parameter model\.layers\.3\.input_layernorm\.weight"):
        plan_tensors([NORM], [RankLayout(placements=[PLACED], unfilled=unfilled)], {NORM[0]: "float32"})
