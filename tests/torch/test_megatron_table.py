"""The committed table of Megatron's configuration is that of the installed version."""

from __future__ import annotations

from miles_async.config.megatron import megatron_fields
from tests.megatron_flags import fields_by_class


def test_the_fields_of_the_table_are_those_of_the_installed_megatron() -> None:
    assert megatron_fields() == fields_by_class()
