"""Records which reward slime computes for a sample: `python tests/unit/rewards/record_slime_rewards.py CHECKOUT`.

Writes `slime_rewards.json`. Each reward function of slime's `rm_hub` is replaced by one that returns its own name, so
only slime's choice between them runs. Recorded from slime's commit 624b824a.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

RUNS = [("math", None), ("boxed_f1", None), (None, "mine.run")]
ROWS = [None, "f1", "boxed_gpqa", " f1 ", ""]
DATA_SETS: list[dict[str, str] | None] = [None, {}, {"rm_type": "gpqa"}, {"custom_rm_path": "mine.data_set"}]
FUNCTIONS = {
    "deepscaler": "get_deepscaler_rule_based_reward",
    "f1": "f1_score",
    "gpqa": "compute_gpqa_reward",
    "math_dapo_utils": "compute_score",
    "math_utils": "grade_answer_verl",
}


def slime_hub(checkout: str) -> Any:
    """Import slime's `rm_hub` with stand-ins for its reward functions."""
    sys.path.insert(0, checkout)
    for module, name in FUNCTIONS.items():
        stub: Any = ModuleType(module)
        sys.modules[f"slime.rollout.rm_hub.{module}"] = stub
        stub.extract_answer = lambda response: "boxed"
        setattr(stub, name, named(module))
    hub: Any = import_module("slime.rollout.rm_hub")

    async def custom(path: str) -> str:
        return path

    hub.load_function = lambda path: lambda args, sample: custom(path)
    return hub


def named(module: str) -> Any:
    def reward(response: str, label: Any, **kwargs: Any) -> Any:
        found = f"boxed_{module}" if response == "boxed" else module
        return [found] if module == "f1" else found

    return reward


def main(checkout: str) -> None:
    hub = slime_hub(checkout)
    data_sets = import_module("slime.utils.eval_config")
    hub.grade_answer_verl = lambda response, label: (_ for _ in ()).throw(LookupError(response))
    records = []
    for (rm_type, custom), row, data_set in itertools.product(RUNS, ROWS, DATA_SETS):
        args = SimpleNamespace(rm_type=rm_type, custom_rm_path=custom, eval_custom_rm_path=None)
        metadata = {} if row is None else {"rm_type": row}
        path = None
        if data_set is not None:
            [config] = data_sets.build_eval_dataset_configs(args, [{"name": "d", "path": "d.jsonl", **data_set}], {})
            metadata, path = config.inject_metadata(metadata), config.custom_rm_path
        sample = SimpleNamespace(custom_rm_path=path, metadata=metadata, response="text", label="")
        try:
            chosen = asyncio.run(hub.async_rm(args, sample))
        except LookupError as error:  # `math` is a yes or no in slime, so its stand-in raises
            chosen = "boxed_math" if error.args[0] == "boxed" else "math"
        run = {"rm_type": rm_type, "custom_rm_path": custom}
        records.append({"run": run, "row": row, "data_set": data_set, "chosen": chosen})
    lines = ",\n".join(json.dumps(record) for record in records)
    Path(__file__).with_name("slime_rewards.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
