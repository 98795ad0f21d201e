"""Megatron-LM (https://github.com/NVIDIA/Megatron-LM), whose flags scripts for slime and Miles pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_async.guests import Guest

if TYPE_CHECKING:
    from miles_async.config.translation import Flag, Translator


class Megatron(Guest):
    """Gives Megatron's flags their meaning: those of the model are compared with its checkpoint, and those of
    Megatron-core's configuration are passed on."""

    name = "Megatron-LM"

    def flags(self) -> Mapping[str, Flag]:
        from miles_async.compat.megatron.flags import flags

        return flags()

    def combine(self, values: Mapping[str, Any], translator: Translator) -> None:
        from miles_async.compat.megatron.flags import combine

        combine(values, translator)
