"""Evaluation data sets (`eval_datasets`) as groups of samples without responses."""

from __future__ import annotations

import itertools
from itertools import islice, takewhile

from miles_async.adapters.datasets.factory import open_data
from miles_async.config.schema import EvalDataset, RunConfig
from miles_async.types import Group


def eval_groups(config: RunConfig, name: str, dataset: EvalDataset, *, checkpoint: str | None = None) -> list[Group]:
    """Return the first `size` rows of a data set, in file order, with `n_samples` samples each.

    Feed indices start with `name`. `checkpoint` is the folder of the tokenizer for chat templates. Raises UserError as
    `open_data` does.
    """
    data = config.data.model_copy(
        update={
            "prompt_data": dataset.path,
            "input_key": dataset.input_key,
            "label_key": dataset.label_key,
            "reasoning_gym_task": None,
            "rollout_shuffle": False,
            "eval_size": 0,
        }
    )
    rollout = config.rollout.model_copy(update={"n_samples_per_prompt": dataset.n_samples})
    source = open_data(config.model_copy(update={"data": data, "rollout": rollout}), checkpoint=checkpoint)
    # The source feeds forever: the first group of the second epoch marks the end of the data.
    fed = (source.get_samples(1)[0] for _ in itertools.count())
    first_epoch = takewhile(lambda group: group.feed_index.startswith("sample_0_"), fed)
    groups = list(islice(first_epoch, dataset.size))
    for group in groups:
        group.feed_index = f"{name}_{group.feed_index}"
    return groups
