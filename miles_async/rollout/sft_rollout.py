"""Supervised fine-tuning batches, as in slime: examples are tokenized with a loss mask, and nothing is generated.

    --rollout-function-path miles_async.rollout.sft_rollout.generate_rollout --loss-type sft_loss

An example is a conversation (`metadata["messages"]`, or a prompt that is a list of messages) or a text prompt with a
label. Of a conversation, the assistant's turns with their end-of-turn tokens are trained on; the other turns and the
text that the chat template adds are not, and neither is an assistant's turn whose `step_loss_mask` is 0. Of a text
prompt, the label is trained on, followed by the end-of-text token. The prompt has the same tokens as in generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from miles_async.adapters.sglang.multi_turn import TurnTokenizer
from miles_async.errors import UserError
from miles_async.modes.shipped import Supervised
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Group, Sample, SampleStatus, VersionSpan


class SftTokenizer(TurnTokenizer, Protocol):
    @property
    def end(self) -> str:
        """The token that ends a turn or a text."""
        ...


@Supervised()
async def generate_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """Return `rollout_batch_size` groups of examples.

    With `evaluation`, return rewards and truncation flags of the held-out data sets instead.
    """
    if evaluation:
        return await data_source.evaluate(rollout_id)
    groups: list[Group] = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            fill_example(sample, args.tokenizer, version=data_source.live_version)
    return groups


def fill_example(sample: Sample, tokenizer: SftTokenizer, *, version: int) -> None:
    """Set tokens, loss mask and reward of a sample from its example, in place.

    `version` becomes the sample's weight version, so that examples, which no model sampled, never count as stale.
    Raises UserError if the example contains no text to train on.
    """
    encoded = _encoded_example(sample, tokenizer)
    tokens = [token for ids, _, _ in encoded for token in ids]
    mask = [int(trained) for ids, _, trained in encoded for _ in ids]
    if 1 not in mask[1:]:
        raise UserError(
            f"sample {sample.index}: its example has no text to train on: add an assistant turn that step_loss_mask "
            "does not exclude, or set label_key to the key of the answer"
        )
    # The response begins at the first trained token. A model cannot predict the first token of a sequence, so 1 is
    # least.
    first = max(mask.index(1), 1)
    sample.tokens, sample.loss_mask = tokens, mask[first:]
    sample.response_length = len(tokens) - first
    sample.response = "".join(text for _, text, trained in encoded if trained)
    sample.rollout_log_probs = [0.0] * sample.response_length
    sample.spans = [VersionSpan(version, 0, sample.response_length)]
    sample.reward = 0.0
    sample.status = SampleStatus.COMPLETED


def _encoded_example(sample: Sample, tokenizer: SftTokenizer) -> list[tuple[list[int], str, bool]]:
    """The parts of the example: token ids, text, and whether the part is trained on."""
    example = sample.metadata.get("messages") or sample.prompt
    if isinstance(example, str):
        prompt = tokenizer.encode(example), example, False
        if sample.label is None:
            return [prompt]
        answer = f"{sample.label}{tokenizer.end}"
        return [prompt, (tokenizer.encode_text(answer, after=example), answer, True)]
    pieces = list(chat_pieces(example, tokenizer, sample.metadata.get("tools")))
    ids = _encode_pieces([text for text, _ in pieces], tokenizer)
    return [(part, text, trained) for part, (text, trained) in zip(ids, pieces, strict=True)]


def _encode_pieces(pieces: Sequence[str], tokenizer: SftTokenizer) -> list[list[int]]:
    """The token ids of consecutive pieces of a text.

    Together they are the ids of the whole text, unless a token would span two pieces: in generation, prompt and
    response are tokenized separately.
    """
    separate = [tokenizer.encode_text(piece) for piece in pieces]
    if list(chain.from_iterable(separate)) == tokenizer.encode_text("".join(pieces)):
        # This is so for most tokenizers, and saves encoding the text before each piece.
        return separate
    return [tokenizer.encode_text(piece, after="".join(pieces[:number])) for number, piece in enumerate(pieces)]


def chat_pieces(
    messages: Sequence[dict[str, Any]], tokenizer: SftTokenizer, tools: list[dict[str, Any]] | None = None
) -> Iterator[tuple[str, bool]]:
    """Split a rendered conversation into pieces of text, with a flag whether the piece is trained on.

    Raises UserError if the chat template changes earlier turns when later turns follow.
    """
    chat = list(messages)
    whole = tokenizer.render(chat, tools, answer_next=False)
    position = 0
    for number, message in enumerate(chat):
        # As in slime, any other value than 1 excludes the turn.
        if message["role"] != "assistant" or message.get("step_loss_mask", 1) != 1:
            continue
        before = tokenizer.render(chat[:number], tools) if number else ""
        after = tokenizer.render(chat[: number + 1], tools, answer_next=False)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise UserError(
                f"the chat template changes turn {number} of an example when other turns follow, so its loss mask "
                "would be wrong; use a template that keeps earlier turns, or examples with one assistant turn"
            )
        # Templates add a line break after the end-of-turn token, which a model never generates.
        end = after.rfind(tokenizer.end, len(before))
        stop = len(after) if end < 0 else end + len(tokenizer.end)
        yield whole[position : len(before)], False
        yield whole[len(before) : stop], True
        position = stop
    # The text after the last trained turn is left out, because no trained token depends on it.
