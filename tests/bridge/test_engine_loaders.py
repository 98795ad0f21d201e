"""Publishes reach the parameters of SGLang's models, also of those whose engines do not run on a CPU.

SGLang builds each model on CPU parameters, and its own loader is the reference (`engine_loaders.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.bridge.engine_families import COPIES, LOADERS
from tests.bridge.engine_loaders import CASES, DRAFTING, LOADED, QUANTISED, REFUSED, Case
from tests.stack.job import ROOT
from tests.waiting import START_SECONDS

Found = Mapping[str, list[dict[str, Any]]]
"""By the name of a case: what each rank found."""


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("engines")
    command = [sys.executable, "-m", "tests.bridge.engine_loaders", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=START_SECONDS)
    return {
        case.name: [json.loads((folder / f"{case.name}.{rank}.json").read_text()) for rank in range(case.ranks)]
        for case in CASES
    }


@each(LOADED)
def test_a_publish_gives_the_parameters_of_an_engine_that_starts_with_the_weights(found: Found, case: Case) -> None:
    for rank in found[case.name]:
        assert rank == {
            "unknown": LOADERS.get(case.family, COPIES),
            "not loaded": [],
            "changed by the search": [],
            "wrong after writes": [],
            "wrong after loads by name": [],
        }


@each(DRAFTING)
def test_a_publish_brings_the_draft_model_the_weights_of_its_head(found: Found, case: Case) -> None:
    for rank in found[case.name]:
        assert rank == {"not loaded": [], "wrong": []}


@each(REFUSED)
def test_sglang_does_not_load_the_model(found: Found, case: Case) -> None:
    assert case.error is not None
    assert all(case.error in rank["error"] for rank in found[case.name])


@each(QUANTISED)
def test_an_engine_that_quantises_weights_is_refused(found: Found, case: Case) -> None:
    [rank] = found[case.name]
    assert rank["refused"] == (
        "the engine quantises its parameter model.layers.0.self_attn.qkv_proj.weight (float8_e4m3fn), and the "
        "learner's weights are not quantised: start the engines without quantisation"
    )


def test_sglangs_loader_copies_weights_into_quantised_parameters_without_their_scales(found: Found) -> None:
    online, blocks = (found[case.name][0] for case in QUANTISED)
    assert "Attempted to load weight" in online["loaded"]
    assert blocks["loaded"] == "without an error"
    assert "model.layers.0.self_attn.o_proj.weight" in blocks["changed"]
    assert not any("scale" in name for name in blocks["changed"])
