"""A published checkpoint whose model also takes images trains as a text model and is exported whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_async.batching.batch import rank_batches
from miles_async.models.text_part import TEXT_PARTS, is_of_images
from tests.bridge.computing import RESPONSES, SEQUENCES, bridge_config
from tests.bridge.families import FAMILIES, reference, write_checkpoint
from tests.stack.learning import learning, uneven_groups, weights_of

NAMES = [name for name, family in FAMILIES.items() if family.architecture in TEXT_PARTS]


def whole(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_an_untrained_export_is_the_checkpoint_with_its_vision_tower(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(name, tmp_path / "checkpoint")
    with learning(path, bridge_config()) as learner:
        published = weights_of(learner)
        learner.save_hf(str(tmp_path / "export"))
    expected, found = whole(path), whole(tmp_path / "export")
    assert any(map(is_of_images, expected))
    assert published.keys() == {tensor for tensor in expected if not is_of_images(tensor)}
    assert found.keys() == expected.keys()
    assert [tensor for tensor in found if not torch.equal(found[tensor], expected[tensor])] == []
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "export"))
    assert before["text_config"].pop("dtype", "float32") == after["text_config"].pop("dtype") == after["dtype"]
    assert after == before


@pytest.mark.parametrize("name", NAMES)
def test_training_changes_the_text_part_alone_and_transformers_computes_the_same_from_the_export(
    tmp_path: Path, name: str
) -> None:
    path, run = write_checkpoint(name, tmp_path / "checkpoint"), bridge_config(lr=0.01)
    with learning(path, run) as learner:
        assert learner.train(0, rank_batches(uneven_groups(0), run, 1)[0]).finite
        logprobs = learner.logprobs(SEQUENCES)
        learner.save_hf(str(tmp_path / "export"))
    before, after = whole(path), whole(tmp_path / "export")
    same = {tensor for tensor in before if torch.equal(before[tensor], after[tensor])}
    assert same == {tensor for tensor in before if is_of_images(tensor)}
    expected = reference(tmp_path / "export", SEQUENCES, RESPONSES, tmp_path / "gradient")
    errors = [
        abs(one - other)
        for row, wanted in zip(logprobs, expected, strict=True)
        for one, other in zip(row, wanted, strict=True)
    ]
    assert max(errors) < 1e-4


def test_an_export_in_another_precision_names_it_for_the_text_part_too(tmp_path: Path) -> None:
    path = write_checkpoint("Gemma 3, images", tmp_path / "checkpoint")
    with learning(path, bridge_config(precision="bf16")) as learner:
        learner.save_hf(str(tmp_path / "export"))
    found = whole(tmp_path / "export")
    assert {is_of_images(name): tensor.dtype for name, tensor in found.items()} == {
        False: torch.bfloat16,
        True: torch.float32,
    }
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
