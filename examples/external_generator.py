"""Generate outside of the run, and post what is finished.

    python train_async.py … --rollout-function-path miles_async.rollout.external_rollout.generate_rollout \
        --agent-port 8800 &
    python -m examples.external_generator --url http://127.0.0.1:8800 --group-size 4

Needs nothing of this project but its address: three requests make a trajectory. Sums are asked for, and the answer is
scored here, where the environment lives.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

import aiohttp

GROUPS_AT_ONCE = 8
PAUSE_SECONDS = 0.5


async def play(http: aiohttp.ClientSession, url: str, question: str, answer: str) -> dict[str, Any]:
    """One conversation; what it returns is a sample of a group."""
    session = await _post(http, f"{url}/sessions", {})
    request = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
    completion = await _post(http, f"{session['base_url']}/chat/completions", request)
    said = completion["choices"][0]["message"]["content"]
    reward = sum(character.isdecimal() for character in said) / max(len(said), 1)
    return {"session": session["session"], "reward": 1.0 if said.strip() == answer else 0.1 * reward}


async def generate(url: str, group_size: int) -> None:
    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(_forever(http, url, group_size) for _ in range(GROUPS_AT_ONCE)))


async def _forever(http: aiohttp.ClientSession, url: str, group_size: int) -> None:
    while True:
        left, right = random.randint(1, 9), random.randint(1, 9)
        try:
            samples = [play(http, url, f"{left}+{right}=", str(left + right)) for _ in range(group_size)]
            await _post(
                http, f"{url}/trajectories", {"samples": await asyncio.gather(*samples)}, until_there_is_room=True
            )
        except (aiohttp.ClientError, OSError):
            # The run has not started yet, publishes, or is over: whoever started this decides when to end it.
            await asyncio.sleep(PAUSE_SECONDS)


async def _post(http: aiohttp.ClientSession, url: str, body: Any, *, until_there_is_room: bool = False) -> Any:
    while True:
        async with http.post(url, json=body) as response:
            if response.status == 429 and until_there_is_room:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            response.raise_for_status()
            return await response.json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="where the run's endpoint listens")
    parser.add_argument("--group-size", type=int, default=4, help="the run's n_samples_per_prompt")
    arguments = parser.parse_args()
    asyncio.run(generate(arguments.url, arguments.group_size))


if __name__ == "__main__":
    main()
