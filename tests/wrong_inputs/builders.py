"""Makes the files that are too large, or too strange, to be written in a table. Each function fills a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def deep_nesting(folder: Path) -> None:
    """A YAML file with 100,000 open brackets."""
    (folder / "deep.yaml").write_text("data: {reasoning_gym_settings: {a: " + "[" * 100_000 + "}}\n")


def huge_integer(folder: Path) -> None:
    """A number of 5,000 digits."""
    (folder / "digits.yaml").write_text("rollout: {num_rollout: " + "9" * 5000 + "}\n")


def huge_hexadecimal(folder: Path) -> None:
    """A hexadecimal number of 5,000 digits, which Python reads but cannot print."""
    (folder / "digits.yaml").write_text("rollout: {num_rollout: 0x" + "f" * 5000 + "}\n")


def alias_bomb(folder: Path) -> None:
    """Nine levels of lists, each with ten times the list before."""
    levels = ['a0: &a0 ["text"]', *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
    text = "data: {reasoning_gym_settings: {" + ", ".join(levels) + "}}\n"
    (folder / "bomb.yaml").write_text(text)


def merge_bomb(folder: Path) -> None:
    """Thirty levels of mappings, each of which merges the mapping before twice."""
    levels = ["  a0: &a0 {key: 1}", *(f"  a{n}: &a{n}\n    <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, 31))]
    (folder / "bomb.yaml").write_text("\n".join(["data:", *levels]) + "\n")


def huge_file(folder: Path) -> None:
    """A file of 64 GiB that takes no room on the disk."""
    with (folder / "rows.yaml").open("wb") as file:
        file.truncate(64 << 30)


def roll_range_of_many_digits(folder: Path) -> None:
    """A file of ROLL with a range of 10**5000 devices."""
    (folder / "roll.yaml").write_text("actor_train: {device_mapping: 'list(range(0," + "9" * 5000 + "))'}\n")


def roll_device_of_many_digits(folder: Path) -> None:
    """A file of ROLL with one device, whose number has 5,000 digits."""
    (folder / "roll.yaml").write_text("actor_infer: {device_mapping: '[" + "9" * 5000 + "]'}\n")


BUILDERS: Mapping[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        deep_nesting,
        huge_integer,
        huge_hexadecimal,
        alias_bomb,
        merge_bomb,
        huge_file,
        roll_range_of_many_digits,
        roll_device_of_many_digits,
    )
}
