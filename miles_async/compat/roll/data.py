"""Data sets, rewards, evaluation, sizes and schedule of ROLL's pipelines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from miles_async.adapters.environments.server import Roll
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.prompt_files import count_rows

_FILES = "actor_train.data_args.file_name"
_MESSAGES = "actor_train.data_args.messages"
_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in ("native", "qwen2_5", "qwen2-vl")},
    "qwen3": {"enable_thinking": True},
}
"""The arguments with which ROLL's templates call that of the tokenizer. Others change the messages, or render them in
another way."""
_SHARES = "actor_train.data_args.domain_interleave_probs"
_GENERATING = "actor_infer.generating_args"
_WORKERS = {
    "CodeSandboxRewardWorker": "code",
    "CrossThinkQARuleRewardWorker": "roll_choice",
    "GeneralRuleRewardWorker": "roll_ifeval",
    "LLMJudgeRewardWorker": "llm_judge",
    "MathRuleRewardWorker": "roll_math",
}
"""The built-in reward in place of one of ROLL's workers."""
_ONLY: Mapping[str, Mapping[str, Any]] = {
    "CrossThinkQARuleRewardWorker": {"reward_type": "soft", "response_length_penalty_coef": 0},
}
"""The values of a worker's settings that its counterpart has."""
_LABELS = {"code": "test_cases"}
"""The key of what a reward compares with; that of others is `ground_truth`."""
_ADVICE = {
    "DetectionRewardWorker": "rows of text only, because models are trained on text",
}
"""What takes the place of a worker."""
_FALLBACK = "math_rule"
"""The domain of rows whose tag belongs to no domain."""
_ROWS_READ = 20
_PROMPT_LENGTH = 1024
"""ROLL's default of prompt_length."""
_EVAL_SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""ROLL's defaults of `GeneratingArguments`. They do not depend on those of `actor_infer`."""


def trains_agents(keys: CombinedKeys) -> bool:
    """Whether the file is one of ROLL's agentic pipeline, whose environments have the prompts."""
    return bool(keys.given("train_env_manager", "custom_envs"))


def trained_tags(keys: CombinedKeys) -> list[Mapping[str, Any]]:
    """The entries of `custom_envs` that are trained, as far as they are sections."""
    tags = keys.section("train_env_manager").get("tags")
    found = [keys.section("custom_envs").get(str(tag)) for tag in (tags if isinstance(tags, list) else ())]
    return [tag for tag in found if isinstance(tag, Mapping)]


def trains_steps(keys: CombinedKeys) -> bool:
    """Whether each step of a trajectory is a sample."""
    return any(Roll.manager_of(tag) in Roll.BY_STEP for tag in trained_tags(keys))


def whole_number_in(keys: CombinedKeys, section: Mapping[str, Any], prefix: str, name: str) -> int | None:
    """A number of 1 or more in a section; None without it."""
    key = f"{prefix}.{name}"
    return CombinedKeys(keys.translator, {key: section.get(name)}).whole_number(key)


def evaluates(keys: CombinedKeys) -> bool:
    """Whether the run evaluates. As in ROLL, environments are evaluated only if they are trained."""
    if trains_agents(keys) and "debug.debug_rollout_only" in keys.translator.translation:
        return False
    return bool(keys.number("eval_steps") and keys.given("validation", "val_env_manager"))


def sizes(keys: CombinedKeys) -> None:
    """Prompts per batch, samples per prompt and lengths."""
    sequences = f"{_GENERATING}.num_return_sequences"
    batch = keys.whole_number("rollout_batch_size")
    if trains_agents(keys):
        key = "train_env_manager.group_size"
        trajectories = whole_number_in(keys, keys.section("train_env_manager"), "train_env_manager", "group_size") or 1
        keys.set("rollout.n_samples_per_prompt", trajectories, key)
        if batch is not None and batch % trajectories:
            keys.refuse(
                f"rollout_batch_size {batch} counts trajectories, but is not a multiple of {key} {trajectories}: set "
                f"it to {max(trajectories, batch - batch % trajectories)}"
            )
        elif batch is not None:
            keys.set("rollout.rollout_batch_size", batch // trajectories, "rollout_batch_size")
        keys.note("has no effect in ROLL either: an environment has one trajectory", sequences)
    else:
        if batch is not None:
            keys.set("rollout.rollout_batch_size", batch, "rollout_batch_size")
        group = "num_return_sequences_in_group"
        key = group if group in keys.values else sequences
        if (samples := keys.whole_number(key)) is not None:
            keys.set("rollout.n_samples_per_prompt", samples, key)
        if key == group:
            keys.note(f"has no effect in ROLL either: {group} takes its place", sequences)
    _lengths(keys)


def _lengths(keys: CombinedKeys) -> None:
    longest, key = f"{_GENERATING}.max_new_tokens", "response_length"
    whole, response = (keys.whole_number(name) for name in ("sequence_length", key))
    prompt = keys.whole_number("prompt_length")
    answers = [tag.get("max_tokens_per_step") for tag in trained_tags(keys)] if trains_steps(keys) else []
    lengths = [answer for answer in answers if type(answer) is int and answer > 0]
    if whole is not None and lengths:
        # ROLL limits a step together with its prompt.
        answer = min(max(lengths), keys.whole_number(longest) or max(lengths))
        keys.set("rollout.rollout_max_response_len", answer, "custom_envs")
        if prompt is None:
            keys.set("rollout.rollout_max_prompt_len", max(1, whole - answer), "sequence_length custom_envs")
        keys.note("has no effect beside max_tokens_per_step of custom_envs", key)
        return
    if response is None and whole is not None:
        # ROLL limits a trajectory together with its first prompt, and we limit what follows the first prompt.
        room = min(_PROMPT_LENGTH, whole // 2) if prompt is None else prompt
        response, key = max(1, whole - room), "sequence_length prompt_length" if prompt else "sequence_length"
    else:
        keys.note("has no effect beside response_length", "sequence_length")
    if response is None:
        key, response = longest, keys.whole_number(longest)
    elif not trains_agents(keys):  # an agent's turns are limited by its environment
        keys.note("has no effect in ROLL either: response_length takes its place", longest)
    if response is None:
        return
    keys.set("rollout.rollout_max_response_len", response, key)
    context = keys.translator.translation.get("engine.sglang_server_args.context_length")
    longest_sample = response + (_PROMPT_LENGTH if prompt is None else prompt)
    is_vllm = keys.values.get("actor_infer.strategy_args.strategy_name") == "vllm"
    if context is not None and isinstance(context.value, int) and longest_sample > context.value and is_vllm:
        # vLLM ends a response that reaches max_model_len, and SGLang refuses the request unless it may do so, too.
        keys.set("engine.sglang_server_args.allow_auto_truncate", True, context.key)


def schedule(keys: CombinedKeys) -> None:
    """How far generation may be ahead, and for how long the run goes on."""
    key = "async_generation_ratio"
    ratio = keys.number(key)
    if ratio == 0:
        keys.set("rollout.schedule", "synchronous", key)
    elif ratio is not None:
        keys.set("rollout.schedule", "fully_async", key)
        keys.set("rollout.rollout_function_path", "stream", key)
        keys.set("rollout.max_weight_staleness", ceil(ratio), key)
    if (steps := keys.whole_number("max_steps")) is not None:
        keys.set("rollout.num_rollout", steps, "max_steps")
    size = keys.size("learner.global_batch_size")
    decays = not str(keys.values.get("actor_train.training_args.lr_scheduler_type")).startswith("constant")
    if decays and trains_steps(keys) and steps is not None and size > 1:
        # As in ROLL, where trajectories count, although their steps take more optimizer steps.
        trained = steps * keys.size("rollout.rollout_batch_size") * keys.size("rollout.n_samples_per_prompt")
        passes = keys.size("learner.passes_per_rollout")
        keys.set("learner.lr_decay_steps", max(1, trained * passes // size), "max_steps rollout_batch_size")
    if evaluates(keys):
        keys.set("rollout.eval_interval", keys.number("eval_steps"), "eval_steps")
    else:
        keys.note("has no effect at 0, or without validation and val_env_manager, or without training", "eval_steps")
    kept = keys.number("max_ckpt_to_keep")
    if kept is not None:
        keys.set("learner.save_keep", kept or None, "max_ckpt_to_keep")
    warmup = "actor_train.training_args.warmup_ratio"
    part = keys.number(warmup)
    if part and not keys.values.get("actor_train.training_args.warmup_steps"):
        keys.set("learner.lr_warmup_fraction", part, warmup)
    else:
        keys.note("has no effect at 0 or beside warmup_steps", warmup)


def downloads(keys: CombinedKeys) -> None:
    """The hub from which models come. A folder comes from none."""
    key, hub = "model_download_type", keys.values.get("model_download_type")
    names = [keys.values.get(name) for name in ("pretrain", "reward_pretrain")]
    models = [name for name in names[: 2 if keys.values.get("adv_estimator") == "gae" else 1] if isinstance(name, str)]
    missing = [name for name in models if not Path(name).expanduser().is_dir()]
    if hub in (None, "HUGGINGFACE_HUB"):
        keys.note("has no effect: names of models are those of the Hugging Face Hub", key)
    elif not missing:
        keys.note("has no effect: pretrain is a folder", key)
    elif hub == "MODELSCOPE":
        keys.refuse(
            f"{key} MODELSCOPE is not supported: run modelscope download --model {missing[0]:.200} --local_dir FOLDER "
            "and set pretrain to this folder, or remove the key for the model of this name on the Hugging Face Hub"
        )
    else:
        keys.refuse(f"{key} {hub!r:.80} is unknown: set pretrain to a folder, or the key to HUGGINGFACE_HUB")


def tracking(keys: CombinedKeys) -> None:
    """TensorBoard and Weights & Biases."""
    tracker = keys.values.get("track_with")
    match tracker:
        case "tensorboard" | "wandb":
            keys.set(f"observability.use_{tracker}", True, "track_with")
        case "stdout" | "swanlab" | "trackio":
            keys.translator.idle["track_with"] = (
                "has no effect: metrics are on the terminal, on the page and in the files of the run; use_tensorboard "
                "and use_wandb send them elsewhere"
            )
        case None:
            pass
        case _:
            keys.refuse(f"track_with {tracker!r:.80} is not a tracker of ROLL: set it to tensorboard or wandb")
    settings = {"project": "wandb_project", "api_key": "wandb_key"} if tracker == "wandb" else {}
    for name, value in keys.section("tracker_kwargs").items():
        if name in settings:
            keys.set(f"observability.{settings[name]}", value, f"tracker_kwargs.{name}")
        else:
            keys.translator.idle[f"tracker_kwargs.{name}"] = "has no effect: the run names its folder and its files"


def recordings(keys: CombinedKeys) -> None:
    """Batches that are saved (`dump`), or trained again without generating them (`mock`)."""
    found = keys.section("rollout_mock")
    mode, folder = found.get("mode", "dump"), found.get("dump_dir", "./rollout_mock_dumps")
    if not found.get("enable"):
        keys.note("has no effect: it is not enabled", "rollout_mock")
    elif mode in ("dump", "mock"):
        setting = "save_debug_rollout_data" if mode == "dump" else "load_debug_rollout_data"
        keys.set(f"debug.{setting}", f"{folder}/{{rollout_id}}.safetensors", "rollout_mock")
    else:
        keys.refuse(f"rollout_mock.mode {mode!r:.80} is unknown: set it to dump or mock")


def template(keys: CombinedKeys) -> None:
    """How prompts are rendered."""
    of_run, of_training, of_engines = (
        "global_template",
        "actor_train.data_args.template",
        "actor_infer.data_args.template",
    )
    if trains_agents(keys):
        why = "has no effect: chats are always rendered with the template of the tokenizer"
        keys.note(why, of_run, of_training, of_engines)
        return
    key = of_training if keys.values.get(of_run) is None else of_run
    name = keys.values.get(key)
    keys.note("has no effect in ROLL either: prompts have the template of actor_train", of_engines)
    if key == of_run:
        keys.note("has no effect beside global_template", of_training)
    else:
        keys.note("has no effect: it is null", of_run)
    if name is None:
        keys.note("has no effect: it is null", of_training)
    elif isinstance(name, str) and name in _TEMPLATES:
        keys.set("data.apply_chat_template", True, key)
        if arguments := _TEMPLATES[name]:
            keys.set("data.apply_chat_template_kwargs", arguments, key)
    else:
        keys.refuse(
            f"{key} {name!r:.80} has no counterpart: set it to native for the template of the tokenizer, and "
            "apply_chat_template_kwargs to {chat_template: TEXT} for another one"
        )


def data_and_rewards(keys: CombinedKeys) -> None:
    """The files of each domain, their shares of a batch, and the rewards of the domains."""
    rewards = {name: of if isinstance(of, Mapping) else {} for name, of in keys.section("rewards").items()}
    shares = keys.section(_SHARES)
    domains = [name for name in rewards if not shares or name in shares]
    kinds = {name: _reward(keys, name, rewards[name]) for name in domains}
    for name in sorted(rewards.keys() - kinds.keys()):
        keys.translator.idle[f"rewards.{name}"] = "has no effect: its domain has no share in domain_interleave_probs"
    for name in sorted(shares.keys() - rewards.keys() if rewards else ()):
        keys.refuse(f"{_SHARES}.{name} has no reward: add rewards.{name}, or remove it")
    files = _files(keys, _FILES)
    if files:
        # ROLL has no key for the order of rows: each epoch has another one.
        keys.set("data.rollout_shuffle", True, _FILES)
    if files and not keys.given(_MESSAGES):
        keys.set("data.input_key", "prompt", _FILES)
    domain_of = _domain_of(keys, rewards)
    if len(files) <= 1 and len(domains) <= 1:
        for file in files:
            keys.set("data.prompt_data", file, _FILES)
        keys.note("has no effect: all rows have the same domain", _SHARES)
        for kind in filter(None, kinds.values()):
            keys.set("rollout.rm_type", kind, "rewards")
            keys.set("data.label_key", _label(kind), "rewards")
    elif not domains:
        keys.refuse(
            f"{_FILES} has several files, and rewards has no domains for them: add rewards, or write all rows to one "
            "file"
        )
    elif not files:
        keys.refuse(f"rewards has several domains, but {_FILES} is not set: set it to their files")
    else:
        _several(keys, files, kinds, domain_of)
    evaluation(keys, kinds, domain_of)


def _reward(keys: CombinedKeys, name: str, reward: Mapping[str, Any]) -> str | None:
    """The built-in reward of a domain; None after a problem."""
    worker = str(reward.get("worker_cls")).rpartition(".")[2]
    if worker not in _WORKERS:
        advice = _ADVICE.get(worker, "a function that scores its rows as ROLL does as custom_rm_path")
        keys.refuse(
            f"rewards.{name}.worker_cls {worker} has no counterpart: remove rewards.{name} and its share, and write "
            f"datasets.{name} into a file of your own, with {advice}"
        )
    match reward:
        case {"model_args": {"model_name_or_path": model}} if worker == "LLMJudgeRewardWorker":
            why = "is not started: serve it with SGLang, and set rm_url to its chat completions"
            keys.translator.idle[f"{model!s:.200} of rewards.{name}"] = why
    match reward:
        case {"query_filter_config": {"type": kind}} if kind != "no_filter":
            keys.refuse(
                f"rewards.{name}.query_filter_config {kind!r:.80} has no counterpart: remove it, and set "
                "dynamic_sampling_filter_path to a function that keeps the same groups"
            )
    for setting, only in _ONLY.get(worker, {}).items():
        if reward.get(setting, only) != only:
            keys.refuse(
                f"rewards.{name}.{setting} {reward[setting]!r:.80} has no counterpart: set it to {only}, or remove "
                f"rewards.{name} and its share, and write datasets.{name} into a file of your own, with custom_rm_path"
            )
    return _WORKERS.get(worker)


def _label(kind: str | None) -> str:
    return _LABELS.get(str(kind), "ground_truth")


def _files(keys: CombinedKeys, key: str) -> Sequence[str]:
    match keys.values.get(key):
        case None:
            return ()
        case str() as file:
            return (file,)
        case [*files] if files and all(isinstance(file, str) for file in files):
            return files
    keys.refuse(f"{key} is not a list of files: write it as [file.jsonl]")
    return ()


def _domain_of(keys: CombinedKeys, rewards: Mapping[str, Any]) -> Mapping[str, str]:
    """The domain of each tag."""
    found = {}
    for name, reward in rewards.items():
        tags = reward.get("tag_included") or []
        if isinstance(tags, list):
            found.update({str(tag): name for tag in tags})
        else:
            keys.refuse(f"rewards.{name}.tag_included is not a list: write it as [tag]")
    return found


def _several(
    keys: CombinedKeys,
    files: Sequence[str],
    kinds: Mapping[str, str | None],
    domain_of: Mapping[str, str],
) -> None:
    """Each domain is a data set, whose file is the one with rows of its tags."""
    shares = keys.section(_SHARES)
    owned: dict[str, list[str]] = {name: [] for name in kinds}
    for file in files:
        domain = _domain(keys, _FILES, file, domain_of)
        if domain in owned:
            owned[domain].append(file)
        elif domain is not None:
            keys.translator.idle[f"{_FILES} {file}"] = f"is not read: {domain} has no share in domain_interleave_probs"
    for domain, of_domain in owned.items():
        if kinds[domain] is None:  # its reward is refused
            keys.translator.idle.update({f"{_FILES} {file}": "is not read without a reward" for file in of_domain})
            continue
        share = CombinedKeys(keys.translator, {f"{_SHARES}.{domain}": shares.get(domain)}).number(f"{_SHARES}.{domain}")
        # ROLL mixes the rows of all files of a domain.
        rows = [count_rows(file) if len(of_domain) > 1 else 1 for file in of_domain]
        for position, file in enumerate(of_domain):
            dataset = f"data.datasets.{domain}" + (f"_{position}" if position else "")
            weight = (1.0 if share is None else share) * rows[position] / max(1, sum(rows))
            keys.set(f"{dataset}.prompt_data", file, _FILES)
            keys.set(f"{dataset}.weight", weight, _SHARES if domain in shares else "rewards")
            keys.set(f"{dataset}.rm_type", kinds[domain], "rewards")
            keys.set(f"{dataset}.label_key", _label(kinds[domain]), "rewards")


def _domain(keys: CombinedKeys, key: str, file: str, domain_of: Mapping[str, str]) -> str | None:
    """The domain of the first rows of a file; None after a problem."""
    try:
        with Path(file).expanduser().open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, _ROWS_READ) if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSONL"
        keys.refuse(f"{key}: {file} cannot be read for the tags of its rows: {reason}")
        return None
    found = {
        row.get("domain") or domain_of.get(str(row.get("tag")), _FALLBACK) for row in rows if isinstance(row, Mapping)
    }
    if len(found) != 1:
        shown = ", ".join(sorted(map(str, found))) or "no domain"
        keys.refuse(f"{key}: {file} has rows of {shown}: write one file for each domain")
        return None
    return str(found.pop())


def check_sampling(keys: CombinedKeys, section: str, sampling: Mapping[str, Any]) -> None:
    """Refuse a sampling beside that of the training which ends responses at other strings, or has a penalty."""
    ends = keys.translator.translation.get("rollout.rollout_stop")
    strings, of_training = sampling.get("stop_strings") or [], (None if ends is None else ends.value) or []
    if strings != of_training:
        keys.refuse(
            f"{section}.stop_strings {strings!r:.80} are not the {of_training!r:.80} at which the responses of the "
            "training end: set both to the same strings, because all responses of a run end at rollout_stop"
        )
    if (penalty := sampling.get("repetition_penalty")) not in (1, None):
        keys.refuse(
            f"{section}.repetition_penalty {penalty!r:.80} has no counterpart, because engines sample from the "
            "probabilities of the model: set it to 1"
        )


def evaluation(keys: CombinedKeys, kinds: Mapping[str, str | None], domain_of: Mapping[str, str]) -> None:
    """The data sets of `validation`. With several domains, each file has the reward of the domain of its rows."""
    validation = keys.section("validation")
    data, sampling = (validation.get(name) or {} for name in ("data_args", "generating_args"))
    if not isinstance(data, Mapping) or not isinstance(sampling, Mapping):
        keys.refuse("validation.data_args and validation.generating_args are sections: put keys below them")
        return
    key = "validation.data_args.file_name"
    datasets = {}
    if data.get("file_name") is not None:
        check_sampling(keys, "validation.generating_args", sampling)
    if "max_new_tokens" in sampling:
        keys.translator.idle["validation.generating_args.max_new_tokens"] = (
            "has no effect in ROLL either: responses of evaluations have the limit of those of the training"
        )
    for file in _files(CombinedKeys(keys.translator, {key: data.get("file_name")}), key):
        domain = _domain(keys, key, file, domain_of) if len(kinds) > 1 else next(iter(kinds), None)
        if domain is not None and domain not in kinds:
            keys.refuse(f"{key}: {file} has rows of {domain}, which has no reward: add rewards.{domain} and its share")
        kind = kinds.get(str(domain))
        fields = {
            "path": file,
            "label_key": _label(kind),
            "input_key": keys.values.get(_MESSAGES),
            "rm_type": kind,
            "n_samples": sampling.get("num_return_sequences"),
            **{name: sampling.get(name, default) for name, default in _EVAL_SAMPLING.items()},
        }
        datasets[Path(file).stem] = {name: value for name, value in fields.items() if value is not None}
    if datasets:
        keys.set("rollout.eval_datasets", datasets, "validation")
