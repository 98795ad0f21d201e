"""Records the verdicts of slime's rewards, which `tests/stack/test_rewards_of_slime.py` compares with ours.

    python -m tests.oracles.slime_rewards CHECKOUT

slime's mathematics needs pylatexenc. The verdicts are those of slime 624b824a (21 Aug 2026).
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.oracles.answer_pairs import TEXTS, chosen, lines, pairs

VERDICTS = Path(__file__).with_name("slime_rewards.json")
SOURCE = "THUDM/slime slime/rollout/rm_hub 624b824a"


def cases(kind: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return the responses, labels and metadata on which rewards of this kind are compared."""
    match kind:
        case "math":
            return [(f"\\boxed{{{pair.answer}}}", pair.label, {}) for pair in pairs()]
        case "deepscaler":
            return [(f"<think>no</think> so \\boxed{{{pair.answer}}}", pair.label, {}) for pair in pairs()]
        case "dapo":
            return [(pair.answer, pair.label, {}) for pair in lines()]
        case "f1":
            return [(response, label, {}) for response in TEXTS for label in TEXTS]
        case _:
            return [(response, label, metadata) for response, label, metadata, _ in chosen()]


def record(checkout: str) -> dict[str, list[float]]:
    """Return the rewards of slime in `checkout` for all cases, by kind."""
    # The package's own `__init__` imports the whole of slime.
    package = types.ModuleType("slime_rewards")
    package.__path__ = [str(Path(checkout) / "slime" / "rollout" / "rm_hub")]
    sys.modules["slime_rewards"] = package

    def function(module: str, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"slime_rewards.{module}"), name)
        return found

    grade, compute_gpqa = function("math_utils", "grade_answer_verl"), function("gpqa", "compute_gpqa_reward")
    deepscaler = function("deepscaler", "get_deepscaler_rule_based_reward")
    dapo, f1 = function("math_dapo_utils", "compute_score"), function("f1", "f1_score")
    return {
        "math": [float(grade(response, label)) for response, label, _ in cases("math")],
        "deepscaler": [float(deepscaler(response, label)) for response, label, _ in cases("deepscaler")],
        "dapo": [float(dapo(response, label)["score"]) for response, label, _ in cases("dapo")],
        "f1": [float(f1(response, label)[0]) for response, label, _ in cases("f1")],
        "gpqa": [float(compute_gpqa(*case[:2], metadata=case[2])) for case in cases("gpqa")],
    }


if __name__ == "__main__":
    rewards = record(sys.argv[1])
    rows = [
        f'"{kind}": [\n'
        + ",\n".join(json.dumps([*case, reward]) for case, reward in zip(cases(kind), given, strict=True))
        for kind, given in rewards.items()
    ]
    VERDICTS.write_text(f'{{"source": "{SOURCE}",\n' + "\n],\n".join(rows) + "\n]}\n", encoding="utf-8")
