"""ROLL (https://github.com/alibaba/ROLL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_async.guests import Guest

if TYPE_CHECKING:
    from miles_async.config.translation import Outcome

_ROLES = ("actor_train", "actor_infer", "reference")


class Roll(Guest):
    """Translates ROLL's configuration files, which have a section for each role."""

    name = "ROLL"

    def recognises(self, content: Mapping[str, Any]) -> bool:
        return any(role in content for role in _ROLES)

    def translate(self, content: Mapping[str, Any]) -> Outcome:
        from miles_async.compat.roll.translation import translate

        return translate(content)

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.roll.defaults import DEFAULTS

        return DEFAULTS
