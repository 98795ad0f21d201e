"""Recorded launch scripts of other projects as command lines of this project.

A recording (`record.py`) has the flags of a script. Nothing is changed but paths: each one names a file or folder that
exists here. The checkpoint is a `config.json` with the dimensions that the flags of the script describe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
MODELS: Mapping[str, tuple[str, str]] = {
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "GLM-4-0414": ("glm4", "Glm4ForCausalLM"),
    "GLM-4.5": ("glm4_moe", "Glm4MoeForCausalLM"),
    "GLM-4.7-Flash": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "Kimi K2": ("kimi_k2", "KimiK2ForCausalLM"),
    "Nemotron-H": ("nemotron_h", "NemotronHForCausalLM"),
    "Nemotron-H, experts": ("nemotron_h", "NemotronHForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "Llama": ("llama", "LlamaForCausalLM"),
    "MiniMax-M2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "Qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3.5, images": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "Qwen3.5-MoE, images": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
"""`model_type` and architecture of each family."""
_KEYS = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "intermediate_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocab_size",
    "--max-position-embeddings": "max_position_embeddings",
    "--norm-epsilon": "rms_norm_eps",
    "--rotary-base": "rope_theta",
    "--rotary-percent": "partial_rotary_factor",
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_nope_head_dim",
    "--qk-pos-emb-head-dim": "qk_rope_head_dim",
    "--v-head-dim": "v_head_dim",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--moe-router-topk": "num_experts_per_tok",
}
_SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
"""Of a script that leaves the shape to the checkpoint."""
_PATHS = {
    "--ref-load": "torch_dist",
    "--load": "save",
    "--save": "save",
    "--prompt-data": "rows.jsonl",
}


@dataclass(frozen=True)
class Script:
    """One recorded launch script."""

    name: str
    repository: str
    path: str
    commit: str
    family: str
    program: str
    """`train.py` or `train_async.py`."""
    arguments: Sequence[Sequence[str]]
    """Each flag and its values, in order."""
    files: Mapping[str, Any]
    """The contents of YAML files that the script passes."""

    def words(self, flag: str) -> Sequence[str]:
        """The values of a flag; none if the script does not have it. The last one counts if it is repeated."""
        return next((row[1:] for row in reversed(self.arguments) if row[0] == flag), ())

    def has(self, flag: str) -> bool:
        return any(row[0] == flag for row in self.arguments)

    def command(self, folder: Path) -> list[str]:
        """The command line, in which every path exists below `folder`."""
        (folder / "torch_dist").mkdir(exist_ok=True)
        (folder / "torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
        (folder / "rows.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n' * 64)
        self._checkpoint(folder / "model")
        return [word for flag, *values in self.arguments for word in (flag, *self._changed(flag, values, folder))]

    def _changed(self, flag: str, values: Sequence[str], folder: Path) -> Iterator[str]:
        for position, value in enumerate(values):
            if flag == "--hf-checkpoint":
                yield str(folder / "model")
            elif flag in _PATHS:
                yield str(folder / _PATHS[flag])
            elif flag == "--eval-prompt-data" and position % 2:
                yield str(folder / "rows.jsonl")
            elif value in self.files:
                path = folder / Path(value).name
                path.write_text(yaml.safe_dump(_with_paths(self.files[value], str(folder / "rows.jsonl"))))
                yield str(path)
            else:
                yield value

    def _checkpoint(self, folder: Path) -> None:
        """Write a `config.json` with the dimensions of the script's flags."""
        folder.mkdir(exist_ok=True)
        kind, architecture = MODELS[self.family]
        numbers = {key: json.loads(self.words(flag)[0]) for flag, key in _KEYS.items() if self.words(flag)}
        config = {
            **_SHAPE,
            "hidden_act": "silu",
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": not self.has("--untie-embeddings-and-output-weights"),
            **numbers,
        }
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        if self.words("--num-experts"):
            config["n_routed_experts" if self.has("--multi-latent-attention") else "num_experts"] = int(
                self.words("--num-experts")[0]
            )
        if layers := self.words("--moe-layer-freq"):
            first = re.sub(r"[\s\[]", "", layers[0])
            dense = re.match(r"(?:0\]\*(\d+))|((?:0,)*)", first)
            assert dense is not None
            config["first_k_dense_replace"] = int(dense[1] or 0) or (dense[2] or "").count("0")
        config["attention_bias"] = self.has("--add-qkv-bias")
        if "MoE" in self.family and not self.words("--num-experts"):
            config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        whole: dict[str, Any] = config
        if "images" in self.family:
            whole = {"text_config": {**config, "model_type": f"{kind}_text"}}
        whole |= {"model_type": kind, "architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(whole))


def _with_paths(content: Any, rows: str) -> Any:
    """The content of a file in which every `path` names a file that exists."""
    if isinstance(content, Mapping):
        return {key: rows if key == "path" else _with_paths(value, rows) for key, value in content.items()}
    return [_with_paths(one, rows) for one in content] if isinstance(content, list) else content


def scripts(project: str) -> list[Script]:
    """The recorded scripts of `slime` or `miles`."""
    found = []
    for file in sorted((FOLDER / project).glob("*.json")):
        content = json.loads(file.read_text())
        names = ("repository", "path", "commit", "family", "program", "arguments", "files")
        found.append(Script(name=file.stem, **{name: content[name] for name in names}))
    return found
