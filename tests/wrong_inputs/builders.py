"""Makes the files that are too large, or too strange, to be written in a table. Each function fills a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


def deep_nesting(folder: Path) -> None:
    """A YAML file with 100,000 open brackets."""
    (folder / "deep.yaml").write_text("data: {reasoning_gym_settings: {a: " + "[" * 100_000 + "}}\n")


def huge_integer(folder: Path) -> None:
    """A number of 5,000 digits."""
    (folder / "digits.yaml").write_text("rollout: {num_rollout: " + "9" * 5000 + "}\n")


def huge_hexadecimal(folder: Path) -> None:
    """A hexadecimal number of 5,000 digits, which Python reads but cannot print."""
    (folder / "digits.yaml").write_text("rollout: {num_rollout: 0x" + "f" * 5000 + "}\n")


def alias_bomb(folder: Path) -> None:
    """Nine levels of lists, each with ten times the list before."""
    levels = ['a0: &a0 ["text"]', *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
    text = "data: {reasoning_gym_settings: {" + ", ".join(levels) + "}}\n"
    (folder / "bomb.yaml").write_text(text)


def merge_bomb(folder: Path) -> None:
    """Thirty levels of mappings, each of which merges the mapping before twice."""
    levels = ["  a0: &a0 {key: 1}", *(f"  a{n}: &a{n}\n    <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, 31))]
    (folder / "bomb.yaml").write_text("\n".join(["data:", *levels]) + "\n")


def huge_file(folder: Path) -> None:
    """A file of 64 GiB that takes no room on the disk."""
    with (folder / "rows.yaml").open("wb") as file:
        file.truncate(64 << 30)


def roll_range_of_many_digits(folder: Path) -> None:
    """A file of ROLL with a range of 10**5000 devices."""
    (folder / "roll.yaml").write_text("actor_train: {device_mapping: 'list(range(0," + "9" * 5000 + "))'}\n")


def roll_device_of_many_digits(folder: Path) -> None:
    """A file of ROLL with one device, whose number has 5,000 digits."""
    (folder / "roll.yaml").write_text("actor_infer: {device_mapping: '[" + "9" * 5000 + "]'}\n")


def checkpoint(folder: Path) -> None:
    """The folder `model` with a checkpoint, as far as it is read before a run starts. Files that exist stay."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    files = {
        "config.json": {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "vocab_size": 2,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
        },
    }
    for name, content in files.items():
        if not (model / name).exists():
            (model / name).write_text(json.dumps(content))
    if not (model / "tokenizer.json").exists():
        tokenizer = Tokenizer(WordLevel({"?": 0, "one": 1}, unk_token="?"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(model / "tokenizer.json"))
    if not (model / "model.safetensors").exists():
        save_file({"weight": np.zeros(100, np.float32)}, model / "model.safetensors")


def checkpoint_of_experts(folder: Path, model_type: str = "qwen3_moe", layer: str = "gate_proj") -> None:
    """A checkpoint of a model with two experts, of which only one tensor of the first is there."""
    checkpoint(folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"model_type": model_type, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    name = f"model.layers.0.mlp.experts.0.{layer}.weight"
    save_file({name: np.zeros((8, 8), np.float32)}, folder / "model" / "model.safetensors")


def checkpoint_of_mixtral(folder: Path) -> None:
    checkpoint_of_experts(folder, "mixtral", "w1")


def checkpoint_without_tokenizer(folder: Path) -> None:
    checkpoint(folder)
    (folder / "model" / "tokenizer.json").unlink()


def checkpoint_without_weights(folder: Path) -> None:
    checkpoint(folder)
    (folder / "model" / "model.safetensors").unlink()


def checkpoint_of_pickles(folder: Path) -> None:
    checkpoint_without_weights(folder)
    (folder / "model" / "pytorch_model.bin").write_bytes(b"PK")


def checkpoint_with_cut_weights(folder: Path) -> None:
    checkpoint(folder)
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def checkpoint_without_template(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    checkpoint(folder)


def deep_config(folder: Path) -> None:
    """A checkpoint whose `config.json` has 100,000 open brackets."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": ' + "[" * 100_000)
    checkpoint(folder)


def long_prompts(folder: Path) -> None:
    """A checkpoint, and rows with prompts of 300 tokens."""
    checkpoint(folder)
    row = json.dumps({"prompt": "one " * 300, "label": "1"})
    (folder / "long.jsonl").write_text(f"{row}\n" * 3)


def deep_row(folder: Path) -> None:
    """A row of data with 100,000 open brackets."""
    (folder / "deep.jsonl").write_text('{"prompt": "1", "label": ' + "[" * 100_000 + "]" * 100_000 + "}\n")


def _parquet(path: Path, columns: Mapping[str, Sequence[str]]) -> bytes:
    parquet.write_table(pa.table(columns), path, compression="snappy")
    return path.read_bytes()


def cut_parquet(folder: Path) -> None:
    content = _parquet(folder / "cut.parquet", {"prompt": ["1+1"], "label": ["2"]})
    (folder / "cut.parquet").write_bytes(content[: len(content) // 2])


def damaged_parquet(folder: Path) -> None:
    """A Parquet file whose metadata is intact, and whose pages are not."""
    content = bytearray(_parquet(folder / "damaged.parquet", {"prompt": ["1+1"] * 99, "label": ["2"] * 99}))
    content[4:60] = bytes(56)
    (folder / "damaged.parquet").write_bytes(content)


def other_parquet(folder: Path) -> None:
    _parquet(folder / "other.parquet", {"question": ["1+1"]})


def no_rows_parquet(folder: Path) -> None:
    _parquet(folder / "none.parquet", {"prompt": [], "label": []})


BUILDERS: Mapping[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        deep_nesting,
        huge_integer,
        huge_hexadecimal,
        alias_bomb,
        merge_bomb,
        huge_file,
        roll_range_of_many_digits,
        roll_device_of_many_digits,
        checkpoint,
        checkpoint_of_experts,
        checkpoint_of_mixtral,
        checkpoint_without_tokenizer,
        checkpoint_without_weights,
        checkpoint_of_pickles,
        checkpoint_with_cut_weights,
        checkpoint_without_template,
        deep_config,
        long_prompts,
        deep_row,
        cut_parquet,
        damaged_parquet,
        other_parquet,
        no_rows_parquet,
    )
}
