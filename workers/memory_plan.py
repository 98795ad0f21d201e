"""`make plan`: the memory plan of a job from Megatron's modules, beside that of `--check-config`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from miles_async.adapters.megatron.model.fake_ranks import measure_stages
from miles_async.config.cli import EXIT_INVALID, parse_or_exit
from miles_async.config.memory import learner_job, plan_of, planned_model, precision_on_gpus
from miles_async.config.table import memory_table
from miles_async.planning.plan import GIB


def main(argv: Sequence[str]) -> int:
    """Print both plans. The arguments are those of `train_async.py`."""
    config = parse_or_exit(argv, "train_async.py", "make plan")
    model, memory = planned_model(config), config.cluster.gpu_memory_gib
    if model is None or memory is None:
        print("make plan: set gpu_memory_gib, and hf_checkpoint to a model whose family is known", file=sys.stderr)
        return EXIT_INVALID
    card, precision = int(memory * GIB), precision_on_gpus(config.learner)
    tokens = learner_job(config, model, card).tokens
    learner = config.learner.model_copy(update={"precision": precision})
    measured = measure_stages(learner, str(config.model.hf_checkpoint), tokens)
    print(f"from the settings:\n\n{memory_table(plan_of(config, model, card), precision)}\n")
    from_modules = memory_table(plan_of(config, model, card, measured), precision)
    print(f"with the weights and activations of Megatron's modules, with the local layers:\n\n{from_modules}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
