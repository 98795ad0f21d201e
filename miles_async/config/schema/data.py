"""The prompts to train on."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from miles_async.section import Section

CHAT_PARAMETERS = frozenset(
    "add_generation_prompt continue_final_message conversation max_length messages padding "
    "return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation".split()
)
"""Parameters of transformers' `apply_chat_template` that are not variables of a template, so the run sets them."""


class Dataset(Section):
    """What each data set for training or evaluation may set. Where one sets no reward, that of the run applies."""

    input_key: str | None = None
    """Key of the prompt in a row. If unset, input_key of the run applies."""
    label_key: str | None = None
    """Key of the expected answer in a row. If unset, label_key of the run applies."""
    metadata_key: str | None = None
    """Key of the metadata in a row. If unset, metadata_key of the run applies."""
    tool_key: str | None = None
    """Key of the tools in a row. If unset, tool_key of the run applies."""
    apply_chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template for prompts of this data set, such as {enable_thinking: true}, in addition to
    those of the run. {chat_template: TEXT} renders them with another template. apply_chat_template must be set."""
    max_response_len: int | None = Field(None, ge=1)
    """Maximum response length in tokens. If unset, rollout_max_response_len applies."""
    rm_type: str | None = None
    """Built-in reward for all rows of this data set. If unset, the reward of the run applies."""
    custom_rm_path: str | None = None
    """User-defined reward for this data set, called as custom_rm_path of the run is."""
    reward_key: str | None = None
    """Key of the number that counts if the reward is a dictionary. If unset, reward_key of the run applies."""


class AdapterShare(Section):
    """One entry of `adapters`."""

    weight: float = Field(1.0, gt=0, le=1e6)
    """Share of the batches that train this adapter, relative to the weights of the others."""


class TrainDataset(Dataset):
    """One entry of `datasets`: a file of prompts. The settings of the run apply where it sets nothing."""

    prompt_data: str
    """JSONL or Parquet file of prompts, or a data set on the Hugging Face Hub, as prompt_data of the run."""
    weight: float = Field(1.0, gt=0, le=1e6)
    """Share of the prompts that come from this data set, relative to the weights of the others."""
    adapter: str | None = None
    """Name of the adapter that this data set trains, one of adapters. It must be set if adapters is."""
    max_prompt_len: int | None = Field(None, ge=1)
    """Maximum prompt length in tokens. If unset, rollout_max_prompt_len applies."""
    dynamic_sampling_filter_path: str | None = None
    """Function that decides whether a finished group is kept. If unset, that of the run applies."""
    eval_size: int | None = Field(None, ge=0, le=1_000_000)
    """Number of problems that are held out from training and evaluated under the name of this data set. If unset,
    eval_size of the run applies."""


class Data(Section):
    """Where prompts and labels come from: a file, a reasoning-gym task, or the rollout function."""

    prompt_data: str | None = None
    """JSONL or Parquet file of prompts, or a data set on the Hugging Face Hub: `owner/name` is its split train,
    `owner/name:test` its split test. `path@[a:b]` uses rows a up to, but not including, b. If unset, set
    reasoning_gym_task or disable_rollout_global_dataset instead."""
    datasets: dict[str, TrainDataset] = {}
    """Several data sets to train on, by name, instead of prompt_data. Each has its own prompt_data and weight, and may
    have its own keys, reward, limits, filter and held-out problems."""
    adapters: dict[str, AdapterShare] = {}
    """Several adapters to train in one run (lora_rank), by name. Each data set names the adapter that it trains, and
    each adapter has its own batches, optimizer state and weight versions. Batches train the adapters in proportion to
    their weights, if they have full batches. If unset, the run trains one adapter on all data sets."""
    dataset_sampling: str = "weights"
    """How the next prompt is chosen. weights: from the data sets in proportion to their weights, in the order of each.
    difficulty: the same, but without prompts whose mean reward was outside of difficulty_band: they are left out in the
    next epoch of their data set and tried again in the one after it. A function, as module.function with the signature
    fn(args, datasets) -> name, chooses the data set; datasets has the state of each by name."""
    difficulty_band: list[float] = Field([0.2, 0.8], min_length=2, max_length=2)
    """Lowest and highest mean reward of a prompt's samples that dataset_sampling difficulty goes on training."""
    input_key: str = "input"
    """Key of the prompt in a row of prompt_data. The value is a string, which is used verbatim, or a list of chat
    messages, also as text in JSON, which the tokenizer's chat template renders. Agents and functions of users get the
    messages."""
    label_key: str | None = None
    """Key of the expected answer in a row of prompt_data. If unset, samples have no label, and rewards that
    compare responses with it refuse the rows."""
    metadata_key: str = "metadata"
    """Key of an object in a row of prompt_data that is copied to sample.metadata."""
    tool_key: str = "tools"
    """Key of the list of tool descriptions in a row of prompt_data. The chat template and tool functions receive it."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template before anything else sees them: sample.prompt is then text. A
    string is rendered as the message of a user. hf_checkpoint must be set. Leave this off for agents, whose requests
    are always rendered."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template for every chat, such as {enable_thinking: true}: for prompts, requests of
    agents, supervised examples and the warm start."""
    disable_rollout_global_dataset: bool = False
    """Run without a data set: the rollout function receives empty samples and supplies the prompts itself."""
    data_source_path: str | None = None
    """Class that returns the prompts for training, as module.Class. An object cls(args) has the method
    get_samples(num_samples), which returns groups of n_samples_per_prompt samples. A resumed run draws as many groups
    as before from a new object and discards them. The run keeps returned groups itself. The other data of the run are
    then for evaluations and the warm start. If unset, the run reads its data itself."""
    buffer_filter_path: str | None = None
    """Function that chooses which returned groups are generated next, as module.function with the signature fn(args,
    rollout_id, buffer, num_samples) -> groups. If unset, returned groups are reused first in, first out."""
    reasoning_gym_task: str | None = None
    """Name of the reasoning-gym task that generates the problems, such as chain_sum."""
    reasoning_gym_settings: dict[str, Any] = {}
    """Settings of the reasoning-gym task, passed on unchanged, such as {min_terms: 2, max_terms: 2}."""
    reasoning_gym_size: int = Field(20_000, ge=1)
    """Number of generated reasoning-gym problems per epoch."""
    environment: str | None = None
    """Environment whose tasks are trained: verifiers:NAME, openenv:NAME, roll:NAME, or LIBRARY:NAME with the library of
    an installed package. NAME is an installed package or a Python file; for openenv also the URL of a server. Set
    custom_generate_function_path to miles_async.rollout.environment.generate. The environment computes the rewards. The
    tasks come from the environment, or from prompt_data with `metadata.task`. For roll, data sets name the tasks of a
    tag as environment:TAG."""
    environment_settings: dict[str, Any] = {}
    """Settings of the environment. For verifiers its configuration, such as {taskset: {split: train}, agent: {harness:
    {id: bash}}}. For openenv split, max_turns, action_field and observation_field. For roll tags (entries of ROLL's
    custom_envs by name) and max_new_tokens."""
    environment_size: int = Field(20_000, ge=1)
    """Maximum number of tasks that are read from the environment, which may have infinitely many."""
    environment_python: str | None = None
    """Python interpreter that has the environment and its library. If unset, .venv-verifiers/bin/python,
    .venv-openenv/bin/python or .venv-roll/bin/python, which `make setup-verifiers`, `make setup-openenv` and
    `make setup-roll` create."""
    prompt_template: str = "{question}"
    """Template of the prompt for reasoning-gym problems. `{question}` is replaced by the whole question, `{expression}`
    by the text after the question's last colon."""
    eval_size: int = Field(0, ge=0, le=1_000_000)
    """Number of problems that are held out from training and used to measure greedy accuracy. 0 disables this
    evaluation."""
    rollout_shuffle: bool = False
    """Reshuffle the prompts at the start of every epoch. If off, prompts keep the order of the data set."""
    rollout_seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of the prompt order, of the reasoning-gym problems and of the engines' sampling."""

    @property
    def adapter_weights(self) -> dict[str, float]:
        """The weight of each adapter by its name. A run that does not train several has one, whose name is empty."""
        return {name: adapter.weight for name, adapter in self.adapters.items()} or {"": 1.0}

    @property
    def sampling_function(self) -> str | None:
        """Path of the user's function that chooses the data set of the next prompt; None without one."""
        return None if self.dataset_sampling in ("weights", "difficulty") else self.dataset_sampling
