"""Supervised batches: nothing is generated, lessons become tokens and a loss mask (seed `slime-walkthrough`).

    --rollout-function-path miles_async.rollout.sft_rollout.generate_rollout --loss-type sft_loss

A lesson is a conversation (`metadata["messages"]`, or a prompt that is a list of messages): the turns of the assistant
are trained, each with the end-of-turn token, whatever else the checkpoint's chat template puts between them is not.
Or it is a plain prompt and its label: the label is trained, ended by the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from miles_async.errors import UserError
from miles_async.pipeline.source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Group, Sample, SampleStatus, VersionSpan


class SftTokenizer(Protocol):
    @property
    def end(self) -> str: ...

    def encode_text(self, text: str) -> list[int]: ...

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, answer_next: bool = True
    ) -> str: ...


async def generate_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """`rollout_batch_size` groups of lessons; with `evaluation`, the held-out scores of the engines."""
    if evaluation:
        return await data_source.evaluate(rollout_id)
    groups: list[Group] = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            learn(sample, args.tokenizer, version=data_source.live_version)
    return groups


def learn(sample: Sample, tokenizer: SftTokenizer, *, version: int) -> None:
    """Fill the sample with its lesson. `version` dates it: what no model sampled is as old as the model it meets.

    Raises UserError that names the sample where there is nothing to train.
    """
    pieces = list(_pieces(sample, tokenizer))
    encoded = [(tokenizer.encode_text(text), trained) for text, trained in pieces]
    tokens = [token for ids, _ in encoded for token in ids]
    mask = [int(trained) for ids, trained in encoded for _ in ids]
    if 1 not in mask[1:]:
        raise UserError(f"sample {sample.index}: its lesson holds nothing to train; give it an answer to learn")
    # The first token is predicted from nothing.
    first = max(mask.index(1), 1)
    sample.tokens, sample.loss_mask = tokens, mask[first:]
    sample.response_length = len(tokens) - first
    sample.response = "".join(text for text, trained in pieces if trained)
    sample.rollout_log_probs = [0.0] * sample.response_length
    sample.spans = [VersionSpan(version, 0, sample.response_length)]
    sample.reward = 0.0
    sample.status = SampleStatus.COMPLETED


def _pieces(sample: Sample, tokenizer: SftTokenizer) -> Iterator[tuple[str, bool]]:
    """The lesson's text, cut where training begins and ends. Pieces are encoded one by one, as in generation."""
    messages = sample.metadata.get("messages") or sample.prompt
    if isinstance(messages, str):
        yield messages, False
        yield f"{sample.label}{tokenizer.end}", True
        return
    yield from chat_pieces(messages, tokenizer, sample.metadata.get("tools"))


def chat_pieces(
    messages: Sequence[dict[str, Any]], tokenizer: SftTokenizer, tools: list[dict[str, Any]] | None = None
) -> Iterator[tuple[str, bool]]:
    """Raises UserError where the chat template changes earlier turns when later ones follow."""
    chat = list(messages)
    whole = tokenizer.render(chat, tools, answer_next=False)
    place = 0
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.render(chat[:number], tools) if number else ""
        answered = tokenizer.render(chat[: number + 1], tools, answer_next=False)
        if not (whole.startswith(asked) and whole.startswith(answered)):
            raise UserError(
                f"the chat template changes turn {number} of a lesson when others follow it: its loss mask would be "
                "wrong; use a template that leaves earlier turns alone, or lessons of one turn"
            )
        # Behind the end of a turn, templates put a line break that no model is asked for.
        end = answered.rfind(tokenizer.end, len(asked))
        stop = len(answered) if end < 0 else end + len(tokenizer.end)
        yield whole[place : len(asked)], False
        yield whole[len(asked) : stop], True
        place = stop
    # What follows the last answer teaches nothing.
