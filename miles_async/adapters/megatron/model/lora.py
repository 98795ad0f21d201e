"""LoRA adapters of Megatron's linear layers: one for each linear layer of the checkpoint (`models/lora.py`).

Megatron computes queries, keys and values in one layer, and gate and up projection in another. Each of them has an
adapter here, as in PEFT. Tensor-parallel ranks divide B where the layer divides its outputs, and A where it
divides its inputs. Between both matrices, activations are only as wide as the rank of the adapter, so what the ranks
exchange for it is small.

Each expert has its own adapters, one for each of its layers. Expert-parallel ranks hold those of their experts.
The router has no adapter. With `experts_shared_outer_loras`, the experts of a layer share the matrices on the side
that is as wide as the model. Each rank then has the gradients of its tokens and experts, as it has those of the norm
of a dense layer, and Megatron adds up those of all ranks of the stage once per step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    unwrap_model,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, ModuleList, Parameter, ParameterList
from torch.nn.functional import dropout

from miles_async.adapters.megatron.model.hf_weights import broadcast_from_stage
from miles_async.adapters.megatron.model.linear_parts import Columns, Part, equal
from miles_async.adapters.megatron.model.process_groups import all_gather, gather_json
from miles_async.adapters.megatron.model.source import ModelSource
from miles_async.config.model_shape import linear_layers_of
from miles_async.config.schema import Learner, Model
from miles_async.errors import UserError
from miles_async.models.lora import AdapterConfig, check_adapter, read_tensors, shared_name, tensor_names, untie
from miles_async.models.lora_layers import FEED_FORWARD, HEAD, adapted
from miles_async.models.packed_experts import linear_layers_in, unpack


class Linear(NamedTuple):
    """One of Megatron's linear layers. The layers of several experts may be one module."""

    name: str
    """Of the weight, in the whole model."""
    weight: Tensor
    """This rank's part."""
    splits_output: bool
    """Whether ranks divide the layer's outputs, and not its inputs."""
    of_expert: bool


class Adapters(Module):
    """The adapters of one of Megatron's linear layers, which holds one or several layers of the checkpoint."""

    def __init__(self, linear: Linear, parts: Sequence[Part], settings: Learner) -> None:
        """`parts` are the layers of the checkpoint that get adapters."""
        super().__init__()
        self.names = [part.name for part in parts]
        self.enabled = True
        """Whether the layer adds the outputs of the adapters."""
        self._columns = [part.columns for part in parts]
        self._rank, self._scale = settings.lora_rank, settings.lora_scale
        self._dropout = settings.lora_dropout
        self.splits_output, self.of_expert = linear.splits_output, linear.of_expert
        self.group = _group_of(of_expert=self.of_expert)
        """The ranks that divide the layer."""
        self._sequence_parallel = settings.sequence_parallel
        expert_parallel = self.of_expert and parallel_state.get_expert_model_parallel_world_size() > 1
        inputs, device = linear.weight.shape[1], linear.weight.device
        self.shares_outer: bool = self.of_expert and settings.experts_shared_outer_loras
        """Whether the experts of the layer share the matrix that ranks do not divide."""

        def parameter(rows: int, columns: int, axis: int, pieces: Sequence[int]) -> Parameter:
            made = Parameter(torch.zeros(rows, columns, device=device))
            is_split = axis == (0 if self.splits_output else 1)
            # Without expert parallelism, ranks that divide no expert have all experts, for tokens of their own.
            is_everywhere = (self.shares_outer and not is_split) or (
                self.of_expert and self.group.size() == 1 and not expert_parallel
            )
            # Megatron's norm of the gradients counts a parameter with this attribute. It counts others on the first
            # rank of the dense layers' group, which need not be the first rank of an expert's group.
            is_counted = not is_everywhere and (is_split or self.group.rank() == 0)
            set_tensor_model_parallel_attributes(made, is_counted, axis if is_split else -1, 1)
            # Ranks see different tokens of the other matrix's side. Megatron adds up the gradients of such parameters.
            adds_up = settings.sequence_parallel and (is_everywhere or not (is_split or self.of_expert))
            made.sequence_parallel = adds_up  # type: ignore[attr-defined]
            # Whether the gradient is averaged over all data-parallel ranks, or over those that have the expert.
            made.allreduce = is_everywhere or not expert_parallel  # type: ignore[attr-defined]
            made.whole_rows = None  # type: ignore[attr-defined]
            made.pieces = pieces  # type: ignore[attr-defined]
            return made

        self.a = ParameterList(parameter(self._rank, inputs, 1, [inputs]) for _ in parts)
        self.b = ParameterList(parameter(sum(part.pieces), self._rank, 0, part.pieces) for part in parts)

    def share(self, first: Adapters) -> None:
        """Use the matrices that the experts share in place of own ones. `first` are the adapters of another expert."""
        if self.splits_output:
            self.a = first.a
        else:
            self.b = first.b

    def named_pairs(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's parts of A and B of each adapter, with PEFT's names."""
        for name, a, b in zip(self.names, self.a, self.b, strict=True):
            yield from zip(tensor_names(name), (a, b), strict=True)

    def shrink(self, x: Tensor) -> Tensor:
        """The products of the layer's input and A of all adapters, scaled."""
        dropped = dropout(x, self._dropout) if self._dropout and self.training else x
        return self._scale * _product(dropped, self._shared(torch.cat(list(self.a)), is_whole=self.splits_output))

    def _shared(self, matrix: Tensor, *, is_whole: bool) -> Tensor:
        """A or B as a forward pass uses it. `is_whole` says whether every rank of the group has the whole matrix.

        Ranks that divide an expert have the same tokens. The dispatcher adds up their outputs and the gradients of
        their inputs. If every rank has the whole matrix, its gradients have to be added up too. Megatron adds up those
        of a matrix that the experts share.
        """
        adds_up = self.of_expert and is_whole and not self.shares_outer
        return copy_to_tensor_model_parallel_region(matrix, self.group) if adds_up else matrix

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the layer's output [..., outputs of this rank], plus what the adapters compute from its input.

        `output` must not be used afterwards, because it may have been changed in place.
        """
        hidden = self.shrink(x)
        if self.of_expert:
            exchange = _unchanged
        elif self.splits_output:
            exchange = gather_from_sequence_parallel_region if self._sequence_parallel else _copy_to_ranks
        else:
            exchange = _reduce_scatter if self._sequence_parallel else reduce_from_tensor_model_parallel_region
        if not self.splits_output or output._is_view():
            # A single rank's "reduced" output and that of oneDNN are views, which autograd lets nobody change.
            output = output.clone()
        matrices = [self._shared(b, is_whole=not self.splits_output).to(output.dtype) for b in self.b]
        added: Tensor = _AddOutputs.apply(output, exchange(hidden), self._columns, *matrices)  # type: ignore[no-untyped-call]
        return added


def _group_of(*, of_expert: bool) -> ProcessGroup:
    """The ranks that divide a linear layer."""
    if of_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


class HeadAdapter(Adapters):
    """The adapter of the output layer. `OutputLayer` computes it from the hidden states of the tokens that it reads."""

    def __init__(self, model: Any, vocabulary: int, settings: Learner) -> None:
        """`model` is the last pipeline stage. B has a row for each entry of the padded vocabulary, and those of the
        padding stay 0."""
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        linear = Linear(HEAD, weight, splits_output=True, of_expert=False)
        super().__init__(linear, equal([HEAD], len(weight)), settings)
        # Every rank has the hidden states of all tokens.
        self.a[0].sequence_parallel = False
        self.b[0].whole_rows = vocabulary

    def shrink(self, x: Tensor) -> Tensor:
        """[k, rank] of hidden states x [k, h], the same on all tensor-parallel ranks."""
        shrunk = _copy_to_ranks(super().shrink(x))
        if shrunk.requires_grad:
            # Megatron reduces a copy of a gradient that is not contiguous, and goes on with the gradient itself.
            shrunk.register_hook(Tensor.contiguous)
        return shrunk


class _AddOutputs(torch.autograd.Function):
    """Adds `hidden @ B.T` of each adapter to the columns of its layer, without further tensors of the output's size."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, hidden: Tensor, columns: Sequence[Sequence[Columns]], *matrices: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, *matrices)
        ctx.columns = columns
        ctx.mark_dirty(output)
        rows = output.view(-1, output.shape[-1])
        for part, b, own in zip(_parts(hidden, matrices), matrices, columns, strict=True):
            for one in own:
                rows[:, one.of_output].addmm_(part, b[one.of_rows].t())
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, *matrices = ctx.saved_tensors
        rows, of_hidden = gradient.reshape(-1, gradient.shape[-1]), torch.zeros_like(hidden)
        of_matrices = [torch.empty_like(b) for b in matrices]
        parts = zip(
            _parts(hidden, matrices), _parts(of_hidden, matrices), matrices, of_matrices, ctx.columns, strict=True
        )
        for part, of_part, b, of_b, own in parts:
            for one in own:
                of_output = rows[:, one.of_output]
                of_part.addmm_(of_output, b[one.of_rows])
                of_b[one.of_rows] = of_output.t() @ part
        return gradient, of_hidden, None, *of_matrices


def _parts(hidden: Tensor, matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[t, rank] for each adapter."""
    return hidden.view(-1, hidden.shape[-1]).split(matrices[0].shape[1], -1)


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


_copy_to_ranks = copy_to_tensor_model_parallel_region
_reduce_scatter = reduce_scatter_to_sequence_parallel_region


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the type of `x`, by the function of Megatron that `cpu.py` makes faster on some processors."""
    result: Tensor = linear_with_grad_accumulation_and_async_allreduce(
        x,
        weight.to(x.dtype),
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
    )
    return result


def _add_output(linear: Any, original: Callable[..., Any], x: Tensor, *args: Any, **options: Any) -> Any:
    """Replaces the product of a linear layer."""
    output, bias = original(x, *args, **options)
    return linear.adapters(x, output) if linear.adapters.enabled else output, bias


def _add_outputs(linear: Any, original: Callable[..., Any], x: Tensor, m_splits: Sequence[int]) -> Any:
    """Replaces `forward` of a layer of several experts. The rows of `x` are sorted by expert, `m_splits` of each."""
    output, bias = original(x, m_splits)
    if not linear.adapters[0].enabled:
        return output, bias
    sizes = list(m_splits)
    of_experts = zip(linear.adapters, x.split(sizes), output.split(sizes), strict=True)
    return torch.cat([adapters(rows, outputs) for adapters, rows, outputs in of_experts]), bias


def attach_adapters(chunks: Sequence[Module], source: ModelSource, settings: Learner, checkpoint: Path) -> None:
    """Freeze loaded chunks and give their linear layers adapters, in float32.

    A is drawn as in PEFT, from the seed and the name of the layer, and B is 0; or both are those of `lora_load`. Raises
    UserError if that adapter does not fit.
    """
    loaded, config = None, adapter_config(settings, checkpoint)
    if settings.lora_load is not None:
        folder = Path(settings.lora_load).expanduser()
        check_adapter(folder, config, checkpoint)
        loaded = unpack(read_tensors(folder), config)
        if settings.experts_shared_outer_loras:
            _check_shared(loaded, folder)
    for chunk in chunks:
        chunk.requires_grad_(False)
        model = unwrap_model(chunk)
        for layer in model.decoder.layers:
            _attach(layer, source, settings, config.modules, loaded)
        if model.post_process and HEAD in config.modules:
            model.output_layer.adapters = HeadAdapter(model, source.shape.vocabulary, settings)
            _fill(model.output_layer.adapters, loaded, settings.seed)
        if model.pre_process and settings.recompute_granularity is not None:
            # Recomputed layers only get gradients if their input needs one.
            model.embedding.register_forward_hook(_require_gradient)


def _attach(
    layer: Any,
    source: ModelSource,
    settings: Learner,
    modules: Sequence[str],
    loaded: Mapping[str, Tensor] | None,
) -> None:
    """Give the linear layers of a decoder layer the adapters that `modules`, PEFT's `target_modules`, choose."""
    first: dict[bool, Adapters] = {}

    def adapters_of(linear: Linear) -> Adapters | None:
        parts = source.linear_parts(linear.name, len(linear.weight))
        kinds = {part.name.rpartition(".")[2] for part in parts}
        if linear.of_expert and not kinds <= {*FEED_FORWARD}:
            raise UserError(
                f"{parts[0].name} gets no adapter, because it is none of {', '.join(FEED_FORWARD)}: unset lora_rank"
            )
        chosen = adapted([part.name for part in parts], modules)
        if not chosen:
            return None
        adapters = Adapters(linear, [part for part in parts if part.name in chosen], settings)
        if adapters.shares_outer:
            adapters.share(first.setdefault(adapters.splits_output, adapters))
        _fill(adapters, loaded, settings.seed)
        return adapters

    for module, linears in list(_linear_layers(layer, settings)):
        found = [adapters for linear in linears if (adapters := adapters_of(linear)) is not None]
        if not found:
            continue
        if _holds_experts(module):
            module.adapters = ModuleList(found)
            module.forward = partial(_add_outputs, module, module.forward)
            continue
        [module.adapters] = found
        # A layer that first normalizes its input has its product in a method.
        product = "project" if "layer_norm_weight" in module._parameters else "forward"
        setattr(module, product, partial(_add_output, module, getattr(module, product)))


def _linear_layers(layer: Any, settings: Learner) -> Iterator[tuple[Any, list[Linear]]]:
    """The modules of a decoder layer that are linear layers. Each holds one, or one of each expert on this rank."""
    adapts_experts = not {*settings.lora_targets.modules}.isdisjoint(FEED_FORWARD)
    for path, module in layer.named_modules():
        name, of_expert = f"decoder.layers.{layer.layer_number - 1}.{path}", path.startswith("mlp.experts.")
        if of_expert and not adapts_experts:
            continue
        if _holds_experts(module):
            weights = [
                module.get_parameter(f"weight{position}") for position in range(len(layer.mlp.local_expert_indices))
            ]
            names = [f"{name}.weight{number}" for number in layer.mlp.local_expert_indices]
            splits_output = module.axis == 0
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
            weights, names, splits_output = (
                [module.weight],
                [f"{name}.weight"],
                isinstance(module, ColumnParallelLinear),
            )
            if of_expert:
                experts, _, position, linear = name.rsplit(".", 3)
                names = [f"{experts}.{linear}.weight{layer.mlp.local_expert_indices[int(position)]}"]
        else:
            continue
        yield module, [Linear(*pair, splits_output, of_expert) for pair in zip(names, weights, strict=True)]


def _holds_experts(module: Module) -> bool:
    """Whether a module is a linear layer of all experts on this rank."""
    return "weight0" in module._parameters


def _require_gradient(_: Module, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


@torch.no_grad()
def _fill(adapters: Adapters, loaded: Mapping[str, Tensor] | None, seed: int) -> None:
    group = adapters.group
    for name, parameter in adapters.named_pairs():
        axis = _split_axis(parameter)
        if loaded is not None:
            whole = loaded[name]
            if _whole_rows(parameter) is not None:
                padding = len(parameter) * group.size() - len(whole)
                whole = torch.nn.functional.pad(whole, (0, 0, 0, padding))
        elif ".lora_A." in name:
            # The same in every parallel layout. Kaiming's uniform distribution with a = sqrt(5) has this bound.
            inputs = parameter.shape[1] * (group.size() if axis == 1 else 1)
            own = shared_name(name) if adapters.shares_outer else name
            generator = torch.Generator().manual_seed(_seed(f"{seed} {own}"))
            bound = 1 / math.sqrt(inputs)
            whole = torch.empty(len(parameter), inputs).uniform_(-bound, bound, generator=generator)
        else:
            continue
        parameter.copy_(whole if axis is None else _part(whole, axis, _pieces(parameter), group))


def _part(whole: Tensor, axis: int, pieces: Sequence[int], group: ProcessGroup) -> Tensor:
    """This rank's part of a whole matrix. Ranks divide it piece by piece; `pieces` are the sizes on each rank."""
    parts = whole.split([size * group.size() for size in pieces], axis)
    return torch.cat([one.chunk(group.size(), axis)[group.rank()] for one in parts], axis)


def _joined(parts: Sequence[Tensor], axis: int, pieces: Sequence[int]) -> Tensor:
    """The whole matrix, from the parts of all ranks. See `_part`."""
    by_piece = zip(*(part.split(list(pieces), axis) for part in parts), strict=True)
    return torch.cat([torch.cat(one, axis) for one in by_piece], axis)


def _check_shared(loaded: Mapping[str, Tensor], folder: Path) -> None:
    """Raise UserError if experts of a layer do not share what they have to."""
    shared: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        if not torch.equal(shared.setdefault(shared_name(name), tensor), tensor):
            raise UserError(
                f"the experts in lora_load {folder} do not share {name}: unset experts_shared_outer_loras, or set "
                "another lora_load"
            )


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _split_axis(parameter: Any) -> int | None:
    """The dimension that tensor-parallel ranks divide; None if each has the whole matrix."""
    return None if parameter.partition_dim < 0 else parameter.partition_dim


def _pieces(parameter: Any) -> Sequence[int]:
    """Sizes on this rank of the pieces that ranks divide one by one, in the dimension that they divide."""
    sizes: Sequence[int] = parameter.pieces
    return sizes


def _whole_rows(parameter: Any) -> int | None:
    """The rows of the whole matrix without those of a padded vocabulary; None if nothing is padded."""
    rows: int | None = parameter.whole_rows
    return rows


def adapters_of(chunks: Sequence[Module]) -> list[Adapters]:
    """All adapters of the chunks of this rank; none if all weights are trained."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters)]


@contextmanager
def without_adapters(chunks: Sequence[Module]) -> Iterator[None]:
    """Within the context, the model computes what its frozen weights compute alone."""
    adapters = adapters_of(chunks)
    for one in adapters:
        one.enabled = False
    try:
        yield
    finally:
        for one in adapters:
            one.enabled = True


@contextmanager
def without_dropout(chunks: Sequence[Module]) -> Iterator[None]:
    """Within the context, adapters use all of their inputs."""
    adapters = adapters_of(chunks)
    for one in adapters:
        one.train(False)
    try:
        yield
    finally:
        for one in adapters:
            one.train()


def adapter_config(settings: Learner, checkpoint: Path) -> AdapterConfig:
    """What PEFT and engines must know of an adapter of the model in a folder."""
    layers = linear_layers_of(Model(hf_checkpoint=str(checkpoint)))
    if layers is None:
        raise UserError(f"the linear layers of the model in {checkpoint} are not known: unset lora_rank")
    modules = settings.lora_targets.of_model(layers)
    return AdapterConfig(
        settings.lora_rank, settings.lora_scale, modules, settings.lora_dropout, alternates=layers.alternates
    )


@torch.no_grad()
def export_adapter(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of every adapter once, whole and with PEFT's names, on every rank.

    This is a collective operation: all ranks must iterate to the end. Tensors may be parameters, so copy those that
    must outlast the next optimizer step.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    own = [(adapters, *pair) for adapters in adapters_of(chunks) for pair in adapters.named_pairs()]
    # Expert-parallel ranks hold different experts in the same order.
    of_ranks = zip(*gather_json([name for _, name, _ in own], experts), strict=True)
    described = [
        (
            adapters.of_expert,
            names if adapters.of_expert else [name],
            tuple(one.shape),
            _split_axis(one),
            _pieces(one),
            _whole_rows(one),
        )
        for (adapters, name, one), names in zip(own, of_ranks, strict=True)
    ]
    for stage, held in enumerate(gather_json(described, pipeline)):
        for number, (of_expert, names, shape, axis, pieces, rows) in enumerate(held):
            held_here = own[number][-1] if stage == pipeline.rank() else None
            part = broadcast_from_stage(held_here, shape, "torch.float32", stage)
            parts = [part] if axis is None else all_gather(part, _group_of(of_expert=of_expert))
            whole = part if axis is None else _joined(parts, axis, pieces)
            for name, tensor in zip(names, all_gather(whole, experts) if of_expert else [whole], strict=True):
                yield name, tensor[:rows]


def sharded_adapters(chunk: Module) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Megatron's sharded state of the adapters of a chunk, by their names in the chunk.

    The keys in the checkpoint are PEFT's names, or that of all experts, which do not depend on the parallel layout.
    """
    local_names = {parameter: name for name, parameter in chunk.named_parameters()}
    state = {}
    dense = {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    of_experts = {
        "tp_group": parallel_state.get_expert_tensor_parallel_group(),
        "dp_cp_group": parallel_state.get_expert_data_parallel_group(),
    }
    for adapters in adapters_of([chunk]):
        for name, parameter in adapters.named_pairs():
            axis = _split_axis(parameter)
            is_shared = adapters.shares_outer and axis is None
            key, groups = shared_name(name) if is_shared else name, dense
            if adapters.of_expert and not is_shared:
                groups = of_experts
            state[local_names[parameter]] = _sharded(parameter, key, axis, groups)
    return state


def _sharded(
    parameter: Parameter, key: str, axis: int | None, groups: Mapping[str, ProcessGroup]
) -> ShardedTensor | ShardedTensorFactory:
    if axis is None:
        return make_sharded_tensor_for_checkpoint(parameter, key, **groups)
    # How much a vocabulary is padded depends on the number of ranks.
    shard = partial(
        make_tp_sharded_tensor_for_checkpoint,
        tp_axis=axis,
        allow_shape_mismatch=_whole_rows(parameter) is not None,
        **groups,
    )
    pieces = list(_pieces(parameter))
    if len(pieces) == 1:
        return shard(parameter, key)

    def build(key: str, tensor: Tensor, replica: Any, flattened: Any) -> list[ShardedTensor]:
        """Each piece is a tensor of the checkpoint, so that its layout does not depend on the number of ranks."""
        assert flattened is None, "the optimizer has whole parameters"
        return [shard(one, f"{key}.{number}") for number, one in enumerate(tensor.split(pieces, axis))]

    replica = make_sharded_tensor_for_checkpoint(parameter, key, **groups).replica_id
    return ShardedTensorFactory(key, parameter, build, partial(torch.cat, dim=axis), replica)


def merge_adapter(weights: dict[str, Tensor], adapter: Mapping[str, Tensor], config: AdapterConfig) -> None:
    """Add what the adapter computes to weights with Hugging Face names, in float32 and in place.

    An output layer with an adapter gets its own weight.
    """
    if tensor_names(HEAD)[0] in adapter:
        untie(weights)
    for name, tensor in weights.items():
        for layer, weight in linear_layers_in(name, tensor, config):
            of_a, of_b = tensor_names(layer)
            if of_a in adapter:
                change = config.scale * adapter[of_b].float() @ adapter[of_a].float()
                weight.copy_(weight.float() + change)
