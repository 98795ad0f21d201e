"""What SGLang's own loaders do with tiny checkpoints, on CPU parameters and without a forward pass.

Run as a script, this file builds the model of every case as SGLang's model loader does, on each rank of the case, and
writes to `FOLDER/CASE.RANK.json` what happens to the parameters. One process imports SGLang and is forked for each
rank, because SGLang's settings and process groups are global.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import ADDED_TO_CONFIG, add_to_config
from miles_async import cpu_compat
from miles_async.adapters.sglang.engine_weights import Model, RankLayout, watch_loader
from miles_async.adapters.sglang.engine_weights import tensors_of as parameters_of
from miles_async.adapters.sglang.launch import EngineSpec, unused_models
from miles_async.adapters.sglang.weight_placement import find_placements
from miles_async.adapters.weights.layout import TensorDescription, TensorPlan, plan_tensors, plans_by_name
from miles_async.adapters.weights.staging import Staging, describe, plans_of_source
from miles_async.errors import FatalError
from miles_async.models.text_part import is_of_images
from tests.bridge.engine_families import LOADERS, WITHOUT_LOADER
from tests.bridge.families import tensors_of, write_checkpoint
from tests.bridge.mtp import write_with_head

SOURCES = 2
"""Learner ranks that send the weights."""
BUCKET_BYTES = 1
"""So small that each bucket is one block."""
SGLANGS_CONFIG: Mapping[str, Mapping[str, Any]] = {
    **ADDED_TO_CONFIG,
    # SGLang ignores the number of groups under transformers' name. Published checkpoints have SGLang's default, 8.
    "Nemotron-H": {"mamba_n_groups": 2},
    "Nemotron-H, experts": {"mamba_n_groups": 2},
    # Megatron-Bridge has another name for the architecture.
    "Kimi K2": {**ADDED_TO_CONFIG["Kimi K2"], "architectures": ["DeepseekV3ForCausalLM"]},
}
"""What SGLang reads in `config.json` and `write_checkpoint` does not write."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    # torch's CUDA build brings NCCL, which several ranks would use although there is no device.
    "SGLANG_NCCL_SO_PATH": os.devnull,
}
"""SGLANG_USE_CPU_ENGINE is not set, so SGLang builds the models as for a GPU: its engines on CPUs pad some of them."""


@dataclass(frozen=True)
class Case:
    """An engine, of which only the model is built."""

    family: str
    dtype: str = "bfloat16"
    ranks: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of SGLang's server."""
    error: str | None = None
    """With which SGLang does not load the model."""
    draft: bool = False
    """Whether the engine has a draft model of an MTP head."""

    @property
    def name(self) -> str:
        draft = ["draft"] if self.draft else []
        return ", ".join([self.family, self.dtype, f"{self.ranks} ranks", *self.arguments, *draft])


_EXPERTS = {"ep_size": 2}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
LOADED = [
    *(Case(family, dtype) for family in LOADERS for dtype in ("bfloat16", "float32")),
    *(Case(family, ranks=2) for family in LOADERS),
    *(Case(family, ranks=2, arguments=_EXPERTS) for family in ("Qwen3-MoE", "DeepSeek-V3")),
]
REFUSED = [
    *(Case(family, error=error) for family, error in WITHOUT_LOADER.items()),
    # SGLang divides the experts of quantised gpt-oss only.
    Case("gpt-oss", ranks=2, arguments=_EXPERTS, error="The size of tensor a (2) must match the size of tensor b (4)"),
]
QUANTISED = [
    Case("Qwen3", arguments={"quantization": "fp8"}),
    Case("Qwen3", arguments={"json_model_override_args": json.dumps({"quantization_config": _BLOCKS})}),
]
DRAFTING = [
    *(Case(family, draft=True) for family in ("Qwen3.5", "Qwen3.5-MoE, images", "DeepSeek-V3")),
    *(Case(family, ranks=2, draft=True) for family in ("Qwen3.5-MoE", "GLM-4.5")),
]
CASES = [*LOADED, *REFUSED, *QUANTISED, *DRAFTING]


def main(folder: Path) -> None:
    kinds = sorted({(case.family, case.draft) for case in CASES})
    for family, draft in kinds:
        for seed in (1, 2):
            write_published(family, checkpoint_of(folder, family, seed, draft=draft), seed, draft=draft)
    import_models([checkpoint_of(folder, family, 1, draft=draft) for family, draft in kinds])
    fork = multiprocessing.get_context("fork")
    for case in CASES:
        ranks = [fork.Process(target=run, args=(case, folder, rank)) for rank in range(case.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


def prepare() -> None:
    os.environ |= ENVIRONMENT
    cpu_compat.install()
    # SGLang imports the kernel of rotary embeddings from here if it knows neither a GPU nor a CPU. Nothing calls it.
    sys.modules["vllm._custom_ops"] = kernels = ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None  # type: ignore[attr-defined]


def checkpoint_of(folder: Path, family: str, seed: int, *, draft: bool = False) -> Path:
    return folder / family / ("with head" if draft else "without head") / str(seed)


def write_published(family: str, path: Path, seed: int, *, draft: bool) -> None:
    write = write_with_head if draft else write_checkpoint
    add_to_config(write(family, path, seed), SGLANGS_CONFIG.get(family, {}))


def import_models(checkpoints: Sequence[Path]) -> None:
    """Import SGLang's models of these checkpoints, and not its 200 others."""
    unused = [set(unused_models(EngineSpec(name="", model_path=str(path), log_path=path))) for path in checkpoints]
    # SGLang lacks a model of a family without unused ones, and then wraps transformers' model.
    left_out = set.intersection(*filter(None, unused)) - {"transformers"}
    drafts = {name for name in left_out if name.endswith(("_mtp", "_nextn"))}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(left_out - drafts)
    import sglang.srt.models.registry  # noqa: F401


def run(case: Case, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    paths = [checkpoint_of(folder, case.family, seed, draft=case.draft) for seed in (1, 2)]
    first, second = map(tensors_of, paths)
    try:
        model, draft = build(case, paths[0], folder / f"{case.name}.groups", rank)
        load(model, first)
        if draft is not None:
            found = observe_draft(model, draft, first, second)
        else:
            found = observe_quantised(model, second) if case in QUANTISED else observe(model, first, second, rank)
    except (ValueError, RuntimeError) as error:
        found = {"error": str(error)}
    (folder / f"{case.name}.{rank}.json").write_text(json.dumps(found))


def build(case: Case, checkpoint: Path, groups: Path, rank: int) -> tuple[Model, Model | None]:
    """The model of an engine's rank before it is loaded, as `DefaultModelLoader.load_model` builds it, and its draft
    model."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import get_context, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(checkpoint),
        device="cpu",
        dtype=case.dtype,
        tp_size=case.ranks,
        attention_backend="triton",
        sampling_backend="pytorch",
        mem_fraction_static=0.5,
        disable_radix_cache=True,
        **case.arguments,
    )
    publish(arguments, role="scheduler")
    initialize_moe_config()
    config, loading = ModelConfig.from_server_args(arguments), LoadConfig()
    init_distributed_environment(case.ranks, rank, f"file://{groups}", rank, "gloo")
    initialize_model_parallel(case.ranks, expert_model_parallel_size=arguments.ep_size)
    initialize_dp_attention(arguments, config)
    get_context().override("tests", device="cuda")
    drafting = ModelConfig.from_server_args(arguments, is_draft_model=True) if case.draft else None
    with set_default_torch_dtype(config.dtype), torch.device("cpu"):
        model, draft = (
            None if one is None else _initialize_model(one, loading, _get_quantization_config(one, loading))
            for one in (config, drafting)
        )
    if model is not None and draft is not None:
        model.miles_draft = (draft, config.hf_text_config.num_hidden_layers)
    return model, draft


def observe(model: Model, first: Mapping[str, Tensor], second: Mapping[str, Tensor], rank: int) -> dict[str, Any]:
    """Publish the checkpoint `first`, with which the model was loaded, after loading `second`.

    The result names the tensors of the model that are not as they should be. After a publish they should be those of a
    model that SGLang loads with the first checkpoint.
    """
    expected = state_of(model)
    load(model, second)
    other = state_of(model)
    layout = find_placements(model, names_and_shapes(first))
    changed = differences(other, state_of(model))
    loaded = differences(expected, other)
    layouts = [layout] * dist.get_world_size()
    dist.all_gather_object(layouts, layout)
    plans = plans_of(model, describe(first.items()), layouts)

    def after(send: Callable[[Model, Staging, int], None]) -> list[str]:
        load(model, second)
        for source in range(SOURCES):
            staging = Staging(plans_of_source(plans, source, SOURCES))
            staging.fill(1, first.items())
            send(model, staging, rank)
        return differences(expected, state_of(model))

    return {
        "unknown": layout.unknown,
        # Some parameters are 0, such as the experts' biases of gpt-oss on all ranks but the first.
        "not loaded": [
            name
            for name, one in model.named_parameters()
            if name not in loaded and one.any() and not is_of_images(name)
        ],
        "changed by the search": changed,
        "wrong after writes": after(write) if layout.unknown is None else [],
        "wrong after loads by name": after(load_by_name),
    }


def observe_draft(
    model: Model, draft: Model, first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Publish the checkpoint `first` to a model and its draft model, which share embedding and output layer."""
    load(draft, first)
    # As `set_embed_and_head` does, which needs a GPU for some models.
    draft.model.embed_tokens.weight, draft.lm_head.weight = model.get_embed_and_head()
    expected = state_of(model), state_of(draft)
    for one in (model, draft):
        load(one, second)
    other = state_of(draft)
    watch_loader(model, whole=True)
    plans = plans_by_name(describe(first.items()))
    for source in range(SOURCES):
        staging = Staging(plans_of_source(plans, source, SOURCES))
        staging.fill(1, first.items())
        load_by_name(model, staging, source)
    loaded = differences(expected[1], other)
    return {
        "not loaded": [name for name, one in draft.named_parameters() if name not in loaded and one.any()],
        "wrong": [
            name
            for one, held in zip((model, draft), expected, strict=True)
            for name in differences(held, state_of(one))
        ],
    }


def observe_quantised(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """How a publish to a quantised model is refused, and what SGLang's loader does with bfloat16 tensors."""
    layout = find_placements(model, names_and_shapes(tensors))
    with pytest.raises(FatalError) as refused:
        plan_tensors(describe(tensors.items()), [layout], {})
    before = state_of(model)
    try:
        model.load_weights((name, tensor.bfloat16()) for name, tensor in tensors.items())
    except AssertionError as error:
        loaded = str(error)
    else:
        loaded = "without an error"
    return {"refused": str(refused.value), "loaded": loaded, "changed": differences(before, state_of(model))}


def names_and_shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, list[int]]]:
    return [(name, list(tensor.shape)) for name, tensor in tensors.items()]


def load(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors as SGLang does when an engine starts."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.load_weights_and_postprocess(model, iter(tensors.items()), torch.device("cpu"))


def plans_of(model: Model, tensors: Sequence[TensorDescription], layouts: Sequence[RankLayout]) -> list[TensorPlan]:
    if layouts[0].unknown is not None:
        return plans_by_name(tensors)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in parameters_of(model).items()}
    return plan_tensors(tensors, layouts, dtypes)


def write(model: Model, staging: Staging, rank: int) -> None:
    """Write the staged bytes into the parameters, as one-sided transports do."""
    parameters = parameters_of(model)
    for bucket in staging.buckets(BUCKET_BYTES):
        for source, name, target, size in staging.segments(bucket, rank):
            memory = parameters[name].data.view(-1).view(torch.uint8)
            memory[target : target + size] = staging.buffer[source : source + size]


def load_by_name(model: Model, staging: Staging, _: int) -> None:
    """Let SGLang's loader load the staged tensors, as `broadcast` does."""
    for bucket in staging.buckets(BUCKET_BYTES):
        model.load_weights([(plan.name, staging.tensor(plan.name)) for plan in bucket])


def state_of(model: Model) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, and of the tensors that modules keep besides them."""
    return {name: tensor.detach().clone() for name, tensor in (parameters_of(model) | dict(_kept(model))).items()}


def _kept(model: Model) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}", value


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors whose bytes differ."""

    def bytes_of(tensor: Tensor) -> Tensor:
        return tensor.flatten().view(torch.uint8)

    return [name for name, tensor in one.items() if not torch.equal(bytes_of(tensor), bytes_of(other[name]))]


if __name__ == "__main__":
    prepare()
    main(Path(sys.argv[1]))
