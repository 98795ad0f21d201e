"""The tensors of MTP heads in a checkpoint. The learner and the processes of engines read this module."""

from __future__ import annotations

import re
from collections.abc import Container

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def is_of_heads(name: str, further: Container[int]) -> bool:
    """Whether a tensor of a checkpoint belongs to MTP heads only.

    Some families name them `mtp`. Others number them as `further` layers, after those of the model.
    """
    number = _LAYER.search(name)
    return name.startswith("mtp.") or (number is not None and int(number[1]) in further)
