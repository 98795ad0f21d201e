"""A chat with more than text is refused before the chat template would write a token in place of an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.errors import TemplateError

TEMPLATE = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> CheckpointTokenizer:
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return CheckpointTokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "part, medium",
    [
        ({"type": "image"}, "image"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url"),
        ({"image": "a.png"}, "image"),
        ({"type": "video", "video": "a.mp4"}, "video"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
    ],
)
def test_a_part_of_a_message_that_is_no_text_is_named(
    tokenizer: CheckpointTokenizer, part: dict[str, Any], medium: str
) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]
    with pytest.raises(TemplateError, match=f"^a message contains {medium}, but the model reads only text: leave it"):
        tokenizer.render(chat)


def test_the_text_of_a_message_in_parts_is_rendered(tokenizer: CheckpointTokenizer) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "an image "}, {"type": "text", "text": "of me"}]}]
    assert tokenizer.render(chat) == "an image of me"
