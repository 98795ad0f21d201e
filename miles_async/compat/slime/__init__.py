"""slime (https://github.com/THUDM/slime)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.guests import Guest
from miles_async.section import Section
from miles_async.types import Group

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig
    from miles_async.config.translation import Flag, Translator


class Slime(Guest):
    """Lets functions and workers that were written for slime run unchanged."""

    name = "slime"
    is_compared = True

    class Settings(Section):
        slime_imports: bool = False
        """Let user modules import names of slime and Miles, such as slime.rollout.sglang_rollout and miles.utils.types,
        from this project. Their other modules come from a checkout on PYTHONPATH. slime's fully_async_rollout then runs
        unchanged, and samples accept further attributes, as slime's do. If off, imports of slime and miles find only a
        checkout."""

    def flags(self) -> Mapping[str, Flag]:
        from miles_async.compat.slime.flags import FLAGS

        return FLAGS

    def combine(self, values: Mapping[str, Any], translator: Translator) -> None:
        from miles_async.compat.slime.flags import combine

        combine(values, translator)

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.slime.defaults import DEFAULTS

        return DEFAULTS

    def equivalents(self) -> Mapping[str, Mapping[Any, Any]]:
        from miles_async.compat.slime.defaults import EQUIVALENTS

        return EQUIVALENTS

    def resolve(self, config: RunConfig) -> RunConfig:
        from miles_async.compat.slime.resolution import resolve

        return resolve(config)

    def load_batch(self, path: Path) -> tuple[int, list[Group]] | None:
        from miles_async.compat.slime.saved_batches import load_batch

        return load_batch(path)

    def arguments(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        from miles_async.compat.slime.arguments import of_evaluation, of_flags

        return {
            **of_flags(self.flags(), settings),
            **of_evaluation(settings),
            "rollout_global_dataset": not settings["disable_rollout_global_dataset"],
        }

    def install_modules(self, settings: Mapping[str, Any]) -> None:
        if settings["slime_imports"]:
            from miles_async.compat.slime.imports import install_slime_imports

            install_slime_imports()

    def use_router(self, url: str, key: str) -> None:
        from miles_async.compat.slime.http_utils import use_router

        use_router(url, key)
