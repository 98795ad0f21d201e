"""A harness of `verifiers` for tasks without tools: it asks the model once per turn, inside the environment's process.

The chat programs of the library start a Python process per turn, which costs about a second of CPU time.
"""

from __future__ import annotations

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ChatHarness"]


class ChatHarnessConfig(vf.HarnessConfig):
    """The harness has no settings."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http,
            http.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}) as answer,
        ):
            error = "" if answer.ok else await answer.text()
        return vf.ProgramResult(exit_code=int(bool(error)), stdout="", stderr=error)
