"""Where a run saturates on 8 to 4,096 GPUs, in closed form.

Every part of a run that exists once is a station that each batch visits. Its demand is the seconds that one batch keeps
it busy. By the utilisation law, X batches per second keep a station busy for the share X * demand, so the station with
the largest demand limits X (Lazowska et al., Quantitative System Performance, 1984, chapter 5). Costs per message were
measured in this repository (`Costs`); what a GPU and a link do was not, and is assumed from published figures.
`cluster.py` checks these formulas against the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

from benchmarks.records import recorded
from miles_async.scheduling.bounds import Bounds

PEAK_FLOPS = 989e12
"""Of one GPU, dense bfloat16: data sheet of the NVIDIA H100 SXM."""
DECODE_UTILISATION = 0.05
"""Assumption: share of the peak that decoding reaches, at 2 FLOPs per active parameter and token. The best published
figure is 0.21: DeepSeek-V3 in FP8, 22,300 tokens/s on 8 H100 (lmsys.org/blog/2025-05-05-large-scale-ep)."""
TRAIN_UTILISATION = 0.35
"""Assumption: share of the peak that training reaches, at 6 FLOPs per active parameter and token. Pre-training of
Llama 3 405B reached 0.38 to 0.43 (arXiv 2407.21783, table 4)."""
LINK_BYTES_PER_SECOND = 50e9
"""Of each GPU's network adapter, 400 Gbit/s (arXiv 2407.21783, section 3.3.1)."""
LINK_UTILISATION = 0.5
"""Assumption: share of the link that gathering and sending weights reach."""
ROUTER_CORES = 16
"""Assumption: cores that sglang-router, which is multi-threaded, may use."""
PORTS = 28_232
"""Connections that one process may have to one address: Linux' default `net.ipv4.ip_local_port_range`."""
PARALLEL_SENDS = 16
"""`workers.learner.MAX_PARALLEL_SENDS`."""
REQUESTS_PER_PUBLISH = 6
"""Requests of the rollout worker to each engine: two to pause, three to commit, one to resume (`SGLangFleet`)."""
REQUESTS_PER_CHECK = 2
"""Requests of the rollout worker to each engine at every `engine_health_interval_seconds`."""
TURN_TOKENS = 256
"""Tokens per turn of `benchmarks.agent_endpoint`."""
LONGEST = 4.0
"""Assumption: the token limit of a response, as a multiple of the mean."""
SURPLUS = 1.1
"""Groups in flight over those that the engines can decode at once."""
BUSY = 0.7
"""Load of the event loop up to which `benchmarks.rollout_worker` measured a lag of milliseconds."""
MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU seconds per message, unless another unit is given."""

    worker_per_group: float
    worker_per_sample: float
    worker_per_token: float
    worker_per_turn: float
    """Of an agent that uses the endpoint: with the parsing of its requests and answers."""
    request: float
    """To an engine, for the rollout worker."""
    store_per_sample: float
    store_per_token: float
    store_on_loop: float
    """Share of the store's CPU time that the event loop loses, because the store is written by a thread beside it."""
    driver_per_group: float
    router_per_request: float
    router_per_token: float
    pack_per_token: float
    bytes_per_token: float
    """Bytes of a packed batch."""
    ray_per_call: float
    """Of the thread that calls; Ray's own threads take as much again on other cores."""
    ray_per_byte: float
    """Elapsed seconds."""
    stop: float
    """Elapsed seconds until an engine has stopped for a publish."""
    round_trip: float
    """Elapsed seconds of the requests that commit a version on an engine; a verification takes no longer."""
    copy_overhead: float
    """Time of a publish over p2p as a multiple of a bare copy by Mooncake."""

    @staticmethod
    def measured() -> Costs:
        """Read the results of the benchmarks of this repository."""
        costs = recorded("message-costs")
        per_turn = recorded("agent_endpoint")["128 sessions, 50 ms engine"]["cpu_ms_per_turn"] / 1e3
        store = recorded("run-store")
        transfer = recorded("weight-transfer")["100 MB"]
        with_store, without = (store[f"greatest_groups_per_second{name}"] for name in ("", "_without_store"))
        p2p = next(row for row in transfer["pause"] if row["transport"] == "p2p")
        return Costs(
            **{one.name: costs[one.name] for one in fields(Costs) if one.name in costs},
            worker_per_turn=per_turn,
            store_on_loop=(1 / with_store - 1 / without) / (store["writer_cpu_seconds_per_1000_groups"] / 1000),
            stop=p2p["stop"] / 1e3,
            round_trip=p2p["commit"] / 1e3,
            copy_overhead=transfer["bare"][0]["p2p / bare"],
        )


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    parameters: float
    active: float
    """Parameters that one token uses."""
    largest_tensor: float
    """Elements of the embedding: one rank sends it, because tensors are not divided among ranks."""
    tensors: int
    engine_gpus: int
    replica_ranks: int
    """Learner ranks that share one copy of the model."""

    @property
    def bytes(self) -> float:
        return 2 * self.parameters


MODELS = {
    "4B": ModelSize(
        parameters=4e9, active=4e9, largest_tensor=151_936 * 2560, tensors=398, engine_gpus=1, replica_ranks=2
    ),
    "32B": ModelSize(
        parameters=32.8e9, active=32.8e9, largest_tensor=151_936 * 5120, tensors=707, engine_gpus=4, replica_ranks=8
    ),
    # Like Llama 4 Maverick, with one tensor per expert and matrix.
    "400B-A17B": ModelSize(
        parameters=400e9, active=17e9, largest_tensor=202_048 * 5120, tensors=9_600, engine_gpus=16, replica_ranks=32
    ),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster and its job. In the reference job, the batch grows with the cluster, so that GPUs keep their work."""

    gpus: int
    model: ModelSize = MODELS["4B"]
    engine_share: float = 0.75
    """Share of the GPUs that generate; decoding a token takes longer than training on it."""
    streams: int = 128
    """Samples that an engine decodes at once."""
    group: int = 16
    prompt: int = 512
    response: int = 8192
    """Mean tokens per sample."""
    spread: float = 0.5
    """Sigma of the log-normal response lengths."""
    turns: int = 1
    """Requests per sample; more than one are an agent's."""
    staleness: int = 3
    batch_groups: int | None = None
    """P; None for as many as are in flight."""
    health_interval: float = 1.0
    workers: int = 1
    """Rollout workers with disjoint shards of prompts and engines. More than one is not implemented."""

    @property
    def engines(self) -> int:
        return max(1, round(self.gpus * self.engine_share / self.model.engine_gpus))

    @property
    def ranks(self) -> int:
        return self.gpus - self.engines * self.model.engine_gpus

    def longest_of(self, samples: int) -> float:
        """Length of the longest of some samples over the mean: Blom's approximation of a normal order statistic."""
        quantile = NormalDist().inv_cdf((samples - 0.375) / (samples + 0.25))
        return min(LONGEST, math.exp(self.spread * quantile - self.spread**2 / 2))

    @property
    def sample_seconds(self) -> float:
        """Mean time that an engine takes for a sample."""
        return self.response * self.streams * self.engines / self.decode_rate

    @property
    def group_seconds(self) -> float:
        return self.sample_seconds * self.longest_of(self.group)

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all engines."""
        gpus = self.engines * self.model.engine_gpus
        return gpus * PEAK_FLOPS * DECODE_UTILISATION / (2 * self.model.active)

    @property
    def in_flight(self) -> int:
        """N: enough groups to keep the engines busy while the last samples of other groups finish."""
        return math.ceil(SURPLUS * self.engines * self.streams / self.group * self.longest_of(self.group))

    @property
    def batch(self) -> int:
        return self.batch_groups or self.in_flight

    @property
    def slots(self) -> int:
        """B, from the schedule's own formula."""
        slots = Bounds.derive(
            rollout_batch_size=self.batch,
            over_sampling_batch_size=self.in_flight,
            max_weight_staleness=self.staleness,
        ).slots
        assert slots is not None
        return slots

    @property
    def batch_tokens(self) -> int:
        return self.batch * self.group * (self.prompt + self.response)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Seconds per batch, and costs that every second has. All of them are those of one rollout worker."""

    generate: float
    train: float
    stage: float
    """Gathering the weights, while the learner waits."""
    distribute: float
    """Packing a batch and sending it to the ranks: on the event loop, while the batch before it is trained."""
    per_group: float
    """Of the event loop, for one group."""
    control: float
    """Of the event loop, for the messages of a publish: one Ray call per rank and engine."""
    write: float
    """Sending and verifying the weights."""
    pause: float
    """Engines generate nothing during a publish."""
    background: float
    """Share of the event loop that health checks take."""
    store: float
    router: float
    connections: float
    """Share of the ports, times seconds."""
    slots: float
    """Share of the slots, times seconds."""
    driver: float
    driver_background: float
    """Share of the driver's CPU time that heartbeats take."""

    @property
    def step(self) -> float:
        """From the beginning of one step to that of the next, if the queue always holds the next batch."""
        return max(self.distribute, self.train) + self.stage


def demand_of(cluster: Cluster, costs: Costs) -> Demand:
    model, engines, ranks, shards = cluster.model, cluster.engines, cluster.ranks, cluster.workers
    groups, samples = cluster.batch, cluster.batch * cluster.group
    sample_tokens = cluster.prompt + cluster.response
    link = LINK_BYTES_PER_SECOND * LINK_UTILISATION

    train = cluster.batch_tokens * 6 * model.active / (ranks * PEAK_FLOPS * TRAIN_UTILISATION)
    stage = model.bytes / link
    # Each rank sends an equal share of the weights to every engine, but at least one whole tensor.
    share = max(model.bytes / ranks, 2 * model.largest_tensor)
    sent = max(engines * share, model.bytes / model.engine_gpus) / link * costs.copy_overhead
    # A rank sends to 16 engines at once; an engine verifies the parts of one rank after the other.
    verified = costs.round_trip * max(engines / PARALLEL_SENDS, min(ranks, model.tensors))
    control = (engines * ranks * costs.ray_per_call + engines * REQUESTS_PER_PUBLISH * costs.request) / shards
    write = sent + verified
    pause = costs.stop + control + write + costs.round_trip
    # All ranks of a model replica read the same copy of their part.
    per_token = costs.pack_per_token + costs.bytes_per_token * costs.ray_per_byte
    distribute = cluster.batch_tokens * per_token / shards

    store_per_sample = costs.store_per_sample + costs.store_per_token * sample_tokens
    if cluster.turns == 1:
        requests, worker_per_sample = groups, costs.worker_per_sample + costs.worker_per_token * cluster.response
    else:
        requests = samples * cluster.turns
        rest = max(0.0, cluster.response - cluster.turns * TURN_TOKENS)
        worker_per_sample = costs.worker_per_turn * cluster.turns + costs.worker_per_token * rest
    per_group = costs.worker_per_group + cluster.group * (worker_per_sample + costs.store_on_loop * store_per_sample)

    # An agent's samples have a request each; other samples of a group share one.
    connections = groups if cluster.turns == 1 else samples
    # Slots become free when a batch is published, all at once, and a later batch needs the slowest of these groups.
    batch_seconds = cluster.sample_seconds * cluster.longest_of(samples)
    return Demand(
        generate=samples * cluster.response / cluster.decode_rate + pause,
        train=train,
        stage=stage,
        distribute=distribute,
        per_group=per_group / shards,
        control=control,
        write=write,
        pause=pause,
        background=engines / cluster.health_interval * REQUESTS_PER_CHECK * costs.request / shards,
        store=samples * store_per_sample / shards,
        router=(requests * costs.router_per_request + samples * cluster.response * costs.router_per_token)
        / (ROUTER_CORES * shards),
        connections=connections * cluster.group_seconds / (PORTS * shards),
        slots=groups * (batch_seconds + max(distribute, train) + stage + pause) / cluster.slots,
        driver=groups * costs.driver_per_group,
        driver_background=(ranks + engines) * costs.ray_per_call,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    groups_per_second: float
    tokens_per_second: float
    utilisation: Mapping[str, float]
    """Of each part; above 1 only for the driver, which no batch waits for."""
    first: str
    """The part that limits the run."""
    of_gpus: float
    """Throughput as a share of what engines and learner could do if nothing else took time."""
    learner_waits: float
    """Share of the time."""
    staleness: float
    """Mean age of a trained group in versions."""
    pause: float
    """Seconds that engines stand still for a publish."""
    loop_lag: float
    """Mean seconds that the event loop is late: the waiting time of an M/G/1 queue. Infinite if it is saturated."""


def predict(cluster: Cluster, costs: Costs) -> Prediction:
    demand = demand_of(cluster, costs)
    # Seconds per batch of each station that batches wait for.
    stations = {
        "engines": demand.generate,
        "training loop": demand.step,
        "slots": demand.slots,
        "rollout worker": cluster.batch * demand.per_group + demand.control + demand.distribute,
        "store": demand.store,
        "router": demand.router,
        "connections": demand.connections,
        "publishing": demand.stage + demand.pause,
    }
    background = {"rollout worker": demand.background, "driver": demand.driver_background}
    capacity = {
        part: max(0.0, 1 - background.get(part, 0.0)) / seconds for part, seconds in stations.items() if seconds
    }
    first = min(capacity, key=lambda part: capacity[part])
    rate = capacity[first]
    # Two parts of the training loop, and the driver, which nothing waits for.
    others = {
        "learner": demand.train + demand.stage,
        "batch distribution": demand.distribute,
        "driver": demand.driver,
    }
    utilisation = {part: background.get(part, 0.0) + rate * seconds for part, seconds in (stations | others).items()}
    groups_per_second = rate * cluster.batch
    return Prediction(
        groups_per_second=groups_per_second,
        tokens_per_second=groups_per_second * cluster.group * cluster.response,
        utilisation=utilisation,
        first=first,
        of_gpus=rate * max(demand.generate - demand.pause, demand.train),
        learner_waits=1 - utilisation["learner"],
        staleness=_staleness(cluster, demand, rate, first),
        pause=demand.pause,
        loop_lag=_lag(cluster, demand, rate, utilisation["rollout worker"]),
    )


def _staleness(cluster: Cluster, demand: Demand, rate: float, first: str) -> float:
    """Versions between a group's first token and its step: Little's law, with time in batches."""
    # A backlog before the learner takes all slots; those of the batch that is trained and published do not wait.
    backlog = cluster.slots / cluster.batch - rate * (demand.step + demand.pause)
    if first in ("training loop", "slots", "publishing"):
        return backlog
    if first == "engines":
        # Groups are generated, and then wait for the rest of their batch: for half of it on average.
        return min(rate * (cluster.group_seconds + demand.pause) + 0.5, backlog)
    # Groups in flight wait before another part: N of them, of which P pass per version.
    return min(cluster.in_flight / cluster.batch, backlog)


def _lag(cluster: Cluster, demand: Demand, rate: float, utilisation: float) -> float:
    if utilisation >= 1:
        return math.inf
    squares = cluster.batch * demand.per_group**2 + demand.distribute**2 + demand.control**2
    return rate * squares / (2 * (1 - utilisation))


def workers_needed(cluster: Cluster, costs: Costs) -> int:
    """The smallest number of rollout workers of which none is busier than `BUSY`; `MOST_WORKERS` at most."""
    for workers in range(1, MOST_WORKERS):
        prediction = predict(replace(cluster, workers=workers), costs)
        if prediction.utilisation["rollout worker"] <= BUSY:
            return workers
    return MOST_WORKERS
