"""The reference pages of the documentation site, generated from the code while MkDocs builds the site.

`reference/settings.md` lists every setting of the schema by section, `reference/models.md` every family of models that
was tested, `reference/flags-of-slime.md` every flag that launch scripts of slime and Miles use, and
`reference/keys-of-verl.md` every key that those of verl use. `reports.py` makes the pages of what a run reports.
`reference/python/` has a page per public module or package; mkdocstrings reads the names from the source files and
imports nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from miles_async.compat.megatron.flags import flags as megatron_rules
from miles_async.compat.miles.flags import FLAGS as MILES
from miles_async.compat.roll.table import TABLE as ROLL
from miles_async.compat.roll.table import VLLM
from miles_async.compat.slime.flags import FLAGS as SLIME
from miles_async.compat.verl.rules import FLAGS as FLAGS_OF_VERL
from miles_async.compat.verl.rules import TABLE as VERL
from miles_async.compat.verl.rules import rule_below
from miles_async.config.fields import SECTIONS, SETTINGS, Setting
from miles_async.config.guest_flags import meaning, shown
from miles_async.config.translation import Flag, entries
from tests.bridge.engine_families import LOADERS, WITHOUT_LOADER
from tests.launch_scripts.outcomes import GPUS, as_words
from tests.launch_scripts.record import PROJECTS
from tests.launch_scripts.replay import Recording, Script, recorded_results, scripts
from tests.launch_scripts.roll_files import roll_files

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "types", "errors", "events", "ports", "pipeline", "rollout", "modes", "rewards", "filters", "losses", "models",
    "transports", "wire_formats", "environments", "columns", "token_values", "plugins", "section", "guests", "compat",
)  # fmt: skip
"""The modules and packages of `miles_async` whose names users may import."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """MkDocs calls this function first: the pages of Python names join the navigation."""
    reference = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    reference.append({"Python": [{f"miles_async.{name}": f"reference/python/{name}.md"} for name in _public()]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """MkDocs calls this function once it has collected the pages."""
    files.append(File.generated(config, "reference/settings.md", content=settings_page()))
    files.append(File.generated(config, "reference/models.md", content=models_page()))
    files.append(File.generated(config, "reference/flags-of-slime.md", content=flags_page()))
    files.append(File.generated(config, "reference/keys-of-verl.md", content=keys_of_verl_page()))
    files.append(File.generated(config, "reference/keys-of-roll.md", content=keys_of_roll_page()))
    for name in _public():
        files.append(File.generated(config, f"reference/python/{name}.md", content=python_page(name)))
    return files


def settings_page() -> str:
    """Every setting with its flag, values, default and help, one table per section of the YAML file."""
    lines = [
        "# Settings",
        "",
        "A setting has three spellings: the flag below, its name under its section in a YAML file (`--config`), and a",
        "dotted override such as `rollout.rollout_batch_size=32`. Later sources win: YAML files in order, then flags,",
        "then overrides. A flag `--[no-]name` needs no value. `--sglang-ANYTHING` passes any other server argument to",
        "SGLang. `--check-config` prints the values that follow from the settings.",
        "",
        "Values are YAML 1.2. Only `true` and `false` are booleans, but a switch in a file may also be yes, no, on or",
        "off. `1:00` and `2026-11-23` are strings, `0x10` and `0o20` are 16, and `010` is refused. A flag whose",
        "setting is a string takes its value verbatim. In a file, quote a string that looks like a number. `null` or",
        "`None` unsets a setting.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section}", "", "| flag | value | default | meaning |", "|---|---|---|---|"]
        lines += [_row(setting) for setting in SETTINGS.values() if ".".join(setting.path[:-1]) == section]
    return "\n".join(lines) + "\n"


def models_page() -> str:
    """Every family of models with its sources, and what was shown with a tiny checkpoint on a CPU."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())
    lines = [
        "# Models",
        "",
        "The learner takes a model from [a plug-in](../how-to/model-plugin.md) or from",
        "[Megatron-Bridge](../how-to/bridge-models.md). `make test-bridge` converts a tiny checkpoint of each family",
        "to Megatron and back in each layout below. All tensors must be equal, and log-probabilities and gradients of",
        "the learner must be those of transformers. `python -m benchmarks.models` trains each checkpoint for ten steps",
        "with an engine on a CPU, and compares the engine's log-probabilities with those that transformers computes",
        f"from the exported weights. These are the results of {recorded['date']}, commit `{recorded['commit']}`.",
        "",
        "| family | architecture | source | layouts | ten steps with an engine | engine against transformers |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in recorded["result"].items():
        if "failed" in result:
            shown = "its loader on CPU parameters" if name in LOADERS else ""
            trained, difference = f"no: {_escaped(result['failed'])}", shown
        else:
            trained, difference = f"yes, `{result['transport']}`", f"{result['difference']:.1e} nats"
        sources, layouts = (", ".join(result[key]) for key in ("sources", "layouts"))
        cells = (name, f"`{result['architecture']}`", sources, layouts, trained, difference)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "An engine on a CPU is SGLang with attention in PyTorch, which lacks what some families need. For these,",
        "`tests/bridge/test_engine_loaders.py` shows that a publish gives the parameters that the engine's own loader",
        "gives, on CPU parameters and without computing with them ([Engines](../how-to/bridge-models.md#engines)).",
        f"SGLang has no model of {', '.join(WITHOUT_LOADER)}. With multi-head",
        "latent attention it computes other log-probabilities than transformers from the start, although weights that",
        "were published give the same log-probabilities as an engine that starts with them. SGLang computes Mistral",
        "without its sliding window, so contexts that are longer than the window differ. Gemma differs because",
        "[SGLang computes the exact GELU](../how-to/model-data-reward.md#model). Mixtral has a plug-in, which `make",
        "test-all` compares with transformers. Kimi-Linear cannot be trained: neither Megatron-Bridge nor transformers",
        "has it. Families with images are compared and trained in",
        "[their text part](../how-to/bridge-models.md#models-that-also-take-images).",
    ]
    return "\n".join(lines) + "\n"


def flags_page() -> str:
    """What each flag of the recorded launch scripts means here, and the scripts themselves."""
    recorded = [script for project in ("slime", "miles") for script in scripts(project)]
    used = Counter(flag for script in recorded for flag in {row[0] for row in script.arguments})
    rules = {shown(name): (name, rule) for name, rule in {**megatron_rules(), **MILES, **SLIME}.items()}
    lines = [
        "# Flags of slime and Miles",
        "",
        f"The flags of {len(recorded)} launch scripts of slime and Miles, and what each means here. A flag is the",
        "setting of the same name, or is *mapped* to other settings, *compared* with the checkpoint or with what every",
        "run does, *passed on* to Megatron-core, *without effect* for a reason, or *refused* with what to use.",
        "`--help-slime` and `--help-megatron` print the whole tables. Tests run `--check-config` on all of these",
        "scripts, with a small checkpoint of their family and rows with their keys, and some with another number of",
        "GPUs: see the [results](#scripts).",
        "",
        "| flag | scripts | | meaning |",
        "|---|---|---|---|",
    ]
    for flag, count in sorted(used.items()):
        name = flag[2:].replace("-", "_")
        if name in SETTINGS:
            kind, text = "setting", f"[{name}](settings.md)"
        elif flag in rules:
            kind, text = meaning(*rules[flag])
        else:
            kind, text = "passed on", "is an argument of SGLang or of its router"
        lines.append(f"| `{flag}` | {count} | {kind} | {_escaped(text)} |")
    return "\n".join([*lines, *_script_lines(recorded, "flags"), *_left_out_lines("miles"), ""])


def keys_of_verl_page() -> str:
    """What each key of the recorded launch scripts of verl means here, and the scripts themselves."""
    recorded = scripts("verl")
    used = Counter(key for script in recorded for key in {row[0].lstrip("+~") for row in script.arguments})
    lines = [
        "# Keys of verl",
        "",
        f"The keys of {len(recorded)} launch scripts of verl, and what each means here. A key is *mapped* to settings,",
        "*compared* with other keys or with what every run does, *passed on* to Megatron-core, *without effect* for a",
        "reason, or *refused* with what to use. [Move a job from verl](../how-to/from-verl.md) says how. Tests run",
        "`--check-config` on all of these scripts with SGLang as the engine, and some with more GPUs: see the",
        "[results](#scripts).",
        "",
        "| key | scripts | | meaning |",
        "|---|---|---|---|",
    ]
    for key, count in sorted(used.items()):
        rule = VERL.get(key) or rule_below(key)
        flag = FLAGS_OF_VERL[key.removeprefix("--").replace("-", "_")] if rule is None else Flag(rule)
        kind, text = meaning(key, flag)
        lines.append(f"| `{key}` | {count} | {kind} | {_escaped(text)} |")
    return "\n".join([*lines, *_script_lines(recorded, "keys"), ""])


def _script_lines(recorded: Sequence[Script], arguments: str) -> Iterator[str]:
    """A table of the scripts with the number of their arguments, which the project calls `arguments`."""
    yield from ("", "## Scripts", "", f"| script | commit | model | {arguments} | `--check-config` |")
    yield "|---|---|---|---|---|"
    for script in recorded:
        row = (_link(script), script.commit[:8], script.family, len(script.arguments), _result(script))
        yield "| " + " | ".join(map(str, row)) + " |"


def _left_out_lines(project: str) -> Iterator[str]:
    """The scripts that are not recorded although their models are trained here, each with the reason."""
    yield from ("", "## Scripts that are left out", "")
    yield "Scripts of other model families are not in the table, and neither are these:"
    yield ""
    for launch, why in PROJECTS[project].left_out.items():
        yield f"- `{launch}`: {why}"


def _link(recording: Recording) -> str:
    address = f"https://github.com/{recording.repository}/blob/{recording.commit}/{recording.path}"
    return f"[{recording.path}]({address})"


def _result(recording: Recording) -> str:
    """Whether a script or a file passes `--check-config`, and with which number of GPUs, or why not in a few words."""
    reasons = recorded_results(recording.project)[recording.name]
    gpus = GPUS.get(recording.name)
    passes = "passes" if gpus is None else f"passes with `{as_words(gpus)}`"
    return f"refused: {_escaped(', '.join(reasons))}" if reasons else passes


def keys_of_roll_page() -> str:
    """What each key of the recorded files of ROLL means here, and why files are refused."""
    recorded = roll_files()
    used = Counter(
        key
        for file in recorded
        for key in {key for content in file.files.values() for key, _ in entries(content, ROLL)}
    )
    lines = [
        "# Keys of ROLL",
        "",
        f"The keys of {len(recorded)} configuration files of ROLL, and what each means here. A key is *mapped* to",
        "settings, *compared* with what every run does, *without effect* for a reason, or *refused* with what to use.",
        "Keys that a file of [Hydra](https://hydra.cc) defines only to refer to them are left out. Tests run",
        "`--check-config` on all of these files, with `--rm-url` if a judge scores: see the [results](#files).",
        "",
        "| key | files | | meaning |",
        "|---|---|---|---|",
    ]
    for key, count in sorted(used.items()):
        if (rule := ROLL.get(key)) is not None:
            kind, text = meaning(key, Flag(rule))
            lines.append(f"| `{key}` | {count} | {kind} | {_escaped(text.replace('other flags', 'other keys'))} |")
    lines += ["", "## Arguments of vLLM", "", "| argument | | meaning |", "|---|---|---|"]
    for name, rule in sorted(VLLM.items()):
        kind, text = meaning(name, Flag(rule))
        lines.append(f"| `{name}` | {kind} | {_escaped(text)} |")
    lines += ["", "## Files", "", "| file | commit | model | `--check-config` |", "|---|---|---|---|"]
    for file in recorded:
        lines.append(f"| {_link(file)} | {file.commit[:8]} | {file.checkpoint} | {_result(file)} |")
    return "\n".join([*lines, ""])


def _row(setting: Setting) -> str:
    kinds = sorted(kind.__name__ for kind in setting.kinds if kind is not NoneType)
    value = ", ".join(f"`{choice}`" for choice in setting.choices) or " or ".join(kinds)
    flag = f"--[no-]{setting.flag[2:]}" if bool in setting.kinds else setting.flag
    default = "unset" if setting.default is None else f"`{setting.default}`"
    return f"| `{flag}` | {value} | {default} | {_escaped(setting.help)} |"


def _escaped(text: str) -> str:
    """`text` for a Markdown table, where `|` ends a cell and `<` starts a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def python_page(name: str) -> str:
    """The directives with which mkdocstrings shows the module `miles_async.NAME`, or all modules of that package."""
    modules = list(_modules(name))
    lines = [f"# miles_async.{name}"]
    for module in modules:
        lines += ["", f"::: {module}"]
        if len(modules) == 1:
            lines += ["    options:", "      show_root_heading: false", "      heading_level: 1"]
    return "\n".join(lines) + "\n"


def _public() -> list[str]:
    return [name for name in PUBLIC if any(_modules(name))]


def _modules(name: str) -> Iterator[str]:
    """The module `miles_async.NAME`, or every module with content of the package of that name."""
    package = ROOT / "miles_async"
    for path in [package / f"{name}.py", *sorted((package / name).rglob("*.py"))]:
        if path.exists() and path.stat().st_size and path.name != "__main__.py":
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
