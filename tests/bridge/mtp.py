"""Tiny checkpoints with an MTP head, and what transformers' layers compute from the head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bridge.families import save, tensors_of, write_checkpoint

COUNTS = {"Qwen3.5": "mtp_num_hidden_layers", "Qwen3.5-MoE": "mtp_num_hidden_layers"}
"""The keys of `config.json` that count the heads; `num_nextn_predict_layers` for all other families."""
_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


def write_with_head(family: str, path: Path, seed: int = 1) -> Path:
    """Write the family's checkpoint with a head, whose layer is like the last one, and with random values in it."""
    write_checkpoint(family, path, seed)
    file, content = path / "config.json", json.loads((path / "config.json").read_text())
    text = content.get("text_config", content)
    last, hidden = text["num_hidden_layers"] - 1, text["hidden_size"]
    key = next((key for name, key in COUNTS.items() if family.startswith(name)), "num_nextn_predict_layers")
    text[key] = 1
    file.write_text(json.dumps(content))
    tensors, draw = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, generator=draw)

    marker = f"layers.{last}."
    of_layer = {name.partition(marker)[2]: one for name, one in tensors.items() if marker in name}
    made = {f"layer.{name}": one + random(*one.shape) for name, one in of_layer.items()}
    made |= {f"{name}.weight": 1 + random(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    made["eh_proj.weight"] = random(hidden, 2 * hidden)
    named = {name_in_checkpoint(family, name, last + 1): one for name, one in made.items()}
    save_file({**tensors, **named}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def name_in_checkpoint(family: str, name: str, number: int) -> str:
    """The name of a tensor of the head, such as `eh_proj.weight` or `layer.mlp.down_proj.weight`."""
    if not family.startswith("Qwen"):
        return f"model.layers.{number}.{name.removeprefix('layer.')}"
    if name.startswith("layer."):
        return f"mtp.layers.0.{name.removeprefix('layer.')}"
    return f"{_QWEN[name.removesuffix('.weight')]}.weight"


def is_of_head(name: str, layers: int) -> bool:
    return name.startswith(("mtp.", f"model.layers.{layers}."))


def reference_of_head(
    family: str, path: Path, sequences: Sequence[Sequence[int]], responses: Sequence[int], scratch: Path
) -> tuple[float, dict[str, Tensor]]:
    """What transformers' layers compute: the negative log-likelihood of the responses under the head, divided by the
    number of their tokens, and its gradient by the names of the checkpoint. It is in nothing but the head."""
    config = AutoConfig.from_pretrained(path)
    layers, tensors = config.num_hidden_layers, tensors_of(path)
    # transformers loads the layer of the head as one more layer.
    config.num_hidden_layers = layers + 1
    for key in ("layer_types", "mlp_layer_types"):
        if kinds := config.to_dict().get(key):
            setattr(config, key, [*kinds[:layers], kinds[layers - 1]])
    further = f"model.layers.{layers}."
    longer = {name.replace("mtp.layers.0.", further): one for name, one in tensors.items()}
    scratch.mkdir(parents=True)
    config.save_pretrained(scratch)
    save_file(longer, scratch / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, attn_implementation="sdpa")
    *kept, layer = model.model.layers
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = layers
    modules = {name: type(model.model.norm)(config.hidden_size) for name in ("enorm", "hnorm", "shared_head.norm")}
    for norm in modules.values():
        vars(norm).update({name: one for name, one in vars(model.model.norm).items() if name.endswith("eps")})
    modules["eh_proj"] = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    for name, module in modules.items():
        module.load_state_dict({"weight": tensors[name_in_checkpoint(family, f"{name}.weight", layers)]})
    captured: dict[str, Any] = {}
    kept[-1].register_forward_pre_hook(lambda _, __, options: captured.update(options), with_kwargs=True)
    total = torch.zeros(())
    for tokens, response in zip(sequences, responses, strict=True):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            hidden, embedded = model.model(ids).last_hidden_state, model.model.embed_tokens(ids)
        given = captured | {"attention_mask": None, "past_key_values": None, "use_cache": False}
        given["position_embeddings"] = tuple(one[:, :-1] for one in captured["position_embeddings"])
        given["position_ids"] = torch.arange(len(tokens) - 1)[None]
        joined = torch.cat([modules["enorm"](embedded[:, 1:]), modules["hnorm"](hidden[:, :-1])], -1)
        output = layer(modules["eh_proj"](joined), **given)
        output = modules["shared_head.norm"](output[0] if isinstance(output, tuple) else output)
        logprobs = torch.nn.functional.linear(output, model.lm_head.weight.detach())[0, :-1].log_softmax(-1)
        first = max(len(tokens) - response, 2)
        targets = torch.tensor(tokens[first:])
        total = total - logprobs[first - 2 :].gather(1, targets[:, None]).sum() / sum(responses)
    total.backward()
    gradient = {name_in_checkpoint(family, f"{name}.weight", layers): one.weight.grad for name, one in modules.items()}
    model.model.layers = torch.nn.ModuleList([*kept, layer])
    model.config.num_hidden_layers = layers + 1
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, buffer in layer.named_buffers():
            if "correction_bias" in name:
                buffer.zero_()
    save(model, scratch / "gradient")
    for name, one in tensors_of(scratch / "gradient").items():
        if name.startswith(further):
            gradient[name_in_checkpoint(family, f"layer.{name.removeprefix(further)}", layers)] = one
    return float(total.detach()), gradient
