"""The warm start for `examples/environments/two_words.py`, which only the Python of the environment can import."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.types import Sample


def warm_start_examples(sample: Sample) -> Iterator[tuple[str, str]]:
    """The prompts of both turns of a perfect model, as the chat template renders them, and the answers."""
    history = ""
    for answer in str(sample.label).split():
        history += f"user: {answer[::-1]}<eos>assistant: "
        yield history, answer
        history += f"{answer}<eos>"
