"""Miles (https://github.com/radixark/miles), whose flags are those of slime and some more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from miles_async.guests import Guest
from miles_async.section import Section

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig
    from miles_async.config.translation import Flag


class Miles(Guest):
    """Gives the flags that Miles adds to slime's their meaning."""

    name = "miles"

    class Settings(Section):
        async_data_buffer_capacity_factor: float | None = Field(None, gt=0, le=1e6)
        """Number of finished groups that may wait for training, as a multiple of rollout_batch_size. It sets
        queue_capacity, which counts the groups in flight too. If unset, queue_capacity applies."""

    def flags(self) -> Mapping[str, Flag]:
        from miles_async.compat.miles.flags import FLAGS

        return FLAGS

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.miles.defaults import DEFAULTS

        return DEFAULTS

    def arguments(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        from miles_async.compat.slime.arguments import of_flags

        return of_flags(self.flags(), settings)

    def resolve(self, config: RunConfig) -> RunConfig:
        from miles_async.config.fields import with_settings

        rollout = config.rollout
        assert isinstance(rollout, self.Settings)
        factor = rollout.async_data_buffer_capacity_factor
        if factor is None:
            return config
        in_flight = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return with_settings(config, queue_capacity=in_flight + max(1, int(factor * rollout.rollout_batch_size)))
