#!/bin/bash
# Two machines with eight GPUs each. One task per machine starts torchrun, which starts the ranks.
#SBATCH --job-name=infinity
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
# The batch script gets SIGTERM five minutes before the end, and hands it on: the job then saves, and can be queued again.
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
set -euo pipefail

GPUS=${SLURM_GPUS_ON_NODE:-8}
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
FIRST=${HOSTS%%$'\n'*} # not by a pipe to head, which may end scontrol, and with it this script
# Swap files belong on a disk of the machine itself, not on a network: $SLURM_TMPDIR is found without being named.
export INFINITY_CACHE="${SLURM_SUBMIT_DIR:-.}/cache"
# Pinned memory and io_uring's buffers count as locked: the limit has to be raised by the cluster where it is small.
ulimit -l unlimited || echo "locked memory is limited to $(ulimit -l) KiB: see infinity env"

trap '[ -z "${child:-}" ] || kill -TERM "$child"; wait' TERM
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS" --rdzv-backend c10d --rdzv-endpoint "$FIRST:29500" \
    --rdzv-id "$SLURM_JOB_ID" "$@" &
child=$!
wait $child
