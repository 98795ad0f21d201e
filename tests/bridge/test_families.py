"""A model of Megatron-Bridge computes what transformers computes, and its weights survive the way there and back.

Run as a script this file is the two ranks of the parallel layouts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import claim_port
from miles_async.errors import UserError
from tests.bridge.computing import bridge_config, compute, differences, write_reference
from tests.bridge.families import FAMILIES, LAYOUTS
from tests.stack.forked_ranks import fork_ranks, run_ranks
from tests.stack.learning import learning

SAME: dict[str, list[str]] = {"names": [], "values": [], "logprobs": [], "gradient": []}


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    folder = write_reference(name, tmp_path)
    with learning(folder / "checkpoint", bridge_config()) as learner:
        compute(learner, folder / "out")
    assert differences(folder, folder / "out") == SAME


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_reference(name, root / name)
    with run_ranks("tests.bridge.test_families", root):
        pass
    return root


@pytest.mark.parametrize("name, layout", [(name, layout) for name, one in FAMILIES.items() for layout in one.layouts])
def test_two_ranks_agree_with_transformers(layouts: Path, name: str, layout: str) -> None:
    assert differences(layouts / name, layouts / name / layout) == SAME


@pytest.mark.parametrize("name, layout", [(name, layout) for name, one in FAMILIES.items() for layout in one.refused])
def test_a_layout_that_the_bridge_cannot_compute_is_refused(layouts: Path, name: str, layout: str) -> None:
    path, sentence = layouts / name / "checkpoint", (layouts / name / layout).read_text()
    assert sentence.startswith(f"Megatron-Bridge cannot build the model of {path} with these settings: ")
    assert FAMILIES[name].refused[layout] in sentence


def run_layouts(rank: int, root: Path, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    for name, family in FAMILIES.items():
        for layout in [*family.layouts, *family.refused]:
            run = bridge_config(actor_num_gpus_per_node=2, **LAYOUTS[layout])
            address = (rank, 2, "127.0.0.1", ports[f"{name} {layout}"])
            try:
                learner = MegatronLearner(run, str(root / name / "checkpoint"), *address)
            except UserError as error:
                (root / name / layout).write_text(str(error))
                destroy_process_groups()
                continue
            compute(learner, root / name / layout, rank)
            learner.close()


if __name__ == "__main__":
    outputs = [f"{name} {layout}" for name, one in FAMILIES.items() for layout in [*one.layouts, *one.refused]]
    # Other tests must not take the ports before they are used.
    claimed = {output: claim_port() for output in outputs}
    fork_ranks(2, run_layouts, Path(sys.argv[1]), {output: port.number for output, port in claimed.items()})
