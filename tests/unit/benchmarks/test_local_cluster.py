"""`make cluster-up` refuses with one sentence if this machine cannot make network namespaces."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.cluster.__main__ import main


def test_a_user_who_is_not_root_is_told_to_be_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["up"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("needs network namespaces, which only root may create: run it as root")


def test_a_machine_without_ip_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["up"]) == 2
    assert capsys.readouterr().err == (
        "error: a cluster on one machine needs the command `ip`: install the package iproute2\n"
    )
