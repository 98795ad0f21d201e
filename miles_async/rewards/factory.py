"""Builds the rewarders that the configuration, the rows of the data and the evaluation data sets name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from miles_async import ports
from miles_async.config.fields import values_of
from miles_async.config.generation import generates
from miles_async.config.schema import Dataset, RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError, UserError
from miles_async.plugins import errors_of
from miles_async.rewards.functions.exact import Exact
from miles_async.rewards.grader_pool import GraderPool
from miles_async.rewards.plugin import BOXED, REWARDS, Reward, RunsIn, complaints, row_reward
from miles_async.rewards.rewarder import Rewarder, raise_first
from miles_async.types import Group, Sample
from miles_async.user_code import is_async


class RunRewards:
    """The rewards of a run. Implements the `Rewarder` port for training, where each group gets the reward of its data
    set; `of` is the rewarder of a data set.

    Each rewarder is opened when it is first needed, and shared by all rows and data sets that name the same reward.
    """

    def __init__(self, config: RunConfig, args: Any) -> None:
        """`args` is the flat configuration that rewards receive.

        Raises UserError if the reward for training is unknown or incomplete, or the user's function cannot be imported.
        """
        self._config = config
        self._args = args
        self._opened: dict[tuple[str, str | None], Rewarder] = {}
        own = {name: self.of(dataset) for name, dataset in config.data.datasets.items()}
        self._of_datasets = {name: rewarder for name, rewarder in own.items() if rewarder is not None}
        """The rewarders of data sets for training that have their own."""
        has_none = config.rollout.rm_type is None and config.rollout.custom_rm_path is None
        needs_none = bool(own) and own.keys() == self._of_datasets.keys() and has_none
        self._training = None if needs_none else self._of_training(config.rollout.reward_key)

    async def score(self, group: Group) -> None:
        """Score a group for training; see `Rewarder.score`."""
        rewarder = self._of_datasets.get(group.dataset, self._training)
        if rewarder is None:
            raise TrajectoryError(
                f"group {group.feed_index} belongs to no data set, and the run has no other reward: set rm_type"
            )
        await rewarder.score(group)

    def of(self, dataset: Dataset) -> ports.Rewarder | None:
        """Return the rewarder of a data set; None if it is that of the run.

        Raises UserError as the constructor does.
        """
        rollout = self._config.rollout
        key = dataset.reward_key or rollout.reward_key
        if dataset.custom_rm_path is not None:
            return self._custom(dataset.custom_rm_path, key)
        if dataset.rm_type is not None:
            # Rows for evaluation name it in their metadata too (`eval_groups`), so none of them chooses another one.
            return self._by_row(dataset.rm_type, key)
        return None if dataset.reward_key is None else self._of_training(key)

    async def close(self) -> None:
        """Release threads, processes and connections."""
        # A group that is still being scored may open another one meanwhile.
        for rewarder in list(self._opened.values()):
            await rewarder.close()

    def _of_training(self, key: str | None) -> ports.Rewarder:
        environment, rollout = self._config.data.environment, self._config.rollout
        if environment is not None or not generates(self._config):
            # The environment computes the rewards, which this rewarder only checks. Saved batches contain theirs, and
            # supervised examples need none.
            name = environment or "none"
            checks = Rewarder(Exact().score, self._args, name=name, timeout_seconds=None, changes_samples=False)
            return self._opened.setdefault((name, None), checks)
        if rollout.custom_rm_path is not None:
            return self._custom(rollout.custom_rm_path, key)
        if rollout.rm_type is None:
            raise UserError(REWARDS.missing(None))
        return self._by_row(rollout.rm_type, key)

    def _by_row(self, default: str, key: str | None) -> ports.Rewarder:
        self._named(default, key)
        return _ByRow(default, lambda name: self._named(name, key, of_row=name != default))

    def _named(self, name: str, key: str | None, *, of_row: bool = False) -> Rewarder:
        """Return the rewarder of a plug-in, which a row of the data may have named (`of_row`)."""
        for complaint in complaints(name, self._config, of_row=of_row):
            raise UserError(complaint)
        reward = REWARDS.find(name)
        key = reward.key(key)
        if (name, key) not in self._opened:
            self._opened[name, key] = _plugin(self._config, self._args, reward, name=name, key=key)
        return self._opened[name, key]

    def _custom(self, path: str, key: str | None) -> Rewarder:
        """Return the rewarder of the user's function at `path`."""
        if (path, key) not in self._opened:
            self._opened[path, key] = _custom(self._config, self._args, path, key)
        return self._opened[path, key]


class _ByRow:
    """Scores each sample with the reward that its row names in `metadata["rm_type"]`, or else with `default`.

    Rows differ within a group only if a user's function has put samples of several rows together.
    """

    def __init__(self, default: str, named: Callable[[str], Rewarder]) -> None:
        self._default = default
        self._named = named

    async def score(self, group: Group) -> None:
        parts: dict[str, list[Sample]] = {}
        for segments in group.trajectories:
            parts.setdefault(row_reward(segments[-1].metadata, self._default) or self._default, []).extend(segments)
        if len(parts) == 1:
            await self._score_part(next(iter(parts)), group)
            return
        groups = {name: Group(part, feed_index=group.feed_index) for name, part in parts.items()}
        scores = (self._score_part(name, part) for name, part in groups.items())
        results = await asyncio.gather(*scores, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TrajectoryError):
                raise result
        raise_first([result for result in results if isinstance(result, TrajectoryError)])

    async def _score_part(self, name: str, group: Group) -> None:
        try:
            rewarder = self._named(name)
        except UserError as error:
            # The data source refuses such rows, but a user's function may have changed the metadata.
            raise TrajectoryError(f"group {group.feed_index}: {error}", list(group)) from error
        await rewarder.score(group)


def _plugin(config: RunConfig, args: Any, reward: Reward, *, name: str, key: str | None) -> Rewarder:
    """Return the rewarder of a plug-in, which runs where the plug-in declares."""
    settings = values_of(config, reward.settings)
    function: Any
    if reward.runs_in in (RunsIn.GRADER, RunsIn.CHILD):
        function = _confined(config, reward, settings)
    else:
        with errors_of(reward, "open"):
            function = reward.open(SimpleNamespace(**settings))
    asks_server = reward.runs_in is RunsIn.SERVER
    return Rewarder(
        function,
        args,
        name=f"{name} ({reward.origin})" if reward.origin is not None and REWARDS.has(name) else name,
        # Processes and requests to a server have their own deadlines: a deadline here would count the time in the
        # queue and in retries.
        timeout_seconds=config.rollout.reward_timeout_seconds if reward.runs_in is RunsIn.THREAD else None,
        reward_key=key,
        # A server gets the whole response in each case, as in slime.
        boxed=name.startswith(BOXED) and not asks_server,
        reads_box=reward.reads_box,
        changes_samples=False,
        wrong=reward.wrong,
        release=function.close if asks_server else None,
    )


def _confined(config: RunConfig, reward: Reward, settings: dict[str, Any]) -> GraderPool:
    """Return the processes of a reward that parses or evaluates text of the model. They receive only `settings`."""
    rollout = config.rollout
    return GraderPool(
        path=reward.path,
        setting="rm_type",
        args=settings,
        processes=rollout.reward_processes,
        timeout_seconds=rollout.reward_timeout_seconds,
        memory_bytes=int(rollout.reward_memory_gb * 1e9),
        evaluates=reward.runs_in is RunsIn.CHILD,
        allow_unconfined=rollout.allow_unconfined_rewards,
    )


def _custom(config: RunConfig, args: Any, path: str, key: str | None) -> Rewarder:
    """Return the rewarder of the user's function at `path`, which runs here or in processes with this environment."""
    rollout = config.rollout
    function: Any = load_function(path, setting="custom_rm_path")
    timeout: float | None = rollout.reward_timeout_seconds
    if rollout.custom_rm_isolated:
        timeout = None  # the processes have their own deadlines
        function = GraderPool(
            path=path,
            setting="custom_rm_path",
            args=values_of(config),
            processes=rollout.reward_processes,
            timeout_seconds=rollout.reward_timeout_seconds,
            whole_groups=rollout.group_rm,
            is_async=is_async(function),
        )
    return Rewarder(
        function,
        args,
        name=path,
        timeout_seconds=timeout,
        reward_key=key,
        whole_groups=rollout.group_rm,
        wrong=0.0 if key is None else {key: 0.0},
    )
