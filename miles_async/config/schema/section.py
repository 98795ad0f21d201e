"""The base class of all sections of the configuration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of related settings. The docstring under a field is the help text of its flag."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    flag_prefix: ClassVar[str] = ""
    """Put in front of the section's field names in flags: `skip_rollout_` turns `enable` into
    `--skip-rollout-enable`."""
