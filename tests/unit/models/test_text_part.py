"""Which tensors of a model that also takes images are its text part, and their names in a checkpoint of that part."""

from __future__ import annotations

import pytest

from miles_async.models.text_part import is_of_images, text_name


@pytest.mark.parametrize(
    "published, alone",
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.norm.weight", "mtp.norm.weight"),
    ],
)
def test_a_tensor_of_the_text_part_loses_the_name_of_the_part(published: str, alone: str) -> None:
    assert not is_of_images(published)
    assert text_name(published) == alone


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.blocks.0.attn.qkv_proj.weight",
        "model.vision_tower.ln_pre.weight",
    ],
)
def test_the_vision_tower_and_the_projector_are_outside_the_text_part(name: str) -> None:
    assert is_of_images(name)


def test_a_tensor_whose_name_only_resembles_a_vision_tower_is_text() -> None:
    assert not is_of_images("model.layers.0.visualizer.weight")
