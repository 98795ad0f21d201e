"""Every setting of a run, by section. The name of a field is its flag, its YAML key and the word the field uses.

`--rollout-batch-size 32`, `rollout_batch_size: 32` under `rollout:` in YAML and `rollout.rollout_batch_size=32` on the
command line all set the same value. Field names are unique over all sections, so that a flag needs no prefix, but for
the sections that name one. Sections are frozen: what the run folder's `config.yaml` says is what ran. The text under a
field is its help.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from miles_async.recording import Steps


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    flag_prefix: ClassVar[str] = ""
    """What stands before the names of its fields in flags: `skip_rollout_` makes `--skip-rollout-enable`."""


class TinyModel(Section):
    """A small Qwen3 with a byte-level tokenizer, created locally in Hugging Face format."""

    num_layers: int = Field(4, ge=1)
    """Transformer layers of the tiny model."""
    hidden_size: int = Field(128, ge=16)
    """Width of the tiny model."""
    ffn_hidden_size: int = Field(384, ge=16)
    """Width of its feed-forward layers."""
    num_attention_heads: int = Field(4, ge=1)
    """Attention heads of the tiny model."""
    num_query_groups: int = Field(2, ge=1)
    """Key/value heads of the tiny model."""
    max_position_embeddings: int = Field(512, ge=16)
    """Longest sequence the tiny model takes."""
    init_std: float = Field(0.05, gt=0)
    """Standard deviation of its first weights; wider than usual, because so narrow a model learns faster from it."""


class Model(Section):
    hf_checkpoint: str | None = None
    """Folder of the Hugging Face checkpoint to train. Unset: the tiny model below is created."""
    tiny_model: TinyModel = TinyModel()
    """Shape of the model that is created where no checkpoint is named."""


class WarmStart(Section):
    warm_start_max_steps: int = Field(0, ge=0)
    """Supervised steps at most, through the same learner, before RL; 0 trains from the checkpoint as it is."""
    warm_start_accuracy: tuple[float, float] = (0.15, 0.35)
    """Stop at the first greedy accuracy inside this range."""
    warm_start_lr: float = Field(2e-3, gt=0)
    """Learning rate of the supervised steps."""
    warm_start_batch_size: int = Field(128, ge=1)
    """Problems per supervised step."""
    warm_start_check_every: int = Field(20, ge=1)
    """Supervised steps between two looks at the accuracy; near the range half as many."""
    warm_start_template: str = "{prompt}"
    """What it makes of each prompt, where something else will in training: an agent's chat, for example."""
    cache_dir: str = "~/.cache/miles_async"
    """Where warm-started models are kept, by the hash of all that made them."""


class Data(Section):
    prompt_data: str | None = None
    """JSONL or Parquet file of prompts; `path@[a:b]` is rows a to b. Unset: `reasoning_gym_task` makes them."""
    input_key: str = "prompt"
    """Key of the prompt in a row: a text, or a list of chat messages."""
    label_key: str | None = "label"
    """Key of the expected answer in a row; null where rows have none."""
    metadata_key: str = "metadata"
    """Key of a row's object that becomes the sample's metadata."""
    tool_key: str = "tools"
    """Key of a row's list of tool descriptions, for the chat template and for tools."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """More arguments of the chat template, such as enable_thinking."""
    disable_rollout_global_dataset: bool = False
    """No data: samples are fed blank, for a rollout function that brings its own prompts."""
    buffer_filter_path: str | None = None
    """Which returned groups go out again: fn(args, rollout_id, buffer, num_samples). Unset: first in, first out."""
    reasoning_gym_task: str | None = None
    """Any of reasoning-gym's tasks, such as chain_sum."""
    reasoning_gym_settings: dict[str, Any] = {}
    """Settings of that task, passed to reasoning-gym as they are."""
    reasoning_gym_size: int = Field(20_000, ge=1)
    """Training problems per epoch."""
    prompt_template: str = "{question}"
    """The prompt of a reasoning-gym question: `{question}` is the text, `{expression}` what follows its last colon."""
    eval_size: int = Field(512, ge=0)
    """Held-out problems for greedy accuracy, none of which is trained on; 0 measures none."""
    rollout_shuffle: bool = True
    """Shuffle the data anew in every epoch."""
    rollout_seed: int = 42
    """Seed of the data order and of sampling."""


class EvalDataset(Section):
    """One entry of `eval_datasets`. A subset of the settings of training, for one JSONL file."""

    path: str
    input_key: str = "prompt"
    label_key: str = "label"
    size: int | None = Field(None, ge=1)
    """Rows from the beginning. Unset: all."""
    n_samples: int = Field(1, ge=1)
    """Samples per prompt."""
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    max_response_len: int | None = Field(None, ge=1)
    """Unset: rollout_max_response_len."""


class Rollout(Section):
    rollout_function_path: str = "miles_async.rollout.sglang_rollout.generate_rollout"
    """The function that yields a batch of groups, as module.function."""
    schedule: Literal["fully_async", "one_step_off", "synchronous"] | None = None
    """How generation and training overlap: a persistent producer fills a queue (fully_async), the next batch is
    generated while the current one trains (one_step_off), or they alternate (synchronous). Unset: train.py is
    synchronous, and train_async.py is fully_async with fully_async_rollout and one_step_off with other functions."""
    num_rollout: int = Field(100, ge=1)
    """Batches to train; then the run ends."""
    rollout_batch_size: int = Field(32, ge=1)
    """Groups per drained batch, and the work kept in flight where over_sampling_batch_size is unset."""
    n_samples_per_prompt: int = Field(8, ge=1)
    """Samples per group."""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """Groups kept in flight (N); the batch functions generate this many to keep rollout_batch_size."""
    windowed_fifo_ratio: float | None = Field(None, ge=0, le=1)
    """Window W = max(1, floor(ratio * N)): 0 is strict FIFO, 1 is greedy. Unset: greedy."""
    max_weight_staleness: int | None = Field(None, ge=0)
    """Groups older than this many versions when their step begins are recycled. Unset: no bound but the queue."""
    queue_capacity: int = Field(1000, ge=1)
    """Groups the queue holds at most; a full queue stops admission, nothing is dropped."""
    head_deadline_seconds: float | None = Field(None, gt=0)
    """A group that heads the window for longer is a straggler. Unset: it may take its time."""
    head_deadline_action: Literal["wait", "recycle", "salvage"] = "recycle"
    """What happens to a straggler: nothing, a fresh attempt, or another attempt that continues its tokens."""
    max_attempts: int = Field(3, ge=1)
    """Attempts per prompt before it goes to the dead-letter file."""
    rollout_max_prompt_len: int | None = Field(None, ge=1)
    """Longest prompt in tokens; longer ones are skipped and counted."""
    rollout_max_response_len: int = Field(1024, ge=1)
    """Response tokens at most."""
    rollout_temperature: float = Field(1.0, ge=0)
    """Sampling temperature."""
    rollout_top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling."""
    rollout_top_k: int = -1
    """Top-k sampling; -1 is off."""
    rollout_stop: list[str] = []
    """Strings that end a response."""
    rollout_stop_token_ids: list[int] = []
    """Token ids that end a response."""
    rollout_skip_special_tokens: bool = True
    """Leave special tokens out of the response text; its tokens are kept either way."""
    rm_type: str | None = None
    """The built-in reward (exact, math, f1, remote_rm, ...); `boxed_` before it reads only the last \\boxed{}."""
    custom_rm_path: str | None = None
    """Your own reward, as module.function: fn(args, sample) -> number, plain or async; a list with group_rm."""
    custom_rm_isolated: bool = False
    """Run your own reward in processes of its own, ended at the deadline: for slow or untrusted code."""
    group_rm: bool = False
    """Score a whole group in one call: fn(args, samples) -> one number per sample."""
    reward_key: str | None = None
    """The entry of a dictionary reward that is trained on."""
    rm_url: str | None = None
    """Where rm_type remote_rm posts prompt, response and label."""
    remote_rm_concurrency: int = Field(64, ge=1)
    """Requests at rm_url at once at most."""
    remote_rm_retries: int = Field(3, ge=0)
    """Further tries after a lost connection or a 5xx answer; a 4xx answer is never tried again."""
    reward_processes: int = Field(1, ge=1)
    """Processes for rewards that may hang (math, dapo, deepscaler, custom_rm_isolated)."""
    reward_timeout_seconds: float = Field(60.0, gt=0)
    """A group whose rewards take longer fails and is retried."""
    dynamic_sampling_filter_path: str | None = None
    """Keep a finished group or not: fn(args, group) -> bool or Verdict, as module.function."""
    over_sampling_filter_path: str | None = None
    """Batch functions: order over_sampling_batch_size groups, best first: fn(args, groups) -> groups; the rest goes."""
    rollout_sample_filter_path: str | None = None
    """Look at a batch before it trains: fn(args, groups) may set sample.remove_sample, which masks its loss."""
    skip_rollout: bool = False
    """Deprecated: replay every step, as skip.rollout and skip.async_rollout do; gives way where one of them is on."""
    partial_rollout: bool = False
    """Batch functions: groups aborted at the end of a batch go back with their tokens and are continued."""
    eval_interval: int | None = Field(None, ge=1)
    """Rollouts between two evaluations; asynchronous runs train on meanwhile. Unset: only before and after the run."""
    eval_datasets: dict[str, EvalDataset] = {}
    """More data sets to evaluate on, by name, each with its own sampling settings."""
    eval_function_path: str | None = None
    """Your own evaluation, as module.function: fn(args, rollout_id, data_source, evaluation=True) -> scores by name."""
    custom_generate_function_path: str | None = None
    """Generate each sample by your own async fn(args, sample, sampling_params) -> sample, as module.function."""
    agent_port: int = Field(0, ge=0, le=65535)
    """Port on loopback of the OpenAI-compatible endpoint for agents and external generators; 0 takes a free one."""
    generate_timeout_seconds: float = Field(1800.0, gt=0)
    """A sample whose own generate function takes longer fails, and its group is retried."""
    tool_max_turns: int = Field(4, ge=1)
    """Tool calls at most per sample, for miles_async.rollout.tool_use.generate."""
    tool_search_corpus: str | None = None
    """JSONL file of documents with a text each, which that function's search tool searches."""
    shuffle_rewards: bool = False
    """Control experiment: permute rewards between the samples of a batch, so that nothing can be learned from them."""


class Algorithm(Section):
    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """How rewards become advantages, and what is clipped: grpo, gspo and cispo compare the samples of a group and clip
    the ratio of a token, of its sequence, or the weight and not the gradient; reinforce_plus_plus normalizes over the
    batch, with _baseline after subtracting the group's mean; ppo trains a critic and compares with its values."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards, under ppo."""
    lambd: float = Field(1.0, ge=0, le=1)
    """Lambda of generalized advantages, under ppo: 0 trusts the critic, 1 the rewards."""
    normalize_advantages: bool = False
    """Move and scale ppo's advantages to mean 0 and variance 1 over the tokens of an optimizer step."""
    value_clip: float = Field(0.2, gt=0)
    """How far the critic's values may move within one drained batch before its loss stops pulling."""
    num_critic_only_steps: int = Field(0, ge=0)
    """Rollouts at the beginning that train the critic alone."""
    critic_load: str | None = None
    """Hugging Face checkpoint that the critic starts from, below its new head. Unset: the one training starts from."""
    critic_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic; it falls like the policy's. Unset: lr."""
    critic_lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which it rises from 0."""
    grpo_std_normalization: bool = True
    """Divide group advantages by the group's standard deviation."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over the step's tokens (DAPO), over its samples of their token means (GRPO, GSPO), or the token sum divided
    by samples times rollout_max_response_len (Dr. GRPO)."""
    eps_clip: float = Field(0.2, ge=0)
    """Lower clip of the policy ratio: 1 - eps."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Upper clip, 1 + eps; unset: same as eps_clip."""
    off_policy_correction: Literal["tis", "decoupled", "icepop", "sequence", "none"] = "tis"
    """Weight for tokens that older weights or another engine sampled: the truncated ratio of a token (tis), its plain
    ratio (decoupled), its ratio inside a band and else 0 (icepop), the truncated ratio of its sequence, or none."""
    tis_clip: float = Field(2.0, gt=0)
    """Upper bound of the importance weight under tis and sequence."""
    icepop_band: tuple[float, float] = (0.5, 5.0)
    """Outside of these ratios icepop leaves a token out."""
    overlong_buffer_len: int | None = Field(None, ge=1)
    """Response tokens before the limit over which a penalty grows (DAPO). Unset: long answers are not penalized."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What is taken off the reward of an answer at the limit."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the distance from a frozen reference model to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Its weight there."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """How the distance is estimated, in the loss and in the reward."""
    kl_coef: float = Field(0.0, ge=0)
    """Take this times the distance of a token and those after it off the token's advantage; above 0, a reference model
    is kept too."""
    ref_load: str | None = None
    """Hugging Face checkpoint of the reference model. Unset: the one that training starts from."""


class Learner(Section):
    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """What is minimized: the policy-gradient loss, or the negative log-likelihood of lessons (supervised)."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step. Unset: derived from the rollout batch and num_steps_per_rollout."""
    num_steps_per_rollout: int = Field(1, ge=1)
    """Optimizer steps per drained batch."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to min_lr in this shape; WSD stays until the end."""
    lr_decay_steps: int | None = Field(None, ge=1)
    """Optimizer step at which min_lr is reached. Unset: the end of the run."""
    min_lr: float = Field(0.0, ge=0)
    """What the learning rate falls to."""
    lr_wsd_decay_steps: int | None = Field(None, ge=1)
    """Steps over which the learning rate falls at the end under WSD. Unset: a tenth of lr_decay_steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """In what shape it falls then."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """First-moment decay of Adam."""
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    """Second-moment decay of Adam."""
    clip_grad: float = Field(1.0, gt=0)
    """Gradient norm clip."""
    max_tokens_per_gpu: int = Field(8192, ge=1)
    """Tokens per packed micro-batch and rank, never exceeded."""
    use_dynamic_batch_size: bool = True
    """Fill micro-batches up to max_tokens_per_gpu; off, each has micro_batch_size samples, however long."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples per micro-batch and rank where use_dynamic_batch_size is off."""
    balance_data: bool = True
    """Give every data-parallel rank the same work; off, samples are dealt to the ranks in turn."""
    use_dynamic_batching_in_train: bool = False
    """Train on rows of sorted samples, padded within their micro-batch, instead of packing them end to end."""
    max_tokens_per_microbatch_in_train: int | None = Field(None, ge=1)
    """Rows times row length of such a micro-batch at most. Unset: max_tokens_per_gpu * context_parallel_size."""
    sequence_length_round_in_train: int = Field(64, ge=1)
    """Its row length is a multiple of this, and this of tensor_model_parallel_size * context_parallel_size."""
    use_dynamic_batching_in_infer: bool = False
    """The same for work without gradients, such as log-probabilities."""
    max_tokens_per_microbatch_in_infer: int | None = Field(None, ge=1)
    """The same limit there. Unset: max_tokens_per_gpu."""
    sequence_length_round_in_infer: int = Field(64, ge=1)
    """The same multiple there."""
    ref_use_dynamic_batching_in_infer: bool | None = None
    """The same for the reference model alone. Unset, as for the next two: what holds for other such work."""
    ref_max_tokens_per_microbatch_in_infer: int | None = Field(None, ge=1)
    """Its limit, where it takes padded rows."""
    ref_sequence_length_round_in_infer: int | None = Field(None, ge=1)
    """Its multiple there."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the learner. Under bf16 weights and activations are bfloat16; the optimizer's own weights, the
    gradients and the loss stay fp32. What is published and exported is bfloat16 then."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Stages that the layers are dealt to, each with ranks of its own."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2)
    """Chunks of layers per pipeline rank, taken in turn so that less of the pipeline stands idle. Unset: one."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share each sequence; a micro-batch then holds so many times max_tokens_per_gpu."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that the experts of a mixture-of-experts layer are dealt to."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Ranks that share each expert. Unset: tensor_model_parallel_size."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in the backward pass instead of keeping them: of whole layers, or of attention alone.
    Unset: all are kept."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Under full: all layers in groups of recompute_num_layers, or the first recompute_num_layers of each stage."""
    recompute_num_layers: int | None = Field(None, ge=1)
    """See recompute_method."""
    sequence_parallel: bool = False
    """Split activations of tensor-parallel ranks along the sequence."""
    use_distributed_optimizer: bool | None = None
    """Each data-parallel rank keeps a part of the optimizer's state, instead of all of it. Unset: on GPUs."""
    max_nonfinite_batches: int = Field(3, ge=1)
    """Stop the run after so many batches in a row whose loss or gradient was not finite."""
    save: str | None = None
    """Folder to keep checkpoints in; one is written at the end. Unset: none."""
    save_interval: int | None = Field(None, ge=1)
    """Rollouts between two checkpoints (save, save_hf), besides the last."""
    async_save: bool = True
    """Write checkpoints while training goes on; off, the next step waits until they are written."""
    save_hf: str | None = None
    """Folder to export the model to in Hugging Face format whenever a checkpoint is due; `{rollout_id}` in its name."""
    save_keep: int = Field(2, ge=1)
    """Newest checkpoints to keep; older ones are removed."""
    load: str | None = None
    """The save folder of an earlier run, to go on from its newest checkpoint."""
    actor_num_nodes: int = Field(1, ge=1)
    """Nodes of the learner."""
    actor_num_gpus_per_node: int = Field(1, ge=1)
    """Learner ranks per node; on a CPU machine, processes."""
    train_env_vars: dict[str, str] = {}
    """Environment variables of the learner's processes, where policy, reference model and critic live."""
    ref_env_vars: dict[str, str] = {}
    """Others of the reference model alone, while it is built and while it computes."""
    critic_env_vars: dict[str, str] = {}
    """Others of the critic alone, likewise."""
    deterministic_mode: bool = False
    """Use only algorithms that give the same bits each time, on GPUs too; they may be slower."""
    learner_cpus: list[int] | None = None
    """CPU cores the learner is pinned to. Unset: any."""
    learner_threads: int | None = Field(None, ge=1)
    """Torch threads per learner rank on a CPU machine. Unset: as many as the cores it may use."""
    seed: int = 1234
    """Seed of initial weights and batch order."""


class Weights(Section):
    weight_transfer: Literal["auto", "memory", "p2p", "broadcast", "disk", "disk_delta"] = "auto"
    """How weights reach the engines: a copy into their memory on the same machine, Mooncake one-sided writes, a
    collective, or a shared folder with all of them or with what changed. auto tries what is there and takes the
    fastest, the copy into their memory only where it saves 10 ms."""
    update_weight_buffer_size: int = Field(512 << 20, ge=1)
    """Bytes that are sent at a time: what a collective makes an engine hold beside its own weights at most."""
    check_weight_update_equal: bool = False
    """Compare every byte of an engine's weights after each write, instead of samples of each tensor."""
    update_weight_timeout_seconds: float = Field(30.0, gt=0)
    """A write that has not ended by then counts as torn, and its engine as lost."""
    update_weights_interval: int = Field(1, ge=1)
    """Batches trained between two publishes."""
    pause_generation_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests while weights are written."""


class Engine(Section):
    rollout_num_gpus: int = Field(1, ge=1)
    """Devices for engines; on a CPU machine, engine ranks."""
    rollout_num_gpus_per_engine: int = Field(1, ge=1)
    """Tensor-parallel size of one engine."""
    sglang_server_concurrency: int = Field(512, ge=1)
    """Requests in flight per engine at most."""
    adaptive_concurrency: bool = False
    """Keep fewer groups in flight while the engines report a full KV cache or a long line of requests."""
    sglang_server_args: dict[str, Any] = {}
    """Any other SGLang server argument, by its own name; `--sglang-mem-fraction-static 0.8` sets one."""
    engine_env_vars: dict[str, str] = {}
    """Environment variables of the engines' processes; they win over what we set there."""
    sglang_router_policy: Literal[
        "cache_aware", "round_robin", "power_of_two", "random", "consistent_hashing", "prefix_hash"
    ] = "cache_aware"
    """How the router picks an engine; the hashing ones may send everything to one of them."""
    sglang_router_ip: str | None = None
    """Address of an sglang-router of yours, to use instead of starting one; it must reach the engines."""
    sglang_router_port: int | None = Field(None, ge=1, le=65535)
    """Its port."""
    sglang_router_request_timeout_secs: float = Field(600.0, gt=0)
    """A request that takes longer is given up and its group retried."""
    engine_cpus: list[int] | None = None
    """CPU cores the engines are pinned to. Unset: any."""
    engine_start_timeout_seconds: float = Field(300.0, gt=0)
    """An engine that is not healthy by then stops the run with the end of its log."""
    engine_health_interval_seconds: float = Field(1.0, gt=0)
    """Between two looks at an engine that serves, and at the router."""
    engine_health_timeout_seconds: float = Field(30.0, ge=2)  # SGLang itself looks once a second
    """An engine that draws no token for so long, when it could, is taken for hung and replaced."""


class Cluster(Section):
    ray_address: str | None = None
    """An existing Ray cluster. Unset: one is started on this machine and ended with the run."""
    colocate: bool = False
    """train.py: engines share the learner's devices; each leaves its memory to the other while it waits."""


class SkipRole(Section):
    """When a stage is skipped (seed `skip-manager`; docs/skip.md)."""

    enable: bool = False
    """Replay this role's steps where they were recorded, record them where not."""
    dump_dir: str = "~/.cache/miles_async/skip"
    """Where recordings are kept."""
    steps: list[int | str] = []
    """Steps that may be skipped: integers and ranges such as 1-128 (both ends included) or 5- (no end)."""
    action: Literal["cache", "repeat"] = "cache"
    """cache replays the same step, repeat the nearest one that was recorded."""

    @field_validator("steps", mode="before")
    @classmethod
    def _are_steps(cls, value: Any) -> list[Any]:
        """One step or range needs no brackets."""
        entries = value if isinstance(value, list) else [value]
        Steps.parse(entries)
        return entries


class SkipRollout(SkipRole):
    flag_prefix = "skip_rollout_"


class SkipAsyncRollout(SkipRole):
    flag_prefix = "skip_async_rollout_"


class Skip(Section):
    flag_prefix = "skip_"

    rollout: SkipRollout = SkipRollout()
    """Batches by trainer step: train.py, and train_async.py with a batch function."""
    async_rollout: SkipAsyncRollout = SkipAsyncRollout()
    """Groups by feed order: fully asynchronous runs."""
    roles: dict[str, SkipRole] = {}
    """Roles of your own, each with the four settings of the others: skip.roles.reward.enable=true."""
    replay_timing: Literal["recorded", "none"] = "recorded"
    """A replayed group takes as long as its generation took, or no time."""
    drain_seconds: float = Field(60.0, ge=0)
    """When a fully asynchronous run ends, finish the groups that are being recorded, for so long at most."""
    mismatch: Literal["refuse", "generate"] = "refuse"
    """A recording made under other settings stops the run, or is left alone and the step generated."""
    max_bytes: int | None = Field(None, ge=1)
    """Record no more once a folder of recordings holds so many bytes."""


class Observability(Section):
    project_name: str = Field("miles_async", pattern=r"^[\w.-]+$")
    """What the run belongs to; part of the path of its recordings."""
    experiment_name: str = Field("default", pattern=r"^[\w.-]+$")
    """What the run tries; part of the path of its recordings."""
    run_dir: str = "runs"
    """Folder that holds a folder per run, and `latest`."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics on loopback; 0 takes a free one and prints it."""
    sample_interval_seconds: float | None = Field(5.0, gt=0)
    """Seconds between two generated samples that page and report show; null shows none."""
    trace: bool = False
    """Write trace.json into the run folder: groups, requests, steps, publishes and pauses, for ui.perfetto.dev."""
    trace_max_bytes: int = Field(64 * 2**20, ge=2**16)
    """Size of that file at most; when it gets full, groups and requests are left out first."""
    log_format: Literal["console", "json"] = "console"
    """Log lines for people or for machines."""
    progress_bar: bool = True
    """Show the progress bar on stderr."""
    use_tensorboard: bool = False
    """Write the curves of the run into its folder for TensorBoard, too."""
    use_wandb: bool = False
    """Send the curves of the run to Weights & Biases, too."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline keeps them in the run folder; `wandb sync` sends them later."""
    wandb_project: str | None = None
    """Project there. Unset: project_name."""
    wandb_group: str | None = None
    """Group there. Unset: experiment_name."""
    wandb_always_use_train_step: bool = False
    """Plot rollouts and evaluations over optimizer steps, not over rollouts."""
    no_progress_warn_seconds: float = Field(30.0, gt=0)
    """Warn each time this long passes without a collected group."""
    no_progress_abort_seconds: float = Field(600.0, gt=0)
    """Stop the run after this long without one."""


class Debug(Section):
    save_debug_rollout_data: str | None = None
    """Save every batch to this file, such as `debug/{rollout_id}.safetensors`; `make inspect` shows it."""
    load_debug_rollout_data: str | None = None
    """Train on saved batches, `{rollout_id}` in the name, instead of generating any; starts no engine."""
    debug_rollout_only: bool = False
    """Generate only: no learner, no weight writes."""
    debug_train_only: bool = False
    """Train only, on load_debug_rollout_data: no engine, no router."""
    use_pytorch_profiler: bool = False
    """Write a profile of the learner's steps, one file per rollout and rank, for chrome://tracing or Perfetto."""
    profile_step_start: int = Field(1, ge=0)
    """The first rollout that is profiled."""
    profile_step_end: int = Field(2, ge=1)
    """The first one after it that is not."""
    profile_dir: str = "profiles"
    """Folder to write profiles to."""
    dump_details: str | None = None
    """Folder for what is needed to look into a run later: every batch, and the tokenizer."""


class RunConfig(Section):
    """The whole configuration of a run."""

    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    data: Data = Data()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    learner: Learner = Learner()
    weights: Weights = Weights()
    engine: Engine = Engine()
    cluster: Cluster = Cluster()
    skip: Skip = Skip()
    observability: Observability = Observability()
    debug: Debug = Debug()
