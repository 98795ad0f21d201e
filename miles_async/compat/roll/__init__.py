"""ROLL (https://github.com/alibaba/ROLL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_async.guests import Guest

if TYPE_CHECKING:
    from miles_async.config.translation import Outcome

_ROLES = ("actor_train", "actor_infer", "reference")
_OTHER_PIPELINES = {
    "student_pretrain": "distillation",
    "student_train": "on-policy distillation",
    "sft_train": "supervised fine-tuning",
    "chosen_key": "preference optimization",
}
"""ROLL's pipelines without a counterpart, by a key that only their files have."""


class Roll(Guest):
    """Translates ROLL's configuration files, which have a section for each role."""

    name = "ROLL"

    def recognises(self, content: Mapping[str, Any]) -> bool:
        return any(key in content for key in (*_ROLES, *_OTHER_PIPELINES))

    def translate(self, content: Mapping[str, Any]) -> Outcome:
        from miles_async.compat.roll.translation import translate
        from miles_async.config.translation import Outcome

        if (key := next((key for key in _OTHER_PIPELINES if key in content), None)) is not None:
            sentence = (
                f"{key} belongs to ROLL's pipeline of {_OTHER_PIPELINES[key]}: only files of its pipelines rlvr and "
                "agentic can be translated, so set the settings of miles_async instead"
            )
            return Outcome(problems=[sentence])
        return translate(content)

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.roll.defaults import DEFAULTS

        return DEFAULTS
