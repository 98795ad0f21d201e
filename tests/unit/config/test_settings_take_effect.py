"""Settings that act in another process: their values arrive in what that process is given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from miles_async.adapters.datasets.factory import eval_groups
from miles_async.adapters.sglang import launch, router
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator, TokenLimits
from miles_async.adapters.sglang.launch import Rendezvous
from miles_async.batching.batch import TrainStep, policy_steps, rank_batches, repack_for_forward
from miles_async.config.generation import generates
from miles_async.config.schema import EvalDataset
from miles_async.config.table import table
from miles_async.config.untested import weight_transport
from miles_async.errors import TrajectoryError, UserError
from miles_async.modes.shipped import Supervised
from miles_async.types import FROM_DATASET, Group, Prompt, Sample
from tests.configuration import KEYS, run_config
from tests.sim.engines import Engines
from tests.sim.world import World
from workers.learner import LearnerRank
from workers.specs import (
    ENVIRONMENT,
    ROUTER_GRACE_SECONDS,
    engine_spec,
    eval_sampling_of,
    external_router,
    greedy_of,
    ray_arguments,
    router_spec,
    sampling_of,
    seed_of_requests,
)

LOGS = Path("/logs")
MEETING = Rendezvous("127.0.0.1", 2, 3)


# --- engines, router, Ray -------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"rollout_num_gpus_per_engine": 2}, "--tp-size 2"),
        ({"sglang_server_concurrency": 7}, "--max-running-requests 7"),
        ({"rollout_seed": 5}, "--random-seed 5"),
        ({"eval_interval": 5, "sglang_server_concurrency": 8}, "--max-running-requests 10"),
        ({"eval_interval": 5}, "--enable-priority-scheduling"),
        ({"sglang_server_args": {"schedule_policy": "fcfs"}}, "--schedule-policy fcfs"),
        ({"weight_transfer": "p2p"}, "--remote-instance-weight-loader-start-seed-via-transfer-engine"),
    ],
)
def test_an_engine_setting_is_on_the_command_line_of_the_server(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)

    def command_line(**settings: Any) -> str:
        return " ".join(launch.command(engine_spec(run_config(**settings), "e", checkpoint, LOGS), 1, MEETING)) + " "

    assert f"{words} " in command_line(**setting)
    assert f"{words} " not in command_line(weight_transfer="disk")


@pytest.mark.parametrize(
    "settings, on_gpus, transport",
    [
        ({}, True, "p2p"),
        ({"colocate": True}, True, "ipc"),
        ({"colocate": True}, False, "p2p"),
        ({"colocate": True, "actor_num_nodes": 2}, True, "p2p"),
        ({"colocate": True, "weight_transfer": "disk"}, True, "disk"),
    ],
)
def test_weights_go_to_colocated_engines_by_ipc_on_the_gpus_of_one_node_unless_a_transport_is_set(
    settings: dict[str, Any], on_gpus: bool, transport: str
) -> None:
    assert weight_transport(run_config(**settings), on_gpus=on_gpus) == transport


@pytest.mark.parametrize("cuda, dtypes", [(True, ("bfloat16", "bfloat16", "auto")), (False, ("float32",) * 3)])
def test_on_a_gpu_the_engines_compute_in_the_learners_bfloat16(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, cuda: bool, dtypes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: cuda)

    def dtype(**settings: Any) -> str:
        words = launch.command(engine_spec(run_config(**settings), "e", checkpoint, LOGS), 1, MEETING)
        return words[words.index("--dtype") + 1]

    assert (dtype(), dtype(precision="bf16"), dtype(precision="fp32")) == dtypes
    assert dtype(precision="bf16", sglang_server_args={"dtype": "float16"}) == "float16"


@pytest.mark.parametrize("arguments, seeds", [({}, ["5", "6", "7"]), ({"random_seed": 9}, ["9", "10", "11"])])
def test_each_engine_draws_other_samples(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], seeds: list[str]
) -> None:
    """Their first requests may be for the same prompt, and their batches may be equal."""
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    run = run_config(rollout_seed=5, sglang_server_args=arguments)
    commands = [launch.command(engine_spec(run, "e", checkpoint, LOGS, number=n), 1, MEETING) for n in range(3)]
    assert [words[words.index("--random-seed") + 1] for words in commands] == seeds


@pytest.mark.parametrize(
    "arguments, seed",
    [
        ({}, None),
        ({"enable_deterministic_inference": False}, None),
        ({"enable_deterministic_inference": True}, 5),
        ({"rl_on_policy_target": "fsdp"}, 5),
    ],
)
def test_requests_have_seeds_if_engines_sample_with_a_seed_per_request(
    arguments: dict[str, Any], seed: int | None
) -> None:
    assert seed_of_requests(run_config(rollout_seed=5, sglang_server_args=arguments)) == seed


def test_engines_are_pinned_to_their_cores(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    spec = engine_spec(run_config(engine_cpus=[3, 5]), "e", checkpoint, LOGS)
    assert spec.cpus == (3, 5)
    assert launch.environment(spec)["SGLANG_CPU_OMP_THREADS_BIND"] == "3"
    assert engine_spec(run_config(), "e", checkpoint, LOGS).cpus is None


def test_the_configured_environment_of_an_engine_overrides_the_inherited_one(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    own = {"SGLANG_TIMEOUT_KEEP_ALIVE": "5", "NVTE_DEBUG": "1"}
    ours = launch.environment(engine_spec(run_config(), "e", checkpoint, LOGS))
    assert launch.environment(engine_spec(run_config(engine_env_vars=own), "e", checkpoint, LOGS)) == {**ours, **own}
    assert ours["SGLANG_TIMEOUT_KEEP_ALIVE"] != "5"


def test_the_router_gets_its_policy_and_its_timeout() -> None:
    settings = run_config(sglang_router_policy="round_robin", sglang_router_request_timeout_secs=9)
    arguments = router.arguments(router_spec(settings, LOGS), 1, 2)
    assert (arguments["policy"], arguments["request_timeout_secs"]) == ("round_robin", 9 + ROUTER_GRACE_SECONDS)


def test_a_port_alone_is_the_one_at_which_the_run_starts_its_router() -> None:
    settings = run_config(sglang_router_port=31000)
    assert external_router(settings) is None
    assert router_spec(settings, LOGS).port == 31000


def test_an_external_router_is_used_and_must_answer() -> None:
    assert external_router(run_config()) is None
    url = external_router(run_config(sglang_router_ip="127.0.0.1", sglang_router_port=9))
    assert url == "http://127.0.0.1:9"
    with pytest.raises(
        UserError,
        match=r"^no sglang-router answers at sglang_router_ip .*: http://127\.0\.0\.1:9/workers: .*refused",
    ):
        router.require_router(url)


def test_the_number_of_engines_and_of_learner_ranks_follows_from_the_devices() -> None:
    def rows(**settings: int) -> dict[str, str]:
        return {line.split()[0]: line.split()[1] for line in table(run_config(**settings), "train.py").splitlines()}

    devices = {"rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2}
    found = rows(**devices, actor_num_nodes=2, actor_num_gpus_per_node=4)
    assert (found["engines"], found["learner"]) == ("3", "8")
    assert (rows()["engines"], rows()["learner"]) == ("1", "1")


@pytest.mark.parametrize(
    "settings, engines",
    [
        ({"eval_size": 0}, 0),
        ({"eval_size": 4}, 1),
        ({"eval_size": 0, "eval_function_path": "mine.evaluate"}, 1),
        ({"eval_size": 0, "eval_datasets": {"few": {"path": "rows.jsonl"}}}, 1),
    ],
)
def test_supervised_runs_need_engines_only_if_something_is_evaluated(settings: dict[str, Any], engines: int) -> None:
    sft_examples = run_config(rollout_function_path=Supervised.function, **settings)
    assert generates(sft_examples) is bool(engines)
    rows = {line.split()[0]: line.split()[1] for line in table(sft_examples, "train.py").splitlines()}
    assert rows["engines"] == str(engines)


def test_a_configured_ray_cluster_is_joined_and_otherwise_a_local_one_is_started() -> None:
    assert ray_arguments(run_config(ray_address="10.0.0.1:6379"))["address"] == "10.0.0.1:6379"
    started = ray_arguments(run_config())
    assert (started["address"], started["_node_ip_address"]) == ("local", "127.0.0.1")
    assert started["_system_config"] == {"worker_niceness": 0}


def test_the_processes_of_a_run_download_nothing_and_send_no_statistics() -> None:
    theirs = ray_arguments(run_config(ray_address="auto"))["runtime_env"]
    for variables in (ENVIRONMENT, theirs["env_vars"]):
        assert (variables["HF_HUB_OFFLINE"], variables["RAY_USAGE_STATS_ENABLED"]) == ("1", "0")


def test_processes_on_an_external_ray_cluster_get_the_environment_and_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = ray_arguments(run_config(ray_address="auto"))["runtime_env"]
    assert theirs["env_vars"]["HF_HUB_OFFLINE"] == "1"
    monkeypatch.chdir("/")
    theirs["worker_process_setup_hook"]()
    assert Path.cwd() == tmp_path


# --- sampling -------------------------------------------------------------------------------------------------------


def test_samples_are_drawn_as_configured_and_held_out_ones_greedily() -> None:
    settings = run_config(
        rollout_temperature=0.7,
        rollout_top_p=0.9,
        rollout_top_k=20,
        rollout_stop=["END"],
        rollout_stop_token_ids=[7, 9],
        rollout_skip_special_tokens=False,
        rollout_max_response_len=12,
    )
    drawn = sampling_of(settings)
    assert drawn.max_new_tokens == 12
    assert drawn.body(budget=5) == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "stop": ["END"],
        "stop_token_ids": [7, 9],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    greedy = greedy_of(settings)
    assert (greedy.temperature, greedy.max_new_tokens, greedy.stop) == (0, 12, ("END",))
    assert (greedy.top_p, greedy.top_k, greedy.stop_token_ids) == (1.0, -1, (7, 9))


def test_sampling_settings_survive_a_generate_function() -> None:
    body = {"max_new_tokens": 9, "temperature": 0.5, "stop": "END", "regex": "a+", "stop_token_ids": [3]}
    again = SamplingParams.of(body).body(4)
    assert (again["max_new_tokens"], again["temperature"], again["stop"]) == (4, 0.5, ["END"])
    assert (again["regex"], again["stop_token_ids"]) == ("a+", [3])
    assert (again["no_stop_trim"], again["spaces_between_special_tokens"]) == (True, False)


def test_a_generate_function_may_change_how_tokens_become_text() -> None:
    body = {"max_new_tokens": 9, "no_stop_trim": False, "spaces_between_special_tokens": True}
    again = SamplingParams.of(body).body(4)
    assert (again["no_stop_trim"], again["spaces_between_special_tokens"]) == (False, True)


def test_each_evaluation_data_set_may_set_its_sampling(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}=", "label": str(n)}) + "\n" for n in range(5)))
    settings = run_config(
        **KEYS,
        reasoning_gym_task="chain_sum",
        rollout_temperature=0.8,
        rollout_top_p=0.9,
        rollout_top_k=50,
        eval_datasets={
            "few": {
                "path": str(rows),
                "size": 2,
                "n_samples": 3,
                "max_response_len": 4,
                "temperature": 0,
                "top_p": 0.5,
                "top_k": -1,
            },
            "all": {"path": str(rows)},
        },
    )
    few, whole = settings.rollout.eval_datasets["few"], settings.rollout.eval_datasets["all"]

    def sampling(dataset: EvalDataset) -> tuple[float, float, int, int]:
        found = eval_sampling_of(settings, dataset)
        return found.temperature, found.top_p, found.top_k, found.max_new_tokens

    assert sampling(few) == (0, 0.5, -1, 4)
    assert sampling(whole) == (0.8, 0.9, 50, 1024), "those of the rollout"
    assert [[sample.prompt for sample in group] for group in eval_groups(settings, "few", few)] == [
        ["0="] * 3,
        ["1="] * 3,
    ]
    assert [group.feed_index for group in eval_groups(settings, "all", whole)][-1] == "all_sample_0_4"


def test_the_metadata_of_an_evaluation_data_set_takes_the_place_of_that_of_its_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input": "1+1=", "label": "2", "metadata": {"split": "train", "level": 1}}) + "\n")
    settings = run_config(
        reasoning_gym_task="chain_sum",
        label_key="label",
        eval_datasets={"a": {"path": str(rows), "n_samples": 2, "metadata_overrides": {"split": "test"}}},
    )
    [group] = eval_groups(settings, "a", settings.rollout.eval_datasets["a"])
    assert [(sample.metadata["split"], sample.metadata["level"]) for sample in group] == [("test", 1)] * 2


def test_an_evaluation_data_set_has_the_keys_of_the_run_unless_it_sets_its_own(tmp_path: Path) -> None:
    rows, others = tmp_path / "rows.jsonl", tmp_path / "others.jsonl"
    rows.write_text(json.dumps({"messages": "1+1=", "answer": "2"}) + "\n")
    others.write_text(json.dumps({"question": "2+2=", "answer": "4"}) + "\n")
    settings = run_config(
        reasoning_gym_task="chain_sum",
        input_key="messages",
        label_key="answer",
        eval_datasets={"same": {"path": str(rows)}, "own": {"path": str(others), "input_key": "question"}},
    )
    found = {name: eval_groups(settings, name, one)[0][0] for name, one in settings.rollout.eval_datasets.items()}
    assert {name: (one.prompt, one.label) for name, one in found.items()} == {
        "same": ("1+1=", "2"),
        "own": ("2+2=", "4"),
    }
    wrong = settings.rollout.eval_datasets["own"].model_copy(update={"input_key": None})
    with pytest.raises(UserError, match=r"^eval_datasets\.own: prompt_data .*no key 'messages' \(input_key\)"):
        eval_groups(settings, "own", wrong)


class Bytes:
    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> list[int]:
        return list(str(prompt).encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode()


async def test_a_prompt_that_is_too_long_is_refused_before_it_reaches_an_engine() -> None:
    generator = SGLangGenerator(
        "http://127.0.0.1:1",
        Bytes(),
        sampling_of(run_config()),
        limit=lambda: 1,
        engines=list,
        max_prompt_tokens=run_config(rollout_max_prompt_len=4).rollout.rollout_max_prompt_len,
    )
    try:
        with pytest.raises(TrajectoryError, match=r"sample 3 .* 5 tokens, more than rollout_max_prompt_len 4"):
            await generator.generate(Group([Sample(index=3, prompt="12345")]))
    finally:
        await generator.close()


async def test_each_data_set_may_have_lower_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = SGLangGenerator(
        "http://127.0.0.1:1",
        Bytes(),
        sampling_of(run_config(rollout_max_response_len=9)),
        limit=lambda: 8,
        engines=list,
        max_prompt_tokens=10,
        dataset_limits={"short": TokenLimits(4, 3), "free": TokenLimits(None, None)},
    )
    asked: list[tuple[int, int]] = []

    async def post(call: Any, samples: list[Sample], params: dict[str, Any]) -> None:
        asked.append((len(samples), params["max_new_tokens"]))

    monkeypatch.setattr(generator, "_post", post)

    def group(name: str, prompt: str) -> Group:
        return Group(
            Sample(index=3, prompt=prompt, metadata={FROM_DATASET: {"name": name, "epochs": 0.0}}) for _ in range(2)
        )

    try:
        for name in ("short", "free", ""):
            await generator.generate(group(name, "1234"))
        with pytest.raises(TrajectoryError, match=r"5 tokens, more than datasets\.short\.max_prompt_len 4"):
            await generator.generate(group("short", "12345"))
        with pytest.raises(TrajectoryError, match=r"11 tokens, more than rollout_max_prompt_len 10"):
            await generator.generate(group("free", "12345678901"))
    finally:
        await generator.close()
    assert asked == [(2, 3), (2, 9), (2, 9)]


# --- what the learner is handed --------------------------------------------------------------------------------------


def shares(world_size: int = 1, **settings: Any) -> list[list[TrainStep]]:
    """Two groups of four samples of 20 tokens, rewards 0 and 10."""
    groups = [
        Group(
            Sample(index=4 * g + i, tokens=[1] * 20, response_length=1, rollout_log_probs=[-1.0], reward=10.0 * (i % 2))
            for i in range(4)
        )
        for g in range(2)
    ]
    return rank_batches(groups, run_config(**settings), world_size)


def test_a_batch_is_split_into_the_configured_number_of_steps() -> None:
    assert [step.total_tokens for step in shares()[0]] == [8]
    assert [step.total_tokens for step in shares(num_steps_per_rollout=4)[0]] == [2, 2, 2, 2]


def test_a_micro_batch_never_holds_more_tokens_than_allowed() -> None:
    def sizes(**settings: int) -> list[int]:
        return [len(batch.tokens) for batch in shares(**settings)[0][0].micro_batches]

    assert sizes() == [160]
    assert sizes(max_tokens_per_gpu=40) == [40] * 4
    with pytest.raises(UserError, match="raise max_tokens_per_gpu"):
        sizes(max_tokens_per_gpu=19)


def test_ranks_that_share_layers_get_the_same_samples() -> None:
    assert [sum(len(batch.lengths) for batch in steps[0].micro_batches) for steps in shares(2)] == [4, 4]
    for sharing in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        same, again = shares(2, **{sharing: 2})
        assert same is again
        assert sum(len(batch.lengths) for batch in same[0].micro_batches) == 8


def test_megatron_numbers_the_ranks_of_a_layer_first_and_those_of_a_stage_last() -> None:
    handed = [id(share) for share in shares(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)]
    assert [handed.index(share) for share in handed] == [0, 0, 2, 2, 0, 0, 2, 2]


def test_virtual_stages_take_micro_batches_in_groups() -> None:
    def counts(**settings: Any) -> set[int]:
        used = {"pipeline_model_parallel_size": 3, "max_tokens_per_gpu": 50} | settings
        return {len(steps[0].micro_batches) for steps in shares(3, **used)}

    assert counts() == {4}
    assert counts(virtual_pipeline_model_parallel_size=2) == {6}
    assert counts(virtual_pipeline_model_parallel_size=2, use_dynamic_batch_size=False) == {9}
    assert counts(use_dynamic_batching_in_train=True, sequence_length_round_in_train=10) == {6}


def test_context_parallel_ranks_share_a_larger_micro_batch() -> None:
    [[alone]] = shares(1, max_tokens_per_gpu=45)
    [[shared], _] = shares(2, max_tokens_per_gpu=45, context_parallel_size=2)
    assert [len(batch.tokens) for batch in alone.micro_batches] == [40] * 4
    assert sorted(len(batch.tokens) for batch in shared.micro_batches) == [80, 80]
    [[step], *_] = shares(3, context_parallel_size=3)
    assert {int(length) for batch in step.micro_batches for length in batch.lengths} == {24}, "6 pieces of 4"
    assert step.packing is not None
    assert step.packing.padding == 24 / 20


def test_sequence_parallel_ranks_split_a_micro_batch_evenly() -> None:
    def padding(**settings: Any) -> float:
        [step] = shares(3, tensor_model_parallel_size=3, **settings)[0]
        assert step.packing is not None
        return round(step.packing.padding * 160)

    assert padding() == 160
    assert padding(sequence_parallel=True) == 162
    assert padding(sequence_parallel=True, max_tokens_per_gpu=41) == 168, "two samples, filled up, would hold 42"


def test_advantages_are_divided_by_the_spread_of_their_group_or_not() -> None:
    def advantages(**settings: bool) -> set[float]:
        return {round(float(a), 3) for batch in shares(**settings)[0][0].micro_batches for a in batch.advantages}

    assert advantages() == {-0.866, 0.866}
    assert advantages(grpo_std_normalization=False) == {-5.0, 5.0}


def advantages_of(rewards: list[list[float]], **settings: Any) -> list[float]:
    """Of each sample, by index; the i-th sample has i + 1 response tokens."""
    samples = iter(range(100))
    groups = [
        Group(
            Sample(index=(i := next(samples)), tokens=[1] * (i + 3), response_length=i + 1, reward=reward,
                   rollout_log_probs=[-1.0] * (i + 1))
            for reward in group
        )
        for group in rewards
    ]  # fmt: skip
    [[step]] = policy_steps(groups, run_config(**settings), ranks=1, computes_all=True)
    [batch] = step.micro_batches
    return [round(float(batch.advantages[batch.sequences == i][0]), 3) for i in range(len(batch.lengths))]


def test_reinforce_plus_plus_compares_with_the_tokens_of_the_whole_batch() -> None:
    rewards = [[0.0, 3.0], [3.0, 3.0]]  # 1, 2, 3 and 4 tokens: the mean over tokens is 2.7, the variance 0.9
    assert advantages_of(rewards) == [-0.707, 0.707, 0, 0]
    assert advantages_of(rewards, advantage_estimator="reinforce_plus_plus") == [-2.846, 0.316, 0.316, 0.316]
    baseline = advantages_of(rewards, advantage_estimator="reinforce_plus_plus_baseline")
    assert baseline == [-1.938, 1.585, -0.176, -0.176], "less the group's mean, then normalized over the tokens"


def test_ppo_does_not_compare_rewards_within_a_group() -> None:
    assert advantages_of([[0.0, 3.0], [3.0, 3.0]], advantage_estimator="ppo") == [0, 3, 3, 3]


def test_an_answer_close_to_the_length_limit_loses_reward() -> None:
    settings = {"rollout_max_response_len": 4, "grpo_std_normalization": False}
    assert advantages_of([[1.0] * 4], **settings) == [0, 0, 0, 0]
    assert advantages_of([[1.0] * 4], **settings, overlong_buffer_len=2) == [0.375, 0.375, -0.125, -0.625]
    assert advantages_of([[1.0] * 4], **settings, overlong_buffer_len=2, overlong_penalty=2)[3] == -1.25


@pytest.mark.parametrize(
    "aggregation, weights",
    [
        ("token_mean", [0.25, 0.25, 0.25, 0.25]),
        ("sequence_mean", [0.5, 1 / 6, 1 / 6, 1 / 6]),
        ("sequence_sum", [0.5] * 4),
        ("constant", [0.05] * 4),
    ],
)
def test_the_aggregation_sets_the_weight_of_a_token_of_a_long_answer(aggregation: str, weights: list[float]) -> None:
    group = Group(
        Sample(index=i, tokens=[1] * 5, response_length=n, rollout_log_probs=[-1.0] * n, reward=float(i))
        for i, n in enumerate((1, 3))
    )
    settings = run_config(loss_aggregation=aggregation, rollout_max_response_len=10)
    [[step]] = rank_batches([group], settings, 1)
    [batch] = step.micro_batches
    assert batch.loss_weights / step.total_tokens == pytest.approx(weights)


def test_a_micro_batch_of_fixed_size_holds_the_configured_number_of_samples() -> None:
    def sizes(**settings: Any) -> list[int]:
        return [len(b.lengths) for b in shares(use_dynamic_batch_size=False, **settings)[0][0].micro_batches]

    assert sizes() == [1] * 8
    assert sizes(micro_batch_size=3) == [3, 3, 2]


def test_ranks_get_balanced_work_unless_samples_are_assigned_round_robin() -> None:
    def tokens(**settings: Any) -> list[int]:
        group = Group(
            Sample(index=i, tokens=[1] * n, response_length=1, rollout_log_probs=[-1.0], reward=float(i))
            for i, n in enumerate((40, 10, 30, 10, 20, 10))
        )
        ranks = rank_batches([group], run_config(**settings), 2)
        return [sum(len(batch.tokens) for batch in steps[0].micro_batches) for steps in ranks]

    assert tokens() == [60, 60]
    assert tokens(balance_data=False) == [90, 30]


def test_rows_of_dynamic_batching_are_as_long_and_as_many_as_allowed() -> None:
    def rows(**settings: Any) -> list[tuple[int, int]]:
        used = {"use_dynamic_batching_in_train": True, "sequence_length_round_in_train": 16} | settings
        return [(len(b.lengths), int(b.lengths[0])) for b in shares(**used)[0][0].micro_batches]

    assert rows() == [(8, 32)]
    assert rows(sequence_length_round_in_train=8) == [(8, 24)]
    assert rows(max_tokens_per_microbatch_in_train=96) == [(3, 32), (3, 32), (2, 32)]
    [[step]] = shares(use_dynamic_batching_in_train=True)
    assert step.packing is not None
    assert step.packing.padding == 64 / 20


def test_forward_only_passes_have_separate_row_lengths_and_limits() -> None:
    def rows(**settings: Any) -> list[tuple[int, int]]:
        learner = run_config(sequence_length_round_in_infer=8, **settings).learner
        return [(len(b.batch.lengths), int(b.batch.lengths.max())) for b in repack_for_forward(batches, learner)]

    batches = shares()[0][0].micro_batches
    assert rows() == [(8, 20)]
    assert rows(use_dynamic_batching_in_infer=True) == [(8, 24)]
    assert rows(use_dynamic_batching_in_infer=True, max_tokens_per_microbatch_in_infer=48) == [(2, 24)] * 4
    assert rows(max_tokens_per_gpu=40) == [(2, 20)] * 4


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"advantage_estimator: no advantage estimator is called 'vpg': use one of cispo, grpo, .*, got 'vpg'",
    ):
        run_config(advantage_estimator="vpg")


# --- data and pipeline ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_control_experiment_gives_samples_the_rewards_of_others(shuffled: bool) -> None:
    seen: list[Group] = []

    def rewarded_by_index(group: Group) -> bool:
        for sample in group:
            sample.reward = float(sample.index or 0)
        seen.append(group)
        return True

    settings = run_config(shuffle_rewards=shuffled, rollout_batch_size=8, num_rollout=1, n_samples_per_prompt=2)
    World(config=settings, keep=rewarded_by_index).run()
    trained = [sample for group in seen[:8] for sample in group]
    assert any(sample.reward != sample.index for sample in trained) is shuffled


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_engines_are_paused_in_the_configured_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    modes: list[str] = []
    pause = Engines.pause

    async def noting(engines: Engines, mode: str) -> None:
        modes.append(mode)
        await pause(engines, mode)

    monkeypatch.setattr(Engines, "pause", noting)
    World(config=run_config(pause_generation_mode=mode, rollout_batch_size=4, num_rollout=2)).run()
    assert modes == [mode] * 3


def test_engines_that_remove_old_requests_themselves_are_paused_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = set()

    async def note(engines: Engines, mode: str) -> None:
        modes.add(mode)

    monkeypatch.setattr(Engines, "pause", note)
    World(config=run_config(max_kv_staleness=1, rollout_batch_size=4, num_rollout=2)).run()
    assert modes == {"in_place"}


def test_the_learners_processes_get_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "of before")
    LearnerRank(run_config(train_env_vars={"NCCL_DEBUG": "WARN"}, deterministic_mode=True), 0, 1, Path("run"))
    found = [os.environ[name] for name in ("NCCL_DEBUG", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")]
    assert found == ["WARN", "Ring", ":4096:8"]


def test_the_reference_model_has_separate_batching_settings() -> None:
    of_the_actor = {"max_tokens_per_microbatch_in_infer": 100, "sequence_length_round_in_infer": 8}
    actor = run_config(**of_the_actor).learner
    assert actor.reference_batching == actor
    of_the_reference = {
        "ref_use_dynamic_batching_in_infer": True,
        "ref_max_tokens_per_microbatch_in_infer": 300,
        "ref_sequence_length_round_in_infer": 16,
    }
    own = run_config(**of_the_actor, **of_the_reference).learner.reference_batching
    assert (own.use_dynamic_batching_in_infer, actor.use_dynamic_batching_in_infer) == (True, False)
    assert (own.max_tokens_per_microbatch_in_infer, own.sequence_length_round_in_infer) == (300, 16)
