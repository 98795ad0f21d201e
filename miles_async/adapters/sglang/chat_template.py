"""The chat template of a checkpoint, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path


def chat_template(checkpoint: Path) -> str | None:
    """Read the chat template as transformers saves it: in its own file, or in the configuration of the tokenizer."""
    file, settings = checkpoint / "chat_template.jinja", checkpoint / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    template = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
