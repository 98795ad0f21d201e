"""A reward function: the last number of the response is the answer.

    python train_async.py --config configs/smollm2-cpu.yaml --custom-rm-path examples.last_number.reward

`sample` also has `prompt`, `metadata` and `tokens`. A reward may be any number; the function may be async.
"""

import re
from typing import Any

from miles_async.types import Sample


def reward(args: Any, sample: Sample) -> float:
    numbers = re.findall(r"-?\d+", sample.response)
    return 1.0 if numbers and numbers[-1] == sample.label else 0.0
