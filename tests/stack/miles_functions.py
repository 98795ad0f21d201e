"""An agent, tools and functions as users write them for Miles."""

from dataclasses import replace

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput, RolloutFnTrainInput, RolloutFnTrainOutput
from miles.rollout.generate_hub import single_turn
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
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


class Rollout(InferenceRolloutFn):
    """Generates a batch as Miles does, and adds a metric."""

    async def _call_train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        output = await super()._call_train(input)
        samples = [sample for group in output.samples for sample in group]
        metrics = {"agent/turns_mean": sum(sample.metadata["turns"] for sample in samples) / len(samples)}
        return RolloutFnTrainOutput(output.samples, {**(output.metrics or {}), **metrics})


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    params = {**input.sampling_params, "max_new_tokens": 20}
    output = await single_turn.generate(replace(input, sampling_params=params))
    assert input.state.tokenizer.decode(output.samples.tokens)
    output.samples.metadata["turns"] = 1
    return output
