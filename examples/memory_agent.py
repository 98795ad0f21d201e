"""An agent with a calculator and a memory that it compacts, trained without changes to the agent.

    python train_async.py --config configs/memory-agent-cpu.yaml

The agent reads a long sum in parts. For each part the model writes an expression, the calculator evaluates it, and the
model notes what to remember. The agent then drops the conversation and goes on with the note alone, as agents do whose
context is full. So a sample has one segment per part, and all segments are trained with the reward of the last answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import openai

from examples.openai_agent import model_client
from miles_async.rollout.tools.calculator import calculate
from miles_async.types import Sample

TERMS_PER_PART = 2
REMEMBERED = 0.4
"""Share of the sums in whose warm-start examples the agent uses its note. It ignores the note in the others."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the agent solve the prompt in one session, which stores the tokens of all segments."""
    async with model_client(args, sample, sampling_params) as client:
        sample.metadata["answer"] = await solve(client, str(sample.prompt))
    return sample


async def solve(client: openai.AsyncOpenAI, question: str) -> str:
    """Return the answer of the model to a sum."""
    memory = ""
    for part in parts(question):
        messages: list[Any] = [{"role": "user", "content": task(memory, part)}]
        expression = await _ask(client, messages)
        messages.append({"role": "user", "content": result(expression)})
        memory = await _ask(client, messages)
    return memory


def parts(question: str) -> list[str]:
    """Split `1 + 2 - 3 + 4` into `1 + 2` and `- 3 + 4`."""
    terms = re.findall(r"[+-]? ?\d+", question)
    return [" ".join(terms[i : i + TERMS_PER_PART]).strip() for i in range(0, len(terms), TERMS_PER_PART)]


def task(memory: str, part: str) -> str:
    return f"{memory} {part}".strip()


def result(expression: str) -> str:
    return f"= {calculate(expression)}"


def warm_start_examples(sample: Sample) -> Iterator[tuple[str, str]]:
    """The requests of an agent that often ignores its note, and their answers.

    So the model knows the form of every answer before RL, but RL has to teach it what the note is for.
    """
    question, memory = str(sample.prompt), ""
    remembers = random.Random(question).random() < REMEMBERED
    for part in parts(question):
        prompt = f"user: {task(memory, part)}<eos>assistant: "
        expression = task(memory if remembers else "", part).replace(" ", "")
        yield prompt, expression
        memory = calculate(expression)
        yield f"{prompt}{expression}<eos>user: {result(expression)}<eos>assistant: ", memory


async def _ask(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    """Append the answer of the model to `messages`, and return it."""
    answer = await client.chat.completions.create(model="policy", messages=messages)
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text
