"""Creates a small random Qwen3 with a byte-level tokenizer: no download, and equal files for equal seeds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from miles_async.atomic_files import atomic_folder
from miles_async.config.schema import TinyModel

EOS_ID = 256
PAD_ID = 257
_VOCAB_SIZE = 320
"""256 bytes and two special tokens, rounded up to a multiple of 64, to which engines pad embeddings."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def create_tiny_model(shape: TinyModel, path: Path, *, seed: int) -> None:
    """Write configuration, random weights (float32 safetensors) and tokenizer to the new folder `path`.

    Raises OSError if `path` exists and is not empty.
    """
    config = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        initializer_range=shape.init_std,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        # transformers initializes the padding embedding to zeros. RMSNorm divides by their norm, so one sampled <pad>
        # would dominate the gradient of a whole batch.
        torch.nn.init.normal_(
            model.get_parameter("model.embed_tokens.weight").data[PAD_ID], std=config.initializer_range
        )
    with atomic_folder(path) as draft:
        model.save_pretrained(draft)
        byte_tokenizer().save_pretrained(draft)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per UTF-8 byte, whose id is the byte's value, and `<eos>` and `<pad>`.

    Decoding an encoded text gives the same text.
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    if (fast.eos_token_id, fast.pad_token_id) != (EOS_ID, PAD_ID):
        raise AssertionError("the special tokens do not follow the bytes in the vocabulary")
    return fast
