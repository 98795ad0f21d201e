"""Miles (https://github.com/radixark/miles), whose flags are those of slime and some more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from miles_async.guests import Guest
from miles_async.section import Section

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig
    from miles_async.config.translation import Flag


class Miles(Guest):
    """Gives the flags that Miles adds to slime's their meaning, and calls functions, agents and tools as Miles does."""

    name = "miles"
    recorded = (
        "custom_agent_function_path",
        "generate_tool_specs_path",
        "generate_execute_tool_function_path",
        "generate_max_turns",
        "max_seq_len",
        "max_answer_len",
    )

    class Settings(Section):
        async_data_buffer_capacity_factor: float | None = Field(None, gt=0, le=1e6)
        """Number of finished groups that may wait for training, as a multiple of rollout_batch_size. It sets
        queue_capacity, which counts the groups in flight too. If unset, queue_capacity applies."""
        custom_agent_function_path: str | None = None
        """Agent of Miles that generates each sample, as module.function with the signature async fn(*, base_url,
        prompt, request_kwargs, metadata) -> dict or None. base_url is the address of a session without /v1, which
        needs no API key; prompt is the prompt of the row; request_kwargs are the sampling parameters for a chat
        completion; what the function returns is added to sample.metadata, for the reward. If unset, no agent is
        called."""
        generate_tool_specs_path: str | None = None
        """List of tools in OpenAI's format, as module.name, that the model may call while it generates a sample in
        several turns. generate_execute_tool_function_path must be set too. If unset, no tools are offered."""
        generate_execute_tool_function_path: str | None = None
        """Function that executes a tool call of the model, as module.function with the signature async fn(name, params)
        -> text. generate_tool_specs_path must be set too. If unset, no tools are executed."""
        generate_max_turns: int = Field(16, ge=1)
        """Maximum number of answers per sample with generate_tool_specs_path."""
        max_seq_len: int | None = Field(None, ge=1)
        """Maximum number of tokens of a sample of custom_agent_function_path or generate_tool_specs_path: its prompt
        and all turns. rollout_max_response_len then limits one answer. If unset, it limits all turns together."""
        max_answer_len: int | None = Field(None, ge=1)
        """Maximum number of tokens of one answer of custom_agent_function_path or generate_tool_specs_path. If unset,
        rollout_max_response_len; with max_seq_len, the value that rollout_max_response_len was set to."""

    def flags(self) -> Mapping[str, Flag]:
        from miles_async.compat.miles.flags import FLAGS

        return FLAGS

    def defaults(self) -> Mapping[str, Any]:
        from miles_async.compat.miles.defaults import DEFAULTS

        return DEFAULTS

    def equivalents(self) -> Mapping[str, Mapping[Any, Any]]:
        from miles_async.compat.slime.defaults import EQUIVALENTS

        return EQUIVALENTS

    def arguments(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        from miles_async.compat.slime.arguments import of_flags
        from miles_async.modes.shipped import Stream

        is_stream = settings["rollout_function_path"] == Stream.function
        return {**of_flags(self.flags(), settings), "fully_async": is_stream}

    def adapt_function(self, function: Callable[..., Any], name: str, setting: str) -> Callable[..., Any] | None:
        from miles_async.compat.miles.forms import in_slimes_form

        return in_slimes_form(function, name, setting)

    def resolve(self, config: RunConfig) -> RunConfig:
        from miles_async.compat.miles.resolution import resolve

        return resolve(config)

    def problems(self, settings: Any) -> Iterator[str]:
        from miles_async.compat.miles.resolution import problems

        return problems(settings)

    def check(self, config: RunConfig) -> None:
        from miles_async.compat.miles.resolution import check

        check(config)
