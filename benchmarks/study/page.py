"""The text of `docs/explanation/staleness.md`, from the stored runs of the study."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from benchmarks.study.runs import (
    AGAIN,
    CLAIM,
    FRESH,
    KEY_LIMITS,
    LEAST_SHARE,
    RATES,
    SEEDS,
    STALE,
    STALE_FLAGS,
    WINDOW,
    Cell,
    Outcome,
    cells,
    limit_of,
)

LIMITS = (1, 2, 4, 8, 16)
VARIANTS = ("none", "default", "recommended")
IN_TURNS, SHIPPED = ("in turns", "default"), ("limit 2", "default")
STALE_BASES = tuple(("in turns", variant) for variant in FRESH)
"""What the runs with really stale samples are compared with."""
WAIT_BASES = tuple(("in turns", variant) for variant in AGAIN)
"""What the runs whose tools wait are compared with."""
SUMMARIZED = {
    "default": "the default correction",
    "recommended": "`sequence`",
    "decoupled": "`decoupled`",
    "naive": "`--use-rollout-logprobs`",
    **{name: name for name in RATES},
}
"""The variants that the first paragraph names."""
INTRODUCTION = """\
# What staleness costs

<!-- `make study` writes this page and its plots. Change the text in benchmarks/study/page.py. -->

{summary}A fully asynchronous run trains on samples that older weights generated. This page shows what that costs,
measured on the job of `make run-tiny` (`configs/arithmetic-cpu.yaml`): a tiny model adds three numbers on the real
stack. Every run trains the same number of samples. Accuracy is greedy, on 512 held-out problems. `train.py` generates,
trains and publishes in turns. Its samples are fresh, except for the surplus of over-sampling, which the next batch
uses. `make study` repeats the measurement. It continues where it was interrupted, and the results are in
`benchmarks/results/study/`.
"""


FEW = ("no pair", "one seed", "two seeds")
"""By their number, what is said of values that are too few for an interval."""

Runs = dict[tuple[str, str], dict[int, Outcome]]
"""Runs by schedule and variant, then by seed."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of a sample and the half width of its 95 % confidence interval (Student's t)."""

    mean: float
    half: float
    size: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The half width is infinite for fewer than three values: the distance of two says nothing about others."""
        size = len(values)
        if size < len(FEW):
            return cls(fmean(values or [0.0]), float("inf"), size)
        return cls(fmean(values), float(stdtrit(size - 1, 0.975)) * stdev(values) / size**0.5, size)

    @property
    def holds_zero(self) -> bool:
        return abs(self.mean) <= self.half

    def shown(self, mean: str) -> str:
        """The formatted mean with its interval, or with the number of seeds."""
        if self.half < float("inf"):
            return f"{mean} ± {self.half:.{len(mean.partition('.')[2])}f}"
        return f"{mean} ({FEW[self.size]})" if self.size else FEW[0]

    def __str__(self) -> str:
        return self.shown(f"{self.mean:+.3f}")


def page(runs: Runs, waits: Runs, simulated: Mapping[str, float]) -> str:
    """The page in Markdown. `runs` holds at least one run in turns, and `waits` those of the job whose tools wait.

    `simulated` has the speed-up over training in turns that the simulator predicts for each schedule of `waits`.
    """
    sections = (
        INTRODUCTION.format(summary=_summary(runs, waits)),
        _really_stale(runs),
        _waits(waits, simulated),
        _keys(waits),
        _same_samples(runs),
        _limits(runs),
        _signals(runs),
    )
    return "\n".join(section for section in sections if section)


def by_name(stored: Iterable[tuple[Cell, Outcome]]) -> Runs:
    runs: Runs = {}
    for cell, outcome in stored:
        runs.setdefault((cell.schedule, cell.variant), {})[cell.seed] = outcome
    return runs


def difference(runs: Runs, name: tuple[str, str]) -> Interval:
    """Accuracy of `name` minus accuracy in turns at the same learning rate, over the pairs of `_pairs`."""
    bases: Sequence[tuple[str, str]] = STALE_BASES if name[1].startswith(STALE) else (IN_TURNS,)
    if name[1].removeprefix(STALE) in RATES:
        bases = [("in turns", name[1])]
    return _gain([pair for base in bases if base in runs for pair in _pairs(runs[base], runs[name])])


def _stale(runs: Runs, limit: int, variant: str) -> dict[int, Outcome]:
    """The runs with really stale samples, by seed."""
    return runs.get((f"limit {limit}", STALE + variant), {})


def _gain(pairs: Iterable[tuple[Outcome, Outcome]]) -> Interval:
    """Accuracy of the second run of each pair minus that of the first."""
    return Interval.of([run.after - base.after for base, run in pairs])


def seconds_to(accuracy: float, runs: Iterable[Outcome]) -> float | None:
    """When the mean accuracy of `runs` first reaches `accuracy`, interpolated; None if it never does."""
    curves = [run.curve for run in runs]
    return _reached(
        accuracy,
        [
            (fmean(point[1] for point in points), fmean(point[2] for point in points))
            for points in zip(*curves, strict=True)
        ],
    )


def repeats(runs: Runs, schedule: str) -> list[Outcome]:
    """The runs of `schedule` with the seed that was repeated."""
    repeated = [outcome for name, found in runs.items() for outcome in found.values() if _repeats(name, schedule)]
    return [runs[schedule, "default"][SEEDS[0]], *repeated] if repeated else []


def _repeats(name: tuple[str, str], schedule: str) -> bool:
    return name[0] == schedule and name[1].startswith("repeat ")


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" (SD {stdev(values):.3f})" if len(values) > 1 else "")


def _row(runs: Runs, name: tuple[str, str]) -> str:
    found = list(runs[name].values())
    accuracies = [run.after for run in found]
    gains = [run.after - run.before for run in found]
    against = "" if name == IN_TURNS else str(difference(runs, name))
    numbers = [str(len(found)), _spread(accuracies), f"{min(gains):.3f} to {max(gains):.3f}", against]
    numbers += [f"{fmean(run.staleness for run in found):.2f}", f"{fmean(run.seconds for run in found):.0f}"]
    return f"| {', '.join(name)} | " + " | ".join(numbers) + " |"


def _table(runs: Runs, names: Iterable[tuple[str, str]]) -> str:
    head = (
        "| run | seeds | accuracy | gain, lowest to highest | difference to in turns, 95 % | mean staleness | seconds |"
    )
    return "\n".join([head, "|---" * 7 + "|", *(_row(runs, name) for name in names if name in runs)])


def _summary(runs: Runs, waits: Runs) -> str:
    """Which limit to choose and what it costs, as far as that was measured."""
    sentences = []
    waiting = {limit: pairs for limit in LIMITS if (pairs := _wait_pairs(waits, (f"limit {limit}", "default")))}
    if waiting:
        shown = [
            f"{_gain(pairs)} with a limit of {limit} ({_faster(pairs)} times as fast)"
            for limit, pairs in waiting.items()
        ]
        sentences.append(f"- Samples that wait for tools: {'; '.join(shown)}.")
    for limit in LIMITS:
        differences = {
            flags: difference(runs, name)
            for variant, flags in SUMMARIZED.items()
            if (name := (f"limit {limit}", STALE + variant)) in runs
        }
        # One seed says nothing about a difference.
        shown = [
            f"{found if found.holds_zero else f'**{found}**'} with {flags}"
            for flags, found in differences.items()
            if found.size > 1
        ]
        if shown:
            ages = [run.staleness for variant in SUMMARIZED for run in _stale(runs, limit, variant).values()]
            sentences.append(f"- Limit {limit}, samples {fmean(ages):.1f} versions old on average: {', '.join(shown)}.")
    sentences += _collapses(runs)
    if not sentences:
        return ""
    return (
        "If samples wait for tools, sandboxes or graders, choose a limit of 8 and twice as many groups in flight "
        "(`--over-sampling-batch-size`) as a batch has; otherwise keep the limit of 2. Keep the default correction; "
        "with `gspo` and `gmpo`, set `--off-policy-correction sequence`. Do not raise the learning rate: a rate with "
        "which training in turns learns may be too high for stale samples. The limit decides how long one slow sample "
        "may hold up training. The number of groups in flight decides how old samples are: with N groups in flight and "
        "batches of P, they are on average about N / P versions old under any limit that allows so many groups. "
        "Measured on a tiny model, these are the differences in accuracy to training in turns with as many samples and "
        "the same learning rate (**bold** if the 95 % interval excludes 0):\n\n" + "\n".join(sentences) + "\n\n"
    )


def _collapses(runs: Runs) -> Iterator[str]:
    """In how many runs with really stale samples the reward collapsed, for each limit."""
    for limit in LIMITS:
        shown = []
        for variant, flags in STALE_FLAGS.items():
            found = _stale(runs, limit, variant).values()
            if collapsed := sum(_collapse(run) is not None for run in found):
                shown.append(f"in {collapsed} of {len(found)} runs with `{' '.join(flags)}`")
        if shown:
            yield f"- Limit {limit}: the reward collapsed {', '.join(shown)}."


def _really_stale(runs: Runs) -> str:
    planned = dict.fromkeys((cell.schedule, cell.variant) for cell in cells(["stale"], 1))
    names = sorted((name for name in planned if name in runs), key=lambda name: limit_of(name[0]))
    if not set(STALE_BASES) & runs.keys():
        return ""
    return f"""
## When samples are really stale

In these runs, a hook waits before each reward, as a slow grader does, and many groups are in flight: from 64 under a
limit of 1 to 896 under a limit of 16, with batches of 64 (`benchmarks/study/slow_grader.py`). A row ends with the first
run whose samples are on average less than {LEAST_SHARE:.0%} as old as the limit allows, which happens on a slow
machine. The tables below have the same job without the waits, where generation is the bottleneck and the mean staleness
is about 1 at every limit. The runs in turns of this table have no surplus of over-sampling, so that their staleness is
0. The warm start of a seed differs between machines. A difference is that of runs with one seed and one warm start;
the runs in turns were repeated on each machine. Names are those of the [table without waits](#limits-and-corrections).
`gspo` and `gmpo` have one policy ratio per sequence, and here also one weight (`--off-policy-correction sequence`).
`gspo, tis` and `gmpo, tis` have the default correction, which weights each token by itself. All objectives average the
loss over tokens, and a batch is one step, so their clip ranges have no effect.

| run | seeds | accuracy | difference to in turns, 95 % | mean staleness | oldest | seconds |
{"|---" * 7}|
{chr(10).join(_stale_row(runs, name) for name in names)}

`make study ARGS="stale"` runs {len(planned)} such cells. Cells that have not been run yet: {len(planned) - len(names)}.

{_claim(runs)}{_warnings([run for name in names for run in runs[name].values()])}
"""


def _claim(runs: Runs) -> str:
    """How much better AReaL's decoupled objective is than the naive one with stale samples."""
    sentences = []
    for limit in reversed(LIMITS):
        naive, decoupled = (_stale(runs, limit, name) for name in CLAIM)
        if (found := _gain(_pairs(naive, decoupled))).size:
            age = fmean(run.staleness for run in naive.values())
            sentences.append(f"{found} with samples that were {age:.1f} versions old on average")
    if not sentences:
        return ""
    return (
        "AReaL (arXiv 2505.24298) reports that an objective which clips around the policy before the step, and weights "
        "tokens by their ratio to the policy that sampled (`decoupled`), learns from stale samples from which one that "
        "clips around the policy that sampled does not (`naive`: `--use-rollout-logprobs --off-policy-correction "
        f"none`). Here the accuracy with `decoupled` minus that with `naive` was {', and '.join(sentences)}.\n\n"
    )


def _warnings(found: Sequence[Outcome]) -> str:
    """How many collapses a collapse warning announced in the runs, and how often it was wrong."""
    ends = [(run.announced, _collapse(run)) for run in found]
    collapses = [(announced, end) for announced, end in ends if end is not None]
    foreseen = sum(bool(announced) and announced[0] < end for announced, end in collapses)
    wrong = sum(bool(announced) for announced, end in ends if end is None)
    return (
        f"The reward collapsed in {len(collapses)} of these {len(found)} runs: its mean over {WINDOW} batches fell "
        f"below half of the highest such mean. These runs had an earlier collapse warning: an effective sample size "
        f"below half of its usual value, or below 0.8 of it with spikes of the gradient norm. It announced {foreseen} "
        f"of these collapses before they had happened, and it appeared in {wrong} of the other "
        f"{len(found) - len(collapses)} runs. [The present warning](../how-to/monitor.md#if-a-collapse-is-announced) "
        f"looks at the reward instead of the gradient norm."
    )


def _collapse(run: Outcome) -> int | None:
    """The number of batches after which the reward has collapsed; None if it never does."""
    rewards = [point["reward"] for point in run.points]
    highest = itertools.accumulate(rewards, max)
    fallen = (reward < before / 2 for reward, before in zip(rewards, highest, strict=True))
    return next((WINDOW * number for number, is_low in enumerate(fallen, 1) if is_low), None)


def _stale_row(runs: Runs, name: tuple[str, str]) -> str:
    title = ", ".join(name).replace(STALE, "")
    found = list(runs[name].values())
    against = "" if name[0] == "in turns" else str(difference(runs, name))
    numbers = [str(len(found)), _spread([run.after for run in found]), against]
    numbers += [f"{fmean(run.staleness for run in found):.2f}", str(max(run.max_staleness for run in found))]
    return f"| {title} | " + " | ".join([*numbers, f"{fmean(run.seconds for run in found):.0f}"]) + " |"


def _waits(runs: Runs, simulated: Mapping[str, float]) -> str:
    if IN_TURNS not in runs:
        return ""
    names = (*WAIT_BASES, *((f"limit {limit}", "default") for limit in LIMITS))
    rows = [_wait_row(runs, name, simulated) for name in names if name in runs]
    loads = [run.load for found in runs.values() for run in found.values()]
    return f"""
## Tools that wait

`make run-agents` trains an agent with a calculator that takes the time of a real sandbox: half a second in the median,
and up to 20 seconds (`configs/slow-tools-cpu.yaml`). Each batch has 16 groups of four samples, and there are 20
batches. In turns, a batch waits for the slowest of its 64 calls. Asynchronous runs keep 32 groups in flight. By
Little's law, a group is then trained about two versions after its first token under each limit. The limit decides how
long training can go on beside one slow call.

Evaluations do not count as time of the runs in turns. In asynchronous runs they take place beside training, and an
accuracy is reached when its evaluation has ended. Two runs shared a machine at a time, and the mean load at their
start was {fmean(loads):.1f} processes. Ratios and differences are those of runs with the same seed on the same machine,
with their 95 % intervals. Runs in turns were repeated on each machine.

| schedule | seeds | accuracy | difference | mean age | oldest | seconds | speed-up | simulated | 95 % of the gain |
{"|---" * 10}|
{chr(10).join(rows)}

The speed-up is that over runs in turns. `make sim ARGS="waiting"` predicts the simulated one for [100
batches](scheduling.md#samples-that-wait-for-tools). The last column says how many times sooner a run reaches 95 %
of the gain in accuracy of the run in turns, among the runs that reach it with the same number of samples.
"""


def _keys(runs: Runs) -> str:
    names = [name for limit in KEY_LIMITS if (name := ("limit 8", f"K = {limit}")) in runs]
    if len(names) < 2:
        return ""
    rows = []
    for name in names:
        found = list(runs[name].values())
        pairs = _pairs(runs[names[0]], runs[name]) if name != names[0] else []
        columns = [name[1].removeprefix("K = "), str(len(found)), _spread([run.after for run in found])]
        columns.append(str(_gain(pairs)) if pairs else "")
        columns.append(_ratio([zero.seconds / run.seconds for zero, run in pairs]))
        rows.append("| " + " | ".join([*columns, f"{fmean(run.staleness for run in found):.2f}"]) + " |")
    return f"""
## Keys and values of older versions

The same job with [`--max-kv-staleness K`](weights.md#keys-and-values-of-older-versions) and a limit of 8, or without a
limit if K is -1. Differences and ratios are to the runs with K = 0 and the same seed, on the same machine. The
staleness counts the oldest keys of a group. Prompts and answers of this job are short, so computing them again costs
little.

| K | seeds | accuracy | difference to K = 0 | times as fast | mean staleness |
{"|---" * 6}|
{chr(10).join(rows)}
"""


def _wait_row(runs: Runs, name: tuple[str, str], simulated: Mapping[str, float]) -> str:
    found, in_turns = list(runs[name].values()), name in WAIT_BASES
    columns = [str(len(found)), _spread([run.after for run in found])]
    pairs = [] if in_turns else _wait_pairs(runs, name)
    columns.append(str(_gain(pairs)) if pairs else "")
    columns += [f"{fmean(run.staleness for run in found):.2f}", str(max(run.max_staleness for run in found))]
    columns.append(f"{fmean(_training_seconds(run) if in_turns else run.seconds for run in found):.0f}")
    columns.append(_faster(pairs))
    columns.append(f"{simulated[name[0]]:.2f}" if name[0] in simulated else "")
    sooner = []
    for base, run in pairs:
        target = base.before + 0.95 * (base.after - base.before)
        waited = list(itertools.accumulate([0.0, *base.evaluation_seconds[1:]]))
        first = _reached(
            target, [(time - held, score) for (_, time, score), held in zip(base.curve, waited, strict=True)]
        )
        second = _reached(target, [(time, score) for _, time, score in run.curve])
        if first is not None and second is not None:
            sooner.append(first / second)
    columns.append(_ratio(sooner) + (f" ({len(sooner)} of {len(pairs)})" if len(sooner) < len(pairs) else ""))
    title = ", ".join(name).replace(f", {AGAIN[0]}", "")
    return f"| {title} | " + " | ".join(columns) + " |"


def _wait_pairs(runs: Runs, name: tuple[str, str]) -> list[tuple[Outcome, Outcome]]:
    """Runs in turns and runs of `name` whose tools wait, with one seed and one warm start on one machine."""
    bases = [runs[base] for base in WAIT_BASES if base in runs] if name in runs else []
    pairs = [pair for base in bases for pair in _pairs(base, runs[name])]
    return [(base, run) for base, run in pairs if base.stamp.get("machine") == run.stamp.get("machine")]


def _faster(pairs: Sequence[tuple[Outcome, Outcome]]) -> str:
    """How many times as fast as the run in turns the second run of each pair is."""
    return _ratio([_training_seconds(base) / run.seconds for base, run in pairs])


def _pairs(turns: dict[int, Outcome], found: dict[int, Outcome]) -> list[tuple[Outcome, Outcome]]:
    """The runs with one seed and one warm start.

    Another machine may make another model of the same seed, which its accuracy before training shows.
    """
    return [(turns[seed], run) for seed, run in found.items() if seed in turns and turns[seed].before == run.before]


def _training_seconds(run: Outcome) -> float:
    """The time of a run in turns without its evaluations."""
    return run.seconds - sum(run.evaluation_seconds[1:-1])


def _ratio(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = Interval.of(values)
    return found.shown(f"{found.mean:.2f}")


def _reached(accuracy: float, points: Sequence[tuple[float, float]]) -> float | None:
    """When `(seconds, accuracy)` points first reach an accuracy, interpolated; None if they never do."""
    for (earlier, low), (later, high) in itertools.pairwise(points):
        if low < accuracy <= high:
            return earlier + (later - earlier) * (accuracy - low) / (high - low)
    return None


def _same_samples(runs: Runs) -> str:
    if SHIPPED not in runs:
        return ""
    return f"""
## The shipped limit of 2, at the same number of samples

The runs of this section and the next one divided the advantages of a group by the standard deviation with n in its
denominator. GRPO now takes n - 1, as slime does, so that the advantages of a group of four are 13 % smaller. Adam's
step does not depend on their scale, except where gradients are clipped.

{_table(runs, [IN_TURNS, SHIPPED, ("limit 2", "shuffled")])}

{_repeated(runs)}{_times(runs)} Times depend on the machine and on what else runs on it.

![Accuracy over samples and over time](staleness-curves.svg)
"""


def _repeated(runs: Runs) -> str:
    """How much runs of one seed differ."""
    sentences = [
        f"{len(found)} runs {words} with seed {SEEDS[0]} end at {_spread([run.after for run in found])}."
        for schedule, words in (("in turns", "in turns"), ("limit 2", "with a limit of 2"))
        if (found := repeats(runs, schedule))
    ]
    if not sentences:
        return ""
    return " ".join(["Runs of one seed differ too: answers arrive in another order.", *sentences]) + "\n\n"


def _times(runs: Runs) -> str:
    """Compare the times of pairs of one commit: a stored run may be from before the code became faster."""
    turns, shipped = runs[IN_TURNS], runs[SHIPPED]
    pairs = [(turns[seed], shipped[seed]) for seed in turns if seed in shipped]
    # The first repeated run is that of the seed above.
    pairs += list(zip(repeats(runs, "in turns")[1:], repeats(runs, "limit 2")[1:], strict=False))
    by_commit: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for pair in pairs:
        if pair[0].stamp["commit"] == pair[1].stamp["commit"]:
            by_commit.setdefault(pair[0].stamp["commit"], []).append(pair)
    if not by_commit:
        return "No two runs of a pair are of the same commit, so no times are compared."
    commit, found = max(by_commit.items(), key=lambda item: len(item[1]))
    final = fmean(one.after for one, _ in found)
    whole = fmean(one.seconds for one, _ in found)
    same_samples = fmean(other.seconds for _, other in found)
    load = fmean(run.load for pair in found for run in pair)
    text = (
        f"Times are of the {len(found)} pairs at commit {commit[:7]}, which started at a mean load of {load:.1f} "
        f"processes; an idle machine has less than 1. `train.py` needs {whole:.0f} s from the first "
        f"batch to the last step, and the asynchronous run {same_samples:.0f} s: {whole / same_samples:.2f} times as "
        "fast. "
    )
    reached = seconds_to(final, [other for _, other in found])
    if reached is None:
        return text + f"Its mean accuracy does not reach that of `train.py` at the end ({final:.3f})."
    return text + (
        f"Its mean accuracy reaches that of `train.py` at the end ({final:.3f}) after {reached:.0f} s, "
        f"{whole / reached:.2f} times sooner."
    )


def compares_limits(runs: Runs) -> bool:
    """Whether there are runs with other limits or corrections than the shipped ones."""
    return any(name != SHIPPED for name in runs if name[0].startswith("limit") and name[1] in VARIANTS)


def _limits(runs: Runs) -> str:
    names = [(f"limit {limit}", variant) for limit in LIMITS for variant in VARIANTS]
    others = sorted(
        name
        for name in runs
        if name not in {IN_TURNS, *names} and name[1] != "shuffled" and not name[1].startswith(("repeat ", STALE))
    )
    if not compares_limits(runs):
        return ""
    return f"""
## Limits and corrections

`default` is `--off-policy-correction tis`, `recommended` is `--off-policy-correction sequence`, and the other names are
values of `--off-policy-correction` or `--policy-objective` (see [Learner](learner.md)). If the mean staleness is far
below the limit, generation was slower than training, and the limit had no effect.

{_table(runs, [*names, *others])}

![Accuracy by limit](staleness-limits.svg)

{_advice(runs)}
"""


def _advice(runs: Runs) -> str:
    sentences = []
    for variant, flags in (
        ("default", "the default correction"),
        ("recommended", "`--off-policy-correction sequence`"),
    ):
        # One seed has no interval, so it shows nothing.
        measured = [limit for limit in LIMITS if len(runs.get((f"limit {limit}", variant), {})) > 1]
        if not measured:
            continue
        differences = {limit: difference(runs, (f"limit {limit}", variant)) for limit in measured}
        free = [str(limit) for limit, found in differences.items() if found.holds_zero]
        costs = [f"{found} at limit {limit}" for limit, found in differences.items() if not found.holds_zero]
        if free:
            sentences.append(f"With {flags}, no difference to training in turns was found at limit {', '.join(free)}.")
        if costs:
            sentences.append(f"With {flags}, accuracy differs from training in turns by {', '.join(costs)}.")
    return "**Advice.** " + " ".join(sentences) if sentences else ""


def _signals(runs: Runs) -> str:
    deep = [name for name in runs if name[0].startswith("limit") and name[1] in VARIANTS]
    if not deep:
        return ""
    return """
## What stale samples look like to the learner

The importance weight of a token compares its probability now with its probability when it was sampled. The effective
sample size (ESS) is the share of tokens that remains after weighting: 1 means that old and new policy agree. Both are
shown by age. The gradient norm belongs to a whole optimizer step, so it is shown over the mean age of the batch.

![ESS, log-probability gap and gradient norm by age](staleness-signals.svg)
"""
