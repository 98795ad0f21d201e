#!/bin/bash
# Train on several nodes under Slurm. From the folder of the clone, which all nodes see under the same path:
#   sbatch examples/slurm.sh --config my.yaml --save /shared/saved --save-interval 20 --run-dir /shared/runs
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
export PATH=$PWD/.venv/bin:$PATH
# Ray starts its workers at niceness 15 by default.
export RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0
# Without a token, everybody who reaches the port of Ray can run programs on the nodes.
export RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null

# Slurm runs this script on the first node, which therefore has the head of Ray and the driver.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
address=$(hostname --ip-address | cut -d' ' -f1)
ray start --head --node-ip-address="$address" --port=6379 || exit
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$first" \
        ray start --address="$address:6379" --block &
fi
# A run is refused if the cluster has too few devices, so wait for all nodes.
until [ "$(ray status --address="$address:6379" 2>/dev/null | grep --count ' node_')" = "$SLURM_NNODES" ]; do sleep 2; done

# A shell runs a trap only between two commands or during `wait`, so the driver runs in the background.
python train_async.py --ray-address "$address:6379" --resume auto --drain-seconds 90 "$@" &
driver=$!
trap 'kill -TERM $driver' TERM
wait $driver            # returns when the driver ends, or when the trap has run
wait $driver; code=$?   # returns the exit code of the driver in both cases
# 143 says that SIGTERM stopped the run. The requeued job runs the same command, and `--resume auto` continues the run.
[ $code = 143 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
