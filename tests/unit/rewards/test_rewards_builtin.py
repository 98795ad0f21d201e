"""The answers that the built-in rewards accept."""

from __future__ import annotations

import re
from typing import Any

import pytest
from aiohttp import web

from miles_async.errors import TrajectoryError
from miles_async.rewards import remote
from miles_async.rewards.answers import answer_line, last_boxed
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.functions.data_source import Gsm8k
from miles_async.rewards.functions.f1 import F1
from miles_async.rewards.functions.gpqa import Gpqa
from miles_async.rewards.functions.ifeval import IfEval
from miles_async.rewards.functions.llm_judge import _request
from miles_async.rewards.instructions import follows
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.scoring import scored


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"cut: \boxed{\frac{1}{2", None),
        (r"\fbox{4} or \boxed {5}", "5"),
        (r"\boxed{4} or \fbox{5}", "5"),
        (r"\boxed 5, so", "5"),
        (r"\boxed it", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_the_answer(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_the_last_answer_line_is_the_answer() -> None:
    assert answer_line("Answer: 3\nno,\nANSWER: $12$\n") == "12"
    assert answer_line("Answer: 3" + " " * 300) is None


@pytest.mark.parametrize(
    "token",
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_turn>", "</s>", "<eos>\n"],
)
@pytest.mark.parametrize("answer", ["34", "34.", "**34**", "$34$", "34 "])
def test_the_token_that_ends_a_response_is_no_part_of_its_answer_line(answer: str, token: str) -> None:
    assert answer_line(f"so\nAnswer: {answer}{token}") == "34"


@pytest.mark.parametrize("answer", [r"\frac{1}{2}", r"\dfrac12", "x=\\frac12", "0.5"])
async def test_boxed_math_reads_the_box_as_a_formula_and_no_answer_without_a_box(answer: str) -> None:
    responses = (rf"so \boxed{{{answer}}}.", f"so ${answer}$", r"\boxed{1} = \frac{1}{2}", r"\boxed{}")
    assert await scored(*responses, label=r"\frac{1}{2}", rm_type="boxed_math") == [1.0, 0.0, 0.0, 0.0]


async def test_the_boxed_prefix_passes_only_the_content_of_the_last_box_to_the_reward() -> None:
    assert await scored(r"4 \boxed{5}", r"\boxed{ 4 }", "4", label="4", rm_type="boxed_exact") == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "response, expected",
    [
        ("6 * 200 = 1,200\n#### 1,200", 1.0),
        ("#### 7 no, #### 1200<|im_end|>", 1.0),
        ("#### 1201", 0.0),
        ("The answer is 1200", 0.0),
        ("#### 1200" + "." * 400, 0.0),
    ],
)
def test_gsm8k_looks_for_the_number_after_the_last_mark_at_the_end(response: str, expected: float) -> None:
    assert Gsm8k().score(None, Sample(response=response, label="1200")) == expected


def test_f1_counts_common_words_without_articles_and_punctuation() -> None:
    def score(response: str, label: Any) -> float:
        return F1().score(None, Sample(response=response, label=label))

    assert score("The cat, sat!", "a cat sat") == 1.0
    assert score("cat sat down", "cat") == pytest.approx(0.5)
    assert score("no cat", "no") == 0.0
    assert score("dog", ["cat", "dog"]) == 1.0
    assert score("", "cat") == 0.0


@pytest.mark.parametrize(
    "response, label, metadata, expected",
    [
        ("<think>A or B</think> The answer is (C).", "C", {}, 1.0),
        (r"\boxed{B}", "B", {}, 1.0),
        (r"\boxed{\text{B. 5 cm}}", "B", {}, 1.0),
        ("Answer: D", 3, {}, 1.0),
        ("Answer: D", "A", {}, 0.0),
        ("I cannot say", "A", {}, 0.0),
        ("The answer is a combination of B", "B", {}, 1.0),
        ("B is the correct answer, A is not", "B", {}, 1.0),
        ("Answer: B", "blue", {"choices": ["red", "blue"]}, 1.0),
        ("It is blue.", "blue", {"choices": ["red", "blue"]}, 0.0),
        ("Blue.", "blue", {"choices": ["red", "blue"]}, 1.0),
        ("Answer: B", "blue", {"choices": {"A": "red", "B": "blue"}}, 1.0),
        ("Answer: B", "blue", {"choices": {"first": "red", "second": "blue"}}, 1.0),
        ("Answer: B", "blue", {"choices": {"C": "red", "B": "blue"}}, 1.0),
        ("Answer: B", "whatever", {"correct_letter": "b"}, 1.0),
        ("Answer: A", "A", {"correct_letter": "B"}, 0.0),
        ("(B) holds by theorem Z", "B", {"choices": ["red", "blue"]}, 1.0),
        ("B. The force is 5 N", "B", {}, 1.0),
        ("Answer: R", "R", {"valid_letters": ["Q", "R"]}, 1.0),
    ],
)
def test_gpqa_looks_for_the_letter_of_a_choice(
    response: str, label: Any, metadata: dict[str, Any], expected: float
) -> None:
    assert Gpqa().score(None, Sample(response=response, label=label, metadata=metadata)) == expected


@pytest.mark.parametrize("kind", ["exact", "f1"])
async def test_a_missing_label_is_an_error(kind: str) -> None:
    with pytest.raises(TrajectoryError, match=f"sample 0: reward {kind} raised TypeError: the label is None"):
        await scored("None", label=None, rm_type=kind)


async def test_a_label_of_the_wrong_type_names_its_sample() -> None:
    with pytest.raises(TrajectoryError, match="sample 0: reward gpqa raised TypeError: the label None is neither"):
        await scored("A", label=None, rm_type="gpqa")


@pytest.mark.parametrize(
    "name, arguments, complaint",
    [
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1, "relation": None},
            "kwargs has ['frequency', 'keyword']",
        ),
        ("punctuation:no_comma", {"keyword": "a"}, "no_comma takes no arguments, but kwargs has ['keyword']"),
        (
            "length_constraints:number_words",
            {"num_words": 1, "relation": "at most"},
            "relation 'at most' is unknown: write 'less than' or 'at least'",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "letter 'ab' is not one visible character",
        ),
    ],
)
def test_an_instruction_with_missing_or_invalid_arguments_is_refused(
    name: str, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        follows("a", name, arguments)


def test_arguments_that_are_none_count_as_missing_and_any_character_is_counted() -> None:
    """The data sets of the benchmark give every row all arguments, and ask for `#` in two rows."""
    asked = {"letter": "#", "let_frequency": 2, "let_relation": "at least", "num_words": None, "keywords": None}
    assert follows("#one #two", "keywords:letter_frequency", asked)
    assert not follows("#one two", "keywords:letter_frequency", asked)
    assert not follows(" \n", "punctuation:no_comma", {})


async def test_ifeval_rewards_the_fraction_of_followed_instructions_and_refuses_unknown_ones() -> None:
    asked = {"instruction_id_list": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [None, {}]}
    assert IfEval().score(None, Sample(response="no title", metadata=asked)) == 0.5
    assert IfEval().score(None, Sample(response="<<A title>>", metadata=asked)) == 1.0
    with pytest.raises(TrajectoryError, match="instruction 'language:none' is unknown"):
        await scored("x", metadata={"instruction_id_list": ["language:none"]}, rm_type="ifeval")


class Judge:
    """A reward server that gives these answers one after the other, and repeats the last one."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self._answers = list(answers)
        self.asked: list[Any] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        status, body = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if body is None:
            return await self._broken_off(request)
        return web.json_response(body, status=status)

    async def _broken_off(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b"0.")
        assert request.transport is not None
        request.transport.close()
        return response

    async def score(self, **rollout: Any) -> float:
        app = web.Application()
        app.router.add_post("/rm", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        settings = {"rm_type": "remote_rm", "rm_url": f"http://127.0.0.1:{port}/rm"} | rollout
        rewarder = RunRewards(run_config(**settings), args=None)
        group = Group([Sample(index=3, prompt="q", response="r", label="l")], feed_index="sample_0_0")
        try:
            await rewarder.score(group)
        finally:
            await rewarder.close()
            await runner.cleanup()
        return group[0].scalar_reward


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr(remote, "FIRST_BACKOFF_SECONDS", 0.001)


async def test_a_remote_reward_receives_prompt_response_and_label_and_a_5xx_is_retried() -> None:
    judge = Judge((503, "busy"), (200, 0.5))
    assert await judge.score() == 0.5
    assert judge.asked == [{"prompt": "q", "response": "r", "label": "l"}] * 2


async def test_a_remote_reward_receives_the_whole_response_also_with_the_prefix_boxed() -> None:
    judge = Judge((200, 0.5))
    assert await judge.score(rm_type="boxed_remote_rm") == 0.5
    assert judge.asked == [{"prompt": "q", "response": "r", "label": "l"}]


def completion(text: str, reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@pytest.mark.parametrize(
    "text, reward",
    [
        ("YES", 1.0),
        ("<think>Yes?</think> **No**", 0.0),
        ("no, yesterday", 0.0),
        ("", 0.0),
        ("NO. YES would need the same unit.", 0.0),
        ("YES, there is no difference", 1.0),
    ],
)
async def test_a_judge_is_asked_for_a_completion_and_its_yes_is_the_reward(text: str, reward: float) -> None:
    judge = Judge((200, completion(text)))
    assert await judge.score(rm_type="llm_judge") == reward
    [asked] = judge.asked
    assert (asked["model"], asked["temperature"]) == ("default", 0.0)
    [message] = asked["messages"]
    assert message["role"] == "user"
    assert message["content"].endswith("Question:\nq\n\nResponse:\nr\n\nReference answer:\nl\n")


async def test_a_judge_that_is_cut_off_before_its_verdict_scores_nothing() -> None:
    """The reasoning of a judge names both answers."""
    with pytest.raises(
        TrajectoryError, match="the judge at rm_url has not decided within 512 tokens: serve it without"
    ):
        await Judge((200, completion("Would YES be right? The response says", "length"))).score(rm_type="llm_judge")
    assert await Judge((200, completion("YES. The response says", "length"))).score(rm_type="llm_judge") == 1.0
    assert await Judge((200, completion("Hm.</think>No, be", "length"))).score(rm_type="llm_judge") == 0.0


async def test_a_server_that_is_no_judge_is_an_error_of_its_samples() -> None:
    with pytest.raises(
        TrajectoryError, match="rm_url answered float instead of a chat completion: set it to the address of a judge"
    ):
        await Judge((200, 0.5)).score(rm_type="llm_judge")


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "system\ns\nuser\nq",
    ],
)
def test_a_judge_sees_the_question_of_the_user_and_the_response_after_its_reasoning(prompt: Any) -> None:
    sample = Sample(prompt=prompt, response="hm </think> {r}<|im_end|>", label="{l}")
    [message] = _request(sample)["messages"]
    assert message["content"].endswith("Question:\nq\n\nResponse:\n{r}\n\nReference answer:\n{l}\n")


async def test_a_truncated_answer_of_a_remote_reward_is_retried() -> None:
    judge = Judge((200, None), (200, 0.5))
    assert await judge.score() == 0.5
    assert len(judge.asked) == 2


async def test_a_refusal_of_a_remote_reward_is_not_retried() -> None:
    judge = Judge((422, "no label"))
    with pytest.raises(
        TrajectoryError, match=r'sample 3: reward remote_rm raised .*answered 422: "no label" \(rm_url\)'
    ):
        await judge.score()
    assert len(judge.asked) == 1


async def test_a_remote_reward_fails_after_the_configured_retries() -> None:
    judge = Judge((500, "broken"))
    with pytest.raises(TrajectoryError, match="answered 500"):
        await judge.score(remote_rm_retries=1)
    assert len(judge.asked) == 2


async def test_a_remote_reward_may_be_a_dictionary() -> None:
    assert await Judge((200, {"score": 0.25, "why": "so"})).score(reward_key="score") == 0.25


def test_the_number_of_concurrent_remote_reward_requests_is_limited() -> None:
    rewards: Any = RunRewards(
        run_config(rm_type="remote_rm", rm_url="http://x", remote_rm_concurrency=2),
        args=None,
    )
    [rewarder] = rewards._opened.values()
    assert rewarder.function._permits._value == 2


def ranks(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(position) for position in range(len(samples))]


def too_few(args: Any, samples: list[Sample]) -> list[float]:
    return [1.0]


async def both(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"acc": 1.0, "style": 0.5}


async def test_a_group_reward_scores_all_samples_in_one_call() -> None:
    path = f"{__name__}.ranks"
    assert await scored("a", "b", custom_rm_path=path, group_rm=True) == [0.0, 1.0]


async def test_a_group_reward_of_the_wrong_length_fails_the_group() -> None:
    with pytest.raises(TrajectoryError, match=r"group sample_0_0: .*too_few returned 1 rewards for 2 samples"):
        await scored("a", "b", custom_rm_path=f"{__name__}.too_few", group_rm=True)


async def test_a_dictionary_reward_is_kept_completely_and_one_entry_is_trained_on() -> None:
    path = f"{__name__}.both"
    assert await scored("a", custom_rm_path=path, reward_key="style") == [{"acc": 1.0, "style": 0.5}]
    with pytest.raises(TrajectoryError, match="returned a dictionary: set reward_key to one of acc, style"):
        await scored("a", custom_rm_path=path)
    with pytest.raises(TrajectoryError, match="returned no 'wit'"):
        await scored("a", custom_rm_path=path, reward_key="wit")
    sample = Sample(reward={"acc": 1.0, "style": 0.5}, reward_key="style")
    assert sample.scalar_reward == 0.5
