"""verl (https://github.com/volcengine/verl)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from miles_async.guests import Guest
from miles_async.section import Section

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig
    from miles_async.config.translation import Flag, Outcome
    from miles_async.rollout.recordings import RecordingContext


class Verl(Guest):
    """Translates verl's configuration files and overrides, and runs skip roles of users (SkipManager)."""

    name = "verl"

    class Settings(Section):
        skip_rollout: bool = False
        """Deprecated: replay recorded generation at every step. Set skip.rollout.enable or skip.async_rollout.enable
        and the steps to replay instead; this flag has no effect if one of them is set."""

    def recognises(self, content: Mapping[str, Any]) -> bool:
        from miles_async.compat.verl.translation import recognises

        return recognises(content)

    def has_key(self, key: str) -> bool:
        from miles_async.compat.verl.translation import has_key

        return has_key(key)

    def keys(self) -> Iterable[str]:
        from miles_async.compat.verl.rules import TABLE

        return TABLE

    def flags(self) -> Mapping[str, Flag]:
        from miles_async.compat.verl.rules import FLAGS

        return FLAGS

    def translate(self, content: Mapping[str, Any]) -> Outcome:
        from miles_async.compat.verl.translation import translate

        return translate(content)

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.verl.defaults import DEFAULTS

        return DEFAULTS

    def resolve(self, config: RunConfig) -> RunConfig:
        from miles_async.compat.verl.translation import resolve_skip_rollout

        assert isinstance(config.rollout, self.Settings)
        return resolve_skip_rollout(config) if config.rollout.skip_rollout else config

    def check(self, config: RunConfig) -> None:
        from miles_async.compat.verl.skip.manager import skip_instance
        from miles_async.rollout.recordings import RecordingContext

        # The run itself checks the roles for generation.
        for role, settings in config.skip.roles.items():
            skip_instance(role, settings, config, RecordingContext())

    def begin_run(self, config: RunConfig, context: RecordingContext) -> None:
        from miles_async.compat.verl.skip import SkipManager

        SkipManager.init(config, context)

    def begin_rollout(self, rollout_id: int) -> None:
        from miles_async.compat.verl.skip import SkipManager

        SkipManager.set_step(rollout_id)
