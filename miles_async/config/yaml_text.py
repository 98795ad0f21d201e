"""YAML 1.2 (core schema, section 10.3 of its specification), for files, flags and overrides alike.

PyYAML implements YAML 1.1, in which `yes` and `on` are true, `1:00` is 60, `010` is 8, a date is an object, and 1e-6 is
a string. In YAML 1.2, only `true` and `false` are booleans, `1:00` and dates are strings, and 1e-6 is a number. Three
things differ from its specification. `010` is an error, because it means 8 in one version and 10 in the other; `0823`,
which cannot be octal, is a string as in YAML 1.1. A key that a mapping repeats is an error. Merge keys (`<<`) of YAML
1.1 are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from yaml import YAMLError

from miles_async.errors import UserError
from miles_async.identity import IdentityMap

__all__ = ["YAMLError", "dump_yaml", "parse_yaml", "plain_yaml", "read_keys"]

_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
"""Tag, pattern and first characters of the texts that are not strings. The first pattern that matches counts."""
_NEVER_OCTAL = re.compile(r"^[-+]?0[0-9]*[89][0-9]*$")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_TAB = r"found character '\t' that cannot start any token"
"""How PyYAML reports a line that is indented with a tab."""
_MAX_DIGITS = 100
_MAX_VALUES = 100_000
"""Values of a document, each counted as often as aliases repeat it."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}
    yaml_constructors = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse keys that are not scalars, and duplicate keys: PyYAML silently keeps the last one."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key is a list or a mapping: write a text, and replace templates such as {{ name }}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add((key.tag, key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""


def read_keys(name: str, read: Callable[[], str]) -> Mapping[str, Any]:
    """The keys and values of a YAML file, whose text `read` returns.

    Raises UserError, which begins with `name`, if the file cannot be read or has no keys with values.
    """
    try:
        content = parse_yaml(read())
    except (OSError, ValueError, YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"{name} cannot be read: {reason}") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{name} has no keys with values: write name: value")
    return content


def parse_yaml(text: str) -> Any:
    """Parse one document or one value. Raises YAMLError if the text is invalid or repeats a key."""
    loader = None
    try:
        loader = _Loader(text)
        if (node := loader.get_single_node()) is None:
            return None
        if _count(node, IdentityMap()) > _MAX_VALUES:
            raise YAMLError(
                f"the text has more than {_MAX_VALUES:,} values, counting those that aliases repeat: shorten it"
            )
        return loader.construct_document(node)
    except RecursionError:
        raise YAMLError("lists or mappings are nested too deeply: check the brackets and the indentation") from None
    except (ValueError, YAMLError) as error:  # a ValueError for `!!int many`
        text = str(error).replace('in "<unicode string>", ', "in ")
        raise YAMLError(text.replace(_TAB, "found a tab: indent with spaces")) from None
    finally:
        if loader is not None:
            loader.dispose()


def plain_yaml(text: str) -> Any:
    """The value of a text that need not be YAML: then it is the text itself."""
    try:
        return parse_yaml(text)
    except YAMLError:
        return text


def _count(node: yaml.Node, counts: IdentityMap[yaml.Node, int]) -> int:
    """The number of values in a node. Counts each shared node once, because aliases can repeat it without end.

    `counts` has the nodes that were counted before, with 0 for those that contain `node`.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if counts.get(node) == 0:
        raise yaml.composer.ComposerError(None, None, "an alias refers to what contains it: remove it", node.start_mark)
    if node not in counts:
        counts[node] = 0
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counts[node] = 1 + sum(_count(part, counts) for part in parts)
    return counts[node]


def dump_yaml(value: Any) -> str:
    """The text of plain data, which `parse_yaml` and readers of YAML 1.1 read as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = node.value
    if len(text) > _MAX_DIGITS:
        raise YAMLError(
            f"{text[:10]}... in line {node.start_mark.line + 1} has {len(text)} digits: write a smaller number, or put "
            "quotes around a text"
        )
    if _LEADING_ZERO.fullmatch(text):
        raise YAMLError(
            f"{text} in line {node.start_mark.line + 1} has a leading zero, which some programs read as octal: write "
            f"{int(text)}, or '{text}' in quotes for the text"
        )
    return int(text, 0)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    return bool(node.value.lower() == "true")


def _undefined(loader: _Loader, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not supported", node.start_mark)


def _add_core_schema() -> None:
    _Loader.add_implicit_resolver("tag:yaml.org,2002:str", _NEVER_OCTAL, list("-+0"))
    for name, pattern, first in _CORE_SCHEMA:
        for either in (_Loader, _Dumper):
            either.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(rf"^(?:{pattern})$"), first)
    _Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
    constructors = {
        "null": yaml.SafeLoader.construct_yaml_null,
        "bool": _boolean,
        "int": _integer,
        "float": _float,
        "str": yaml.SafeLoader.construct_yaml_str,
        "seq": yaml.SafeLoader.construct_yaml_seq,
        "map": yaml.SafeLoader.construct_yaml_map,
    }
    for name, construct in constructors.items():
        _Loader.add_constructor(f"tag:yaml.org,2002:{name}", construct)
    _Loader.add_constructor(None, _undefined)


_add_core_schema()
