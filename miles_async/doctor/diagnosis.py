"""The judgement about a machine: what to change, what works, and whether `make run` can work."""

from __future__ import annotations

import msgspec

from miles_async.doctor import options
from miles_async.doctor.facts import Machine
from miles_async.doctor.findings import CHECKS, Finding
from miles_async.doctor.options import Option


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    run_works: bool
    """Whether `make run` can work; no problem is known that keeps it from working."""
    findings: tuple[Finding, ...]
    transports: tuple[Option, ...]
    attention: tuple[Option, ...]
    precisions: tuple[Option, ...]


def diagnose(machine: Machine) -> Diagnosis:
    findings = tuple(finding for check in CHECKS for finding in check(machine))
    return Diagnosis(
        run_works=not any(finding.level == "problem" for finding in findings),
        # Problems first.
        findings=tuple(sorted(findings, key=lambda finding: finding.level)),
        transports=tuple(options.transports(machine)),
        attention=tuple(options.attention(machine)),
        precisions=tuple(options.precisions(machine)),
    )
