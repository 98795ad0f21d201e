"""The reward `llm_judge`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_async.rewards.answers import after_reasoning, label_of
from miles_async.rewards.functions.remote_rm import RemoteRm
from miles_async.rewards.plugin import RewardFunction
from miles_async.types import Sample

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig

_PROMPT = """\
Decide whether the last answer in a response to a question is the same as the reference answer.
The reference may be the letter of an option, a number, a formula or words in any language.
An answer that is missing, cut off or ambiguous is not the same.
Write YES if it is the same and NO if it is not, and nothing else.

Question:
{question}

Response:
{response}

Reference answer:
{reference}
"""
_MAX_TOKENS = 512
_VERDICT, _BEGINS_WITH_VERDICT = re.compile(r"(?i)\b(?:yes|no)\b"), re.compile(r"(?i)\W*(?:yes|no)\b")


class LlmJudge(RemoteRm):
    """1 if the model at rm_url answers YES when it is asked whether the response has the answer of the label, and 0
    otherwise.

    rm_url is the address of chat completions (OpenAI's API), such as http://host:port/v1/chat/completions. The server
    must have a model of the name `default`, as SGLang's always has.
    """

    name = "llm_judge"
    compares = True
    may_be_dictionary = False

    def open(self, settings: Any) -> RewardFunction:
        from miles_async.rewards.remote import RemoteReward

        return RemoteReward(settings, body=_request, reward=_verdict)

    def missing(self, config: RunConfig) -> str | None:
        if super().missing(config) is None:
            return None
        return (
            "needs a judge: serve its model with SGLang, and set rm_url to http://host:port/v1/chat/completions of the "
            "server"
        )


def _request(sample: Sample) -> dict[str, Any]:
    text = _PROMPT.format(
        question=_question(sample.prompt), response=after_reasoning(sample.response), reference=label_of(sample)
    )
    message = {"role": "user", "content": text}
    return {"model": "default", "messages": [message], "temperature": 0.0, "max_tokens": _MAX_TOKENS}


def _question(prompt: Any) -> str:
    """The last message of a user, or the text behind the last mark of a user in a prompt that is rendered."""
    if isinstance(prompt, str):
        return prompt.rpartition("user\n")[2].strip()
    asked = [message for message in prompt if message.get("role") == "user"]
    return str((asked or prompt)[-1].get("content"))


def _verdict(answer: Any) -> float:
    """Raises ValueError if a server that is no judge has answered, or if the answer was cut off before its verdict."""
    match answer:
        case {"choices": [{"message": {"content": str(text)}, "finish_reason": "length"}, *_]} if (
            "</think>" not in text and _BEGINS_WITH_VERDICT.match(text) is None
        ):
            raise ValueError(
                f"the judge at rm_url has not decided within {_MAX_TOKENS} tokens: serve it without reasoning, or "
                "serve another model"
            )
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            found = _VERDICT.search(after_reasoning(text))
            return float(found is not None and found[0].lower() == "yes")
    said = ", ".join(map(str, answer)) if isinstance(answer, Mapping) else type(answer).__name__
    raise ValueError(f"rm_url answered {said:.80} instead of a chat completion: set it to the address of a judge")
