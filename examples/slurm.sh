#!/bin/bash
# Two machines with eight GPUs each, started by one line. What stands after the script is torchrun's:
#
#     sbatch examples/slurm.sh -m infinity train --model MODEL --data chat.jsonl --out tuned --checkpoint saved --resume
#
# The job comes back by itself, with the bits of one that was never struck (docs/returns.md):
#
#     a rank dies            torchrun starts all ranks again
#     torchrun dies          the job is queued again, unless it was refused or failed within a minute: then it would so again
#     a machine is lost      Slurm queues the job again
#     the time is over       the ranks save, train on, and the job is queued again
#
# In a container (pyxis):  IMAGE=registry/infinity:latest sbatch examples/slurm.sh ...
#SBATCH --job-name=infinity
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Slurm sends USR1 five to six minutes before the end. Longer saves:
# SAVE_SECONDS=900 sbatch --signal=B:USR1@960 examples/slurm.sh ...
#SBATCH --signal=B:USR1@300
set -euo pipefail

GPUS=${SLURM_GPUS_ON_NODE:-${GPUS:-8}}
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
FIRST=${HOSTS%%$'\n'*} # not by a pipe to head, which may end scontrol, and with it this script
# Swap files go to $INFINITY_SCRATCH, else to a disk of the machine: $SLURM_TMPDIR, where a cluster sets it, or /tmp.
# This folder has measurements and the status of runs: `INFINITY_CACHE=cache infinity top` shows the job.
export INFINITY_CACHE="${SLURM_SUBMIT_DIR:-.}/cache"
# `infinity train` writes there why it refuses a job, such as a wrong option: it would do so again.
export INFINITY_REFUSED="$INFINITY_CACHE/refused-$SLURM_JOB_ID"
rm -f "$INFINITY_REFUSED"
# For scripts of your own: torchrun's store outlives its ranks, which would find the address of one that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Pinned memory and io_uring's buffers count as locked: the limit has to be raised by the cluster where it is small.
ulimit -l unlimited || echo "locked memory is limited to $(ulimit -l) KiB: see infinity env"

# The save comes first, while the ranks train on. SIGTERM follows with the queue: 30 seconds later torchrun, and Slurm, kill them.
# A last save that takes longer is cut off, and this one stands.
save_and_return() {
    scancel --signal=USR1 "$SLURM_JOB_ID" # to all processes of the step, and not to this script
    local seconds=${SAVE_SECONDS:-240} left=$((${SLURM_JOB_END_TIME:-9999999999} - $(date +%s) - 30))
    if ((seconds > left)); then
        echo "SAVE_SECONDS=$seconds is more than is left, $left s: SAVE_SECONDS=$seconds sbatch --signal=B:USR1@$((seconds + 60)) ..." >&2
        seconds=$((left > 0 ? left : 0))
    fi
    sleep "$seconds" &
    wait $!
    scontrol requeue "$SLURM_JOB_ID"
}
cancelled=
trap save_and_return USR1
trap cancelled=1 TERM # Slurm has sent it to the ranks as well

# USR1 would end torchrun. The ranks have a handler of their own.
srun --kill-on-bad-exit ${IMAGE:+--container-image "$IMAGE" --container-mounts "$PWD:$PWD" --container-workdir "$PWD"} \
    bash -c 'trap "" USR1; exec torchrun "$@"' bash --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" "$@" &
child=$!
status=0
while kill -0 "$child" 2> /dev/null; do # a signal ends wait before srun has ended
    wait "$child" && status=0 || status=$?
done
if ((status)) && [ -e "$INFINITY_REFUSED" ]; then
    echo "not queued again: $(cat "$INFINITY_REFUSED")" >&2
elif ((status)) && [ -z "$cancelled" ] && ((SECONDS > ${LEAST_SECONDS:-60} && ${SLURM_RESTART_COUNT:-0} < 100)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
