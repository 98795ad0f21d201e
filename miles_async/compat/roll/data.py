"""Data sets, rewards, evaluation, sizes and schedule of ROLL's pipelines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from miles_async.compat.roll.values import Values, note, number, section, whole_number
from miles_async.config.prompt_files import count_rows
from miles_async.config.translation import Translator

_FILES = "actor_train.data_args.file_name"
_SHARES = "actor_train.data_args.domain_interleave_probs"
_GENERATING = "actor_infer.generating_args"
_WORKERS = {
    "CodeSandboxRewardWorker": "code",
    "CrossThinkQARuleRewardWorker": "roll_choice",
    "GeneralRuleRewardWorker": "roll_ifeval",
    "LLMJudgeRewardWorker": "llm_judge",
    "MathRuleRewardWorker": "math",
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


def trains_agents(values: Values) -> bool:
    """Whether the file is one of ROLL's agentic pipeline, whose environments have the prompts."""
    return "train_env_manager" in values or "custom_envs" in values


def sizes(translator: Translator, values: Values) -> None:
    """Prompts per batch, samples per prompt and lengths."""
    sequences = f"{_GENERATING}.num_return_sequences"
    batch = whole_number(translator, values, "rollout_batch_size")
    if trains_agents(values):
        key = "train_env_manager.group_size"
        group_size = section(translator, values, "train_env_manager").get("group_size")
        trajectories = whole_number(translator, {key: group_size}, key) or 1
        translator.set("rollout.n_samples_per_prompt", trajectories, key)
        if batch is not None and batch % trajectories:
            translator.problems.append(
                f"rollout_batch_size {batch} counts trajectories, but is no multiple of {key} {trajectories}: set it "
                f"to {max(trajectories, batch - batch % trajectories)}"
            )
        elif batch is not None:
            translator.set("rollout.rollout_batch_size", batch // trajectories, "rollout_batch_size")
        note(translator, values, "has no effect in ROLL either: an environment has one trajectory", sequences)
    else:
        if batch is not None:
            translator.set("rollout.rollout_batch_size", batch, "rollout_batch_size")
        group = "num_return_sequences_in_group"
        key = group if group in values else sequences
        if (samples := whole_number(translator, values, key)) is not None:
            translator.set("rollout.n_samples_per_prompt", samples, key)
        if key == group:
            note(translator, values, f"has no effect in ROLL either: {group} takes its place", sequences)
    _lengths(translator, values)


def _lengths(translator: Translator, values: Values) -> None:
    longest, key = f"{_GENERATING}.max_new_tokens", "response_length"
    whole, response = (whole_number(translator, values, name) for name in ("sequence_length", key))
    prompt = whole_number(translator, values, "prompt_length") or 0
    if response is None and whole is not None:
        # An agent's trajectory has all tokens but those of its first prompt, whose length ROLL does not limit.
        response, key = max(1, whole - prompt), "sequence_length prompt_length" if prompt else "sequence_length"
    else:
        note(translator, values, "has no effect beside response_length", "sequence_length")
    if response is None:
        key, response = longest, whole_number(translator, values, longest)
    elif trains_agents(values):
        note(translator, values, "limits one turn: custom_generate_function_path has to do so", longest)
    else:
        note(translator, values, "has no effect in ROLL either: response_length takes its place", longest)
    if response is not None:
        translator.set("rollout.rollout_max_response_len", response, key)


def schedule(translator: Translator, values: Values) -> None:
    """How far generation may be ahead, and for how long the run goes on."""
    key = "async_generation_ratio"
    ratio = number(translator, values, key)
    if ratio == 0:
        translator.set("rollout.schedule", "synchronous", key)
    elif ratio is not None:
        translator.set("rollout.schedule", "fully_async", key)
        translator.set("rollout.rollout_function_path", "stream", key)
        translator.set("rollout.max_weight_staleness", ceil(ratio), key)
    if (steps := whole_number(translator, values, "max_steps")) is not None:
        translator.set("rollout.num_rollout", steps, "max_steps")
    interval = number(translator, values, "eval_steps")
    if interval and "validation" in values:
        translator.set("rollout.eval_interval", interval, "eval_steps")
    else:
        note(translator, values, "has no effect at 0 or without validation", "eval_steps")
    kept = number(translator, values, "max_ckpt_to_keep")
    if kept is not None:
        translator.set("learner.save_keep", kept or None, "max_ckpt_to_keep")
    warmup = "actor_train.training_args.warmup_ratio"
    part = number(translator, values, warmup)
    if part and not values.get("actor_train.training_args.warmup_steps"):
        translator.set("learner.lr_warmup_fraction", part, warmup)
    else:
        note(translator, values, "has no effect at 0 or beside warmup_steps", warmup)


def tracking(translator: Translator, values: Values) -> None:
    """TensorBoard and Weights & Biases."""
    tracker = values.get("track_with")
    match tracker:
        case "tensorboard" | "wandb":
            translator.set(f"observability.use_{tracker}", True, "track_with")
        case "stdout":
            translator.idle["track_with"] = "has no effect: metrics are on the terminal and on the page"
        case None:
            pass
        case _:
            translator.problems.append(f"track_with {tracker!r:.80} has no counterpart: set it to tensorboard or wandb")
    settings = {"project": "wandb_project", "api_key": "wandb_key"} if tracker == "wandb" else {}
    for name, value in section(translator, values, "tracker_kwargs").items():
        if name in settings:
            translator.set(f"observability.{settings[name]}", value, f"tracker_kwargs.{name}")
        else:
            translator.idle[f"tracker_kwargs.{name}"] = "has no effect: the run names its folder and its files"


def recordings(translator: Translator, values: Values) -> None:
    """Batches that are saved (`dump`), or trained again without generating them (`mock`)."""
    found = section(translator, values, "rollout_mock")
    mode, folder = found.get("mode", "dump"), found.get("dump_dir", "./rollout_mock_dumps")
    if not found.get("enable"):
        note(translator, values, "has no effect: it is not enabled", "rollout_mock")
    elif mode in ("dump", "mock"):
        setting = "save_debug_rollout_data" if mode == "dump" else "load_debug_rollout_data"
        translator.set(f"debug.{setting}", f"{folder}/{{rollout_id}}.safetensors", "rollout_mock")
    else:
        translator.problems.append(f"rollout_mock.mode {mode!r:.80} is unknown: set it to dump or mock")


def data_and_rewards(translator: Translator, values: Values) -> None:
    """The files of each domain, their shares of a batch, and the rewards of the domains."""
    rewards = {
        name: of if isinstance(of, Mapping) else {} for name, of in section(translator, values, "rewards").items()
    }
    shares = section(translator, values, _SHARES)
    domains = [name for name in rewards if not shares or name in shares]
    kinds = {name: _reward(translator, name, rewards[name]) for name in domains}
    for name in sorted(rewards.keys() - kinds.keys()):
        translator.idle[f"rewards.{name}"] = "has no effect: its domain has no share in domain_interleave_probs"
    for name in sorted(shares.keys() - rewards.keys() if rewards else ()):
        translator.problems.append(f"{_SHARES}.{name} has no reward: add rewards.{name}, or remove it")
    files = _files(translator, values, _FILES)
    if len(files) <= 1 and len(domains) <= 1:
        for file in files:
            translator.set("data.prompt_data", file, _FILES)
        note(translator, values, "has no effect: all rows have the same domain", _SHARES)
        for kind in filter(None, kinds.values()):
            translator.set("rollout.rm_type", kind, "rewards")
            translator.set("data.label_key", _label(kind), "rewards")
    elif not domains:
        translator.problems.append(
            f"{_FILES} has several files, and rewards has no domains for them: add rewards, or write all rows to one "
            "file"
        )
    elif not files:
        translator.problems.append(f"rewards has several domains, but {_FILES} is not set: set it to their files")
    else:
        _several(translator, values, files, kinds, rewards)
    evaluation(translator, values, kinds)


def _reward(translator: Translator, name: str, reward: Mapping[str, Any]) -> str | None:
    """The built-in reward of a domain; None after a problem."""
    worker = str(reward.get("worker_cls")).rpartition(".")[2]
    if worker not in _WORKERS:
        advice = _ADVICE.get(worker, "a function that scores its rows as ROLL does as custom_rm_path")
        translator.problems.append(
            f"rewards.{name}.worker_cls {worker} has no counterpart: remove rewards.{name} and its share, and write "
            f"datasets.{name} into a file of your own, with {advice}"
        )
    match reward:
        case {"model_args": {"model_name_or_path": model}} if worker == "LLMJudgeRewardWorker":
            why = "is not started: serve it with SGLang, and set rm_url to its chat completions"
            translator.idle[f"{model!s:.200} of rewards.{name}"] = why
    for key, only in _ONLY.get(worker, {}).items():
        if reward.get(key, only) != only:
            translator.problems.append(
                f"rewards.{name}.{key} {reward[key]!r:.80} has no counterpart: set it to {only}, or remove "
                f"rewards.{name} and its share, and write datasets.{name} into a file of your own, with custom_rm_path"
            )
    return _WORKERS.get(worker)


def _label(kind: str | None) -> str:
    return _LABELS.get(str(kind), "ground_truth")


def _files(translator: Translator, values: Values, key: str) -> Sequence[str]:
    match values.get(key):
        case None:
            return ()
        case str() as file:
            return (file,)
        case [*files] if files and all(isinstance(file, str) for file in files):
            return files
    translator.problems.append(f"{key} is no list of files: write it as [file.jsonl]")
    return ()


def _several(
    translator: Translator,
    values: Values,
    files: Sequence[str],
    kinds: Mapping[str, str | None],
    rewards: Mapping[str, Any],
) -> None:
    """Each domain is a data set, whose file is the one with rows of its tags."""
    domain_of = {}
    for name, reward in rewards.items():
        tags = reward.get("tag_included") or []
        if isinstance(tags, list):
            domain_of.update({str(tag): name for tag in tags})
        else:
            translator.problems.append(f"rewards.{name}.tag_included is no list: write it as [tag]")
    shares = section(translator, values, _SHARES)
    owned: dict[str, list[str]] = {name: [] for name in kinds}
    for file in files:
        domain = _domain(translator, file, domain_of)
        if domain in owned:
            owned[domain].append(file)
        elif domain is not None:
            translator.idle[f"{_FILES} {file}"] = f"is not read: {domain} has no share in domain_interleave_probs"
    for domain, of_domain in owned.items():
        if kinds[domain] is None:  # its reward is refused
            translator.idle.update({f"{_FILES} {file}": "is not read without a reward" for file in of_domain})
            continue
        share = number(translator, {f"{_SHARES}.{domain}": shares.get(domain)}, f"{_SHARES}.{domain}")
        # ROLL mixes the rows of all files of a domain.
        rows = [count_rows(file) if len(of_domain) > 1 else 1 for file in of_domain]
        for position, file in enumerate(of_domain):
            dataset = f"data.datasets.{domain}" + (f"_{position}" if position else "")
            weight = (1.0 if share is None else share) * rows[position] / max(1, sum(rows))
            translator.set(f"{dataset}.prompt_data", file, _FILES)
            translator.set(f"{dataset}.weight", weight, _SHARES if domain in shares else "rewards")
            translator.set(f"{dataset}.rm_type", kinds[domain], "rewards")
            translator.set(f"{dataset}.label_key", _label(kinds[domain]), "rewards")


def _domain(translator: Translator, file: str, domain_of: Mapping[str, str]) -> str | None:
    """The domain of the first rows of a file; None after a problem."""
    try:
        with Path(file).expanduser().open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, _ROWS_READ) if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSONL"
        translator.problems.append(f"{_FILES}: {file} cannot be read for the tags of its rows: {reason}")
        return None
    found = {
        row.get("domain") or domain_of.get(str(row.get("tag")), _FALLBACK) for row in rows if isinstance(row, Mapping)
    }
    if len(found) != 1:
        shown = ", ".join(sorted(map(str, found))) or "no domain"
        translator.problems.append(f"{_FILES}: {file} has rows of {shown}: write one file for each domain")
        return None
    return str(found.pop())


def evaluation(translator: Translator, values: Values, kinds: Mapping[str, str | None]) -> None:
    """The data sets of `validation`."""
    validation = section(translator, values, "validation")
    data, sampling = (validation.get(name) or {} for name in ("data_args", "generating_args"))
    if not isinstance(data, Mapping) or not isinstance(sampling, Mapping):
        translator.problems.append(
            "validation.data_args and validation.generating_args are sections: put keys below them"
        )
        return
    key = "validation.data_args.file_name"
    kind = kinds.get(_FALLBACK) or next(filter(None, kinds.values()), None)
    fields = {
        "label_key": _label(kind),
        "input_key": values.get("actor_train.data_args.messages"),
        "rm_type": kind,
        "n_samples": sampling.get("num_return_sequences"),
        **{name: sampling.get(name) for name in ("temperature", "top_p", "top_k")},
    }
    given = {name: value for name, value in fields.items() if value is not None}
    datasets = {
        Path(file).stem: {"path": file, **given} for file in _files(translator, {key: data.get("file_name")}, key)
    }
    if datasets:
        translator.set("rollout.eval_datasets", datasets, "validation")


def environments(translator: Translator, values: Values) -> None:
    """What belongs to ROLL's environments."""
    for name in section(translator, values, "train_env_manager"):
        if name != "group_size":
            translator.idle[f"train_env_manager.{name}"] = "belongs to ROLL's environments"
