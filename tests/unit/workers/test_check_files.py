"""What `--check-config` reads of the files of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from miles_async.adapters.sglang.light_tokenizer import LightTokenizer
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checkpoints import CheckpointFolder
from miles_async.config.cli import EXIT_INVALID, parse_or_exit
from miles_async.config.fields import with_settings
from miles_async.config.flags import parse_flags
from miles_async.config.model_shape import dimensions
from miles_async.config.schema import RunConfig
from miles_async.config.table import parallel_layout
from miles_async.errors import TemplateError, UserError
from miles_async.modes.shipped import Supervised
from tests.configuration import KEY_FLAGS, KEYS, run_config
from tests.wrong_inputs.builders import checkpoint
from workers.check_config import read_files
from workers.check_files import FIRST_ROWS, check_files

GENERATION = ("--n-samples-per-prompt", "2", "--rollout-max-response-len", "64")
RUN = (*KEY_FLAGS, "--rm-type", "exact", *GENERATION, "--check-config")
GOOD = {"prompt": "one one", "label": "1"}
TEMPLATES = {
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}",
    "blocks of lines": "{% for m in messages %}\n  {% if m.content %}\n {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "tools": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[0].content }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "the prompt of the answer": "{{ messages[0].content }}{% if add_generation_prompt %} one{% endif %}",
    "own variables": "{{ messages[0].content }}{% if thinks %} thinks{% endif %}",
    "documents": "{{ documents }}{{ messages[0].content }}",
}

MIXED: dict[str, Any] = {"prompt_data": None, "apply_chat_template": True}
"""A run with several data sets, whose prompts are rendered."""


def job(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> RunConfig:
    """A run with a checkpoint and a file of prompts."""
    checkpoint(folder)
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = {"hf_checkpoint": str(folder / "model"), "prompt_data": str(file), **KEYS, "rm_type": "exact"}
    sizes = {"n_samples_per_prompt": 8, "rollout_max_response_len": 64}
    return run_config(**{**own, **sizes, "cache_dir": str(folder / "cache"), **settings})


def said(config: RunConfig, name: str = "data", *, full: bool = False) -> list[str]:
    return [f"{value} {text}" for row, value, text in check_files(config, full=full) if row == name]


def refusals(config: RunConfig, *, full: bool = False) -> list[str]:
    with pytest.raises(UserError) as refused:
        check_files(config, full=full)
    return [str(sentence) for sentence in refused.value.args]


def test_the_longest_prompt_is_compared_with_its_limit_and_the_context(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD, {**GOOD, "prompt": "one " * 7}], rollout_max_prompt_len=9)
    [row] = said(config)
    assert row.startswith("2 first rows of ")
    assert row.endswith("longest prompt has 7 tokens (rollout_max_prompt_len 9), 71 with its response (context 256)")


def test_each_data_set_is_read_with_its_own_limits_and_template(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD, {**GOOD, "prompt": "one " * 7}])
    path, twice = config.data.prompt_data, {"chat_template": "{{ messages[0].content }} {{ messages[0].content }}"}
    sets = {
        "plain": {"prompt_data": f"{path}@[:1]", "max_prompt_len": 4},
        "twice": {"prompt_data": path, "apply_chat_template_kwargs": twice, "max_response_len": 10},
    }
    rows = said(job(tmp_path, [GOOD, {**GOOD, "prompt": "one " * 7}], **MIXED, datasets=sets))
    assert [row.partition(" first rows")[0] for row in rows] == ["1", "2"]
    assert rows[0].endswith("4 tokens (rollout_max_prompt_len 4), 68 with its response (context 256)")
    assert "; the longest prompt has 14 tokens, 24 with its response" in rows[1]


def test_every_data_set_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = job(tmp_path, [GOOD]).data.prompt_data
    sets = {
        "keys": {"prompt_data": path, "input_key": "question"},
        "long": {"prompt_data": path, "max_prompt_len": 1},
        "good": {"prompt_data": path},
    }
    keys, long = refusals(job(tmp_path, [GOOD], **MIXED, datasets=sets))
    assert keys.startswith("datasets.keys: prompt_data ")
    assert long.startswith("datasets.long: none of 1 prompts that were tried can be used")


def test_the_reward_of_each_data_set_scores_an_empty_answer(tmp_path: Path) -> None:
    path = job(tmp_path, [GOOD]).data.prompt_data
    sets = {"words": {"prompt_data": path, "rm_type": "dapo"}, "flat": {"prompt_data": path}}
    config = job(tmp_path, [GOOD], prompt_data=None, datasets=sets)
    assert [row.split()[0] for row in said(config, "reward", full=True)] == ["-1", "0"]


def test_prompts_of_messages_are_measured_with_the_chat_template(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "one one"}]
    [row] = said(job(tmp_path, [{**GOOD, "prompt": chat}]))
    assert "the longest prompt has 4 tokens" in row, "role, colon and two words"


def test_prompts_that_are_too_long_are_counted_as_long_as_others_can_be_used(tmp_path: Path) -> None:
    long = {**GOOD, "prompt": "one " * 20}
    [row] = said(job(tmp_path, [GOOD, long, long], rollout_max_prompt_len=9))
    assert "2 cannot be used: the prompt has 20 tokens, more than rollout_max_prompt_len 9" in row
    [refusal] = refusals(job(tmp_path, [long, long], rollout_max_prompt_len=9))
    assert refusal.startswith("prompt_data: none of 2 prompts that were tried can be used")


SUPERVISED = {
    "rollout_function_path": Supervised.function,
    "loss_type": "sft_loss",
    "rm_type": None,
    "n_samples_per_prompt": 1,
}


def conversation(answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "one"}, {"role": "assistant", "content": f"{answer}</s>"}]}


def supervised(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> RunConfig:
    """A run on supervised examples, with a tokenizer that has a token for their end."""
    (folder / "model").mkdir(exist_ok=True)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "model" / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "</s>"})
    )
    return job(folder, rows, **{**SUPERVISED, "label_key": None, **settings})


def test_a_supervised_example_counts_as_a_whole(tmp_path: Path) -> None:
    [row] = said(supervised(tmp_path, [conversation("one"), conversation("one one one one")]))
    # Role, colon and text of two messages, and the token for the end.
    assert row.endswith("; the longest example has 10 tokens, in a context of 256")
    [row] = said(supervised(tmp_path, [{"prompt": "one one", "label": "one"}], label_key="label"))
    assert "the longest example has 4 tokens" in row


def test_supervised_examples_that_do_not_fit_are_said(tmp_path: Path) -> None:
    short, long = conversation("one"), conversation("one " * 300)
    [row] = said(supervised(tmp_path, [short, long], max_tokens_per_gpu=512))
    assert "; 1 cannot be used: the example has 306 tokens, more than the 256 tokens of the model's context" in row
    [row] = said(supervised(tmp_path, [short, long], max_tokens_per_gpu=128))
    assert "the example has 306 tokens, and a micro-batch of the learner holds at most 128: raise" in row
    [refusal] = refusals(supervised(tmp_path, [long]))
    assert refusal.startswith("prompt_data: none of 1 prompts that were tried can be used")


def test_a_supervised_example_without_an_answer_is_refused(tmp_path: Path) -> None:
    asks = {"prompt": [{"role": "user", "content": "one"}]}
    [refusal] = refusals(supervised(tmp_path, [conversation("one"), asks]))
    assert refusal.endswith(
        "no text to train on: add an assistant turn that step_loss_mask does not exclude, or set label_key to the key "
        "of the answer"
    )


def test_with_a_generate_function_the_prompt_of_the_first_turn_counts(tmp_path: Path) -> None:
    own = {"custom_generate_function_path": "agents.generate", "rollout_max_response_len": 250}
    [row] = said(job(tmp_path, [GOOD, {**GOOD, "prompt": "one " * 9}], **own))
    assert row.endswith("; the longest prompt of a first turn has 9 tokens, in a context of 256")
    [row] = said(job(tmp_path, [GOOD, {**GOOD, "prompt": "one " * 256}], **own))
    assert "; 1 cannot be used: the prompt has 256 tokens, and the model's context 256, so a first turn has no" in row
    [refusal] = refusals(job(tmp_path, [{**GOOD, "prompt": "one " * 9}], rollout_max_prompt_len=8, **own))
    assert "the prompt has 9 tokens, more than rollout_max_prompt_len 8" in refusal


def test_a_generate_function_may_render_chats_for_which_the_checkpoint_has_no_template(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    chat = [{"role": "user", "content": "one one"}]
    [row] = said(job(tmp_path, [{**GOOD, "prompt": chat}], custom_generate_function_path="agents.generate"))
    assert row.endswith("rows.jsonl")


def test_a_data_set_for_evaluation_is_measured_with_its_own_response_length(tmp_path: Path) -> None:
    rows = str(tmp_path / "rows.jsonl")
    evaluation, training = said(job(tmp_path, [GOOD], eval_datasets={"aime": {"path": rows, "max_response_len": 100}}))
    assert "for evaluation; the longest prompt has 2 tokens, 102 with its response" in evaluation
    assert "the longest prompt has 2 tokens, 66 with its response" in training


def test_of_long_prompts_only_the_first_ones_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.check_files.MEASURED_CHARACTERS", 20)
    [row] = said(job(tmp_path, [{**GOOD, "prompt": "one " * count} for count in (2, 4, 7)]))
    assert row.startswith("3 first rows of ")
    assert "; the longest prompt of the first 2 has 4 tokens, 68 with its response" in row


@pytest.mark.parametrize("part", ["", "@[1:]", "@[-90:]", "@[:-1]"])
def test_only_the_first_rows_of_a_file_are_read(tmp_path: Path, part: str) -> None:
    config = job(tmp_path, [GOOD] * 90 + [{"question": "1"}])
    [row] = said(with_settings(config, prompt_data=f"{config.data.prompt_data}{part}"))
    assert row.startswith(f"{FIRST_ROWS} first rows")


@pytest.mark.parametrize("part, problem", [("@[85:]", 91), ("@[-3:]", 91), ("@[89:91]", 91)])
def test_the_first_rows_of_a_slice_are_those_that_are_read(tmp_path: Path, part: str, problem: int) -> None:
    config = job(tmp_path, [GOOD] * 90 + [{"question": "1"}])
    [refusal] = refusals(with_settings(config, prompt_data=f"{config.data.prompt_data}{part}"))
    assert f"rows.jsonl, line {problem}: no key 'prompt' (input_key) and no key 'label' (label_key)" in refusal
    assert "the row has 'question'" in refusal


def test_a_parquet_file_is_not_converted(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["one"] * 500, "label": ["1"] * 500}), file, row_group_size=10)
    [row] = said(job(tmp_path, [], prompt_data=str(file)))
    assert row.startswith(f"{FIRST_ROWS} first rows")
    assert not (tmp_path / "cache").exists()


def test_everything_that_is_wrong_is_in_one_list(tmp_path: Path) -> None:
    other = tmp_path / "aime.jsonl"
    other.write_text("{}\n")
    config = job(
        tmp_path,
        [{"prompt": "one", "answer": "1"}],
        eval_datasets={"aime": {"path": str(other)}, "gone": {"path": str(tmp_path / "gone.jsonl")}},
        load=str(tmp_path / "nowhere"),
    )
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    tokenizer, aime, gone, training, load = refusals(config)
    assert "tokenizer.json is not a valid tokenizer" in tokenizer
    assert "aime.jsonl, line 1: no key 'prompt'" in aime
    assert "gone.jsonl cannot be read: No such file" in gone
    assert "no key 'label' (label_key); the row has 'prompt', 'answer'" in training
    assert "nowhere holds no checkpoint" in load


def test_what_is_downloaded_later_is_not_read(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD], hf_checkpoint="owner/model", apply_chat_template=True)
    [row] = said(config)
    assert "their lengths are unknown, because owner/model is not a folder with a tokenizer" in row
    [row] = said(with_settings(config, prompt_data="owner/name:train"))
    assert row == "0 rows read of owner/name:train, which is downloaded when the run starts"


def saved(folder: Path, config: RunConfig, rollout: int = 4, **facts: Any) -> None:
    """Write a checkpoint as a run with `config` does."""
    order = {"seed": 42, "shuffle": False, "n_samples_per_prompt": 8, "rows": 10_000, "content": "unknown"}
    data = {"epoch_id": 0, "sample_offset": 3, "sample_index": 24, "order": order, "metadata": {}}
    data |= {"prompts": 3, "warned": False, "outside": [], "recent": []}
    checkpoints = CheckpointFolder(folder)
    draft = checkpoints.begin(rollout)
    (draft / "weights").write_text("weights")
    of_model = {"model": dimensions(config), "layout": parallel_layout(config.learner)}
    progress = {"rollout": rollout, "data": data, "owed": [{}], **of_model, **facts}
    checkpoints.write_progress(draft, progress)
    checkpoints.commit(draft, rollout, None)


def test_the_checkpoint_to_load_is_named_with_its_progress(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"))
    saved(tmp_path / "saved", config, layout="2 rank(s), tensor-parallel 2")
    [row] = said(config, "load")
    assert row.startswith(f"5 of 100 rollouts are trained in {tmp_path}/saved/rollout_0000004, prompts to finish: 1;")
    assert row.endswith("random numbers start from the seed, because its layout is 2 rank(s), tensor-parallel 2")


def test_a_damaged_checkpoint_is_named_together_with_the_older_one_that_is_loaded(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"))
    saved(tmp_path / "saved", config, rollout=3)
    older = (tmp_path / "saved" / "latest").read_text()
    saved(tmp_path / "saved", config)
    (tmp_path / "saved" / "latest").write_text(f"rollout_0000004\n{older}")
    (tmp_path / "saved" / "rollout_0000004" / "weights").unlink()
    progress, damage = said(config, "load")
    assert progress.startswith("4 of 100 rollouts")
    assert "weights is missing; an older checkpoint is loaded" in damage


def test_an_empty_folder_to_load_begins_a_run(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    [row] = said(job(tmp_path, [GOOD], load=str(tmp_path / "saved")), "load")
    assert row == f"0 checkpoints in {tmp_path}/saved: the run starts from the beginning"


def test_a_checkpoint_of_another_model_or_of_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"))
    saved(tmp_path / "saved", config, model={**dimensions(config), "layers": 48})
    [refusal] = refusals(config)
    assert "belongs to another model (layers 48, not 1)" in refusal
    saved(tmp_path / "saved", config)
    [refusal] = refusals(with_settings(config, rollout_seed=7))
    assert "rollout_seed was 42 and is 7" in refusal


def test_a_checkpoint_of_an_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"), lora_rank=4)
    saved(tmp_path / "saved", config)
    assert said(config, "load")
    [weights] = (tmp_path / "model").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    [refusal] = refusals(config)
    assert "belongs to another model (base_hash" in refusal


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"lora_alpha": 32.0}, "lora_scale 4.0, not 8.0"),
        ({"lora_type": "rslora"}, "lora_scale 4.0, not 8.0"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, "gate_proj up_proj down_proj, not q_proj v_proj"),
    ],
)
def test_a_checkpoint_of_adapters_of_another_form_is_refused(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"), lora_rank=4)
    saved(tmp_path / "saved", config)
    [refusal] = refusals(with_settings(config, **changed))
    assert named in refusal
    assert "settings of LoRA" in refusal
    same = with_settings(config, lora_target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    assert said(same, "load"), "other names of the same layers"


@pytest.mark.parametrize("position", [{}, {"order": []}, {"order": {}}])
def test_a_checkpoint_without_a_valid_data_position_is_refused(tmp_path: Path, position: dict[str, Any]) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"))
    saved(tmp_path / "saved", config, data=position)
    [refusal] = refusals(config)
    assert "the data position of checkpoint" in refusal


def test_a_checkpoint_of_a_version_that_stored_no_model_is_accepted(tmp_path: Path) -> None:
    config = job(tmp_path, [GOOD], load=str(tmp_path / "saved"))
    saved(tmp_path / "saved", config, model={})
    assert len(said(config, "load")) == 1


@pytest.mark.parametrize("indexed", [True, False], ids=["with an index", "in one file"])
def test_a_checkpoint_without_mtp_heads_cannot_train_them(tmp_path: Path, indexed: bool) -> None:
    config = job(tmp_path, [GOOD], enable_mtp_training=True, megatron_to_hf_mode="bridge")
    weights, index = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "model.safetensors.index.json"

    def holds(name: str) -> None:
        save_file({name: np.zeros(1, np.float32)}, weights)
        if indexed:
            index.write_text(json.dumps({"weight_map": {name: weights.name}}))

    # The model has one layer, so a second one is a head of families that number their heads.
    holds("model.layers.1.mlp.down_proj.weight")
    [refusal] = refusals(config)
    assert refusal.endswith("has no MTP heads: unset it, or use a checkpoint that has them")
    shape = tmp_path / "model" / "config.json"
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "num_nextn_predict_layers": 1}))
    assert len(said(config)) == 1
    holds("mtp.layers.0.mlp.down_proj.weight")
    assert len(said(config)) == 1


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "rewards_of_users.py").write_text(
        "def first_word(args, sample):\n    return len(sample.response.split()[0])\n\n"
        "def right(args, sample):\n    return 0.25\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "rewards_of_users"
    sys.modules.pop("rewards_of_users", None)


def test_only_a_full_check_calls_the_reward_of_an_empty_answer(tmp_path: Path, rewards: str) -> None:
    config = job(tmp_path, [GOOD], rm_type=None, custom_rm_path=f"{rewards}.first_word")
    assert said(config, "reward") == []
    [refusal] = refusals(config, full=True)
    assert refusal.startswith(f"custom_rm_path: an empty answer to the first row of {config.data.prompt_data} has no")
    assert "IndexError: list index out of range" in refusal


def test_a_reward_may_need_what_a_generate_function_adds_to_samples(tmp_path: Path, rewards: str) -> None:
    own = {"custom_rm_path": f"{rewards}.first_word", "custom_generate_function_path": f"{rewards}.generate"}
    [row] = said(job(tmp_path, [GOOD], rm_type=None, **own), "reward", full=True)
    assert row.startswith("none for an empty answer to the first row of ")
    assert "IndexError" in row


def test_a_full_check_says_the_reward_of_each_data_set(tmp_path: Path, rewards: str) -> None:
    aime = {"path": str(tmp_path / "rows.jsonl"), "custom_rm_path": f"{rewards}.right"}
    config = job(tmp_path, [GOOD], eval_datasets={"aime": aime})
    evaluation, training = said(config, "reward", full=True)
    assert evaluation.startswith("0.25 of an empty answer to the first row of ")
    assert training.startswith("0 of an empty answer")


def test_a_full_check_names_each_reward_that_fails(tmp_path: Path, rewards: str) -> None:
    path = f"{rewards}.first_word"
    aime = {"path": str(tmp_path / "rows.jsonl"), "custom_rm_path": path}
    config = job(tmp_path, [GOOD], rm_type=None, custom_rm_path=path, eval_datasets={"aime": aime}, prompt_data=None)
    config = with_settings(config, reasoning_gym_task="chain_sum")
    assert len(refusals(config, full=True)) == 2


@pytest.mark.parametrize(
    "words, checks, fully",
    [
        (["--lr", "1"], False, False),
        (["--check-config", "--lr", "1"], True, False),
        (["--check-config", "full", "--lr", "1"], True, True),
        (["--check-config=full"], True, True),
    ],
)
def test_a_check_is_full_only_if_the_command_line_says_so(words: list[str], checks: bool, fully: bool) -> None:
    flags = parse_flags(words)
    assert (flags.check, flags.check_fully, flags.problems) == (checks, fully, [])


def test_another_word_after_check_config_is_refused() -> None:
    [problem] = parse_flags(["--check-config", "fully"]).problems
    assert "unexpected argument 'fully'" in problem


def test_problems_of_settings_and_of_files_come_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(tmp_path, [{"question": "one"}])
    words = [*RUN, "--prompt-data", str(config.data.prompt_data), "--lr", "-1"]
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(words, "train.py", read_files=read_files)
    assert ended.value.code == EXIT_INVALID
    setting, row = capsys.readouterr().err.splitlines()
    assert "--lr" in setting
    assert "no key 'prompt' (input_key)" in row


def test_a_file_that_settings_already_complain_about_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RUN, "--prompt-data", str(tmp_path / "gone.jsonl")]
    with pytest.raises(SystemExit):
        parse_or_exit(words, "train.py", read_files=read_files)
    assert capsys.readouterr().err == f"train.py: prompt_data {tmp_path}/gone.jsonl: no such file\n"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_the_same_text_as_in_transformers(tmp_path: Path, template: str) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "add_bos_token": False,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint(tmp_path)
    chat = [{"role": "user", "content": "one <é>"}, {"role": "assistant", "content": "one"}]
    tools = [{"type": "function", "function": {"name": "<add>", "parameters": {}}}]
    kinds = (LightTokenizer, CheckpointTokenizer)
    light, whole = (kind(str(tmp_path / "model"), template_kwargs={"thinks": True}) for kind in kinds)
    assert light.render(chat, tools) == whole.render(chat, tools)
    assert light.encode(chat, tools) == whole.encode(chat, tools)


def test_a_template_in_a_file_of_its_own_is_used(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    assert LightTokenizer(str(tmp_path / "model")).render([{"role": "user", "content": "one"}]) == "own one"


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError, match="unsafe"):
        LightTokenizer(str(tmp_path / "model")).render([{"role": "user", "content": "one"}])
