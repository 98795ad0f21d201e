"""An agent and tools as users write them for Miles."""

from miles.utils.http_utils import post
from miles.utils.types import Sample


async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    payload = {"model": "default", **request_kwargs, "max_tokens": 20}
    for text in ("Sure?", "Really?"):
        answer = await post(f"{base_url}/v1/chat/completions", {**payload, "messages": messages})
        messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": text}]
        if answer["choices"][0]["finish_reason"] == "length":
            break
    said = "".join(message["content"] for message in messages if message["role"] == "assistant")
    return {"reward": sum(map(str.isalpha, said)) / (len(said) or 1), "agent_metrics": {"turns": len(messages) // 2}}


async def reward_func(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    return sample.metadata.get("reward", 0.0)


tool_specs = [
    {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Twice a number",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]


async def execute_tool(name, params):
    return str(2 * params["x"])
