"""Prompts that lose engines become suspects, are tried one at a time, and are cleared when an attempt ends."""

from __future__ import annotations

from miles_async.scheduling.quarantine import ALONE_LOSSES, CULPRIT_LOSSES, SUSPECT_LOSSES, Quarantine
from miles_async.types import Group, Sample


def group(name: str) -> Group:
    return Group([Sample(prompt=name)], feed_index=name)


def suspect(quarantine: Quarantine, name: str, losses: int = SUSPECT_LOSSES) -> Group:
    prompt = group(name)
    for _ in range(losses):
        quarantine.count_loss(prompt)
    quarantine.hold(prompt)
    return prompt


def test_the_first_loss_of_an_engine_has_no_consequence() -> None:
    quarantine, prompt = Quarantine(), group("a")
    assert quarantine.count_loss(prompt) == 1
    assert not quarantine.suspects(prompt)
    quarantine.count_loss(prompt)
    assert quarantine.suspects(prompt)


def test_one_suspect_is_tried_at_a_time() -> None:
    quarantine = Quarantine()
    first, second = suspect(quarantine, "a"), suspect(quarantine, "b")
    assert quarantine.release() is first
    assert quarantine.release() is None
    assert list(quarantine.waiting) == [second]
    quarantine.end_trial(first)
    assert quarantine.release() is second


def test_a_suspect_that_lost_an_engine_in_its_trial_is_tried_alone_and_before_the_others() -> None:
    quarantine = Quarantine()
    other = suspect(quarantine, "a")
    assert not quarantine.wants_engines_alone
    accused = suspect(quarantine, "b", ALONE_LOSSES)
    assert quarantine.wants_engines_alone
    assert not quarantine.has_engines_alone
    assert quarantine.release() is accused
    assert quarantine.has_engines_alone
    quarantine.clear(accused)
    quarantine.end_trial(accused)
    assert not quarantine.wants_engines_alone
    assert quarantine.release() is other


def test_a_completed_attempt_resets_the_losses_of_a_prompt() -> None:
    quarantine = Quarantine()
    prompt = suspect(quarantine, "a", CULPRIT_LOSSES - 1)
    quarantine.clear(prompt)
    assert quarantine.count_loss(prompt) == 1
