"""Every chat has the token ids of transformers' `apply_chat_template(tokenize=True)`, wherever it is encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from miles_async.adapters.agents.conversation import Conversation
from miles_async.adapters.datasets.factory import eval_groups, open_data
from miles_async.adapters.megatron.training.warm_start import encode_example
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.warm_starts import Example
from miles_async.config.schema import RunConfig
from miles_async.errors import TemplateError, UserError
from miles_async.rollout.sft_rollout import fill_example
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.configuration import KEYS, run_config
from tests.stack.tokenizer_families import FAMILIES, save_family
from workers.preflight import preflight

QUESTION = [{"role": "user", "content": "hi 12, So?"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "So hi"}, {"role": "user", "content": "hi"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "fine So."}]
TRANSCRIPT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_family(request.param, tmp_path / "checkpoint")


def expected(checkpoint: Path, messages: list[dict[str, Any]], **arguments: Any) -> list[int]:
    """What transformers says."""
    given = {"add_generation_prompt": True, "tools": None} | arguments
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
    return ids


def run_of(checkpoint: Path, prompts: list[Any], **settings: Any) -> RunConfig:
    path = checkpoint.parent / "rows.jsonl"
    rows = [{"prompt": prompt, "label": "So", "tools": TOOLS} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "prompt_data": str(path),
        **KEYS,
        "hf_checkpoint": str(checkpoint),
        "rollout_shuffle": False,
        "rm_type": "exact",
        "rollout_skip_special_tokens": True,
    }
    return run_config(**data | {"eval_size": 0, "n_samples_per_prompt": 1} | settings)


class Engine(SGLangGenerator):
    """An engine that knows its prompts and gives the same answer to all of them, which is empty at first."""

    def __init__(self, tokenizer: CheckpointTokenizer) -> None:
        super().__init__("http://127.0.0.1:1", tokenizer, SamplingParams(max_new_tokens=99), limit=int, engines=list)
        self.answer: list[int] = [tokenizer.transformers.eos_token_id]

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        self.tokenize(group)
        [sample] = group
        sample.tokens += self.answer
        sample.response_length += len(self.answer)
        sample.rollout_log_probs += [-1.0] * len(self.answer)
        if sample.loss_mask is not None:
            sample.loss_mask += [1] * len(self.answer)
        sample.spans = [VersionSpan(0, 0, sample.response_length)]
        sample.status = SampleStatus.COMPLETED


async def prompt_ids(tokenizer: CheckpointTokenizer, groups: list[Group]) -> list[list[int]]:
    engine = Engine(tokenizer)
    try:
        for group in groups:
            engine.tokenize(group)
    finally:
        await engine.close()
    return [list(group[0].tokens) for group in groups]


@pytest.mark.parametrize("renders", [True, False])
async def test_prompts_of_training_and_evaluation(family: Path, renders: bool) -> None:
    dataset = {"path": str(family.parent / "rows.jsonl"), "n_samples": 1}
    config = run_of(family, [QUESTION, CHAT], eval_size=1, apply_chat_template=renders, eval_datasets={"more": dataset})
    tokenizer = CheckpointTokenizer.of_run(config.data, str(family))
    data = open_data(config, tokenizer=tokenizer)
    held_out, trained = data.eval_problems(), data.get_samples(1)
    more = eval_groups(config, "more", config.rollout.eval_datasets["more"], tokenizer=tokenizer)
    wanted = [expected(family, messages, tools=TOOLS) for messages in (QUESTION, CHAT)]
    assert sorted(await prompt_ids(tokenizer, [*held_out, *trained])) == sorted(wanted)
    assert await prompt_ids(tokenizer, more) == wanted


async def test_a_prompt_that_is_text_is_rendered_or_gets_the_tokenizers_special_tokens(family: Path) -> None:
    [content] = [message["content"] for message in QUESTION]
    plain = AutoTokenizer.from_pretrained(family)(content).input_ids
    for renders, wanted in ((True, expected(family, QUESTION, tools=TOOLS)), (False, plain)):
        config = run_of(family, [content], apply_chat_template=renders)
        tokenizer = CheckpointTokenizer.of_run(config.data, str(family))
        [group] = open_data(config, tokenizer=tokenizer).get_samples(1)
        # A checkpoint and the store of the run keep the prompt, and the tokens if they are known.
        again = Group.from_prompt_dict(json.loads(json.dumps(group.prompt_dict())))
        assert await prompt_ids(tokenizer, [group, again]) == [wanted, wanted]


@pytest.mark.parametrize("renders", [True, False])
def test_examples_of_the_warm_start(family: Path, renders: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("WARM_START_EXAMPLES", "WARM_START_CHECKS"):
        monkeypatch.setattr(f"workers.preflight.{number}", 1)
    (family / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = run_of(family, [QUESTION], warm_start_max_steps=1, apply_chat_template=renders)
    example = preflight(config).problems[0]
    tokenizer = CheckpointTokenizer.of_run(config.data, str(family))
    prompt, _ = encode_example(tokenizer, example)
    assert prompt == expected(family, QUESTION, tools=TOOLS)


async def test_the_first_request_of_an_agent(family: Path) -> None:
    tokenizer = CheckpointTokenizer(str(family))
    engine, sample = Engine(tokenizer), Sample()
    try:
        conversation = Conversation(sample, MultiTurnSampler(engine, tokenizer), {"max_new_tokens": 99})
        await conversation.complete({"messages": CHAT})
    finally:
        await engine.close()
    assert sample.tokens[: sample.prompt_length] == expected(family, CHAT)


@pytest.mark.parametrize("after", [" So hi", " So 12"])
async def test_text_that_continues_an_answer_gets_no_space_at_its_beginning(family: Path, after: str) -> None:
    file = family / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TRANSCRIPT}))
    theirs: Any = AutoTokenizer.from_pretrained(family)
    asked: Any = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    answered = theirs(asked + after, add_special_tokens=False).input_ids
    tokenizer = CheckpointTokenizer(str(family))
    engine, sample = Engine(tokenizer), Sample()
    engine.answer = answered[len(expected(family, QUESTION)) :]
    sampler = MultiTurnSampler(engine, tokenizer)
    conversation = Conversation(sample, sampler, {"max_new_tokens": 99})
    completion = await conversation.complete({"messages": QUESTION})
    chat = [*QUESTION, completion.message, {"role": "user", "content": "hi"}]
    whole = expected(family, [*QUESTION, {"role": "assistant", "content": after.strip()}, chat[-1]])
    assert (await conversation.complete({"messages": chat})).context == len(whole)
    assert sample.tokens[: len(whole)] == whole

    observed = Sample(tokens=list(answered))
    sampler.observe(observed, "\nuser: hi\nassistant:")
    assert observed.tokens == whole
    await engine.close()


# T5 ends every prompt that is text.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "T5"], indirect=True)
def test_answers_continue_prompts_that_are_text(family: Path) -> None:
    tokenizer = CheckpointTokenizer(str(family))
    theirs: Any = AutoTokenizer.from_pretrained(family)
    prompt, whole = (theirs(text, add_special_tokens=False).input_ids for text in ("1+1=", "1+1=So"))
    example, answer = Sample(prompt="1+1=", label="So"), [*whole[len(prompt) :], theirs.eos_token_id]
    fill_example(example, tokenizer, version=0)
    assert example.tokens[example.prompt_length :] == answer
    assert encode_example(tokenizer, Example("1+1=", "So"))[1] == answer


def test_limits_in_calls_of_a_user_function_do_not_cut_prompts(qwen: Path) -> None:
    tokenizer = CheckpointTokenizer(str(qwen))
    before = tokenizer.encode(CHAT)
    tokenizer.transformers("hi, So it is", truncation=True, max_length=2)
    assert tokenizer.encode(CHAT) == before


def test_supervised_conversations_and_texts(family: Path) -> None:
    tokenizer = CheckpointTokenizer(str(family))
    theirs: Any = AutoTokenizer.from_pretrained(family)
    sample = Sample(prompt=ANSWERED)
    fill_example(sample, tokenizer, version=0)
    whole = expected(family, ANSWERED, add_generation_prompt=False)
    assert sample.tokens == whole[: len(sample.tokens)]
    assert sample.tokens[-1] == theirs.eos_token_id
    assert sample.tokens[: sample.prompt_length] == expected(family, QUESTION)
    assert sample.loss_mask is not None
    answer = sample.tokens[sample.prompt_length :]
    trained = theirs.decode([token for token, entry in zip(answer, sample.loss_mask, strict=True) if entry])
    # Only a model of GPT-OSS begins its message itself.
    trained = trained.replace("<|message|>", "").replace(theirs.eos_token, "/")
    assert trained.replace(" ", "") == "Sohi/fineSo./"

    text = Sample(prompt="hi So", label="hi")
    fill_example(text, tokenizer, version=0)
    assert text.tokens[: text.prompt_length] == theirs("hi So").input_ids


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return save_family("Qwen", tmp_path / "checkpoint")


async def test_template_arguments_reach_every_chat(qwen: Path) -> None:
    wanted = expected(qwen, QUESTION, enable_thinking=False)
    assert wanted != expected(qwen, QUESTION)
    thoughtless = {"apply_chat_template_kwargs": {"enable_thinking": False}, "tool_key": "none"}
    (qwen / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for renders in (True, False):
        config = run_of(qwen, [QUESTION], apply_chat_template=renders, warm_start_max_steps=1, **thoughtless)
        tokenizer = CheckpointTokenizer.of_run(config.data, str(qwen))
        assert await prompt_ids(tokenizer, open_data(config, tokenizer=tokenizer).get_samples(1)) == [wanted]
        [example, *_] = preflight(config).check
        assert encode_example(tokenizer, example)[0] == wanted
    engine, sample = Engine(tokenizer), Sample()
    conversation = Conversation(sample, MultiTurnSampler(engine, tokenizer), {"max_new_tokens": 99})
    await conversation.complete({"messages": QUESTION})
    await engine.close()
    assert sample.tokens[: sample.prompt_length] == wanted
    taught = Sample(prompt=ANSWERED[:2])
    fill_example(taught, tokenizer, version=0)
    whole = expected(qwen, ANSWERED[:2], add_generation_prompt=False, enable_thinking=False)
    assert taught.tokens == whole[: len(taught.tokens)]
    assert taught.tokens[: taught.prompt_length] == wanted
    assert tokenizer.render(QUESTION, template_kwargs={"enable_thinking": True}).endswith("assistant\n")


def test_rendered_text_of_a_user_gets_no_second_bos(tmp_path: Path) -> None:
    folder = save_family("Llama 3", tmp_path)
    tokenizer = CheckpointTokenizer(str(folder))
    assert tokenizer.encode(tokenizer.render(CHAT)) == expected(folder, CHAT)
    assert tokenizer.encode("") == AutoTokenizer.from_pretrained(folder)("").input_ids


def test_the_limits_with_which_a_tokenizer_was_saved_do_not_cut_prompts(qwen: Path) -> None:
    file = qwen / "tokenizer.json"
    limits = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": limits}))
    tokenizer = CheckpointTokenizer(str(qwen))
    assert tokenizer.decode(tokenizer.encode("hi, So it is")) == "hi, So it is"
    assert tokenizer.decode(tokenizer.encode_text("hi, So it is")) == "hi, So it is"


def test_chats_without_a_template_are_refused_before_the_run_unless_a_function_renders_them(qwen: Path) -> None:
    file = qwen / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    config = run_of(qwen, [QUESTION])
    tokenizer = CheckpointTokenizer.of_run(config.data, str(qwen))
    with pytest.raises(UserError, match=r"lists of messages, but the tokenizer of .* has no chat template"):
        open_data(config, tokenizer=tokenizer)
    for setting in ("custom_generate_function_path", "rollout_function_path"):
        mine = run_of(qwen, [QUESTION], **{setting: "mine.function"})
        assert open_data(mine, tokenizer=tokenizer).get_samples(1)[0][0].prompt == QUESTION


def test_messages_that_a_template_refuses_are_an_error_of_the_messages(qwen: Path) -> None:
    file = qwen / "tokenizer_config.json"
    refusing = "{{ raise_exception('roles must alternate') }}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": refusing}))
    with pytest.raises(TemplateError, match="the chat template refused the messages: roles must alternate"):
        CheckpointTokenizer(str(qwen)).encode(QUESTION)
