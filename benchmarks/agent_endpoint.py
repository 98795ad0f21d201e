"""Measures how many agents one endpoint can serve, with a fake engine.

    python -m benchmarks.agent_endpoint [--seconds 20]

The endpoint runs with the real recorder, tokenizer, chat template and parser process. Agents in another process hold
sessions of 10 turns: a third each uses chat completions, responses and Anthropic messages. In each turn the model
calls a tool with 256 tokens, and the agent sends a result of 400 characters. A session ends with about 8,000 tokens and
is posted for training. The measurements are:

- the capacity, with 128 sessions and an engine that answers after 50 ms;
- CPU time per turn and event-loop lag with 2,000 sessions, at 30, 50 and 70 % of this capacity.

Prints a table and writes benchmarks/results/agent_endpoint.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import uvloop

from benchmarks.fake_agents import TURNS
from benchmarks.records import machine_load, record
from benchmarks.rollout_worker import cpu_seconds, fake_engine, wait_until_healthy, watch
from miles_async.adapters.agents.endpoint import AgentEndpoint
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.megatron.model.tiny_model import byte_tokenizer
from miles_async.adapters.sglang.answer_parser import AnswerParserProcess
from miles_async.adapters.sglang.answer_parser_process import Choice
from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.system.memory import tune_memory
from miles_async.events import RequestEnded
from miles_async.types import Group, Sample

SESSIONS = 2000
SHARES = (0.3, 0.5, 0.7)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "the capital of France"}}\n</tool_call>'
ANSWER = CALL.rjust(255, ".")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions as <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template as those of Qwen."""


class InstantStore:
    """A log of posted groups that stores nothing."""

    def post(self, group: Group, number: int, key: str | None) -> None: ...

    def forget_key(self, key: str) -> None: ...

    async def flush(self) -> bool:
        return True

    async def load_posted(self, feed_index: str) -> list[Sample]:
        return []


@dataclass(frozen=True)
class Load:
    """The result of one measurement."""

    turns_per_second: float
    cpu_ms_per_turn: float
    lag_p99_ms: float
    in_flight: int
    """Average number of turns at the engine."""


async def measure(
    engine: str, checkpoint: str, sessions: int, latency: float, seconds: float, *, turns_per_second: float | None
) -> Load:
    """Measure for `seconds`, once the sessions are spread evenly over their turns.

    `latency` is that of the engine in seconds; its response times vary by half of it.
    """
    client = JsonClient()
    await client.post(f"{engine}/latency", {"seconds": latency, "spread": 0.5}, within=10)
    await client.close()
    ended: list[RequestEnded] = []
    first = asyncio.Event()

    def count(request: RequestEnded) -> None:
        ended.append(request)
        first.set()

    sampling = SamplingParams(max_new_tokens=20_000)
    tokenizer = CheckpointTokenizer(checkpoint)
    await asyncio.to_thread(getattr, tokenizer, "transformers")
    generator = SGLangGenerator(
        engine,
        tokenizer,
        sampling,
        limit=lambda: sessions,
        engines=lambda: [EngineInfo("stand-in", engine, 0, 1)],
        on_request=count,
    )
    buffer = TrajectoryBuffer(sessions, 1, log=InstantStore())
    async with AnswerParserProcess(Choice(checkpoint, "auto", "auto")) as parser:
        endpoint = AgentEndpoint(buffer, parser=parser)
        await endpoint.start()
        sampler = MultiTurnSampler(generator, tokenizer)
        endpoint.accept_external(sampler, sampling.body(sampling.max_new_tokens), live=lambda: True)
        spread = TURNS * (latency if turns_per_second is None else sessions / turns_per_second)
        command = [sys.executable, "-m", "benchmarks.fake_agents", endpoint.url, str(sessions)]
        agents = await asyncio.create_subprocess_exec(*command, str(spread), stdin=asyncio.subprocess.PIPE)
        assert agents.stdin is not None, "started with a pipe"
        agents.stdin.write(endpoint.key.encode())
        agents.stdin.close()
        training = asyncio.create_task(_take_forever(buffer))
        try:
            await first.wait()
            await asyncio.sleep(spread)
            tune_memory()
            lags: list[float] = []
            in_flight: list[int] = []
            watching = asyncio.create_task(watch(lags, in_flight, generator))
            ended.clear()
            began, cpu = time.monotonic(), cpu_seconds()
            await asyncio.sleep(seconds)
            wall, cpu, turns = time.monotonic() - began, cpu_seconds() - cpu, len(ended)
            watching.cancel()
            if agents.returncode is not None:
                raise SystemExit("the agents have failed")
        finally:
            training.cancel()
            with suppress(ProcessLookupError):
                agents.kill()
            await agents.wait()
            await endpoint.close()
            await generator.close()
    lags.sort()
    return Load(turns / wall, 1e3 * cpu / turns, 1e3 * lags[int(0.99 * len(lags))], sum(in_flight) // len(in_flight))


async def _take_forever(buffer: TrajectoryBuffer) -> None:
    while True:
        await buffer.take()


async def play(engine: str, checkpoint: str, seconds: float) -> dict[str, Load]:
    await wait_until_healthy(engine)
    capacity = await measure(engine, checkpoint, 128, 0.05, seconds, turns_per_second=None)
    loads = {"128 sessions, 50 ms engine": capacity}
    for share in SHARES:
        rate = share * capacity.turns_per_second
        name = f"{SESSIONS:,} sessions, {share:.0%} of that"
        loads[name] = await measure(engine, checkpoint, SESSIONS, SESSIONS / rate, seconds, turns_per_second=rate)
    return loads


def save_checkpoint(folder: str) -> None:
    """Write a tokenizer with a chat template for tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement (default: 20)")
    arguments = parser.parse_args()
    with TemporaryDirectory() as checkpoint, fake_engine("--text", ANSWER) as engine:
        save_checkpoint(checkpoint)
        loads = uvloop.run(play(engine, checkpoint, arguments.seconds))
    print(f"{'':30}{'turns/s':>10}{'CPU ms/turn':>13}{'lag p99 ms':>12}{'in flight':>11}")
    for name, load in loads.items():
        figures = f"{load.turns_per_second:10.0f}{load.cpu_ms_per_turn:13.2f}{load.lag_p99_ms:12.1f}"
        print(f"{name:30}{figures}{load.in_flight:11}")
    record("agent_endpoint", {**{name: vars(load) for name, load in loads.items()}, "machine_load": machine_load()})


if __name__ == "__main__":
    main()
