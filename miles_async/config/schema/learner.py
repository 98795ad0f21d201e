"""Optimization, batching, parallelism, checkpoints and processes of the learner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from miles_async.config.learning_rate import AnnealStyle, DecayStyle
from miles_async.config.schema.lora import LoraSettings


class Learner(LoraSettings):
    """The learner: optimizer, batching, parallelism, checkpoints and processes. It runs Megatron-core."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """Loss to minimize: policy_loss is the policy-gradient loss, sft_loss the negative log-likelihood of supervised
    examples, and custom_loss what custom_loss_function_path computes."""
    custom_megatron_init_path: str | None = None
    """Function fn(args) that each learner rank calls once before it builds the model, when Megatron's process groups
    exist, as module.function. If unset, nothing is called."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """Function fn(args, model, store_prefix) that each learner rank calls before it computes the log-probabilities of a
    batch without gradients, as module.function. store_prefix is "ref_" for the reference model and "" for the
    policy, which needs no such pass if a batch has one optimizer step. If unset, nothing is called."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """Function fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) that each learner rank calls before
    each optimizer step of the policy, when the gradients are zero, as module.function. opt_param_scheduler is None. If
    unset, nothing is called."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step. If unset, it is rollout_batch_size * n_samples_per_prompt / num_steps_per_rollout."""
    num_steps_per_rollout: int | None = Field(None, ge=1)
    """Optimizer steps per pass over a training batch. If unset, it is rollout_batch_size * n_samples_per_prompt /
    global_batch_size, or 1 if global_batch_size is unset too."""
    passes_per_rollout: int = Field(1, ge=1)
    """How often the optimizer steps of a training batch are taken (PPO's epochs). Ratios compare the weights with those
    before the first pass."""
    segments_are_samples: bool = False
    """Train each segment of a trajectory as a sample: an optimizer step has at most global_batch_size segments, and
    loss_aggregation gives segments the weights of trajectories. The number of optimizer steps per training batch then
    depends on the batch. If off, all segments of a trajectory are in the same step, and count as one sample."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate of the policy."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0 to lr."""
    lr_warmup_fraction: float | None = Field(None, ge=0, le=1)
    """Part of lr_decay_steps over which the learning rate rises, in place of lr_warmup_steps."""
    lr_decay_style: DecayStyle = "linear"
    """Shape of the learning rate after the warm-up. constant keeps lr; linear and cosine fall to min_lr at
    lr_decay_steps; inverse-square-root falls until the end of the run; WSD (warm-up, stable, decay; MiniCPM, arXiv
    2404.06395) keeps lr and falls over the last lr_wsd_decay_steps."""
    lr_decay_steps: int | None = Field(None, ge=1)
    """Optimizer step, counted from the start of the run, at which the learning rate reaches min_lr. If unset, this is
    the end of the run."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_wsd_decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps over which the learning rate falls with lr_decay_style WSD. If unset, a tenth of
    lr_decay_steps."""
    lr_wsd_decay_style: AnnealStyle = "exponential"
    """Shape of the decay at the end of lr_decay_style WSD."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay (AdamW)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    clip_grad: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    max_tokens_per_gpu: int = Field(8192, ge=1)
    """Maximum number of tokens per GPU in a packed micro-batch. Lower it if the learner runs out of memory; it must
    leave room for the longest sample."""
    use_dynamic_batch_size: bool = True
    """Fill micro-batches with as many samples as max_tokens_per_gpu allows. If off, every micro-batch holds
    micro_batch_size samples of any length."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples per micro-batch and rank if use_dynamic_batch_size is off."""
    balance_data: bool = True
    """Distribute samples so that all data-parallel ranks get the same amount of computation. If off, samples are
    assigned to the ranks in turn."""
    share_prefixes: bool | None = None
    """Compute a common prefix of samples, such as the prompt of a group, only once. Gradients are the same up to
    rounding. By default this is on for CPUs. On GPUs it replaces the layers' attention by PyTorch's FlexAttention,
    which was run on one H200 only, so it is off unless it is set."""
    use_dynamic_batching_in_train: bool = False
    """Train on samples that are sorted by length and padded to equal length within a micro-batch (ROLL's dynamic
    batching), instead of packing samples end to end."""
    max_tokens_per_microbatch_in_train: int | None = Field(None, ge=1)
    """Maximum size of a training micro-batch under dynamic batching: number of rows times padded row length, in tokens.
    If unset, it is max_tokens_per_gpu * context_parallel_size."""
    sequence_length_round_in_train: int = Field(64, ge=1)
    """Row lengths are rounded up to this multiple in training micro-batches under dynamic batching. It must be
    divisible by tensor_model_parallel_size * context_parallel_size."""
    use_dynamic_batching_in_infer: bool = False
    """Use dynamic batching (samples sorted by length and padded within a micro-batch) for forward-only passes, such as
    the computation of log-probabilities."""
    max_tokens_per_microbatch_in_infer: int | None = Field(None, ge=1)
    """Maximum size of a forward-only micro-batch under dynamic batching: number of rows times padded row length, in
    tokens. If unset, it is max_tokens_per_gpu * context_parallel_size."""
    sequence_length_round_in_infer: int = Field(64, ge=1)
    """Row lengths are rounded up to this multiple in forward-only micro-batches under dynamic batching. It must be
    divisible by tensor_model_parallel_size * context_parallel_size."""
    ref_use_dynamic_batching_in_infer: bool | None = None
    """Override use_dynamic_batching_in_infer for the reference model. If unset, the reference model uses the same
    setting."""
    ref_max_tokens_per_microbatch_in_infer: int | None = Field(None, ge=1)
    """Override max_tokens_per_microbatch_in_infer for the reference model, in tokens. If unset, the reference model
    uses the same setting."""
    ref_sequence_length_round_in_infer: int | None = Field(None, ge=1)
    """Override sequence_length_round_in_infer for the reference model, in tokens. If unset, the reference model uses
    the same setting."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of the learner. With bf16, weights and activations are bfloat16, while the optimizer's master weights,
    the gradients and the loss stay float32; weights are published and exported as bfloat16. If unset, it is bf16 on
    GPUs and fp32 on CPU machines."""
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Layers of the learner: transformer_engine uses NVIDIA's Transformer Engine, which needs a GPU and bf16, and local
    uses Megatron's own layers with PyTorch's attention and norms. If unset, it is transformer_engine with bf16 on GPUs
    where it is installed, else local."""
    enable_mtp_training: bool = False
    """Also train the heads that predict further tokens (multi-token prediction, MTP), from which engines can draft
    tokens. The checkpoint must have them. Their loss is the negative log-likelihood of the trained tokens, and changes
    no other weights. If off, the heads are neither trained nor exported."""
    mtp_loss_scaling_factor: float = Field(0.2, ge=0)
    """Factor of the loss of the MTP heads, which is the mean over the trained tokens of an optimizer step and over the
    heads. Adam makes the learning of the heads almost independent of it, but clip_grad limits the norm of all gradients
    together."""
    megatron_to_hf_mode: Literal["raw", "bridge"] | None = None
    """Source of the learner's model and of the conversion of its weights: raw uses the model plug-ins, and bridge
    NVIDIA's Megatron-Bridge, which make setup-bridge installs. If unset, it is raw for a model that has a plug-in, else
    bridge. A run that trains adapters (lora_rank) uses the plug-in in any case."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Number of ranks that each layer is split across (tensor parallelism)."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Number of stages that the layers are divided into (pipeline parallelism). Each stage has its own ranks."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2)
    """Number of layer chunks per pipeline rank (interleaved schedule), which shortens the time that pipeline ranks
    idle. If unset, each pipeline rank holds one chunk."""
    context_parallel_size: int = Field(1, ge=1)
    """Number of ranks that each sequence is split across (context parallelism). A micro-batch then holds up to
    context_parallel_size * max_tokens_per_gpu tokens."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Number of ranks that the experts of a mixture-of-experts layer are distributed over (expert parallelism)."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Number of ranks that each expert is split across. If unset, it is tensor_model_parallel_size."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass to save memory: full recomputes whole layers, selective only
    recompute_modules. If unset, all activations are kept."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers recompute_granularity full recomputes: uniform recomputes all layers in groups of
    recompute_num_layers, block only the first recompute_num_layers layers of each pipeline stage."""
    recompute_num_layers: int | None = Field(None, ge=1)
    """Number of layers per group with recompute_method uniform, or number of recomputed layers per pipeline stage with
    recompute_method block."""
    sequence_parallel: bool = False
    """Split the activations outside of attention and feed-forward layers along the sequence across the tensor-parallel
    ranks, which saves memory. tensor_model_parallel_size must be above 1."""
    use_distributed_optimizer: bool | None = None
    """Shard the optimizer state over the data-parallel ranks instead of replicating it. If unset, the state is sharded
    on GPUs and replicated on CPU machines."""
    max_nonfinite_batches: int = Field(1, ge=1)
    """Number of consecutive batches with a non-finite loss or gradient after which the run stops. The weights are not
    updated by such batches. If a run trains several adapters, the batches of each are counted alone."""
    save: str | None = None
    """Folder for checkpoints, from which load resumes. A checkpoint is written every save_interval rollouts and at the
    end of the run, even if Ctrl-C or SIGTERM ends it (drain_seconds). If unset, no checkpoints are written."""
    save_interval: int | None = Field(None, ge=1)
    """Number of rollouts between two checkpoints (save) and exports (save_hf). If unset, only the final ones are
    written."""
    async_save: bool = True
    """Write checkpoints in the background while training continues. If off, training waits until a checkpoint is on
    disk."""
    save_hf: str | None = None
    """Folder for exports of the model in Hugging Face format, written whenever a checkpoint is due. `{rollout_id}` in
    the name is replaced by the number of the rollout. If unset, nothing is exported."""
    save_keep: int | None = Field(None, ge=1)
    """Number of checkpoints to keep in save; older checkpoints are deleted. If unset, all checkpoints are kept."""
    checkpoint_checksums: bool = True
    """Store a checksum of each file of a checkpoint, and compare the checksums when a run resumes (load), so that a
    file with damaged contents is found. If off, only the sizes of files are compared: reading a checkpoint of many
    terabytes takes long."""
    resume: Literal["auto"] | None = None
    """auto continues the newest run that saves to the same folder, if it did not end: the run's folder, store, weight
    versions and prompts are kept. If there is none, a new run begins. Needs save and save_interval."""
    load: str | None = None
    """The save folder of an earlier run. The run resumes from the newest checkpoint in it. If the folder is empty, or
    load is unset, the run starts from the beginning."""
    actor_num_nodes: int = Field(1, ge=1)
    """Number of nodes of the learner."""
    actor_num_gpus_per_node: int = Field(1, ge=1)
    """Learner ranks per node: one per GPU, or one per process on a CPU machine."""
    train_env_vars: dict[str, str] = {}
    """Environment variables of the learner's processes, which run the policy, the reference model and the critic."""
    ref_env_vars: dict[str, str] = {}
    """Environment variables that are set only while the reference model is built or run, in addition to
    train_env_vars."""
    critic_env_vars: dict[str, str] = {}
    """Environment variables that are set only while the critic is built or run, in addition to train_env_vars."""
    deterministic_mode: bool = False
    """Use only deterministic algorithms, so that equal inputs give bitwise equal results. Deterministic algorithms may
    be slower."""
    learner_cpus: list[int] | None = None
    """CPU cores that the learner's ranks are pinned to; the ranks divide the cores among themselves. If unset, ranks
    are not pinned."""
    learner_threads: int | None = Field(None, ge=1, le=1024)
    """PyTorch threads per learner rank. If unset, one thread per CPU core that the rank may use."""
    seed: int = Field(1234, ge=0, le=2**31 - 1)
    """Seed of the learner: initial weights of the tiny model, examples of the warm start, and PyTorch's random
    numbers."""

    @property
    def ranks(self) -> int:
        """Number of learner processes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    def data_parallel_ranks(self, ranks: int) -> int:
        """Number of model replicas that `ranks` learner ranks hold. Each replica trains a part of every batch."""
        stages = self.pipeline_model_parallel_size
        return ranks // (self.tensor_model_parallel_size * self.context_parallel_size * stages)

    def data_parallel_rank(self, rank: int, ranks: int) -> int:
        """The data-parallel rank of learner rank `rank` out of `ranks`.

        Megatron orders ranks by tensor, context, data and pipeline parallelism, with tensor-parallel ranks adjacent.
        """
        ranks_per_stage = self.tensor_model_parallel_size * self.context_parallel_size
        return rank // ranks_per_stage % self.data_parallel_ranks(ranks)

    @property
    def sequence_unit(self) -> int:
        """Sequence lengths are padded to a multiple of this many tokens.

        Under context parallelism each rank takes one chunk from the front and one from the back of a sequence, because
        causal attention then costs every rank the same. So a sequence has two equal chunks per rank.
        """
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size

    @property
    def pack_unit(self) -> int:
        """Packed micro-batches are padded to a multiple of this many tokens, for sequence parallelism to split."""
        shards = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.sequence_unit, self.context_parallel_size * shards)

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum number of tokens in a packed micro-batch over all context-parallel ranks, a multiple of
        `pack_unit`."""
        tokens = self.max_tokens_per_gpu * self.context_parallel_size
        return tokens - tokens % self.pack_unit

    def least_tokens_per_gpu(self, longest: int) -> int:
        """The smallest max_tokens_per_gpu under which a sequence of `longest` tokens fits into a micro-batch."""
        padded = longest + -longest % self.pack_unit
        return -(-padded // self.context_parallel_size)

    @property
    def shares_prefixes(self) -> bool:
        """Whether settings, parallel layout and batching let the learner compute a common prefix of samples once.

        Context parallelism divides every sequence evenly among ranks, and dynamic batching pads rows to equal lengths.
        """
        needs_whole_samples = self.context_parallel_size > 1 or self.use_dynamic_batching_in_train
        return self.share_prefixes is not False and not needs_whole_samples

    @property
    def reference_batching(self) -> Learner:
        """These settings with the reference model's overrides for dynamic batching applied, and without MTP heads."""
        overrides = {
            "enable_mtp_training": False,
            "use_dynamic_batching_in_infer": self.ref_use_dynamic_batching_in_infer,
            "max_tokens_per_microbatch_in_infer": self.ref_max_tokens_per_microbatch_in_infer,
            "sequence_length_round_in_infer": self.ref_sequence_length_round_in_infer,
        }
        return self.model_copy(update={name: value for name, value in overrides.items() if value is not None})

    @property
    def save_folder(self) -> Path | None:
        """Absolute path of the folder `save`; None if it is unset."""
        return None if self.save is None else Path(self.save).expanduser().absolute()

    def export_folder(self, rollout_id: int) -> Path | None:
        """Absolute path of the Hugging Face export after rollout `rollout_id`; None if `save_hf` is unset."""
        if self.save_hf is None:
            return None
        return Path(self.save_hf.replace("{rollout_id}", str(rollout_id))).expanduser().absolute()
