#!/usr/bin/env bash
#SBATCH --job-name=grpo --open-mode=append --requeue
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --time=24:00:00 --signal=B:TERM@300
# GRPO on several nodes under Slurm. At its time limit the job saves, and is queued again until the run is finished.
#
#   sbatch --nodes 4 examples/slurm.sh my.yaml tracking.name=mine actor.replicate=4
#
# Arguments go to `python -m trainer train`. The environment is that of sbatch; the model, the data and tracking.folder
# lie where all nodes see them, and tracking.name is needed to go on with. --signal: seconds before the limit at which
# the run is told to end. They must be enough for a step and its checkpoint, which have 240 s below.
set -uo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # torchrun would give its ranks 30 s
# On each node: $0 is the first one's name.
launch='exec python -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --master-addr "$0" --master-port $((20000 + SLURM_JOB_ID % 10000)) \
    -m trainer train "$@" checkpoint.resume=auto checkpoint.grace_seconds=240'
told=false code=0
trap 'told=true; scancel --signal=TERM "$SLURM_JOB_ID"' TERM # the job's steps, but not this script
srun --kill-on-bad-exit=0 bash -c "$launch" "$head" "$@" &
while kill -0 $! 2> /dev/null; do
    wait $!
    code=$?
done
# The ranks end with 3 where a signal ended the run after a step, and torchrun makes 1 of it, as of all else. What ended
# without having been told needs a look: it is not queued again.
[ $code = 0 ] || [ $told = false ] || exec scontrol requeue "$SLURM_JOB_ID"
exit $code
