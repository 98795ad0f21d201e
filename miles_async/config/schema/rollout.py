"""How batches are generated, scored, filtered and evaluated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from miles_async.config.schema.data import Dataset
from miles_async.rewards.plugin import REWARDS
from miles_async.section import LONGEST_SECONDS, Section

MOST_SAMPLES = 100_000
"""Per prompt. A group is one object of the scheduler, and its samples are stored and sent together."""


class EvalDataset(Dataset):
    """One entry of `eval_datasets`: a JSONL or Parquet file and the sampling parameters it is evaluated with."""

    path: str
    """JSONL or Parquet file of the problems, or a data set on the Hugging Face Hub such as `owner/name:test`."""
    size: int | None = Field(None, ge=1)
    """Number of rows to use, from the first row on. If unset, all rows are used."""
    n_samples: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Samples per prompt."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. 0 is greedy decoding. If unset, rollout_temperature applies."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities add up to this value. 1 disables
    it. If unset, rollout_top_p applies."""
    top_k: int | None = None
    """Sample from the k most likely tokens. -1 disables top-k sampling. If unset, rollout_top_k applies."""
    metadata_overrides: dict[str, Any] = {}
    """Metadata of all samples of this data set, such as {split: test}, for rewards and generate functions. A value
    takes the place of that in the row."""


class Rollout(Section):
    """Generation of training batches: sizes, window, staleness, sampling, rewards, filters and evaluation."""

    rollout_function_path: str = "miles_async.rollout.sglang_rollout.generate_rollout"
    """Function that returns one batch of groups per call, as module.function. Choose
    fully_async_rollout.generate_rollout_fully_async for continuous generation, or name your own function. The name of a
    rollout mode stands for its function: batch, windowed, stream, supervised, external, or that of a plug-in."""
    schedule: Literal["fully_async", "one_step_off", "synchronous"] | None = None
    """How generation and training overlap. fully_async: a persistent producer fills a queue of groups. one_step_off:
    the next batch is generated while the current one trains. synchronous: generation and training alternate.
    Default: synchronous for train.py; for train_async.py, the schedule of the rollout function's mode, which is
    fully_async for a function that is declared with @fully_async, and one_step_off for a function without a
    declaration. --check-config prints which applies."""
    num_rollout: int = Field(100, ge=1)
    """Number of batches to train on; the run ends after them."""
    num_epoch: int | None = Field(None, ge=1)
    """Number of passes over prompt_data, which must be a file. num_rollout is then num_epoch times the number of whole
    batches in the file, or the whole batches in all passes together if the file has less than one. If num_rollout is
    set too, num_epoch has no effect."""
    rollout_batch_size: int = Field(32, ge=1, le=1_000_000)
    """Groups (prompts) per training batch. If over_sampling_batch_size is unset, this is also the number of groups in
    flight."""
    n_samples_per_prompt: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Samples (responses) per prompt, which together form a group. An advantage_estimator that compares the samples of
    a group, such as grpo, needs 2 or more."""
    min_samples_per_group: int | None = Field(None, ge=1)
    """Train a group without the samples that still fail after max_attempts for reasons of infrastructure (a tool server
    that is down, a timeout), if at least this many samples are left. Advantages then compare the samples that are
    left. With fewer, the group is generated again; its finished samples keep their tokens. If unset, a group needs all
    n_samples_per_prompt samples."""
    over_sampling_batch_size: int | None = Field(None, ge=1, le=1_000_000)
    """N, the maximum number of groups in flight, for each adapter if the run trains several. Functions that return
    batches generate up to N groups and keep the first rollout_batch_size of them. If unset, N is rollout_batch_size."""
    windowed_fifo_ratio: float | None = Field(None, ge=0, le=1)
    """Size of the collection window as a fraction of N: W = max(1, floor(ratio * N)) (windowed FIFO, MiniMax Forge,
    arXiv 2605.26494, section 6.2.4). Only the W oldest groups may be collected, so long responses are not crowded out
    by short ones. 0 is strict FIFO, 1 is greedy. If unset, collection is as greedy as max_weight_staleness
    allows without making generation wait for training; with a high limit, W is then larger than N."""
    max_weight_staleness: int | None = Field(None, ge=0)
    """Maximum age of a group when its training step begins, in weight versions, counted from the version that sampled
    the group's oldest token. Older groups are recycled. If unset, only queue_capacity limits the age."""
    off_lineage: Literal["recycle", "train"] = "recycle"
    """What happens to a group with tokens of weight versions that were rolled back because the learner was lost and
    restored from a checkpoint: it is generated again (recycle), or trained with the log-probabilities that it has
    (train). Its age then counts all versions since."""
    queue_capacity: int = Field(1000, ge=1)
    """Maximum number of groups in flight and queued for training. When this number is reached, no new groups are
    started; no group is dropped."""
    head_deadline_seconds: float | None = Field(None, gt=0, le=LONGEST_SECONDS)
    """Seconds for which the oldest group may hold up the collection window before head_deadline_action applies. If
    unset, there is no deadline."""
    head_deadline_action: Literal["wait", "recycle", "salvage"] = "salvage"
    """What happens to the group that exceeds head_deadline_seconds: wait keeps waiting for it, recycle generates the
    group from scratch, salvage starts another attempt that continues the tokens generated so far. If no unfinished
    sample can be continued, salvage keeps the finished samples and generates the others from scratch."""
    max_attempts: int = Field(3, ge=1)
    """Maximum number of attempts to generate a group. A prompt whose last attempt fails is written to
    dead_letters.jsonl in the run folder. Within an attempt of its group, a sample that fails for reasons of
    infrastructure is also generated and scored up to this many times."""
    rollout_max_prompt_len: int | None = Field(None, ge=1)
    """Maximum prompt length in tokens. Longer prompts are skipped and counted. If unset, prompts of any length are
    used."""
    rollout_max_response_len: int = Field(1024, ge=1)
    """Maximum response length in tokens."""
    rollout_temperature: float = Field(1.0, ge=0)
    """Sampling temperature of training samples. 0 is greedy decoding."""
    rollout_top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities add up to this value. 1 disables it.
    Below 1, the engines return the set with each token, and the trainer computes log-probabilities over the same set.
    Without rollout_top_k, the set is also limited to half of --sglang-sampling-mask-max-tokens, 2048 by default."""
    rollout_top_k: int = -1
    """Sample from the k most likely tokens, 2 to --sglang-sampling-mask-max-tokens (4096 by default). -1 disables top-k
    sampling. With any other value, the trainer computes log-probabilities over the same tokens."""
    rollout_stop: list[str] = []
    """Strings that end a response. The response keeps the string that ended it, as in slime."""
    rollout_stop_token_ids: list[int] = []
    """Token ids that end a response, in addition to the tokenizer's end-of-sequence token."""
    rollout_skip_special_tokens: bool = False
    """Remove special tokens, such as the one that ends a response, from the response text. The tokens that are trained
    on are not affected. Rewards that compare the whole text with an answer need this."""
    rm_type: Annotated[str | None, REWARDS] = None
    """Built-in reward, the reward of an installed package, or module.Class of your own. With the prefix `boxed_`, such
    as boxed_exact, only the content of the last \\boxed{} of the response is scored; remote_rm always gets the whole
    response. A row chooses another reward with rm_type in its metadata. With custom_rm_path, which scores all rows,
    it has no effect, as in slime."""
    custom_rm_path: str | None = None
    """User-defined reward, as module.function with the signature fn(args, sample) -> number, plain or async. With
    group_rm the function receives a list of samples and returns a list of numbers."""
    custom_rm_isolated: bool = False
    """Run custom_rm_path in separate processes. A process that exceeds reward_timeout_seconds is killed. Use this for
    functions that may hang or crash. The processes keep the environment, the files and the network of the run."""
    group_rm: bool = False
    """Call custom_rm_path once per group: fn(args, samples) -> one number per sample. If off, the function is called
    once per sample."""
    reward_key: str | None = None
    """Key of the number to train on if the reward is a dictionary. With rm_type code, dapo, roll_choice
    or roll_ifeval, score if unset."""
    reward_processes: int = Field(2, ge=1, le=1024)
    """Maximum number of processes for each reward that may hang: confined rewards, such as rm_type code and math, and
    custom_rm_path with custom_rm_isolated. A reward that hangs occupies one of them for reward_timeout_seconds."""
    reward_memory_gb: float = Field(4.0, ge=1, le=1e6)
    """Memory limit in GB for each process of a confined reward, such as rm_type code or math. A response that needs
    more memory counts as wrong. The limit applies to address space."""
    allow_unconfined_rewards: bool = False
    """Let rewards such as rm_type code and reasoning_gym run responses as Python code even where the kernel permits no
    seccomp filter, so that a response can use the network and the files of the user. If off, the run ends with an error
    there."""
    reward_timeout_seconds: float = Field(60.0, gt=0, le=LONGEST_SECONDS)
    """Time limit in seconds for scoring one sample, or for one request to rm_url. The time in which a reward waits for
    a process, for rm_url or for the engines does not count. If a built-in reward or a plain function exceeds the limit,
    the response counts as wrong: its reward is 0 (dapo and roll_choice: -1). If rm_url or an async function
    exceeds it, the sample is scored again, up to max_attempts times. With group_rm, the limit is that of the group: a
    plain function that exceeds it fails the group, which is generated again."""
    dynamic_sampling_filter_path: str | None = None
    """Function that decides whether a finished group is kept, as module.function with the signature fn(args, group) ->
    bool, Verdict, or slime's DynamicFilterOutput. If unset, every finished group is kept."""
    over_sampling_filter_path: str | None = None
    """Function that ranks the over_sampling_batch_size groups of a batch, best first, as module.function with the
    signature fn(args, groups) -> groups. The first rollout_batch_size groups are trained, the others are dropped. It
    has no effect in fully asynchronous runs. If unset, the groups that finish first are trained."""
    rollout_sample_filter_path: str | None = None
    """Function that inspects a batch before training, as module.function with the signature fn(args, groups). It sets
    sample.remove_sample to exclude a sample from the loss. If unset, all samples are trained."""
    rollout_sample_hook_path: list[str] = []
    """Functions hook(args, sample) that are called in turn with each finished sample before its reward, as
    module.function, plain or async. A returned sample replaces the sample. They get evaluation (a boolean) and
    rollout_id (always None, because a sample belongs to no batch yet) as keyword arguments if they take them. The flag
    may be given several times."""
    custom_reward_post_process_path: str | None = None
    """Function fn(args, samples) that gets all samples of a batch before training and returns two lists with a number
    per sample, as module.function: the rewards to log as raw_reward, and those that take the place of what
    advantage_estimator makes of the rewards of a group; for grpo they are the advantages. overlong_penalty is not
    subtracted from them. If unset, advantage_estimator compares the samples of each group."""
    custom_convert_samples_to_train_data_path: str | None = None
    """Function fn(args, samples) that gets all samples of a batch before training and returns slime's dictionary of
    training data, as module.function. rewards, which take the place of what advantage_estimator makes of the rewards of
    a group, loss_masks, rollout_log_probs and raw_reward are read from it; tokens must be those of the samples. It
    replaces custom_reward_post_process_path. If unset, samples are trained as they are."""
    rollout_all_samples_process_path: str | None = None
    """Function fn(args, all_groups, data_source), as module.function, that gets the finished groups of each batch in
    the order of the data, those that dynamic_sampling_filter_path and over_sampling_filter_path rejected included. The
    rollout function miles_async.rollout.sglang_rollout.generate_rollout calls it. If unset, rejected groups are not
    kept."""
    custom_rollout_log_function_path: str | None = None
    """Function fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time) that is called with all samples of
    each batch before training, as module.function. rollout_extra_metrics are those that the rollout function returned,
    or None; rollout_time is the time in seconds since the collection of the batch began. What it returns has no effect,
    because the metrics of a run are always complete. If unset, only those are logged."""
    custom_eval_rollout_log_function_path: str | None = None
    """Function fn(rollout_id, args, data, extra_metrics) that is called after each evaluation, as module.function. data
    has the entries rewards, truncated and samples for each data set, and extra_metrics are those that the evaluation
    function returned, or None. What it returns has no effect, because the metrics of a run are always complete. If
    unset, only those are logged."""
    custom_args: dict[str, Any] = {}
    """Attributes of `args` for functions of users, in addition to all settings. slime's `--custom-config-path FILE`
    sets them from a file."""
    partial_rollout: bool = False
    """Continue groups that were aborted at the end of a batch from the tokens generated so far. If off, such groups are
    generated from scratch. This applies to rollout functions that return batches."""
    eval_interval: int | None = Field(None, ge=1)
    """Number of rollouts between two evaluations. Asynchronous runs keep training during an evaluation, and skip an
    evaluation that has not started when the next one is due. If unset, the model is evaluated only before and after the
    run."""
    eval_datasets: dict[str, EvalDataset] = {}
    """Additional data sets for evaluation, by name. Each has its own path, size and sampling parameters."""
    eval_function_path: str | None = None
    """User-defined evaluation, as module.function with the signature fn(args, rollout_id, data_source, evaluation=True)
    -> scores by name. If unset, the held-out problems and eval_datasets are evaluated."""
    custom_generate_function_path: str | None = None
    """User-defined generation of one sample, as module.function with the signature async fn(args, sample,
    sampling_params) -> sample. Use this for multi-turn generation and agents. If unset, each group is one request to an
    engine."""
    agent_port: int = Field(0, ge=0, le=65535)
    """Loopback port of the endpoint for agents and external generators, which speaks the protocols of OpenAI and
    Anthropic. 0 picks a free port."""
    tool_call_parser: str = "auto"
    """SGLang's parser that finds the tool calls in answers to agents, such as hermes, qwen3_coder or kimi_k2. auto
    chooses by the chat template of the model, and takes hermes if SGLang knows no parser for the template. none leaves
    tool calls in the text."""
    reasoning_parser: str = "auto"
    """SGLang's parser that separates the reasoning in answers to agents from the text, such as qwen3 or deepseek-r1.
    auto chooses by the chat template of the model. none leaves the reasoning in the text."""
    generate_timeout_seconds: float = Field(1800.0, gt=0, le=LONGEST_SECONDS)
    """Time limit in seconds for one sample of custom_generate_function_path, and for each call of a
    rollout_sample_hook_path. A sample that fails for reasons of infrastructure is generated again within the limit. The
    time in which a sample waits for a place at the engines or at a reward does not count. If a sample exceeds the
    limit, its group is trained without it (min_samples_per_group) or retried. The session of an external generator is
    closed when this time has passed since its last request. An evaluation counts as progress for this time
    (no_progress_warn_seconds)."""
    tool_max_turns: int = Field(4, ge=1)
    """Maximum number of tool calls per sample in miles_async.rollout.tool_use.generate."""
    tool_search_corpus: str | None = None
    """JSONL file of documents, each with a text field, for the search tool of miles_async.rollout.tool_use.generate. If
    unset, the search tool answers with an error."""
    shuffle_rewards: bool = False
    """Control experiment: randomly permute the rewards among the samples of a batch. A model that still improves
    reveals a fault in the experiment."""

    @property
    def smallest_group(self) -> int:
        """Minimum number of surviving samples per group."""
        return self.min_samples_per_group or self.n_samples_per_prompt
