#!/usr/bin/env bash
# Write requirements/cpu.lock anew: resolve everything but SGLang in a fresh environment, then add SGLang without its
# CUDA dependencies. Run `make test` afterwards; the lock is as good as the tests that passed on it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT

sglang=$(sed -n 's/.*"\(sglang==[0-9.a-z]*\)".*/\1/p' pyproject.toml)
python3.11 -m venv "$venv"
"$venv/bin/pip" install -qq --upgrade pip
"$venv/bin/pip" install -qq --requirement requirements/cpu.in --editable ".[dev]"
"$venv/bin/pip" install -qq --no-deps "$sglang"
header=$(grep '^#' requirements/cpu.lock)
{
    echo "$header"
    # A local build's label (torch==2.13.0+cpu) is not part of the public version.
    "$venv/bin/pip" freeze --all --exclude miles_async --exclude pip | sed 's/+cpu$//' | grep -v '^-e' | sort -f
} >"$venv/lock"
cp "$venv/lock" requirements/cpu.lock
git --no-pager diff --stat requirements/cpu.lock
