"""Generate functions of slime's examples run unchanged, with an HTTP server in place of the router.

`SLIME_CHECKOUT=/path/to/slime pytest tests/unit/compat/test_slime_examples.py`, tried with commit 624b824a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles_async.columns.column import NO_LIMITS
from miles_async.config.user_functions import load_function
from miles_async.rollout.contract import Arguments
from miles_async.sample_schema import accept_values, check_columns
from miles_async.types import Sample, SampleStatus, VersionSpan
from tests.unit.compat.slime_names import checkout, names_of_slime


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder of the example, from which modules are imported."""
    folder = checkout("slime")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(folder / "examples" / request.param))
    with names_of_slime():
        yield request.param


async def generated(args: Arguments, module: str, sample: Sample) -> tuple[Sample, Any]:
    """The finished sample of an example, and its reward."""
    sample.use_lists()
    function = load_function(f"{module}.generate", setting="custom_generate_function_path")
    finished = await function(args, sample, {"max_new_tokens": 64})
    accept_values(finished, keeps_objects=True)
    check_columns(finished, NO_LIMITS, newest_version=7)
    return finished, await load_function(f"{module}.reward_func", setting="custom_rm_path")(args, finished)


@pytest.mark.parametrize("example", ["search-r1"], indirect=True)
async def test_search_r1(example: str, arguments: Callable[[list[str]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def search(query: str) -> str:
        return f"about {query}"

    args = await arguments(["<search>6 x 7</search>", "<answer>42</answer>"])
    load_function("generate_with_search.search", setting="search")
    monkeypatch.setattr("generate_with_search.search", search)
    sample, reward = await generated(
        args, "generate_with_search", Sample(index=0, prompt="6 x 7?", label={"ground_truth": {"target": ["42"]}})
    )
    found = "\n\n<information>about 6 x 7</information>\n\n"
    assert sample.response == f"<search>6 x 7</search>{found}<answer>42</answer>"
    assert sample.status is SampleStatus.COMPLETED
    assert [turn.sampled for turn in sample.turns] == [True, False, True]
    first, second = len("<search>6 x 7</search>"), len("<answer>42</answer>")
    length = sample.response_length
    assert sample.spans == [VersionSpan(7, 0, first), VersionSpan(7, length - second, length)]
    assert isinstance(reward, int | float)


@pytest.mark.parametrize("example", ["retool"], indirect=True)
async def test_retool(example: str, arguments: Callable[[list[str]], Any]) -> None:
    args = await arguments(["<code>print(6 * 7)</code>", "Answer: \\boxed{42}"])
    sample: Any
    sample, reward = await generated(args, "generate_with_retool", Sample(index=0, prompt="6 x 7?", label="42"))
    assert "<interpreter>\nOutput:\n42\n</interpreter>" in sample.response
    assert sample.tool_call_count == 1
    assert sample.effective_response_length == len("<code>print(6 * 7)</code>Answer: \\boxed{42}")
    assert (reward["score"], reward["pred"]) == (1.0, "42")
