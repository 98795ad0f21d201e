#!/usr/bin/env bash
# Train Qwen3-4B on 8 GPUs.
#   configs/qwen3-4b-8gpu.sh CHECKPOINT_FOLDER PROMPTS.jsonl [flags…]
# Each line of PROMPTS.jsonl has a `prompt` and a `label`; set other keys with --input-key and --label-key.
# Run `make setup-gpu` once on the machine. Add --check-config to check the settings without starting a run.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,5s/^# //p' "$0" >&2
    exit 2
fi
checkpoint=$(realpath "$1")
prompts=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."
exec .venv/bin/python train_async.py --config configs/qwen3-4b-8gpu.yaml \
    --hf-checkpoint "$checkpoint" --prompt-data "$prompts" "$@"
