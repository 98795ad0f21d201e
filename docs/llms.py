"""Writes `llms.txt`, the list of all pages for programs, from the navigation. MkDocs calls `on_files`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "llms.txt", content=llms_text(files, config)))
    return files


def llms_text(files: Files, config: MkDocsConfig) -> str:
    """Each page with its title, its address on the site and its first sentence, under its section."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", *_lines(config.nav or [], files)]
    return "\n".join(lines) + "\n"


def _lines(entries: list[Any], files: Files) -> Iterator[str]:
    pages = [(title, target) for entry in entries for title, target in entry.items() if isinstance(target, str)]
    if pages:
        yield ""
    for title, target in pages:
        page = files.get_file_from_path(target)
        if page is not None:
            yield f"- [{title}]({page.url}){_first_sentence(page.content_string)}"
    for entry in entries:
        for title, inner in entry.items():
            if not isinstance(inner, str):
                yield from ("", f"## {title}", *_lines(inner, files))


def _first_sentence(page: str) -> str:
    """The first sentence after the heading, without links; nothing if the page begins with something else."""
    found = re.match(r"# [^\n]+\n+(?:<!--[^\n]*\n+)?(?!```)([A-Z`][^\n]*(?:\n[^\n]+)*)", page)
    if found is None:
        return ""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(found[1].split()))
    return ": " + re.split(r"(?<=\.)\s", text)[0].rstrip(":")
