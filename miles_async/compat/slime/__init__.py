"""slime (https://github.com/THUDM/slime)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_async.guests import Guest
from miles_async.section import Section
from miles_async.types import Group

_ADVICE = {
    "lora_": "LoRA is not supported, remove it",
    "tp_comm_overlap": "Transformer Engine has buffers for micro-batches of one size only, and packed ones differ in "
    "size: remove it",
    "eval_prompt_data": "set eval_datasets to the name and the path of each data set",
    "n_samples_per_eval_prompt": "set n_samples of each data set in eval_datasets",
}
"""Beginnings of slime's flags that have no counterpart of a similar name, and what to do instead."""


class Slime(Guest):
    """Lets functions and workers that were written for slime run unchanged."""

    name = "slime"

    class Settings(Section):
        slime_imports: bool = False
        """Let user modules import slime's names, such as slime.rollout.sglang_rollout and slime.utils.types, from this
        project. Other modules of slime come from a checkout on PYTHONPATH. slime's fully_async_rollout then runs
        unchanged. If off, imports of slime find only a checkout."""

    def advice(self, flag: str) -> str | None:
        return next((text for start, text in _ADVICE.items() if flag.startswith(start)), None)

    def load_batch(self, path: Path) -> tuple[int, list[Group]] | None:
        from miles_async.compat.slime.saved_batches import load_batch

        return load_batch(path)

    def arguments(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rollout_global_dataset": not settings["disable_rollout_global_dataset"]}

    def install_modules(self, settings: Mapping[str, Any]) -> None:
        if settings["slime_imports"]:
            from miles_async.compat.slime.imports import install_slime_imports

            install_slime_imports()
