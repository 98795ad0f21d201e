"""An external generator: it generates trajectories outside of the run and posts them for training.

    python train_async.py … --rollout-function-path miles_async.rollout.external_rollout.generate_rollout \
        --agent-port 8800 &
    python -m examples.external_generator --url http://127.0.0.1:8800 --key-file runs/latest/agent_key --group-size 4

The generator imports nothing from this project. It needs three kinds of requests: open a session, ask the model, and
post a group of finished samples. This example asks for sums and computes the rewards itself.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import uuid
from pathlib import Path
from typing import Any

import aiohttp

GROUPS_AT_ONCE = 8
PAUSE_SECONDS = 0.5


class Endpoint:
    """The endpoint of the run. The run writes the key of the endpoint to `key_file` when it starts."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key_file: Path) -> None:
        self._http, self._url, self._key_file = http, url, key_file

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        """Return the answer to a request; `path` may also be a whole URL."""
        url = path if path.startswith("http:") else self._url + path
        headers["Authorization"] = f"Bearer {self._key_file.read_text()}"
        async with self._http.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            return await response.json()

    async def post_group(self, samples: list[dict[str, Any]]) -> str:
        """Post a group until it is acknowledged, and return its name.

        The key ensures that the group is trained once if an answer is lost.
        """
        key = uuid.uuid4().hex
        while True:
            try:
                answer = await self.post("/trajectories", {"samples": samples}, **{"Idempotency-Key": key})
                return str(answer["group"])
            except aiohttp.ClientResponseError as error:
                if error.status not in (429, 503):  # the buffer is full, or the run has just been restored
                    raise
            except (aiohttp.ClientError, OSError):
                pass  # the rollout worker was lost, and another one will answer
            await asyncio.sleep(PAUSE_SECONDS)


async def play(endpoint: Endpoint, question: str, answer: str) -> dict[str, Any]:
    """Run one conversation and return it as one sample of a group."""
    session = await endpoint.post("/sessions", {})
    request = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
    completion = await endpoint.post(f"{session['base_url']}/chat/completions", request)
    response = completion["choices"][0]["message"]["content"]
    # A wrong answer gets a small reward for each digit, so that an untrained model has something to learn from.
    digits = sum(character.isdecimal() for character in response) / max(len(response), 1)
    return {"session": session["session"], "reward": 1.0 if response.strip() == answer else 0.1 * digits}


async def generate(url: str, key_file: Path, group_size: int) -> None:
    async with aiohttp.ClientSession() as http:
        endpoint = Endpoint(http, url, key_file)
        await asyncio.gather(*(_generate_groups(endpoint, group_size) for _ in range(GROUPS_AT_ONCE)))


async def _generate_groups(endpoint: Endpoint, group_size: int) -> None:
    while True:
        left, right = random.randint(1, 9), random.randint(1, 9)
        try:
            samples = [play(endpoint, f"{left}+{right}=", str(left + right)) for _ in range(group_size)]
            await endpoint.post_group(await asyncio.gather(*samples))
        except (aiohttp.ClientError, OSError):
            # The run has not started yet, is publishing weights, or has ended. Try again until this program is stopped.
            await asyncio.sleep(PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the endpoint of the run")
    parser.add_argument("--key-file", type=Path, required=True, help="agent_key in the folder of the run")
    parser.add_argument("--group-size", type=int, default=4, help="n_samples_per_prompt of the run")
    arguments = parser.parse_args()
    asyncio.run(generate(arguments.url, arguments.key_file, arguments.group_size))


if __name__ == "__main__":
    main()
