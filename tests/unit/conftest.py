"""Each unit test begins with samples as they are without `--slime-imports`, which changes the class in a process."""

from __future__ import annotations

import pytest

from miles_async.types import Sample

MEMBERS = dict(vars(Sample))


@pytest.fixture(autouse=True)
def samples_without_the_names_of_slime() -> None:
    """Take back what earlier tests of this process have added to the class."""
    for name in vars(Sample).keys() - MEMBERS.keys():
        delattr(Sample, name)
    for name, member in MEMBERS.items():
        if vars(Sample)[name] is not member:
            setattr(Sample, name, member)
