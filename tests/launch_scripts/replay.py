"""Recorded launch scripts of other projects as command lines of this project.

A recording (`record.py`) has the flags of a script. Nothing is changed but paths, and what the caller names. Each path
is that of a file or folder that exists here. The checkpoint has a `config.json` with the dimensions that the flags of
the script describe, and a tokenizer with a chat template. Rows of data have the keys that the script names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from miles_async.config.cli import read_rows
from miles_async.config.flags import parse_flags
from miles_async.config.load import checked_config
from miles_async.config.yaml_text import parse_yaml
from workers.check_config import read_files

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
    "--moe-shared-expert-intermediate-size": "shared_expert_intermediate_size",
}
_SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
"""Of a script that leaves the shape to the checkpoint."""
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Of Qwen3.5, for whose linear attention scripts have no flags."""
_PATHS = {
    "--hf-checkpoint": "model",
    "--ref-load": "torch_dist",
    "--save": "save",
    "--load": "load",
    "--prompt-data": "rows.jsonl",
}
"""Files and folders of scripts. Those of `--save` and `--load` do not exist before the first start."""
_PROMPTS: Mapping[str, Any] = {"index": 7, "problem": "1 + 1"}
"""Prompts by the key of a row: an index of a task, and a text. Other prompts are chats."""
_LABELS: Mapping[str, Any] = {"reward_model": {"style": "rule", "ground_truth": {"target": ["2"]}}}
"""Labels by the key of a row. Other labels are texts."""
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>\n{% endfor %}"

_ENTRIES = {
    "verl.trainer.main_ppo": "train.py",
    "recipe.dapo.main_dapo": "train.py",
    "verl.experimental.one_step_off_policy.main_ppo": "train_async.py",
    "verl.experimental.fully_async_policy.fully_async_main": "train_async.py",
}
"""The program of this project for each of verl's."""
_LAYERS = {
    "Qwen2.5-Math-7B": 28,
    "Qwen3-8B": 36,
    "Qwen3-235B-A22B": 94,
    "DeepSeek-V3": 61,
    "Moonlight": 27,
    "gpt-oss-20b": 24,
    "GLM-4.5-Air": 46,
    "Qwen3.5-35B-A3B": 40,
    "Qwen3.5-397B-A17B": 60,
    "NVIDIA-Nemotron-3-Nano-30B": 52,
}
"""Layers of the checkpoints that scripts of verl divide into pipeline stages; 48 where nothing else is said."""
_VERL_SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 262_144,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_VERL_EXPERTS = {
    "num_experts": 128,
    "n_routed_experts": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_VERL_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@dataclass(frozen=True)
class Recording:
    """One recorded launch script or configuration file."""

    project: str
    """The name of the folder of its recordings."""
    name: str
    repository: str
    path: str
    commit: str
    family: str
    checkpoint: str
    """The name of the model."""
    program: str
    """`train.py`, `train_async.py`, or a module of verl or ROLL."""
    files: Mapping[str, Any]
    """The contents of YAML files, by path: those that a script passes, or a file of ROLL and those that it includes."""


@dataclass(frozen=True)
class Script(Recording):
    """One recorded launch script."""

    arguments: Sequence[Sequence[str]]
    """Each flag and its values, in order."""

    def words(self, flag: str) -> Sequence[str]:
        """The values of a flag; none if the script does not have it. The last one counts if it is repeated."""
        return next((row[1:] for row in reversed(self.arguments) if row[0] == flag), ())

    def has(self, flag: str) -> bool:
        return any(row[0] == flag for row in self.arguments)

    @property
    def entry(self) -> str:
        """The program of this project that takes the place of the script's."""
        return self.program if self.program.endswith(".py") else _ENTRIES[self.program]

    def command(self, folder: Path, changed: Mapping[str, str] | None = None) -> list[str]:
        """The command line, in which every path exists below `folder`. `changed` has other values for flags and
        overrides; a flag that the script lacks is added."""
        if not self.program.endswith(".py"):
            return self._overrides(folder, changed or {})
        (folder / "torch_dist").mkdir(exist_ok=True)
        (folder / "torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
        (folder / "rows.jsonl").write_text(self._rows("--input-key", "--label-key"))
        (folder / "evaluation.jsonl").write_text(self._rows("--eval-input-key", "--eval-label-key"))
        self._checkpoint(folder / "model")
        others = [row for row in self.arguments if row[0] not in (changed or {})]
        words = [word for flag, *values in others for word in (flag, *self._changed(flag, values, folder))]
        return [*words, *chain.from_iterable((changed or {}).items())]

    def _overrides(self, folder: Path, changed: Mapping[str, str]) -> list[str]:
        """The flags of Hydra and the overrides of a script of verl."""
        (folder / "rows.jsonl").write_text(json.dumps(_VERL_ROW) + "\n")
        self._checkpoint_of_verl(folder / "model")
        paths: dict[str, Any] = {
            "actor_rollout_ref.model.path": folder / "model",
            "data.train_files": folder / "rows.jsonl",
            "data.val_files": folder / "rows.jsonl",
            "trainer.default_local_dir": folder / "save",
        }
        words = []
        for flag, *values in self.arguments:
            key = flag.lstrip("+~")
            files = parse_yaml(values[0]) if key in ("data.train_files", "data.val_files") else None
            if isinstance(files, list):
                for name in {Path(file).parent.name for file in files}:
                    (folder / name).mkdir(exist_ok=True)
                    (folder / name / "rows.jsonl").write_text(json.dumps(_VERL_ROW) + "\n")
                paths[key] = [str(folder / Path(file).parent.name / "rows.jsonl") for file in files]
            value = changed.get(key, str(paths[key]) if key in paths else " ".join(values))
            words += [flag, value] if flag.startswith("--") else [f"{flag}={value}"]
        return words

    def _checkpoint_of_verl(self, folder: Path) -> None:
        """Write a checkpoint of the family with as many layers as the checkpoint of the script."""
        kind, architecture = MODELS[self.family]
        layers = next((count for name, count in _LAYERS.items() if self.checkpoint.startswith(name)), 48)
        config: dict[str, Any] = {**_VERL_SHAPE, "num_hidden_layers": layers}
        if self.family not in ("Qwen2", "Qwen3", "Qwen3.5, images"):
            config |= _VERL_EXPERTS
        if self.family == "DeepSeek-V3":
            config |= _VERL_LATENT
        whole = {"text_config": {**config, "model_type": f"{kind}_text"}} if "images" in self.family else config
        write_checkpoint(folder, {**whole, "model_type": kind, "architectures": [architecture]})

    def _rows(self, input_flag: str, label_flag: str) -> str:
        """Rows with the keys that these flags name, or else those for training."""
        input_key, *_ = self.words(input_flag) or self.words("--input-key") or ["input"]
        chat = [{"role": "user", "content": "1 + 1"}]
        if "sft_rollout" in " ".join(self.words("--rollout-function-path")):
            chat.append({"role": "assistant", "content": "2"})
        row = {input_key: _PROMPTS.get(input_key, chat)}
        row |= {key: _LABELS.get(key, "2") for key in self.words(label_flag) or self.words("--label-key")}
        row |= {key: {"task": "sum"} for key in self.words("--metadata-key")}
        return f"{json.dumps(row)}\n" * 8

    def _changed(self, flag: str, values: Sequence[str], folder: Path) -> Iterator[str]:
        for position, value in enumerate(values):
            if flag in _PATHS:
                # Flags with the same path have the same folder.
                same = next((other for other in _PATHS if _path(self.words(other)) == _path(values)), flag)
                yield str(folder / _PATHS[same])
            elif flag == "--eval-prompt-data" and (position % 2 or len(values) == 1):
                yield str(folder / "evaluation.jsonl")
            elif value in self.files:
                path = folder / Path(value).name
                path.write_text(yaml.safe_dump(_with_paths(self.files[value], str(folder / "evaluation.jsonl"))))
                yield str(path)
            else:
                yield value

    def _checkpoint(self, folder: Path) -> None:
        """Write a checkpoint with the dimensions of the script's flags."""
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
        if "Qwen3.5" in self.family:
            config |= _LINEAR_ATTENTION
        whole: dict[str, Any] = config
        if "images" in self.family:
            whole = {"text_config": {**config, "model_type": f"{kind}_text"}}
        write_checkpoint(folder, {**whole, "model_type": kind, "architectures": [architecture]})


def refusals(words: Sequence[str], entry: str) -> Sequence[str]:
    """The sentences with which `--check-config` refuses a command line. Functions that it names are not imported."""
    flags = parse_flags(words)
    config, found = checked_config(flags, entry=entry)
    read_rows(config, flags, read_files, found)
    return found


def reasons(sentences: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The names of the reasons for refusals: `names` has a part of the sentence for each. A sentence that fits none is
    a reason by itself."""
    return sorted({next((name for name, part in names.items() if part in one), one) for one in sentences})


def recorded_results(project: str) -> dict[str, list[str]]:
    """Why each script or file of a project is refused, by its name; an empty list if it passes the check."""
    results: dict[str, list[str]] = json.loads((FOLDER / f"{project}.json").read_text())
    return results


def record_results(project: str, results: Mapping[str, Sequence[str]]) -> None:
    """Replace what `recorded_results` returns."""
    (FOLDER / f"{project}.json").write_text(json.dumps(results, indent=1) + "\n")


def _path(words: Sequence[str]) -> str:
    return " ".join(words).rstrip("/")


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the `config.json` of a checkpoint, and a tokenizer with a chat template."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": _TEMPLATE}))


@cache
def _tokenizer() -> str:
    tokenizer = Tokenizer(WordLevel({"?": 0, "</s>": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    return str(tokenizer.to_str())


def _with_paths(content: Any, rows: str) -> Any:
    """The content of a file in which every `path` names a file that exists."""
    if isinstance(content, Mapping):
        return {key: rows if key == "path" else _with_paths(value, rows) for key, value in content.items()}
    return [_with_paths(one, rows) for one in content] if isinstance(content, list) else content


Recorded = TypeVar("Recorded", bound=Recording)


def recordings(kind: type[Recorded], project: str) -> list[Recorded]:
    """The recordings of a project, in the order of their names."""
    names = {one.name for one in fields(kind)} - {"project", "name"}
    contents = {file.stem: json.loads(file.read_text()) for file in sorted((FOLDER / project).glob("*.json"))}
    return [
        kind(project=project, name=stem, **{name: content[name] for name in names})
        for stem, content in contents.items()
    ]


def scripts(project: str) -> list[Script]:
    """The recorded scripts of `slime`, `miles` or `verl`."""
    return recordings(Script, project)
