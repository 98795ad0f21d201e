"""What the settings of Miles stand for, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_async.compat.miles.defaults import DEFAULTS, FULLY_ASYNC
from miles_async.config.fields import with_settings
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_named
from miles_async.errors import UserError
from miles_async.json_values import shown

AGENT = "miles_async.compat.miles.agents.generate"
MULTI_TURN = "miles_async.compat.miles.multi_turn.generate"
_HUB = "miles.rollout.generate_hub"
_SHIPPED: Mapping[str | None, str | None] = {
    f"{_HUB}.agentic_tool_call.generate": AGENT,
    f"{_HUB}.multi_turn.generate": MULTI_TURN,
    f"{_HUB}.single_turn.generate": None,
}
"""Generate functions of Miles, and those of this project that do the same; None for what a run does without one."""


def resolve(config: RunConfig) -> RunConfig:
    """The configuration in which settings of this project have the values that those of Miles stand for."""
    rollout: Any = config.rollout
    path = rollout.custom_generate_function_path
    if path in _SHIPPED:
        # Agents and tools import modules of Miles, and some of those modules work only in a run of Miles.
        imports = rollout.slime_imports or _SHIPPED[path] is not None
        config = with_settings(config, custom_generate_function_path=_SHIPPED[path], slime_imports=imports)
    elif path is None and rollout.custom_agent_function_path is not None:
        config = with_settings(config, custom_generate_function_path=AGENT)
    elif path is None and rollout.generate_tool_specs_path is not None:
        config = with_settings(config, custom_generate_function_path=MULTI_TURN)
    is_ours = config.rollout.custom_generate_function_path in (AGENT, MULTI_TURN)
    if is_ours and rollout.max_seq_len is not None and rollout.max_answer_len is None:
        longest = max(1, rollout.max_seq_len - (rollout.rollout_max_prompt_len or 1))
        config = with_settings(
            config, max_answer_len=rollout.rollout_max_response_len, rollout_max_response_len=longest
        )
    if rollout.rollout_function_path == FULLY_ASYNC and "max_attempts" not in rollout.model_fields_set:
        # The default of `--async-unused-samples-handler`, which only this function of Miles reads.
        config = with_settings(config, max_attempts=DEFAULTS["max_attempts"])
    factor = rollout.async_data_buffer_capacity_factor
    if factor is None:
        return config
    in_flight = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    return with_settings(config, queue_capacity=in_flight + max(1, int(factor * rollout.rollout_batch_size)))


_NEEDED_BY = {
    "custom_agent_function_path": AGENT,
    "generate_tool_specs_path": MULTI_TURN,
    "generate_execute_tool_function_path": MULTI_TURN,
}
"""Settings with paths, and the generate function that needs each of them."""
_LENGTHS = ("max_seq_len", "max_answer_len")


def problems(rollout: Any) -> Iterator[str]:
    """One sentence for each of Miles' settings that is missing or without effect; `rollout` is the resolved section.

    Another generate function may read all of them.
    """
    path = rollout.custom_generate_function_path
    values = rollout.model_dump(include={*_NEEDED_BY, *_LENGTHS}, exclude_none=True)
    for setting, function in _NEEDED_BY.items():
        if setting not in values and path == function:
            yield f"custom_generate_function_path {path} needs {setting}: set it to a path such as my_module.name"
        elif setting in values and path != function and path in (AGENT, MULTI_TURN):
            yield f"{setting} has no effect with custom_generate_function_path {path}: unset one of them"
        elif setting in values and path is None:
            yield f"{setting} has no effect without generate_tool_specs_path: set both, or unset it"
    for setting in _LENGTHS:
        if setting in values and path is None:
            yield (
                f"{setting} has no effect without custom_agent_function_path or generate_tool_specs_path: set one of "
                "them, or unset it"
            )


def check(config: RunConfig) -> None:
    """Raises UserError if the tools are not a list of tools, or an agent would get prompts that are rendered."""
    rollout: Any = config.rollout
    if rollout.custom_generate_function_path == AGENT and config.data.apply_chat_template:
        raise UserError(
            "custom_agent_function_path sends chat messages, which the endpoint for agents renders: unset "
            "apply_chat_template"
        )
    if rollout.generate_tool_specs_path is not None:
        load_tools(rollout.generate_tool_specs_path)


def load_tools(path: str) -> list[dict[str, Any]]:
    """The tools at `path`. Raises UserError if they cannot be imported, or are not described as OpenAI does."""
    tools = load_named(path, setting="generate_tool_specs_path")
    if not isinstance(tools, list | tuple) or not tools:
        raise UserError(f"generate_tool_specs_path {path} is {shown(tools)}: name a list with at least one tool")
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(_name_of(tool), str):
            raise UserError(
                f"generate_tool_specs_path {path}: {shown(tool)} is not a tool: write each as "
                '{"type": "function", "function": {"name": …, "parameters": …}}'
            )
    return list(tools)


def _name_of(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None
