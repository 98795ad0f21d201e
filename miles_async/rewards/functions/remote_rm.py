"""The reward `remote_rm`; `rewards/remote.py` computes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field

from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn
from miles_async.section import Section

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig


class RemoteRm(Reward):
    """The answer of the server at rm_url to a POST of the prompt, the response and the label."""

    name = "remote_rm"
    runs_in = RunsIn.SERVER
    may_be_dictionary = True
    reads = ("reward_timeout_seconds",)

    class Settings(Section):
        """The server, and the requests to it."""

        rm_url: str | None = None
        """URL to which rm_type remote_rm posts the prompt, response and label of each sample as JSON, or of the chat
        completions of the judge that rm_type llm_judge asks."""
        remote_rm_concurrency: int = Field(64, ge=1)
        """Maximum number of simultaneous requests to rm_url."""
        remote_rm_retries: int = Field(3, ge=0)
        """Number of times a request to rm_url is repeated after a lost connection, a timeout or a 5xx response. A 4xx
        response is not retried."""

    def open(self, settings: Any) -> RewardFunction:
        from miles_async.rewards.remote import RemoteReward

        return RemoteReward(settings)

    def problems(self, settings: Any) -> Iterator[str]:
        from miles_async.config.redaction import redact_text

        url = settings.rm_url
        if url is not None and not _is_web_address(url):
            yield f"rm_url {redact_text(url)} is not the address of a server: set it to http://host:port/path"

    def missing(self, config: RunConfig) -> str | None:
        assert isinstance(config.rollout, RemoteRm.Settings), "the section has the settings of all rewards"
        if config.rollout.rm_url is not None:
            return None
        return "needs a reward server: set rm_url to the address of the server"


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        valid = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return valid and parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", text)
