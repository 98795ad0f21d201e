"""Records what other implementations compute on drawn inputs, for `test_losses_policy.py`.

Each command needs a checkout and writes one file beside this script:

    python -m tests.stack.recorded_losses.record m2po CHECKOUT    # github.com/Infini-AI-Lab/M2PO
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent


def functions_of(file: Path, names: set[str], surroundings: dict[str, Any]) -> dict[str, Any]:
    """Run only these functions of a file, whose other imports need not be installed."""
    tree = ast.parse(file.read_text())
    found: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert len(found) == len(names), f"{file} does not define {names}"
    # Their annotations name types that are not imported here.
    unevaluated = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(unevaluated + found, []), str(file), "exec"), surroundings)
    return surroundings


def commit_of(checkout: Path) -> str:
    return subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def m2po(checkout: Path) -> dict[str, Any]:
    """Clip range and gradient of each token, of sequences of four tokens, for several spreads of the log-ratios."""
    torch.manual_seed(0)
    file = "verl/trainer/ppo/core_algos.py"
    theirs = functions_of(
        checkout / file,
        {
            "_solve_tau_from_sorted_delta2",
            "_get_trust_region_tokens_delta_sq",
            "kpo_clip_harmful_tokens",
            "compute_m2po_policy_loss",
            "agg_loss",
        },
        {
            "torch": torch,
            "get_ratio_stats": lambda *_: {},
            "verl_F": SimpleNamespace(masked_mean=lambda values, mask: (values * mask).sum() / mask.sum()),
        },
    )
    cases = []
    for spread, shift in ((0.05, 0.0), (0.3, 0.0), (1.0, 0.0), (0.1, 0.5), (0.5, -0.5), (3.0, 0.0)):
        old = -torch.rand(6, 4, dtype=torch.float64) * 3
        log_ratios = (shift + spread * torch.randn(6, 4, dtype=torch.float64)).round(decimals=4)
        # Without a decision: advantages of 0 and ratios of 1.
        advantages = torch.randn(6, 1, dtype=torch.float64).round(decimals=2).repeat(1, 4)
        advantages[2], log_ratios[1, 0] = 0.0, 0.0
        logprobs = (old + log_ratios).requires_grad_()
        with contextlib.redirect_stdout(io.StringIO()):
            loss, *_, stats = theirs["compute_m2po_policy_loss"](
                old, logprobs, advantages, torch.ones(6, 4), M2_budget=0.04, miniclip_low=None, miniclip_high=None
            )
        [gradient] = torch.autograd.grad(loss, logprobs)
        cases.append({
            "log_ratios": log_ratios.flatten().tolist(),
            "advantages": advantages.flatten().tolist(),
            "lowest_ratio": 1 - stats["m2po/clip_low"],
            "highest_ratio": 1 + stats["m2po/clip_high"],
            "gradients": (-24 * gradient).round(decimals=8).flatten().tolist(),
        })  # fmt: skip
    return {"project": "Infini-AI-Lab/M2PO", "commit": commit_of(checkout), "file": file, "cases": cases}


RECORDERS = {"m2po": m2po}


def main(name: str, checkout: str) -> None:
    recorded = RECORDERS[name](Path(checkout))
    cases = ",\n".join(json.dumps(case) for case in recorded.pop("cases"))
    (HERE / f"{name}.json").write_text(f'{json.dumps(recorded)[:-1]}, "cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
