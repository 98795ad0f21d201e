"""A code walkthrough of slime 0.1.0, in its order: what a user of it types or writes.

Functions that the walkthrough shows in full are in `tests/stack/slime_functions.py`; more of them are tested in
`tests/stack/test_slime_functions.py`. `tests/sim/test_building_blocks.py` calls `GenerateState`,
`generate_and_rm_group` and the other building blocks that it describes.
"""

from __future__ import annotations

import asyncio
import io
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import BufferedSource
from miles_async.adapters.storage.rollout_file import load_groups, save_groups
from miles_async.columns.column import NO_LIMITS
from miles_async.compat.slime.data_source import RolloutDataSourceWithBuffer
from miles_async.config.checks import notes
from miles_async.config.device_plan import Demand, demand_of
from miles_async.config.flags import parse_flags
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.errors import UserError
from miles_async.observability.console.program_lines import PlainLines
from miles_async.rewards.factory import RunRewards
from miles_async.rollout.contract import flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, Sample, VersionSpan
from tests.configuration import build, run_config
from tests.scoring import scored
from tests.sim import over_sampling as over_sampling_model
from tests.sim.world import World
from tests.slime_samples import slime_sample
from workers.functions import SavedBatches, dynamic_filter
from workers.specs import sampling_of

USERS_OWN = "tests.stack.slime_functions"


def typed(command_line: str) -> RunConfig:
    return build(parse_flags(command_line.split()).assignments)


# --- Ray placement group --------------------------------------------------------------------------------------------

DEVICES = "--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"


@pytest.mark.parametrize(
    "switch, bundles, engines",
    [
        ("", 16, 4),
        ("--colocate", 8, 4),
        ("--debug-rollout-only", 8, 4),
        ("--debug-train-only --load-debug-rollout-data x", 8, 0),
    ],
    ids=["disaggregated", "colocated", "rollout only", "training only"],
)
def test_the_flags_reserve_as_many_devices_as_in_slime(switch: str, bundles: int, engines: int) -> None:
    demand = demand_of(typed(f"{DEVICES} {switch}"))
    assert (demand.bundles, demand.engines) == (bundles, engines)
    assert isinstance(demand, Demand)


# --- Data source ----------------------------------------------------------------------------------------------------


def data_source(folder: Path, **settings: Any) -> BufferedSource:
    path = folder / "rows.jsonl"
    rows = [{"question": f"q{row}", "answer": f"a{row}", "info": {"level": row}} for row in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = "--input-key question --label-key answer --metadata-key info --n-samples-per-prompt 2 --eval-size 0"
    assignments = parse_flags([*keys.split(), "--prompt-data", str(path)]).assignments
    flags = [f"data.{name}={value}" for name, value in settings.items()]
    return open_data(build([*assignments, *parse_flags(flags).assignments]))


def test_the_sample_has_the_fields_and_methods_of_slime() -> None:
    sample = Sample(index=0, prompt="1+1=", label="2")
    sample.tokens, sample.response, sample.response_length = [1, 2, 3], "2", 1
    sample.reward, sample.loss_mask, sample.status = {"acc": 1.0}, [1], Sample.Status.COMPLETED
    assert sample.get_reward_value(SimpleNamespace(reward_key="acc")) == 1.0
    assert sample.to_dict()["status"] == "completed"
    assert Sample.from_dict(sample.to_dict()) == sample
    assert {status.value for status in Sample.Status} >= {"pending", "completed", "truncated", "aborted"}


def test_get_samples_continues_with_the_next_epoch_and_numbers_the_samples(tmp_path: Path) -> None:
    source = data_source(tmp_path, rollout_shuffle="false")
    groups = [*source.get_samples(2), *source.get_samples(2)]
    assert [group[0].prompt for group in groups] == ["q0", "q1", "q2", "q0"]
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (groups[1][0].label, groups[1][0].metadata["level"]) == ("a1", 1)
    position = source.position()
    assert (position["epoch_id"], position["sample_offset"], position["sample_index"]) == (1, 1, 8)


def test_shuffling_gives_each_epoch_another_order(tmp_path: Path) -> None:
    prompts = [str(group[0].prompt) for group in data_source(tmp_path, rollout_shuffle="true").get_samples(12)]
    epochs = [prompts[start : start + 3] for start in range(0, 12, 3)]
    assert all(sorted(epoch) == ["q0", "q1", "q2"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_returned_groups_come_first_and_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    source = data_source(tmp_path, rollout_shuffle="false")
    first, second = source.get_samples(2)
    source.add_samples([second])
    assert source.get_samples(1)[0].feed_index == second.feed_index
    first.pop()
    with pytest.raises(UserError, match="was returned with 1 samples"):
        source.add_samples([first])


def test_the_buffer_filter_of_the_walkthrough_chooses_by_reward(tmp_path: Path) -> None:
    source = data_source(tmp_path, rollout_shuffle="false", buffer_filter_path=f"{USERS_OWN}.custom_buffer_filter")
    groups = source.get_samples(3)
    for reward, group in enumerate(groups):
        group[0].reward = float(reward)
    source.add_samples(groups)
    assert [group[0].prompt for group in source.get_samples(2)] == ["q2", "q1"]


# --- Rollout control ------------------------------------------------------------------------------------------------


def test_an_existing_router_is_named_by_its_address() -> None:
    flags = "--sglang-router-ip 10.0.0.1 --sglang-router-port 3000 --sglang-router-request-timeout-secs 900"
    engine = typed(flags).engine
    assert (engine.sglang_router_ip, engine.sglang_router_port) == ("10.0.0.1", 3000)
    assert engine.sglang_router_request_timeout_secs == 900


def test_rollout_and_evaluation_functions_are_named_by_their_paths() -> None:
    rollout = typed("--rollout-function-path my.generate_rollout --eval-function-path my.eval_rollout").rollout
    assert (rollout.rollout_function_path, rollout.eval_function_path) == ("my.generate_rollout", "my.eval_rollout")


def loaded(template: str) -> list[Group]:
    """The batch of rollout 4, as a run that only trains loads it, when the trainer is at version 2."""
    settings = run_config(load_debug_rollout_data=template, rollout_batch_size=2, n_samples_per_prompt=2)
    source: Any = SimpleNamespace(trainer_version=2)
    return asyncio.run(SavedBatches(settings, NO_LIMITS)(4, source, 2))


@pytest.mark.parametrize("indices", [{}, {"group_index": None}], ids=["with group indices", "of an early slime"])
def test_debug_data_that_slime_saved_is_loaded(tmp_path: Path, indices: dict[str, Any]) -> None:
    samples = [slime_sample(i, prompt=f"p{i // 2}", **indices) for i in range(4)]
    samples[0]["rollout_routed_experts"] = torch.zeros(3, 2, 1)
    torch.save({"rollout_id": 4, "samples": samples}, tmp_path / "4.pt")
    groups = loaded(str(tmp_path / "{rollout_id}.pt"))
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]
    assert groups[0][0].spans == [VersionSpan(2, 0, 2)], "not newer than the trainer"


def test_debug_data_without_versions_counts_as_sampled_by_the_current_weights(tmp_path: Path) -> None:
    samples = [slime_sample(i, weight_versions=[]) for i in range(4)]
    torch.save({"rollout_id": 4, "samples": samples}, tmp_path / "4.pt")
    assert loaded(str(tmp_path / "{rollout_id}.pt"))[1][1].spans == [VersionSpan(2, 0, 2)]


def test_debug_data_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    def saved(contents: Any) -> str:
        torch.save(contents, tmp_path / "4.pt")
        return str(tmp_path / "{rollout_id}.pt")

    with pytest.raises(UserError, match=r"4\.pt cannot be trained: sample 1 has no rollout_log_probs"):
        loaded(
            saved(
                {
                    "rollout_id": 4,
                    "samples": [slime_sample(i, rollout_log_probs=[-1.0] * 2 * (i != 1)) for i in range(4)],
                }
            )
        )
    with pytest.raises(UserError, match=r"4\.pt has pickled objects \(fractions\.Fraction\); only numbers"):
        loaded(saved({"rollout_id": 4, "samples": [slime_sample(0, label=Fraction(1, 2))]}))
    with pytest.raises(UserError, match=r"4\.pt is not a file that slime's save_debug_rollout_data wrote"):
        loaded(saved([1, 2]))
    with pytest.raises(UserError, match=r"4\.pt cannot be trained: sample 4 has multimodal_inputs"):
        loaded(saved({"rollout_id": 4, "samples": [slime_sample(4, multimodal_inputs={"images": ["a"]})]}))


def test_debug_data_that_could_grow_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    """torch.save compresses nothing, but torch.load reads compressed entries, which can be a thousand times larger."""
    path = tmp_path / "4.pt"
    torch.save({"rollout_id": 4, "samples": [slime_sample(0)]}, tmp_path / "plain.pt")
    with ZipFile(tmp_path / "plain.pt") as plain, ZipFile(path, "w", ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UserError, match=r"4\.pt is compressed, and could need any amount of memory"):
        load_groups(path)


def test_debug_data_is_written_as_safetensors_whatever_its_suffix_and_a_note_says_so(tmp_path: Path) -> None:
    path = tmp_path / "0.pt"
    (note,) = notes(run_config(save_debug_rollout_data=str(path)), "train_async.py")
    assert note.startswith("save_debug_rollout_data writes safetensors files, which torch.load cannot read")
    group = Group([Sample(index=0, prompt="p")], feed_index="sample_0_0")
    save_groups(path, 0, [group])
    assert load_groups(path) == (0, [group])


def test_saved_batches_and_evaluations_are_printed() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream, saved="debug/{rollout_id}.st")
    world = World(config=run_config(rollout_batch_size=4, num_rollout=1, n_samples_per_prompt=2), problems=3).run()
    for event in world.trace.events:
        lines.observe(event)
    printed = stream.getvalue().splitlines()
    assert "Save debug rollout data to debug/0.st" in printed
    assert "eval 0: {'eval/held_out': 1.0, 'eval/held_out-truncated_ratio': 0.0}" in printed


def test_a_function_of_a_user_creates_the_data_source_of_the_walkthrough(tmp_path: Path) -> None:
    data_source(tmp_path)
    settings = run_config(prompt_data=str(tmp_path / "rows.jsonl"), input_key="question", label_key="answer")
    source = RolloutDataSourceWithBuffer(flat_args(settings, tokenizer=None))
    assert [group[0].prompt for group in source.get_samples(2)] == ["q0", "q1"]


def test_evaluations_are_sent_to_wandb() -> None:
    observability = typed("--use-wandb --wandb-always-use-train-step").observability
    assert (observability.use_wandb, observability.wandb_always_use_train_step) == (True, True)


# --- SGLang rollout: GenerateState ----------------------------------------------------------------------------------


def test_the_sampling_parameters_are_those_of_slime() -> None:
    flags = "--rollout-temperature 0.8 --rollout-top-p 0.9 --rollout-top-k 50 --rollout-max-response-len 64"
    config = typed(f"{flags} --rollout-stop </answer> --rollout-stop-token-ids 7 --rollout-skip-special-tokens")
    assert sampling_of(config).body(64) == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "max_new_tokens": 64,
        "stop": ["</answer>"],
        "stop_token_ids": [7],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


# --- SGLang rollout: over-sampling ----------------------------------------------------------------------------------


def test_the_worked_example_of_over_sampling_starts_9_prompts_and_aborts_none() -> None:
    """Over-sample 6, drop 3, choose 4 of 6. slime starts 12 prompts and aborts 3 (docs/explanation/scheduling.md)."""
    choose = load_function(f"{USERS_OWN}.sort_by_reward_std", setting="over_sampling_filter_path")
    world = World(
        config=run_config(rollout_batch_size=4, over_sampling_batch_size=6, num_rollout=1, n_samples_per_prompt=2),
        schedule=Schedule.SYNCHRONOUS,
        keep=lambda group: group.feed_index not in {"sample_0_1", "sample_0_2", "sample_0_3"},
        choose=lambda groups: choose(None, groups),
    ).run()
    ledger = world.service.lifecycle.ledger
    assert ledger.fed == 9
    assert ledger.dropped[DropReason.FILTERED] == 3 + 2, "by the dynamic filter and by the over-sampling filter"
    assert ledger.dropped[DropReason.ABORTED] == 0
    assert [len(batch) for batch in world.trainer.batches] == [4]


def test_starting_prompts_one_by_one_is_faster_with_a_surplus_and_slower_without() -> None:
    def seconds(rule: str, over_sampling: int) -> float:
        return over_sampling_model.average(rule, needed=16, over_sampling=over_sampling, dropped=0.5)[0]

    assert seconds("replace", 32) < seconds("refill", 32)
    assert seconds("replace", 16) > seconds("refill", 16)


def test_without_an_over_sampling_filter_the_unfinished_groups_are_aborted() -> None:
    world = World(
        config=run_config(rollout_batch_size=4, over_sampling_batch_size=6, num_rollout=1, n_samples_per_prompt=2),
        schedule=Schedule.SYNCHRONOUS,
    ).run()
    ledger = world.service.lifecycle.ledger
    assert (ledger.fed, ledger.dropped[DropReason.ABORTED]) == (6, 2)


def test_the_first_and_the_last_sample_of_a_rollout_are_printed() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream, devices=8)
    world = World(
        config=run_config(rollout_batch_size=4, num_rollout=1, n_samples_per_prompt=2), schedule=Schedule.SYNCHRONOUS
    ).run()
    for event in world.trace.events:
        lines.observe(event)
    reserved, first, last, *_ = stream.getvalue().splitlines()
    assert reserved == "Creating placement group with 8 devices..."
    assert first.startswith("First rollout sample: ['?")
    assert first.endswith(", label: , reward: 1.0")
    assert last.startswith("Finish rollout: ['?")


# --- SFT rollout ----------------------------------------------------------------------------------------------------


def test_the_function_for_supervised_fine_tuning_has_the_same_short_name() -> None:
    path = typed("--rollout-function-path sft_rollout.generate_rollout").rollout.rollout_function_path
    assert path == "miles_async.rollout.sft_rollout.generate_rollout"


# --- Filters --------------------------------------------------------------------------------------------------------


def test_the_dynamic_filter_of_the_walkthrough_drops_groups_of_equal_rewards() -> None:
    settings = typed(f"--dynamic-sampling-filter-path {USERS_OWN}.check_reward_nonzero_std")
    keep = dynamic_filter(settings, flat_args(settings))
    groups = [Group([Sample(reward=reward) for reward in rewards]) for rewards in ((1.0, 1.0), (0.0, 1.0))]
    assert [keep(group).keep for group in groups] == [False, True]


# --- Reward models --------------------------------------------------------------------------------------------------


async def test_a_reward_function_of_a_user_is_awaited() -> None:
    assert await scored("ab", "c", label="ab", custom_rm_path=f"{USERS_OWN}.custom_rm") == [1.0, 0.0]


async def test_f1_is_a_reward_type_and_boxed_is_a_prefix() -> None:
    assert await scored("the cat", label="cat", rm_type="f1") == [1.0]
    assert await scored(r"no, \boxed{cat}", label="cat", rm_type="boxed_f1") == [1.0]


@pytest.mark.parametrize("rm_type", ["deepscaler", "dapo", "math", "boxed_math", "f1"])
def test_the_reward_types_of_the_walkthrough_exist(rm_type: str) -> None:
    asyncio.run(RunRewards(run_config(rm_type=rm_type), args=None).close())


def test_an_unknown_reward_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"rm_type 'rouge' is unknown: set .*deepscaler.*custom_rm_path"):
        RunRewards(run_config(rm_type="rouge"), args=None)
