"""The contents of the Grafana dashboards. The user selects the runs to show with the variable `$run`."""

from __future__ import annotations

from dashboards.panels import Dashboard, Panel, Row

RATE = "[$__rate_interval]"
SELECTED_RUNS = 'run=~"$run"'


def of(metric: str, *matches: str) -> str:
    """Return the PromQL selector of one of our metrics, for the selected runs."""
    return f"miles_async_{metric}{{{', '.join((SELECTED_RUNS, *matches))}}}"


def rate(metric: str, *matches: str) -> str:
    return f"rate({of(metric, *matches)}{RATE})"


def rule(name: str, *matches: str) -> str:
    """Return the PromQL selector of a recording rule, for the selected runs."""
    return f"miles_async:{name}{{{', '.join((SELECTED_RUNS, *matches))}}}"


def labels_of(required: str, optional: str) -> str:
    return f"{required}, {optional}" if optional else required


def mean(histogram: str, by: str = "", *matches: str) -> str:
    group = f"sum by ({labels_of('run', by)})"
    return f"{group} ({rate(histogram + '_sum', *matches)}) / {group} ({rate(histogram + '_count', *matches)} > 0)"


def quantile(q: float, histogram: str, by: str = "", *matches: str) -> str:
    return f"histogram_quantile({q}, sum by ({labels_of('run, le', by)}) ({rate(histogram + '_bucket', *matches)}))"


def buckets(histogram: str, *matches: str) -> str:
    return f"sum by (le) (increase({of(histogram + '_bucket', *matches)}{RATE}))"


def external(metric: str) -> str:
    """Return the PromQL selector of another system's metric, for the selected runs."""
    return f"{metric}{{{SELECTED_RUNS}}}"


def engine(metric: str) -> str:
    """Return the PromQL selector of an SGLang metric, for the selected runs.

    prometheus-client replaces the colon in SGLang's names by an underscore if Prometheus requests OpenMetrics.
    """
    return f'{{__name__=~"sglang[:_]{metric}", {SELECTED_RUNS}}}'


VERDICT = Panel(
    "Verdict",
    "The bottleneck of the run during the last seconds. The log and summary.json name the setting to change.",
    "none",
    {"{{verdict}}": of("verdict") + " == 1"},
    "name",
)
TRAINER_TIME = Panel(
    "Where the learner's time goes",
    "Training is `step`. The widest of the other bands is the bottleneck.",
    "percentunit",
    {"{{doing}}": rule("trainer_share:rate1m")},
    "stack",
)
IDLE = Panel(
    "Idle",
    "If both are near zero, generation and training overlap fully.",
    "percentunit",
    {"learner": rule("learner_idle:rate1m"), "engines": rule("engine_idle:rate1m")},
)
QUEUE = Panel(
    "Queue",
    "If the queue is empty, rollout is the bottleneck: add rollout capacity or make samples cheaper to generate. If "
    "the queue is full, training is the bottleneck.",
    "short",
    {"queued": of("queue_depth_groups"), "held back by the window": of("blocked_groups")},
)
TRAINED_STALENESS = Panel(
    "Staleness of trained groups",
    "In weight versions. High staleness reduces the quality of training, not only its speed.",
    "short",
    {
        "mean": mean("staleness_versions", "", 'groups="trained"'),
        "p95": quantile(0.95, "staleness_versions", "", 'groups="trained"'),
        "limit": of("staleness_limit_versions"),
    },
)
REWARD = Panel(
    "Reward",
    "Mean reward of the last trained batch and of each evaluated data set.",
    "none",
    {"trained": of("step_reward"), "{{name}}": of("eval_reward")},
)

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    "The first row shows the bottleneck of the run.",
    (
        Row("Bottleneck", (VERDICT, TRAINER_TIME, IDLE)),
        Row(
            "Learning",
            (
                REWARD,
                Panel(
                    "Batches",
                    "Batches trained since the start of the run.",
                    "short",
                    {"batches": of("rollout_batches")},
                ),
                Panel(
                    "Accuracy",
                    "Fraction of samples with the full reward, by evaluated data set.",
                    "percentunit",
                    {"{{name}}": of("eval_accuracy_ratio")},
                ),
            ),
        ),
        Row(
            "Throughput",
            (
                Panel("Groups trained per second", "", "short", {"groups/s": rule("trained_groups:rate1m")}),
                Panel(
                    "Tokens trained per second",
                    "Prompt and response tokens.",
                    "short",
                    {"tokens/s": rule("trained_tokens:rate1m")},
                ),
                QUEUE,
            ),
        ),
        Row(
            "Progress",
            (
                Panel(
                    "Seconds without progress",
                    "Progress: a group is queued, a step or publish ends, the learner works, or an evaluation runs.",
                    "s",
                    {"since": of("since_progress_seconds")},
                ),
                Panel(
                    "Time left",
                    "Of the remaining batches at the pace so far. A rollback raises it.",
                    "s",
                    {"left": of("eta_seconds")},
                ),
                Panel(
                    "Restarts and undone batches",
                    "Processes that were replaced, and batches whose training was lost. Save more often "
                    "(--save-interval) to lose fewer.",
                    "short",
                    {"{{name}}": of("restarts_total"), "undone batches": of("undone_batches_total")},
                ),
                Panel(
                    "Unsaved batches",
                    "Batches that are in no checkpoint, and --save-interval.",
                    "short",
                    {"unsaved": of("unsaved_batches"), "interval": of("save_interval_batches")},
                ),
                Panel(
                    "Free disk space",
                    "Of the disks with the run folder, the store and the checkpoints.",
                    "bytes",
                    {"{{folder}}": of("disk_free_bytes")},
                ),
                Panel(
                    "Silent processes",
                    "Seconds since each process last answered; 0 while it answers.",
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
    "How many groups are ready to train, how stale they are, and why.",
    (
        Row(
            "Queue",
            (
                QUEUE,
                Panel(
                    "Queue fill", "Fraction of the queue's capacity.", "percentunit", {"fill": rule("queue_fill:ratio")}
                ),
                Panel(
                    "Learner's wait per batch",
                    "Time from requesting a batch to receiving it.",
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
                    "Staleness in versions",
                    "Staleness of groups when they were queued, trained or recycled.",
                    "short",
                    {"{{groups}}": mean("staleness_versions", "groups")},
                ),
                Panel(
                    "Staleness in seconds",
                    "Time since generation began, for groups when they were queued, trained or recycled.",
                    "s",
                    {"{{groups}}": mean("staleness_seconds", "groups")},
                ),
                Panel(
                    "Distribution of staleness",
                    "Staleness in versions of trained groups when their step began.",
                    "short",
                    {"{{le}}": buckets("staleness_versions", 'groups="trained"')},
                    "heatmap",
                ),
                Panel(
                    "Parts of staleness in versions",
                    "The parts add up. publish_lag: versions by which the engines were behind when the group began. "
                    "sampling: versions published while the group was generated. waiting: versions published while "
                    "the group waited for its reward, the window and the queue.",
                    "short",
                    {"{{part}}": mean("staleness_part_versions", "part")},
                    "stack",
                ),
                Panel(
                    "Age of the oldest keys",
                    "Versions by which the oldest keys and values of generated groups were older than the weights. It "
                    "is 0 without --max-kv-staleness.",
                    "short",
                    {"mean": mean("key_age_versions")},
                ),
                Panel(
                    "Reused tokens",
                    "Tokens per second whose keys and values of older weights engines did not compute again after a "
                    "publish.",
                    "short",
                    {"reused": rate("reused_tokens_total")},
                ),
                Panel(
                    "Parts of staleness in seconds",
                    "Faster publishes shorten publish_lag, more engines shorten sampling, and a smaller queue shortens "
                    "waiting.",
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
                    "Recycled groups",
                    "Fraction of the groups that ended because they were too stale to train. To reduce it, lower "
                    "--over-sampling-batch-size, publish faster, or raise --max-weight-staleness.",
                    "percentunit",
                    {"recycled": rule("recycled_share:rate5m")},
                ),
                Panel(
                    "Groups that ended",
                    "Groups per second, by outcome and reason.",
                    "short",
                    {"{{outcome}} {{reason}}": f"sum by (run, outcome, reason) ({rate('ended_groups_total')})"},
                    "stack",
                ),
                Panel(
                    "Wasted tokens",
                    "Share of the generated response tokens that are not trained, by reason. For worker_lost, an "
                    "estimate.",
                    "percentunit",
                    {
                        "{{reason}}": f"sum by (run, reason) ({rate('wasted_tokens_total')}) / on (run) group_left "
                        f"sum by (run) ({rate('generated_tokens_total')})"
                    },
                    "stack",
                ),
            ),
        ),
    ),
)

WINDOW_AND_ADMISSION = Dashboard(
    "window-admission",
    "Window and admission",
    "Which groups may start, and which may be collected.",
    (
        Row(
            "Window",
            (
                Panel(
                    "Age of the window's head",
                    "The window cannot advance past its head. --head-deadline-seconds ends a slow head.",
                    "s",
                    {"head": of("head_age_seconds"), "oldest at the engines": of("oldest_request_seconds")},
                ),
                Panel(
                    "Groups held back",
                    "Finished groups that the window holds back, and the window size W.",
                    "short",
                    {"held back": of("blocked_groups"), "W": of("window_groups")},
                ),
                Panel(
                    "Groups by state",
                    "Every live group is in exactly one state.",
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
                    "Causes for which admission is blocked",
                    "Fraction of the time. in_flight is normal. slots and queue mean that training is too slow.",
                    "percentunit",
                    {"{{cause}}": rule("admission_blocked:rate1m")},
                    "stack",
                ),
                Panel(
                    "Slots",
                    "Groups between admission and the publish of the weights that they trained, and the limit B.",
                    "short",
                    {"held": of("held_slots_groups"), "B": of("slots_groups")},
                ),
                Panel(
                    "In flight",
                    "Groups and requests that are being generated, and groups that wait for their reward.",
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
                    "Generation time",
                    "Time from the first request to the last token of a group.",
                    "s",
                    {"p50": quantile(0.5, "generation_seconds"), "p95": quantile(0.95, "generation_seconds")},
                ),
                Panel(
                    "Reward time",
                    "Time from the last token of a group to its reward.",
                    "s",
                    {"p50": quantile(0.5, "reward_seconds"), "p95": quantile(0.95, "reward_seconds")},
                ),
                Panel(
                    "Response tokens per group",
                    "Mean per group, and the fraction of truncated samples.",
                    "short",
                    {"mean": mean("group_response_tokens"), "truncated fraction": rule("truncated_share:rate1m")},
                ),
            ),
        ),
    ),
)

ENGINES = Dashboard(
    "engines-router",
    "Engines and router",
    "SGLang's and the router's own metrics, next to what the pipeline measures.",
    (
        Row(
            "Measured by the pipeline",
            (
                Panel(
                    "Routed engines",
                    "1 while the engine receives requests, 0 while it is fenced.",
                    "short",
                    {"{{engine}}": of("engine_routed")},
                ),
                Panel("Requests at the engines", "", "short", {"requests": of("in_flight_requests")}),
                Panel(
                    "Idle engines",
                    "Fraction of the time without any request at the engines.",
                    "percentunit",
                    {"idle": rule("engine_idle:rate1m")},
                ),
                Panel(
                    "Why engines are idle",
                    "Fraction of the time without any request at the engines, by cause.",
                    "percentunit",
                    {"{{cause}}": f"avg_over_time({of('engines_idle')}{RATE})"},
                    "stack",
                ),
            ),
        ),
        Row(
            "Reported by the engines",
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
                    "Near 1, SGLang retracts requests: lower --sglang-server-concurrency.",
                    "percentunit",
                    {"{{process}}": engine("token_usage")},
                ),
                Panel(
                    "Generation throughput",
                    "Generated tokens per second.",
                    "short",
                    {"{{process}}": f"sum by (run, process) (rate({engine('generation_tokens_total')}{RATE}))"},
                ),
            ),
        ),
        Row(
            "Router",
            (
                Panel(
                    "Requests",
                    "Requests per second, by endpoint.",
                    "short",
                    {"{{endpoint}}": f"sum by (endpoint) (rate({external('smg_router_requests_total')}{RATE}))"},
                ),
                Panel(
                    "Reachable processes",
                    "1 while Prometheus can scrape the process.",
                    "short",
                    {"{{process}}": external("up")},
                ),
            ),
        ),
    ),
)

LEARNER = Dashboard(
    "learner",
    "Learner",
    "Training steps, throughput, reward and loss.",
    (
        Row(
            "Steps",
            (
                Panel(
                    "Step time",
                    "Duration of the optimizer steps of one batch.",
                    "s",
                    {"mean": mean("step_seconds"), "p95": quantile(0.95, "step_seconds")},
                ),
                Panel(
                    "Tokens per second",
                    "Prompt and response tokens that are trained.",
                    "short",
                    {"tokens/s": rule("trained_tokens:rate1m")},
                ),
                Panel(
                    "Idle",
                    "Fraction of the time outside training steps.",
                    "percentunit",
                    {"idle": rule("learner_idle:rate1m")},
                ),
            ),
        ),
        Row(
            "Learning",
            (
                REWARD,
                Panel(
                    "Learner metrics",
                    "Loss, gradient norm and other metrics of the last batch.",
                    "none",
                    {"{{name}}": of("step_metric")},
                ),
                Panel(
                    "Response length",
                    "Mean response tokens per sample of the last trained batch.",
                    "short",
                    {"tokens": of("step_response_tokens")},
                ),
            ),
        ),
        Row(
            "Stability",
            (
                Panel(
                    "Effective sample size",
                    "Of the importance weights, as a fraction of the tokens; 1 is on-policy. Below half of its usual "
                    "value, a few tokens determine the whole update.",
                    "percentunit",
                    {"ess": of("step_metric", 'name="ess"')},
                ),
                Panel(
                    "Gradient norm",
                    "Before clipping.",
                    "short",
                    {"grad_norm": of("step_metric", 'name="grad_norm"')},
                ),
                Panel(
                    "Collapse risk",
                    "1 while the effective sample size and the reward announce a collapse of the policy. Lower "
                    "--max-weight-staleness or --lr.",
                    "short",
                    {"risk": of("collapse_risk")},
                ),
            ),
        ),
        Row(
            "Problems",
            (
                Panel(
                    "Batches that are not finite",
                    "Batches whose loss or gradient is not finite. Check their rewards, or lower --lr.",
                    "short",
                    {"batches": of("nonfinite_steps_total")},
                ),
                Panel(
                    "Dead letters",
                    "Prompts that get no further attempt, and those of them that could not be written.",
                    "short",
                    {"dead letters": of("dead_letters_total"), "not written": of("unwritten_dead_letters")},
                ),
                Panel(
                    "Event-loop lag of the rollout worker",
                    "Delay with which the event loop wakes up. More than ten milliseconds slow down generation.",
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
    "Weight versions, and how long publishing a version takes.",
    (
        Row(
            "Versions",
            (
                Panel(
                    "Weight versions",
                    "The version of the learner, the version that all engines hold, and the version of each engine.",
                    "short",
                    {
                        "learner": of("trainer_weight_version"),
                        "live": of("live_weight_version"),
                        "{{engine}}": of("engine_weight_version"),
                    },
                ),
                Panel(
                    "Versions behind the learner",
                    "1 is normal while a publish runs.",
                    "short",
                    {"{{engine}}": rule("version_lag")},
                ),
                Panel(
                    "Requests by version of the adapter",
                    "With --lora-rank, requests end under the version that they began with.",
                    "short",
                    {"{{version}}": of("adapter_requests")},
                ),
                Panel("Publishes per minute", "", "short", {"{{outcome}}": f"60 * {rate('publishes_total')}"}),
            ),
        ),
        Row(
            "Publishing",
            (
                Panel(
                    "Publish time by phase",
                    "Generation continues while weights are staged, and stops while the engines are paused. The pause "
                    "consists of stopping, write (transfers the weights), commit (drops cached prefixes and sets the "
                    "version) and resuming.",
                    "s",
                    {"{{phase}}": mean("publish_seconds", "phase")},
                ),
                Panel(
                    "Long pauses",
                    "95th percentile of the pauses during publishes.",
                    "s",
                    {"p95": quantile(0.95, "publish_seconds", "", 'phase="paused"')},
                ),
                Panel(
                    "Transfer rate",
                    "Bytes of weights written to the engines per second.",
                    "Bps",
                    {"written": rate("publish_bytes_total")},
                ),
            ),
        ),
    ),
)

ALL = (OVERVIEW, QUEUE_AND_STALENESS, WINDOW_AND_ADMISSION, ENGINES, LEARNER, WEIGHTS)
