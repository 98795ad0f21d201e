"""Small checkpoint folders with the tokenizers of real model families.

Each has the kind of model, normalizer, pre-tokenizer, post-processor, special tokens and tokenizer class of its family,
and a chat template in the family's format, written for these tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set thought = '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '' %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ thought if m.role == 'assistant' else '' }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ thought }}{% endif %}"
)
BARS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% else %}<\uff5cAssistant\uff5c>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"
)
ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|return|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _first(begin: str = "", end: str = "") -> Callable[[Tokenizer], Any]:
    """A post-processor that adds one token before a text, one after it, or both."""

    def build(tokenizer: Tokenizer) -> Any:
        added = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token]
        return processors.TemplateProcessing(single=f"{begin} $A {end}".strip(), special_tokens=added)

    return build


def _byte_level(tokenizer: Tokenizer) -> Any:
    return processors.ByteLevel(trim_offsets=False)


def byte_level(*specials: str, lines: bool = True, digits: bool = False, nfc: bool = False) -> Tokenizer:
    """BPE over bytes, in which line breaks are split from words: all of them (`lines`), or as GPT-2 does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["ĊĊ", "ĠS", "ĠSo", "hi", "Ġhi"]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *words])}
    merges = [("Ċ", "Ċ"), ("Ġ", "S"), ("ĠS", "o"), ("h", "i"), ("Ġ", "hi")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if lines:
        steps.append(pre_tokenizers.Split(Regex(r"[\r\n]+| ?\w+|[^\s\w]+|\s"), "isolated"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def sentence_pieces(*specials: str, prefix: str, strips: str = "") -> Tokenizer:
    """BPE over characters with byte fallback, as sentencepiece trains it.

    `prefix` is where a text gets a space at its beginning: from the normalizer, the pre-tokenizer, or not at all.
    `strips` is a special token that swallows the whitespace after it.
    """
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = [chr(code) for code in range(33, 127)]
    words = ["▁S", "▁So", "hi", "▁hi", "▁["]
    vocabulary = {token: number for number, token in enumerate([*known, *letters, *words])}
    merges = [("▁", "S"), ("▁S", "o"), ("h", "i"), ("▁", "hi"), ("▁", "[")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    if prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif prefix == "pre-tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=token == strips)
            for token in ("<unk>", "<s>", "</s>", *specials)
        ]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """A unigram model, as T5 has it."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), ("▁So", -2.5), ("▁hi", -2.5)]
    pieces += [(chr(code), -4.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "</s>", "<unk>")])
    return tokenizer


Family = tuple[Callable[[], Tokenizer], Callable[[Tokenizer], Any] | None, str, dict[str, str], str]
"""Tokenizer, post-processor, class in `tokenizer_config.json`, special tokens, chat template."""
_SP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_LLAMA_3 = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_DEEPSEEK = (
    "<\uff5cbegin▁of▁sentence\uff5c>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
)
_HARMONY = ("<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>")
FAMILIES: dict[str, Family] = {
    "Llama 3": (
        lambda: byte_level(*_LLAMA_3),
        lambda tokenizer: processors.Sequence([_byte_level(tokenizer), _first(_LLAMA_3[0])(tokenizer)]),
        "PreTrainedTokenizerFast",
        {"bos_token": _LLAMA_3[0], "eos_token": _LLAMA_3[1]},
        HEADERS,
    ),
    "Llama 2": (
        lambda: sentence_pieces(prefix="normalizer"),
        _first("<s>"),
        "LlamaTokenizer",
        _SP,
        INSTRUCTIONS,
    ),
    "Mistral": (
        lambda: sentence_pieces("[INST]", "[/INST]", prefix="pre-tokenizer"),
        _first("<s>"),
        "PreTrainedTokenizerFast",
        _SP,
        INSTRUCTIONS,
    ),
    "Gemma": (
        lambda: sentence_pieces("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", prefix="none"),
        _first("<bos>"),
        "GemmaTokenizer",
        {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "unk_token": "<unk>"},
        TURNS,
    ),
    "Qwen": (
        lambda: byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", nfc=True),
        _byte_level,
        "Qwen2Tokenizer",
        {"eos_token": "<|im_end|>"},
        CHATML,
    ),
    "DeepSeek": (
        lambda: byte_level(*_DEEPSEEK, digits=True),
        _first(_DEEPSEEK[0]),
        "PreTrainedTokenizerFast",
        {"bos_token": _DEEPSEEK[0], "eos_token": _DEEPSEEK[1]},
        BARS,
    ),
    "Phi 3": (
        lambda: sentence_pieces("<|user|>", "<|assistant|>", "<|end|>", prefix="normalizer", strips="<|end|>"),
        _first("<s>"),
        "LlamaTokenizer",
        _SP | {"eos_token": "<|end|>"},
        ROLES,
    ),
    "GPT-OSS": (
        lambda: byte_level(*_HARMONY),
        _byte_level,
        "PreTrainedTokenizerFast",
        {"bos_token": _HARMONY[0], "eos_token": _HARMONY[1]},
        CHANNELS,
    ),
    "SmolLM2": (
        lambda: byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", lines=False, digits=True),
        None,
        "GPT2Tokenizer",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        CHATML,
    ),
    "T5": (unigram, _first(end="</s>"), "T5Tokenizer", {"eos_token": "</s>", "unk_token": "<unk>"}, PLAIN),
    "BOS and EOS": (
        lambda: byte_level("<s>", "</s>"),
        _first("<s>", "</s>"),
        "PreTrainedTokenizerFast",
        {"bos_token": "<s>", "eos_token": "</s>"},
        "{{ bos_token }}" + PLAIN,
    ),
}


def save_family(name: str, folder: Path) -> Path:
    """Write the tokenizer of a family, with empty weights beside it, to `folder`."""
    build, post_processor, kind, special, template = FAMILIES[name]
    tokenizer = build()
    if post_processor is not None:
        tokenizer.post_processor = post_processor(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "chat_template": template, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    save_file({"none": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder
