"""The client of an environment that runs elsewhere, as the documentation shows it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.unit.adapters.agents.test_agent_endpoint import connected_agent

PAGE = Path(__file__).parents[4] / "docs/how-to/environments.md"


async def test_the_client_in_the_documentation_posts_a_group_of_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [client] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    def run_task(task: str, *, base_url: str, api_key: str, model: str) -> float:
        request: Any = {"model": model, "messages": [{"role": "user", "content": task}]}
        answer = requests.post(
            f"{base_url}/chat/completions", json=request, headers={"Authorization": f"Bearer {api_key}"}, timeout=10
        )
        return float(answer.json()["choices"][0]["message"]["content"] == "2")

    async with connected_agent("2", "3", size=2) as agent:
        folder = tmp_path / "runs/latest"
        folder.mkdir(parents=True)
        (folder / "agent_key").write_text(agent.endpoint.key)
        monkeypatch.chdir(tmp_path)
        code = client.replace("http://127.0.0.1:8800", agent.endpoint.url)
        names: dict[str, Any] = {"run_task": run_task, "TASK": "1 + 1", "N_SAMPLES_PER_PROMPT": 2}
        await asyncio.to_thread(exec, code, names)
        group = await agent.trajectories.take()
    assert [(sample.response, sample.reward) for sample in group] == [("2", 1.0), ("3", 0.0)]
