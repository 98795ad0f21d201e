"""What the dashboards show. `$run` is chosen above each of them."""

from __future__ import annotations

from dashboards.panels import Dashboard, Panel, Row

RATE = "[$__rate_interval]"
CHOSEN = 'run=~"$run"'


def of(metric: str, *matches: str) -> str:
    """One of our metrics, of the runs chosen."""
    return f"miles_async_{metric}{{{', '.join((CHOSEN, *matches))}}}"


def rate(metric: str, *matches: str) -> str:
    return f"rate({of(metric, *matches)}{RATE})"


def rule(name: str, *matches: str) -> str:
    """A recording rule, of the runs chosen."""
    return f"miles_async:{name}{{{', '.join((CHOSEN, *matches))}}}"


def grouping(always: str, further: str) -> str:
    return f"{always}, {further}" if further else always


def mean(histogram: str, by: str = "", *matches: str) -> str:
    group = f"sum by ({grouping('run', by)})"
    return f"{group} ({rate(histogram + '_sum', *matches)}) / {group} ({rate(histogram + '_count', *matches)} > 0)"


def quantile(q: float, histogram: str, by: str = "", *matches: str) -> str:
    return f"histogram_quantile({q}, sum by ({grouping('run, le', by)}) ({rate(histogram + '_bucket', *matches)}))"


def buckets(histogram: str, *matches: str) -> str:
    return f"sum by (le) (increase({of(histogram + '_bucket', *matches)}{RATE}))"


def theirs(metric: str) -> str:
    """A metric of another system, of the runs chosen."""
    return f"{metric}{{{CHOSEN}}}"


def engine(metric: str) -> str:
    """One of SGLang's: prometheus-client makes the colon an underscore for a Prometheus that asks for OpenMetrics."""
    return f'{{__name__=~"sglang[:_]{metric}", {CHOSEN}}}'


VERDICT = Panel(
    "Verdict",
    "What holds the run back, over the last seconds. Its knob is in the log and in summary.json.",
    "none",
    {"{{verdict}}": of("verdict") + " == 1"},
    "name",
)
TRAINER_TIME = Panel(
    "Where the trainer's time goes",
    "Everything but `step` is waiting: the widest band is the bottleneck.",
    "percentunit",
    {"{{doing}}": rule("trainer_share:rate1m")},
    "stack",
)
IDLE = Panel(
    "Idle",
    "Both near zero: generation and training overlap fully.",
    "percentunit",
    {"learner": rule("learner_idle:rate1m"), "engines": rule("engine_idle:rate1m")},
)
QUEUE = Panel(
    "Queue",
    "At zero, rollout is the bottleneck: scale rollout capacity or lower per-sample generation cost. At its "
    "capacity, training is.",
    "short",
    {"queued": of("queue_depth_groups"), "held back by the window": of("blocked_groups")},
)
TRAINED_STALENESS = Panel(
    "Staleness of trained groups",
    "Versions. A quality signal, not only one of speed.",
    "short",
    {
        "mean": mean("staleness_versions", "", 'groups="trained"'),
        "p95": quantile(0.95, "staleness_versions", "", 'groups="trained"'),
        "limit": of("staleness_limit_versions"),
    },
)
REWARD = Panel(
    "Reward",
    "Mean of the last trained batch, and of the data sets.",
    "none",
    {"trained": of("step_reward"), "{{name}}": of("eval_reward")},
)

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    "The first row answers: what is the bottleneck?",
    (
        Row("What is the bottleneck", (VERDICT, TRAINER_TIME, IDLE)),
        Row(
            "Does it learn",
            (
                REWARD,
                Panel("Batches", "Trained since the start.", "short", {"batches": of("rollout_batches")}),
                Panel(
                    "Accuracy",
                    "Share of samples with the full reward.",
                    "percentunit",
                    {"{{name}}": of("eval_accuracy_ratio")},
                ),
            ),
        ),
        Row(
            "How fast",
            (
                Panel("Groups trained per second", "", "short", {"groups/s": rule("trained_groups:rate1m")}),
                Panel(
                    "Tokens trained per second",
                    "Prompt and response.",
                    "short",
                    {"tokens/s": rule("trained_tokens:rate1m")},
                ),
                QUEUE,
            ),
        ),
        Row(
            "Does it move",
            (
                Panel(
                    "Seconds without progress",
                    "A group queued, a step, a publish or an evaluation is progress.",
                    "s",
                    {"since": of("since_progress_seconds")},
                ),
                Panel(
                    "Silent processes",
                    "Seconds for which a process has not answered.",
                    "s",
                    {"{{name}}": of("process_silent_seconds")},
                ),
                TRAINED_STALENESS,
            ),
        ),
    ),
)

QUEUE_AND_STALENESS = Dashboard(
    "queue-staleness",
    "Queue and staleness",
    "How much is ready, how old it is, and why.",
    (
        Row(
            "Queue",
            (
                QUEUE,
                Panel("Fill", "Of the queue's capacity.", "percentunit", {"fill": rule("queue_fill:ratio")}),
                Panel(
                    "Trainer's wait per batch",
                    "From asking for a batch to having it.",
                    "s",
                    {"mean": mean("drain_wait_seconds"), "p95": quantile(0.95, "drain_wait_seconds")},
                ),
            ),
        ),
        Row(
            "Staleness",
            (
                TRAINED_STALENESS,
                Panel(
                    "Versions behind, by what became of the group",
                    "As groups were queued, trained or recycled.",
                    "short",
                    {"{{groups}}": mean("staleness_versions", "groups")},
                ),
                Panel(
                    "Seconds since generation began",
                    "The same groups.",
                    "s",
                    {"{{groups}}": mean("staleness_seconds", "groups")},
                ),
                Panel(
                    "Distribution of trained groups",
                    "Versions behind as their step began.",
                    "short",
                    {"{{le}}": buckets("staleness_versions", 'groups="trained"')},
                    "heatmap",
                ),
                Panel(
                    "What staleness is made of",
                    "Versions; the parts add up. publish_lag: the engines were behind when the "
                    "group began. sampling: versions came while it was generated. waiting: window and queue.",
                    "short",
                    {"{{part}}": mean("staleness_part_versions", "part")},
                    "stack",
                ),
                Panel(
                    "The same in seconds",
                    "Faster publishes shorten publish_lag, more engines sampling, a smaller queue waiting.",
                    "s",
                    {"{{part}}": mean("staleness_part_seconds", "part")},
                    "stack",
                ),
            ),
        ),
        Row(
            "Lost work",
            (
                Panel(
                    "Recycled share",
                    "Of groups that ended: too stale to train. Lower over-sampling, publish faster, or raise "
                    "--max-weight-staleness.",
                    "percentunit",
                    {"recycled": rule("recycled_share:rate5m")},
                ),
                Panel(
                    "Groups ended",
                    "Per second, by outcome and reason.",
                    "short",
                    {"{{outcome}} {{reason}}": f"sum by (run, outcome, reason) ({rate('ended_groups_total')})"},
                    "stack",
                ),
            ),
        ),
    ),
)

WINDOW_AND_ADMISSION = Dashboard(
    "window-admission",
    "Window and admission",
    "Who may start, and who may be collected.",
    (
        Row(
            "Window",
            (
                Panel(
                    "Age of the head",
                    "A head that stays holds everybody up: --head-deadline-seconds ends it.",
                    "s",
                    {"head": of("head_age_seconds"), "oldest at the engines": of("oldest_request_seconds")},
                ),
                Panel(
                    "Held back",
                    "Finished groups beyond the window, and its width.",
                    "short",
                    {"held back": of("blocked_groups"), "W": of("window_groups")},
                ),
                Panel(
                    "Groups by state",
                    "Every live group is in exactly one.",
                    "short",
                    {"{{state}}": of("groups")},
                    "stack",
                ),
            ),
        ),
        Row(
            "Admission",
            (
                Panel(
                    "Admission waits for",
                    "Share of the time. in_flight is as it should be; slots and queue mean that training is behind.",
                    "percentunit",
                    {"{{cause}}": rule("admission_blocked:rate1m")},
                    "stack",
                ),
                Panel(
                    "Slots",
                    "Groups between admission and live weights.",
                    "short",
                    {"held": of("held_slots_groups"), "B": of("slots_groups")},
                ),
                Panel(
                    "In flight",
                    "",
                    "short",
                    {
                        "groups": of("in_flight_groups"),
                        "requests": of("in_flight_requests"),
                        "waiting for reward": of("rewarding_groups"),
                    },
                ),
            ),
        ),
        Row(
            "Groups",
            (
                Panel(
                    "Generation",
                    "First request to last token of a group.",
                    "s",
                    {"p50": quantile(0.5, "generation_seconds"), "p95": quantile(0.95, "generation_seconds")},
                ),
                Panel(
                    "Reward",
                    "Last token to reward.",
                    "s",
                    {"p50": quantile(0.5, "reward_seconds"), "p95": quantile(0.95, "reward_seconds")},
                ),
                Panel(
                    "Response tokens of a group",
                    "And the share of samples that were cut.",
                    "short",
                    {"mean": mean("group_response_tokens"), "truncated share": rule("truncated_share:rate1m")},
                ),
            ),
        ),
    ),
)

ENGINES = Dashboard(
    "engines-router",
    "Engines and router",
    "SGLang's and the router's own metrics, beside what the pipeline knows of them.",
    (
        Row(
            "What the pipeline knows",
            (
                Panel("Routed", "1 while requests may reach the engine.", "short", {"{{engine}}": of("engine_routed")}),
                Panel("Requests at the engines", "", "short", {"requests": of("in_flight_requests")}),
                Panel(
                    "Engines idle",
                    "Share of the time without any request.",
                    "percentunit",
                    {"idle": rule("engine_idle:rate1m")},
                ),
            ),
        ),
        Row(
            "What the engines say",
            (
                Panel(
                    "Running and waiting requests",
                    "",
                    "short",
                    {
                        "{{process}} running": engine("num_running_reqs"),
                        "{{process}} waiting": engine("num_queue_reqs"),
                    },
                ),
                Panel(
                    "KV cache in use",
                    "Near 1, requests are retracted: lower --sglang-server-concurrency.",
                    "percentunit",
                    {"{{process}}": engine("token_usage")},
                ),
                Panel(
                    "Generation",
                    "Tokens per second.",
                    "short",
                    {"{{process}}": f"sum by (run, process) (rate({engine('generation_tokens_total')}{RATE}))"},
                ),
            ),
        ),
        Row(
            "What the router says",
            (
                Panel(
                    "Requests",
                    "Per second.",
                    "short",
                    {"{{route}}": f"sum by (route) (rate({theirs('smg_router_requests_total')}{RATE}))"},
                ),
                Panel(
                    "Is it there",
                    "1 while Prometheus reaches the process.",
                    "short",
                    {"{{process}}": theirs("up")},
                ),
            ),
        ),
    ),
)

LEARNER = Dashboard(
    "learner",
    "Learner",
    "Steps, tokens, loss.",
    (
        Row(
            "Steps",
            (
                Panel(
                    "Step",
                    "Optimizer steps of one batch.",
                    "s",
                    {"mean": mean("step_seconds"), "p95": quantile(0.95, "step_seconds")},
                ),
                Panel(
                    "Tokens per second",
                    "Prompt and response tokens trained.",
                    "short",
                    {"tokens/s": rule("trained_tokens:rate1m")},
                ),
                Panel("Idle", "Share of the time outside steps.", "percentunit", {"idle": rule("learner_idle:rate1m")}),
            ),
        ),
        Row(
            "What it learns",
            (
                REWARD,
                Panel(
                    "Loss, gradient norm and the rest", "Of the last batch.", "none", {"{{name}}": of("step_metric")}
                ),
                Panel(
                    "Response tokens",
                    "Mean of the last trained batch.",
                    "short",
                    {"tokens": of("step_response_tokens")},
                ),
            ),
        ),
        Row(
            "What goes wrong",
            (
                Panel(
                    "Batches that were not finite",
                    "Look at their rewards, or lower --lr.",
                    "short",
                    {"batches": of("nonfinite_steps_total")},
                ),
                Panel(
                    "Event loop of the rollout worker",
                    "How late it wakes; tens of milliseconds are too many.",
                    "s",
                    {"p50": quantile(0.5, "loop_lag_seconds"), "p99": quantile(0.99, "loop_lag_seconds")},
                ),
            ),
        ),
    ),
)

WEIGHTS = Dashboard(
    "weights",
    "Weights",
    "Versions, and how long it takes to make one live.",
    (
        Row(
            "Versions",
            (
                Panel(
                    "Weight versions",
                    "Trainer, live, and each engine.",
                    "short",
                    {
                        "trainer": of("trainer_weight_version"),
                        "live": of("live_weight_version"),
                        "{{engine}}": of("engine_weight_version"),
                    },
                ),
                Panel(
                    "Engines behind the trainer",
                    "One is usual while a publish runs.",
                    "short",
                    {"{{engine}}": rule("version_lag")},
                ),
                Panel("Publishes per minute", "", "short", {"{{outcome}}": f"60 * {rate('publishes_total')}"}),
            ),
        ),
        Row(
            "Publishing",
            (
                Panel(
                    "Seconds by phase",
                    "staged: beside generation; paused: engines stand still. It is made of stopping, write (moves the "
                    "bytes), commit (drops old prefixes, announces the version) and resuming.",
                    "s",
                    {"{{phase}}": mean("publish_seconds", "phase")},
                ),
                Panel("Longest pauses", "", "s", {"p95": quantile(0.95, "publish_seconds", "", 'phase="paused"')}),
                Panel("Bytes per second", "", "Bps", {"written": rate("publish_bytes_total")}),
            ),
        ),
    ),
)

ALL = (OVERVIEW, QUEUE_AND_STALENESS, WINDOW_AND_ADMISSION, ENGINES, LEARNER, WEIGHTS)
