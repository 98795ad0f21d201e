"""Records what other implementations compute on drawn inputs, for the tests of losses and advantages.

Each command needs a checkout and writes one file beside this script:

    python -m tests.torch.recorded_losses.record m2po CHECKOUT COMMIT        # github.com/Infini-AI-Lab/M2PO
    python -m tests.torch.recorded_losses.record slime CHECKOUT COMMIT       # github.com/THUDM/slime
    python -m tests.torch.recorded_losses.record openrlhf CHECKOUT COMMIT    # github.com/OpenRLHF/OpenRLHF
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import random
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

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
    return {"project": "Infini-AI-Lab/M2PO", "file": file, "cases": cases}


def responses() -> dict[str, Any]:
    """Two groups of three responses of uneven lengths: rewards, masks, and the KL divergence at each token."""
    draw = random.Random(0)
    masks = [[1] * length for length in (3, 5, 1, 7, 4, 2)]
    masks[3][2:4] = [0, 0]
    return {
        "rewards": [1.0, 0.0, 0.5, 2.0, -1.0, 2.0],
        "masks": masks,
        "divergences": [[round(draw.gauss(0.2, 0.5), 3) for _ in mask] for mask in masks],
        "kl_coef": 0.3,
    }


def slime(checkout: Path) -> dict[str, Any]:
    """Whitened returns of REINFORCE++."""
    sys.path.insert(0, str(checkout))
    theirs, distributed = (import_module(f"slime.utils.{name}") for name in ("ppo_utils", "distributed_utils"))
    vars(import_module("megatron.core.parallel_state"))["get_context_parallel_world_size"] = lambda: 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = responses()
    masks = [torch.tensor(mask) for mask in given["masks"]]
    lengths = [len(mask) for mask in masks]
    returns = theirs.get_reinforce_plus_plus_returns(
        torch.tensor(given["rewards"]),
        [torch.tensor(one) for one in given["divergences"]],
        masks,
        lengths,
        lengths,
        given["kl_coef"],
        1.0,
    )
    whitened = distributed.distributed_masked_whiten(torch.cat(returns), torch.cat(masks)).split(lengths)
    file = "slime/utils/ppo_utils.py"
    advantages = {"reinforce_plus_plus": [one.tolist() for one in whitened]}
    return {"project": "THUDM/slime", "file": file, "cases": [given | advantages]}


def openrlhf(checkout: Path) -> dict[str, Any]:
    """Normalized advantages of the estimators `reinforce` and `reinforce_baseline`, by the authors of REINFORCE++."""
    file = "openrlhf/trainer/ppo_utils/experience_maker.py"
    names: dict[str, Any] = {"torch": torch, "itertools": itertools, "apply_length_penalties": lambda *_: None}
    functions_of(checkout / "openrlhf/models/utils.py", {"compute_reward"}, names)
    functions_of(checkout / file, {"compute_advantages_and_returns", "get_cumulative_returns"}, names)
    given = responses()
    masks, divergences = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in given[name]], batch_first=True)
        for name in ("masks", "divergences")
    )
    advantages = {}
    for ours, theirs in (("reinforce_plus_plus", "reinforce"), ("reinforce_plus_plus_baseline", "reinforce_baseline")):
        settings = SimpleNamespace(
            algo=SimpleNamespace(advantage=SimpleNamespace(estimator=theirs, gamma=1.0, no_std_norm=False)),
            rollout=SimpleNamespace(n_samples_per_prompt=3),
            reward=SimpleNamespace(clip_range=None),
        )
        maker = SimpleNamespace(
            strategy=SimpleNamespace(args=settings),
            advantage_estimator=theirs,
            kl_ctl=SimpleNamespace(value=given["kl_coef"]),
        )
        maker.get_cumulative_returns = partial(names["get_cumulative_returns"], maker)
        experience = SimpleNamespace(
            index=list(range(6)),
            rewards=torch.tensor(given["rewards"]),
            kl=divergences,
            action_mask=masks.bool(),
            info={},
        )
        names["compute_advantages_and_returns"](maker, [experience])
        rows = zip(experience.advantages.tolist(), given["masks"], strict=True)
        advantages[ours] = [row[: len(mask)] for row, mask in rows]
    return {"project": "OpenRLHF/OpenRLHF", "file": file, "cases": [given | advantages]}


RECORDERS = {"m2po": m2po, "slime": slime, "openrlhf": openrlhf}


def main(name: str, checkout: str, commit: str) -> None:
    recorded = {"commit": commit} | RECORDERS[name](Path(checkout))
    cases = ",\n".join(json.dumps(case) for case in recorded.pop("cases"))
    (HERE / f"{name}.json").write_text(f'{json.dumps(recorded)[:-1]}, "cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
