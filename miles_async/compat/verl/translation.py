"""Translates verl's keys, of its files and of its command line, where Hydra reads them as `section.key=value`.

`rules.py` has the rule of each key. The functions here translate keys that mean something only together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from miles_async.compat.verl.rules import OVERLONG, SKIP_FIELDS, TABLE, rule_below
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.prompt_files import count_rows, split_slice
from miles_async.config.schema import RunConfig
from miles_async.config.translation import Combined, Outcome, Table, Translator, converts, entries, sets

_SECTIONS = frozenset(
    {
        *("actor_rollout_ref", "async_training", "critic", "model_engine", "ray_kwargs", "reward", "reward_model"),
        *("global_profiler", "trainer", "transfer_queue"),
    }
)
"""Sections that only verl has."""
_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
_FULLY_ASYNC = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
_MODEL = "actor_rollout_ref.model"
_FSDP_LORA = {
    "lora_rank": f"{_MODEL}.lora_rank",
    "lora_alpha": f"{_MODEL}.lora_alpha",
    "lora_target_modules": f"{_MODEL}.target_modules",
    "lora_exclude_modules": f"{_MODEL}.exclude_modules",
    "lora_load": f"{_MODEL}.lora_adapter_path",
}
_MEGATRON_LORA = {
    "lora_rank": f"{_MODEL}.lora.rank",
    "lora_alpha": f"{_MODEL}.lora.alpha",
    "lora_target_modules": f"{_MODEL}.lora.target_modules",
    "lora_exclude_modules": f"{_MODEL}.lora.exclude_modules",
    "lora_load": f"{_MODEL}.lora.adapter_path",
    "lora_dropout": f"{_MODEL}.lora.dropout",
}
"""verl's keys for an adapter by our setting, for each of its engines."""
_DRAFTS: Mapping[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
"""Arguments of SGLang that verl sets for drafts, with verl's defaults."""
_FURTHER_TURNS = ("tool_config_path", "function_tool_path", "interaction_config_path")
_PROMPT_KEY, _LABEL_KEY = "prompt", "reward_model.ground_truth"
_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
"""Metrics of verl by which groups are compared as by their rewards."""
_SUM_OVER_LONGEST = "seq-mean-token-sum-norm"
"""The mean of token losses with the sum over each response divided by the longest one."""
_MEANS = converts(
    "algorithm.loss_aggregation",
    {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        _SUM_OVER_LONGEST: "constant",
    },
)
_ESTIMATORS = converts(
    "algorithm.kl_loss_type",
    {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"},
)
_COMPARED_AFTER_PENALTY = ("grpo", "reinforce_plus_plus_baseline")
"""Estimators of verl that compare the samples of a group after the KL penalty."""
_MEANS_OVER_SAMPLES = ("gspo", "geo_mean", "sapo")
"""Losses of verl that do not read loss_agg_mode (`verl/trainer/ppo/core_algos.py`)."""
_RENDERS = "a row of verl has messages, which the chat template renders"
_MiB = 1 << 20


def recognises(content: Mapping[str, Any]) -> bool:
    """Whether the content has a section that only verl has, or a key of verl in a section with one of our names.

    A file with nothing but the section `skip` means the same in both projects, and is read as ours.
    """
    own = {key for key, rule in TABLE.items() if rule != sets(key)}
    return not _SECTIONS.isdisjoint(content) or any(key in own for key, _ in entries(content, TABLE))


def has_key(key: str) -> bool:
    """Whether an override sets a key of verl. `group@section=choice` is Hydra's choice of a file for a section."""
    section = key.rpartition("@")[2].partition(".")[0]
    return key in TABLE or section in {*_SECTIONS, "hydra"} or rule_below(key) is not None


def translate(content: Mapping[str, Any]) -> Outcome:
    """What the content of a file, or the overrides of a command line by key, mean here."""
    table = {**TABLE, **_skip_roles(content.get("skip"))}
    values = dict(entries(content, table))
    table |= {key: rule for key in values if key not in table and (rule := rule_below(key)) is not None}
    translator = Translator("verl", table)
    for key, value in values.items():
        if value is None and key in table:
            translator.idle[key] = "is null, so it sets nothing"
        else:
            translator.apply(key, value)
    _Keys(translator, {key: value for key, value in values.items() if value is not None}).translate()
    return translator


def resolve_skip_rollout(config: RunConfig) -> RunConfig:
    """The configuration without the deprecated `skip_rollout`, which enables both skip roles at every step.

    It has no effect if a role is enabled already.
    """
    skip = config.skip
    if skip.rollout.enable or skip.async_rollout.enable:
        text = "--skip-rollout is deprecated and has no effect beside skip.rollout or skip.async_rollout: remove it"
        update: dict[str, Any] = {}
    else:
        text = "--skip-rollout is deprecated: set skip.rollout.enable or skip.async_rollout.enable, and steps, instead"
        all_steps: dict[str, Any] = {"enable": True, "steps": ["0-"]}
        roles = {"rollout": skip.rollout, "async_rollout": skip.async_rollout}
        enabled = {name: role.model_copy(update=all_steps) for name, role in roles.items()}
        update = {"skip": skip.model_copy(update=enabled)}
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    update["rollout"] = config.rollout.model_copy(update={"skip_rollout": False})
    return config.model_copy(update=update)


def _skip_roles(section: Any) -> Table:
    """The rules for a user's skip modules. Each module has a field in verl's SkipManagerConfig."""
    roles = set(section) - {"rollout", "async_rollout"} if isinstance(section, Mapping) else set()
    return {f"skip.{role}.{name}": sets(f"skip.roles.{role}.{name}") for role in roles for name in SKIP_FIELDS}


class _Keys(CombinedKeys):
    """Computes what the combined keys of verl set."""

    def __init__(self, translator: Translator, values: Mapping[str, Any]) -> None:
        super().__init__(translator, values)
        self._async_keys = [key for key in values if key.startswith("async_training.")]
        self._is_async = bool(self._async_keys)
        self._syncs = self._number("async_training.trigger_parameter_sync_step", 4) if self._is_async else 1
        """Batches between two publishes. verl's fully asynchronous trainer counts in them."""
        self._steps = 1
        """Optimizer steps per batch. verl does not change the learning rate between them."""

    def translate(self) -> None:
        self._batches()
        self._lengths()
        self._schedule()
        self._devices()
        self._layout()
        self._adapters()
        self._micro_batches()
        self._optimizer()
        self._objective()
        self._correction()
        self._kl()
        self._filter()
        self._engines()
        self._heads()
        self._turns()
        self._reference()
        self._rewards()
        self._evaluation()
        self._checkpoints()
        self._trackers()

    def _number(self, key: str, default: int) -> int:
        """A whole number from 1 on; `default` if the key is not given, or if its value is reported as invalid."""
        return self.whole_number(key) or default

    def _batches(self) -> None:
        """Prompts per batch and samples per optimizer step. verl's sizes count prompts."""
        mini_key, n_key, batch_key = f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n", "data.train_batch_size"
        mini = self._number(mini_key, 1) if mini_key in self.values else None
        generated_key = "data.gen_batch_size"
        if self._is_async:
            self.note("has no effect with async_training: a batch has require_batches mini-batches", batch_key)
            self.note("has no effect with async_training: prompts are fed one by one", generated_key)
            if mini is None:
                self.refuse(f"async_training counts batches of {mini_key}: set it, too")
                return
            self._steps = self._number("async_training.require_batches", 1)
            prompts = mini * self._steps
            self.set("rollout.rollout_batch_size", prompts, mini_key, "async_training.require_batches")
        elif batch_key in self.values:
            prompts = self._number(batch_key, 1)
            self.set("rollout.rollout_batch_size", prompts, batch_key)
            self._steps = max(1, prompts // mini) if mini is not None else 1
        if generated_key in self.values and not self._is_async:
            self.set("rollout.over_sampling_batch_size", self._number(generated_key, 1), generated_key)
        if mini is not None and n_key in self.values:
            self.set("learner.global_batch_size", mini * self._number(n_key, 1), mini_key, n_key)
        elif mini is not None:
            self.refuse(f"{mini_key} counts prompts: set {n_key}, the samples per prompt, too")

    def _lengths(self) -> None:
        """How long the run is."""
        steps_key, epochs_key = "trainer.total_training_steps", "trainer.total_epochs"
        prompts_key = "rollout.total_rollout_steps"
        if prompts_key in self.values:
            batches = self._number(prompts_key, 1) // self.size("rollout.rollout_batch_size")
            keys = (prompts_key, f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches")
            self.set("rollout.num_rollout", max(1, batches), *keys)
            self.note(f"has no effect beside {prompts_key}, even if it is reached earlier", epochs_key, steps_key)
        elif steps_key in self.values:
            steps, files = self._number(steps_key, 1), self._train_files()
            counts_rows = epochs_key in self.values and files and all(map(_is_file, files))
            whole = self._batches_of_all_epochs() if counts_rows else None
            if whole is not None and whole < steps:
                self.set("rollout.num_rollout", whole, epochs_key, "data.train_files", "data.train_batch_size")
                self.note(f"has no effect: {epochs_key} ends the run earlier", steps_key)
            else:
                self.set("rollout.num_rollout", steps, steps_key)
                self.note(f"has no effect beside {steps_key}", epochs_key)
        elif epochs_key in self.values:
            self._epochs(epochs_key, "data.train_files")

    def _epochs(self, key: str, files_key: str) -> None:
        """Passes over the data. Those over several files are a number of batches."""
        batches = self._batches_of_all_epochs()
        if len(self._train_files()) > 1 and batches is not None:
            self.set("rollout.num_rollout", batches, key, files_key, "data.train_batch_size")
        else:
            self.set("rollout.num_epoch", self._number(key, 1), key)

    def _batches_of_all_epochs(self) -> int | None:
        """The number of batches in all epochs; None if the size of a batch is not known."""
        prompts = self.translator.translation.get("rollout.rollout_batch_size")
        if prompts is None:
            return None
        # verl leaves out the rows of a pass that do not fill a batch.
        batches: int = sum(map(_rows, self._train_files())) // prompts.value
        return max(1, batches * self._number("trainer.total_epochs", 1))

    def _train_files(self) -> Sequence[Any]:
        """The files of the data; none if the key has another value, which is reported elsewhere."""
        files = self.values.get("data.train_files")
        return files if isinstance(files, list) else [files] if isinstance(files, str) else []

    def _schedule(self) -> None:
        """The fully asynchronous schedule, which a section of verl's configuration selects."""
        if not self._is_async:
            return
        self.set("rollout.rollout_function_path", _FULLY_ASYNC, *self._async_keys)
        trigger, staleness = "async_training.trigger_parameter_sync_step", "async_training.staleness_threshold"
        self.set("weights.update_weights_interval", self._syncs, trigger)
        prompts = self.translator.translation.get("rollout.rollout_batch_size")
        share = self.values.get(staleness, 0.1)
        if not isinstance(share, int | float) or isinstance(share, bool) or share < 0:
            self.refuse(f"{staleness} {share!r} is not a number of 0 or more: write a share, such as 0.5")
        elif prompts is not None:
            capacity = int(prompts.value * (1 + share) * self._syncs)
            mini_keys = self.given(f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches")
            self.set("rollout.queue_capacity", capacity, staleness, trigger, *mini_keys)

    def _devices(self) -> None:
        """GPUs of the learner and the engines, which share GPUs unless the engines have their own."""
        nodes, gpus = "trainer.nnodes", "trainer.n_gpus_per_node"
        own_nodes, own_gpus, hybrid = "rollout.nnodes", "rollout.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"
        if nodes in self.values:
            self.set("learner.actor_num_nodes", self._number(nodes, 1), nodes)
        if gpus in self.values:
            self.set("learner.actor_num_gpus_per_node", self._number(gpus, 1), gpus)
        if self.given(own_nodes, own_gpus):
            engines = self._number(own_nodes, 1) * self._number(own_gpus, 8)
            self.set("engine.rollout_num_gpus", engines, own_nodes, own_gpus)
            self.note("has no effect: the engines have GPUs of their own", hybrid)
        elif self.given(nodes, gpus) and not self._is_async:
            self.set("cluster.colocate", self.values.get(hybrid, True), hybrid, nodes, gpus)
        else:
            self.note("has no effect: set rollout_num_gpus for the engines", hybrid)

    def _layout(self) -> None:
        """verl splits activations among tensor-parallel ranks unless it is told not to."""
        size = f"{_ACTOR}.megatron.tensor_model_parallel_size"
        if f"{_ACTOR}.megatron.sequence_parallel" not in self.values and self.values.get(size, 1) != 1:
            self.set("learner.sequence_parallel", True, size)

    def _adapters(self) -> None:
        """LoRA. As in verl, the keys for Megatron count if their rank is above 0, and otherwise those for FSDP."""
        chosen, others, alpha = _FSDP_LORA, _MEGATRON_LORA, 16
        if self.number(_MEGATRON_LORA["lora_rank"]):
            chosen, others, alpha = _MEGATRON_LORA, _FSDP_LORA, 32
        rank_key, alpha_key, load_key = (chosen[name] for name in ("lora_rank", "lora_alpha", "lora_load"))
        if not self.number(rank_key):
            if load_key in self.values:
                self.refuse(f"{load_key} needs {rank_key}: set it to the rank of that adapter")
            else:
                self.note("has no effect: no adapter is trained", *chosen.values(), *others.values())
            return
        self.note(f"has no effect beside {rank_key}", *others.values())
        for setting, key in chosen.items():
            if key in self.values:
                self.set(f"learner.{setting}", self.values[key], key)
        if alpha_key not in self.values:
            self.set("learner.lora_alpha", alpha, rank_key)

    def _micro_batches(self) -> None:
        dynamic_key, tokens_key = f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu"
        samples_key = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        dynamic = self.values.get(dynamic_key)
        if dynamic is not None:
            self.set("learner.use_dynamic_batch_size", dynamic, dynamic_key)
        if dynamic is False:
            self.note(f"has no effect with {dynamic_key} false", tokens_key)
            if samples_key in self.values:
                self.set("learner.micro_batch_size", self._number(samples_key, 1), samples_key)
        else:
            self.note(f"has no effect: tokens limit a micro-batch, unless {dynamic_key} is false", samples_key)
            if tokens_key in self.values:
                self.set("learner.max_tokens_per_gpu", self._number(tokens_key, 1), tokens_key)

    def _optimizer(self) -> None:
        """verl keeps the learning rate for all optimizer steps of a batch, so its schedule counts batches."""
        batches = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches")
        for key, setting in (
            (f"{_ACTOR}.optim.lr_warmup_steps", "learner.lr_warmup_steps"),
            (f"{_ACTOR}.optim.lr_decay_steps", "learner.lr_decay_steps"),
            ("critic.optim.lr_warmup_steps", "algorithm.critic_lr_warmup_steps"),
        ):
            value = self.values.get(key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                self.refuse(f"{key} {value!r} is not a whole number: write a number of batches")
            elif value is not None and value > 0:
                style = self.values.get(f"{_ACTOR}.optim.lr_decay_style")
                if setting == "learner.lr_decay_steps" and style in ("constant", None):
                    self.note("has no effect: the learning rate stays constant, as verl's default is", key)
                else:
                    self.set(setting, value * self._steps, key, *(batches if self._steps > 1 else ()))
            else:
                self.note("has no effect: lr_warmup_steps_ratio applies, or no warm-up", key)
        warmup_key = "trainer.critic_warmup"
        if (first := self.number(warmup_key)) is not None:
            # verl trains the policy from the step of this number on, and its first step is 1.
            self.set("algorithm.num_critic_only_steps", max(0, first - 1), warmup_key)
        overrides = f"{_ACTOR}.optim.override_optimizer_config"
        part_key, offload_key = f"{overrides}.optimizer_offload_fraction", f"{overrides}.optimizer_cpu_offload"
        if self.values.get(part_key) != 0:
            if part_key in self.values:
                self.set("learner.optimizer_offload_fraction", self.values[part_key], part_key)
        elif self.values.get(offload_key) is True:
            self.refuse(f"{part_key} 0 offloads nothing, but {offload_key} is true: set it to false")
        else:
            self.note("has no effect: 0 offloads nothing", part_key)
        betas_key = f"{_ACTOR}.optim.betas"
        match self.values.get(betas_key):
            case None:
                pass
            case [int() | float() as beta1, int() | float() as beta2]:
                self.set("learner.adam_beta1", beta1, betas_key)
                self.set("learner.adam_beta2", beta2, betas_key)
            case other:
                self.refuse(f"{betas_key} {other!r} is not a pair of numbers: write [0.9, 0.999]")

    def _objective(self) -> None:
        estimator = "algorithm.adv_estimator"
        if self.values.get(estimator) == "gae":
            # verl has no key for it: compute_gae_advantage_return always whitens.
            self.set("algorithm.normalize_advantages", True, estimator)
        both = f"{_ACTOR}.clip_ratio"
        self.number(both)
        self.note("has no effect: clip_ratio_low and clip_ratio_high count, 0.2 in verl unless they are set", both)
        for suffix, setting in (("low", "eps_clip"), ("high", "eps_clip_high")):
            if (key := f"{_ACTOR}.clip_ratio_{suffix}") in self.values:
                self.set(f"algorithm.{setting}", self.values[key], key)
        mode_key, mean_key = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.loss_agg_mode"
        dual, mode = f"{_ACTOR}.clip_ratio_c", self.values.get(mode_key, "vanilla")
        if mode in _MEANS_OVER_SAMPLES:
            self.set("algorithm.loss_aggregation", "sequence_mean", mode_key)
            self.note(f"has no effect in verl either: {mode} is always averaged by seq-mean-token-mean", mean_key)
        elif mean_key in self.values:
            self.translator.follow(_MEANS, mean_key, self.values[mean_key])
        self._scale(mean_key, sums=self.values.get(mean_key) == _SUM_OVER_LONGEST and mode not in _MEANS_OVER_SAMPLES)
        if mode == "vanilla" and dual in self.values:
            self.set("algorithm.eps_clip_c", self.values[dual], dual)
        else:
            self.note(f"has no effect with policy_loss.loss_mode {mode}", dual)

    def _scale(self, mean_key: str, *, sums: bool) -> None:
        """The number by which the sum over a response is divided."""
        key, longest_key = f"{_ACTOR}.loss_scale_factor", "data.max_response_length"
        if sums and key in self.values and self.values[key] != self.values.get(longest_key):
            self.refuse(
                f"{key} {self.values[key]!r:.80} is not {longest_key}, by which {_SUM_OVER_LONGEST} divides the sum "
                "over a response: set both to the same value"
            )
        elif sums:
            self.note(f"has no effect: {longest_key} is the same", key)
        else:
            self.note(f"has no effect without {mean_key} {_SUM_OVER_LONGEST}", key)

    def _correction(self) -> None:
        """How samples of other weights are corrected: by weights, by leaving tokens out, or by the ratio itself."""
        prefix = "algorithm.rollout_correction"
        level_key, threshold_key, bypass_key = (
            f"{prefix}.rollout_is",
            f"{prefix}.rollout_is_threshold",
            f"{prefix}.bypass_mode",
        )
        # verl's configuration for fully asynchronous runs turns this on.
        bypass = self.values.get(bypass_key, self._is_async)
        if bypass is True and f"{prefix}.rollout_rs" in self.values:
            # Rejection needs the learner's own log-probabilities, so the ratio to the engines becomes a weight.
            self.set("algorithm.off_policy_correction", "tis", bypass_key, f"{prefix}.rollout_rs")
            self.note("has no effect beside rollout_rs: the ratio is a weight, off_policy_correction tis", bypass_key)
        elif bypass_key in self.values or bypass is True:
            self.set("algorithm.use_rollout_logprobs", bypass, *(self.given(bypass_key) or self._async_keys))
        level, threshold = self.values.get(level_key), self.values.get(threshold_key, 2.0)
        corrections = {"token": "tis", "sequence": "sequence"}
        if bypass is True:
            self.note("has no effect: the policy ratio itself is to the engines' log-probabilities", level_key)
            self.note("has no effect: the policy ratio itself is to the engines' log-probabilities", threshold_key)
        elif level_key not in self.values:
            self.note(f"has no effect without {level_key}", threshold_key)
        elif level not in corrections:
            self.refuse(f"{level_key} {level!r} has no counterpart: set it to token or sequence")
        elif (band := _band(threshold)) is not None and level == "token":
            self.set("algorithm.off_policy_correction", "icepop", level_key, threshold_key)
            self.set("algorithm.icepop_band", band, level_key, threshold_key)
        elif isinstance(threshold, int | float):
            self.set("algorithm.off_policy_correction", corrections[str(level)], level_key)
            self.set("algorithm.tis_clip", threshold, threshold_key, level_key)
        else:
            self.refuse(f"{threshold_key} {threshold!r} has no counterpart: write a number")
        self._rejection(prefix)

    def _rejection(self, prefix: str) -> None:
        """Which tokens are left out. verl bounds the inverse ratio, except under the older name `geometric`."""
        key, threshold_key, low_key = (f"{prefix}.rollout_rs{end}" for end in ("", "_threshold", "_threshold_lower"))
        levels = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric", "geometric": "geometric"}
        level, threshold = self.values.get(key), self.values.get(threshold_key)
        if key not in self.values:
            self.note(f"has no effect without {key}", threshold_key, low_key)
        elif level not in levels:
            self.refuse(f"{key} {level!r} has no counterpart: set it to {', '.join(levels)}, or set rejection_level")
        else:
            band = _band(threshold)
            if band is None and level == "geometric" and isinstance(threshold, int | float) and threshold > 0:
                band = [self.values.get(low_key, 1 / threshold), threshold]
            elif band is not None:
                band = [1 / band[1], 1 / band[0]]
            if band is None:
                self.refuse(f"{threshold_key} {threshold!r} is not a band: write two ratios, such as 0.5_2.0")
                return
            self.set("algorithm.rejection_level", levels[str(level)], key)
            self.set("algorithm.rejection_band", band, key, threshold_key, low_key)

    def _kl(self) -> None:
        """The KL penalty on rewards and the KL loss, which share an estimator here."""
        on_key, coef_key, kind_key = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
        loss_key, loss_kind_key = f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_type"
        if self.values.get(on_key) is not True:
            if on_key in self.values:
                self.set("algorithm.kl_coef", 0.0, on_key)
            self.note(f"has no effect without {on_key}", coef_key, kind_key)
            if loss_kind_key in self.values:
                self.translator.follow(_ESTIMATORS, loss_kind_key, self.values[loss_kind_key])
            return
        self.set("algorithm.kl_coef", self.values.get(coef_key, 0.001), on_key, coef_key)
        self.translator.follow(_ESTIMATORS, kind_key, self.values.get(kind_key, "kl"))
        if self.values.get("algorithm.adv_estimator") in _COMPARED_AFTER_PENALTY:
            self.refuse(
                f"{on_key} has a counterpart only with adv_estimator gae or reinforce_plus_plus, because verl compares "
                "the rewards of a group less the KL divergence of each whole response: set it to false, and "
                f"{loss_key} to true"
            )
        elif self.values.get(loss_key) is True:
            self.translator.follow(_ESTIMATORS, loss_kind_key, self.values.get(loss_kind_key, "low_var_kl"))
        else:
            self.note(f"has no effect without {loss_key}", loss_kind_key)

    def _filter(self) -> None:
        """Groups without differences in their rewards are dropped. verl's fully asynchronous trainer keeps them."""
        enable_key, metric_key = (f"algorithm.filter_groups.{name}" for name in ("enable", "metric"))
        enable, metric = self.switch(enable_key), self.values.get(metric_key, _METRICS[0])
        if self._is_async:
            why = "has no effect in verl's fully asynchronous runs either; set dynamic_sampling_filter_path to filter"
            self.note(why, enable_key, metric_key)
            return
        if not enable:
            if enable_key in self.values:
                self.set("rollout.dynamic_sampling_filter_path", None, enable_key)
            self.note("has no effect: no groups are filtered", metric_key)
            return
        path = "miles_async.filters.check_reward_nonzero_std"
        self.set("rollout.dynamic_sampling_filter_path", path, enable_key, metric_key)
        if metric not in _METRICS:
            self.refuse(
                f"{metric_key} {metric!r:.80} is not supported: groups are compared by their rewards: set it to acc, "
                f"or set {enable_key} to false and dynamic_sampling_filter_path to a function of your own"
            )

    def _engines(self) -> None:
        """Arguments of the engines whose values have other units or signs there."""
        chunked, prefix = f"{_ROLLOUT}.enable_chunked_prefill", "engine.sglang_server_args"
        if self.values.get(chunked) is False:
            self.set(f"{prefix}.chunked_prefill_size", -1, chunked)
        else:
            self.note("has no effect: SGLang computes long prompts in chunks", chunked)
        for name, argument in (("data_parallel_size", "dp_size"), ("expert_parallel_size", "ep_size")):
            if self.values.get(f"{_ROLLOUT}.{name}", 1) == 1:
                self.note("has no effect: 1 divides nothing", f"{_ROLLOUT}.{name}")
            else:
                self.set(f"{prefix}.{argument}", self.values[f"{_ROLLOUT}.{name}"], f"{_ROLLOUT}.{name}")
        for section in ("override_config", "override_config.model_config"):
            key = f"actor_rollout_ref.model.{section}.max_position_embeddings"
            if key in self.values:
                self.set(f"{prefix}.context_length", self.values[key], key)
                self.set("engine.engine_env_vars.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1", key)
        bucket = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
        if bucket in self.values:
            self.set("weights.update_weight_buffer_size", self._number(bucket, 2048) * _MiB, bucket)

    def _heads(self) -> None:
        """MTP heads, which the learner trains, and from which engines draft tokens."""
        keys = {name: f"{_MODEL}.mtp.{name}" for name in ("enable", "enable_train", "enable_rollout", "detach_encoder")}
        factor, drafts = f"{_MODEL}.mtp.mtp_loss_scaling_factor", {name: f"{_MODEL}.mtp.{name}" for name in _DRAFTS}
        on = {name: self.switch(key) for name, key in keys.items()}
        if not on["enable"]:
            self.note("has no effect: MTP heads are neither trained nor used", *keys.values(), factor, *drafts.values())
            return
        if not (on["enable_train"] or on["enable_rollout"]):
            self.note("has no effect: MTP heads are neither trained nor used", keys["enable"])
        if on["enable_train"]:
            trains = [keys[name] for name in ("enable", "enable_train", "detach_encoder")]
            self.set("learner.enable_mtp_training", True, *trains)
            self.set("learner.mtp_loss_scaling_factor", self.values.get(factor, 0.1), factor, keys["enable_train"])
            if not on["detach_encoder"]:
                self.refuse(
                    f"{keys['detach_encoder']} is not true, but the loss of MTP heads changes nothing but the heads "
                    "here: set it to true"
                )
        else:
            self.note("has no effect: MTP heads are not trained", keys["enable_train"], keys["detach_encoder"], factor)
        if not on["enable_rollout"]:
            self.note("has no effect: engines do not draft tokens", keys["enable_rollout"], *drafts.values())
        elif self.values.get(f"{_ROLLOUT}.top_p", 1) != 1 or self.values.get(f"{_ROLLOUT}.top_k", -1) > 0:
            self.note(
                "has no effect: with top_p or top_k the learner needs sampling masks, which SGLang does not return for "
                "drafted tokens; without drafts the responses have the same distribution and take longer",
                *(keys["enable_rollout"], *drafts.values()),
            )
        else:
            for name, key in drafts.items():
                value = self.values.get(key, _DRAFTS[name])
                self.set(f"engine.sglang_server_args.{name}", value, keys["enable_rollout"], key)

    def _turns(self) -> None:
        """verl takes a second turn only for tools or an interaction, and for rows whose `agent_name` asks for one."""
        key = f"{_ROLLOUT}.multi_turn.enable"
        configured = self.given(*(f"{_ROLLOUT}.multi_turn.{name}" for name in _FURTHER_TURNS))
        if self.switch(key) and configured:
            self.refuse(
                f"{key} is true, and {configured[0]} makes responses of several turns: set "
                "custom_generate_function_path to a function that runs the agent"
            )
        elif key in self.values:
            self.note(
                "has no effect: without tools and an interaction, each response is one turn of the model, also for "
                "rows whose agent_name asks for tools",
                key,
            )

    def _reference(self) -> None:
        """The learner runs the reference model in its own layout."""
        for key, value in self.values.items():
            if not key.startswith(f"{_REF}.megatron.") or not isinstance(self.translator.table.get(key), Combined):
                continue
            actor = key.replace(f"{_REF}.", f"{_ACTOR}.", 1)
            same = self.values.get(actor, 1 if key.endswith("_parallel_size") else value)
            if value == same:
                self.note("has no effect: the reference model runs in the layout of the learner", key)
            else:
                self.refuse(f"{key} {value!r} differs from {actor} {same!r}: set both to the same value")

    def _rewards(self) -> None:
        """Data of verl: the answer, and the name of the data set, which chooses the reward of a row."""
        files_key, manager_keys = "data.train_files", ("reward.reward_manager.name", "reward_model.reward_manager")
        match self.values.get(files_key):
            case None:
                self.note(f"has no effect without {files_key}: rm_type chooses the reward", *manager_keys)
                return
            case str(file) | [str(file)]:
                self.set("data.prompt_data", file, files_key)
            case [*files] if all(isinstance(file, str) for file in files):
                # verl shuffles the rows of all files together.
                datasets = {name: {"prompt_data": file, "weight": _rows(file)} for name, file in _named(files).items()}
                self.set("data.datasets", datasets, files_key)
            case other:
                self.refuse(f"{files_key} {other!r} is not a list of files: write [one.parquet, other.parquet]")
        if "data.prompt_key" not in self.values:
            self.set("data.input_key", _PROMPT_KEY, files_key)
        self.set("data.label_key", _LABEL_KEY, files_key)
        self.set("data.metadata_key", "extra_info", files_key)
        if "reward.custom_reward_function.path" not in self.values:
            self.set("rollout.rm_type", "data_source", *manager_keys, files_key)
        self._overlong()

    def _overlong(self) -> None:
        """The penalty on long responses."""
        for section in OVERLONG:
            enable, length, factor = (f"{section}.{name}" for name in ("enable", "len", "penalty_factor"))
            if self.values.get(enable) is not True:
                self.note(f"has no effect without {enable}", enable, length, factor)
                continue
            self.set("algorithm.overlong_buffer_len", self._number(length, 4096), enable, length)
            self.set("algorithm.overlong_penalty", self.values.get(factor, 1.0), enable, factor)
        longest = self.values.get("data.max_response_length")
        for key in self.given("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"):
            if longest is not None and self.values[key] != longest:
                self.refuse(
                    f"{key} {self.values[key]!r} differs from data.max_response_length {longest!r}, from which the "
                    "penalty is counted: set both to the same value"
                )
            else:
                self.note("has no effect: the penalty is counted from data.max_response_length", key)

    def _evaluation(self) -> None:
        """The data sets of an evaluation, and how its responses are sampled: greedily, unless that is set."""
        files_key, frequency_key, before_key = "data.val_files", "trainer.test_freq", "trainer.val_before_train"
        sampling = {name: f"{_ROLLOUT}.val_kwargs.{name}" for name in ("n", "temperature", "top_p", "top_k")}
        all_keys = tuple(sampling.values())
        frequency = self.values.get(frequency_key, -1)
        if isinstance(frequency, int) and frequency > 0:
            self.set("rollout.eval_interval", frequency * self._syncs, frequency_key)
        else:
            self.note("has no effect: no evaluation comes between the first and the last", frequency_key)
        self.note("has no effect: a run that evaluates does so before the first batch, too", before_key)
        if files_key not in self.values:
            self.note(f"has no effect without {files_key}", *all_keys)
            return
        if frequency == -1 and self.values.get(before_key, True) is False:
            self.note(f"has no effect, because {frequency_key} and {before_key} turn evaluations off", files_key)
            self.note("has no effect without evaluations", *all_keys)
            return
        files = self.values[files_key]
        files = [files] if isinstance(files, str) else files
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            self.refuse(f"{files_key} {files!r} is not a list of files: write [one.parquet, other.parquet]")
            return
        fields = {
            "label_key": _LABEL_KEY,
            "input_key": self.values.get("data.prompt_key", _PROMPT_KEY),
            "n_samples": self.values.get(sampling["n"], 1),
            "temperature": self.values.get(sampling["temperature"], 0.0),
            "top_p": self.values.get(sampling["top_p"], 1.0),
            "top_k": self.values.get(sampling["top_k"], -1),
        }
        datasets = {name: {"path": path, **fields} for name, path in _named(files).items()}
        self.set("rollout.eval_datasets", datasets, files_key, *all_keys)

    def _checkpoints(self) -> None:
        folder_key, frequency_key, mode_key = "trainer.default_local_dir", "trainer.save_freq", "trainer.resume_mode"
        kept_key, path_key = "trainer.max_actor_ckpt_to_keep", "trainer.resume_from_path"
        frequency, mode = self.values.get(frequency_key), self.values.get(mode_key, "auto")
        saves = isinstance(frequency, int) and frequency > 0
        if mode not in ("auto", "disable", "resume_path"):
            self.refuse(f"{mode_key} {mode!r} has no counterpart: set it to auto, disable or resume_path")
        if mode == "resume_path" and path_key in self.values:
            self.set("learner.load", self.values[path_key], mode_key, path_key)
        else:
            self.note(f"has no effect: {mode_key} is {mode}", path_key)
        if frequency_key in self.values and not saves:
            self.note("has no effect: nothing is saved", frequency_key, folder_key, kept_key, mode_key)
            return
        folder = self.values.get(folder_key)
        if saves and not folder:
            project, name = (self.values.get(f"trainer.{one}_name", "default") for one in ("project", "experiment"))
            folder = f"checkpoints/{project}/{name}"
        if folder:
            self.set("learner.save", folder, *self.given(folder_key, frequency_key)[:1])
        if saves and frequency is not None:
            self.set("learner.save_interval", frequency * self._syncs, frequency_key)
        if kept_key in self.values:
            self.set("learner.save_keep", self._number(kept_key, 1), kept_key)
        if mode == "auto" and saves:
            # A colocated run is continued from its checkpoints alone.
            colocated = self.translator.translation.get("cluster.colocate")
            setting, value = ("load", folder) if colocated is not None and colocated.value else ("resume", "auto")
            self.set(f"learner.{setting}", value, mode_key, frequency_key)
        elif mode != "resume_path":
            self.note("has no effect: the run starts from hf_checkpoint", mode_key)

    def _trackers(self) -> None:
        key = "trainer.logger"
        names = self.values.get(key, [])
        for name in [names] if isinstance(names, str) else names:
            if name in ("wandb", "tensorboard"):
                self.set(f"observability.use_{name}", True, key)
            elif name != "console":
                self.refuse(f"{key} {name!r} has no counterpart: use console, wandb or tensorboard")
        if names in ("console", ["console"]):
            self.note("has no effect: every run writes to the console", key)


def _band(threshold: Any) -> list[float] | None:
    """The bounds of `low_high`; None for anything else."""
    try:
        low, high = map(float, str(threshold).split("_"))
    except ValueError:
        return None
    return [low, high] if 0 < low < high else None


def _rows(file: Any) -> int:
    """The number of rows of a file; 1 if there is no such file, which is reported elsewhere."""
    return max(1, count_rows(str(file))) if _is_file(file) else 1


def _is_file(file: Any) -> bool:
    path, _ = split_slice(str(file))
    return Path(path).expanduser().is_file()


def _named(files: Iterable[str]) -> Mapping[str, str]:
    """Data sets by a name that tells them apart: that of the file, or also that of its folder."""
    files = list(files)
    paths = [PurePath(file) for file in files]
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{path.parent.name}_{path.stem}" for path in paths]
    return dict(zip(stems, files, strict=True))
