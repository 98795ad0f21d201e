"""Every setting of a run, by section. The name of a field is its flag, its YAML key and the word the field uses.

`--rollout-batch-size 32`, `rollout_batch_size: 32` under `rollout:` in YAML and `rollout.rollout_batch_size=32` on the
command line all set the same value. Field names are unique over all sections, so that a flag needs no prefix. Sections
are frozen: what the run folder's `config.yaml` says is what ran. The text under a field is its help.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


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
    cache_dir: str = "~/.cache/miles_async"
    """Where warm-started models are kept, by the hash of all that made them."""


class Data(Section):
    prompt_data: str | None = None
    """JSONL file of prompts. Unset: problems come from `reasoning_gym_task`."""
    input_key: str = "prompt"
    """Key of the prompt in a JSONL row."""
    label_key: str = "label"
    """Key of the expected answer in a JSONL row."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
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
    rm_type: str | None = None
    """The built-in reward: reasoning_gym, or exact (the answer equals the label)."""
    custom_rm_path: str | None = None
    """Your own reward, async fn(args, sample) -> float, as module.function."""
    reward_timeout_seconds: float = Field(60.0, gt=0)
    """A group whose rewards take longer fails and is retried."""
    dynamic_sampling_filter_path: str | None = None
    """Keep a finished group or not: fn(args, group) -> bool, as module.function."""
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
    advantage_estimator: Literal["grpo"] = "grpo"
    """How rewards become advantages."""
    grpo_std_normalization: bool = True
    """Divide group advantages by the group's standard deviation."""
    eps_clip: float = Field(0.2, ge=0)
    """Lower clip of the policy ratio: 1 - eps."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Upper clip, 1 + eps; unset: same as eps_clip."""
    use_tis: bool = True
    """Truncated importance sampling against the engines' own log-probabilities."""
    tis_clip: float = Field(2.0, gt=0)
    """Upper bound of the importance weight."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""


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
    lr_decay_style: Literal["constant", "linear"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall in a straight line to 0 at the last rollout."""
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
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the learner."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer."""
    sequence_parallel: bool = False
    """Split activations of tensor-parallel ranks along the sequence."""
    actor_num_nodes: int = Field(1, ge=1)
    """Nodes of the learner."""
    actor_num_gpus_per_node: int = Field(1, ge=1)
    """Learner ranks per node; on a CPU machine, processes."""
    learner_cpus: list[int] | None = None
    """CPU cores the learner is pinned to. Unset: any."""
    learner_threads: int | None = Field(None, ge=1)
    """Torch threads per learner rank on a CPU machine. Unset: as many as the cores it may use."""
    seed: int = 1234
    """Seed of initial weights and batch order."""


class Weights(Section):
    weight_transfer: Literal["auto", "p2p", "broadcast", "disk"] = "auto"
    """How weights reach the engines: Mooncake one-sided writes, a collective, or a shared folder."""
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
    sglang_router_policy: str = "cache_aware"
    """How the router picks an engine."""
    sglang_router_request_timeout_secs: float = Field(600.0, gt=0)
    """A request that takes longer is given up and its group retried."""
    engine_cpus: list[int] | None = None
    """CPU cores the engines are pinned to. Unset: any."""
    engine_start_timeout_seconds: float = Field(300.0, gt=0)
    """An engine that is not healthy by then stops the run with the end of its log."""


class Cluster(Section):
    ray_address: str | None = None
    """An existing Ray cluster. Unset: one is started on this machine and ended with the run."""


class Observability(Section):
    run_dir: str = "runs"
    """Folder that holds a folder per run, and `latest`."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /metrics on loopback; 0 takes a free one and prints it."""
    log_format: Literal["console", "json"] = "console"
    """Log lines for people or for machines."""
    progress_bar: bool = True
    """Show the progress bar on stderr."""
    no_progress_warn_seconds: float = Field(30.0, gt=0)
    """Warn each time this long passes without a collected group."""
    no_progress_abort_seconds: float = Field(600.0, gt=0)
    """Stop the run after this long without one."""


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
    observability: Observability = Observability()
