"""A process of the run dies: the error that ends the run names the process and its log."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

from miles_async.adapters.ray.actor_errors import all_results
from miles_async.errors import FatalError
from tests.stack.conftest import Stack
from workers.cluster import _call


class Doomed:
    def die(self) -> None:
        os._exit(1)


def test_the_process_that_died_is_named_with_its_log(stack: Stack) -> None:
    doomed: Any = ray.remote(Doomed).options(name="learner-9", num_cpus=0).remote()
    sentence = r"^learner-9 died: .*logs/learner-9\.log in the run folder$"
    with pytest.raises(FatalError, match=sentence):
        stack.do(all_results([doomed.die.remote()]))
    with pytest.raises(FatalError, match=sentence):
        stack.do(_call(doomed.die))
