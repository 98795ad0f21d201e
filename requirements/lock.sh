#!/usr/bin/env bash
# Write requirements/*.lock: cpu-3.11.lock and cpu-3.12.lock from pyproject.toml and cpu.in, the others from their own
# *.in. Versions change only where they have to; `make lock ARGS=--upgrade` takes the newest ones. Run `make test-all`
# with both Pythons and `make test-environments` afterwards, because a lock is only as good as the tests that pass on it.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet uv

# Resolve for one version of Python, which need not be installed: compile VERSION LOCK INPUTS…
compile() {
    "$folder/bin/uv" pip compile --quiet --config-file requirements/uv.toml --python-version "$1" --generate-hashes \
        --no-annotate --custom-compile-command "make lock" --output-file "$2" "${@:3}"
}

# torch has two builds of each version: the public one, which needs CUDA's libraries, and one for CPUs with the label
# +cpu, which not every index serves. The pin torch==VERSION matches both, so the lock lists the hashes of both: first
# that of the CPU build, which stays if the version does.
add_cpu_build() {
    local version=$1 lock=$2 before=$3 pin hash
    pin=$(grep -o '^torch==[^ ]*' "$lock")
    if "$folder/bin/pip" download --quiet --no-deps --python-version "$version" --only-binary :all: \
        --dest "$folder/$version" "$pin+cpu" 2>/dev/null; then
        hash=$(sha256sum "$folder/$version"/torch-*.whl | cut -d" " -f1)
    elif grep -q "^$pin " "$before"; then
        hash=$(sed -n '/^torch==/{n;s/.*sha256:\([0-9a-f]*\).*/\1/p}' "$before")
    else
        echo "No index serves $pin+cpu for Python $version. Set PIP_FIND_LINKS to a folder that has the wheel." >&2
        exit 1
    fi
    grep -q "sha256:$hash" "$lock" || sed -i "s/^torch==.*/&\n    --hash=sha256:$hash \\\\/" "$lock"
}

sed -n 's/.*"\(sglang==[^"]*\)".*/\1/p' pyproject.toml >"$folder/sglang.in"
for version in 3.11 3.12; do
    lock=requirements/cpu-$version.lock
    cp "$lock" "$folder/before.lock"
    compile "$version" "$lock" --extra dev "$@" requirements/cpu.in "$folder/sglang.in" pyproject.toml
    add_cpu_build "$version" "$lock" "$folder/before.lock"
done
# For Python 3.11, because 3.12 needs no package that 3.11 does not.
for library in verifiers openenv roll; do
    compile 3.11 "requirements/$library.lock" "$@" "requirements/$library.in"
done
# It is installed next to the packages of the CPU lock, so it gets their versions.
compile 3.12 requirements/bridge.lock "$@" --constraint requirements/cpu-3.12.lock requirements/bridge.in
# It is installed next to the packages of the CPU lock, too.
compile 3.11 requirements/ifbench.lock "$@" --constraint requirements/cpu-3.11.lock requirements/ifbench.in
git --no-pager diff --stat requirements
