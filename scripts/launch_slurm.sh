#!/bin/bash
# Slurm job for GPU nodes: one task per node, which uses all GPUs of the node.
#
#   sbatch --nodes=8 --gpus-per-node=8 scripts/launch_slurm.sh --config=configs/grpo_7b.py [--config.KEY=VALUE ...]
#
# Submit it from the clone of this repository, on a disk that all nodes share, after `uv sync --inexact --extra cuda`.
# A job that Slurm requeues after a node failure or preemption resumes from the newest checkpoint.
# SIGTERM arrives two minutes before the time limit: the run saves and stops.
#SBATCH --job-name=jaxrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail
if (( $# < 1 )); then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}  # not `| head`: scontrol may be killed by SIGPIPE, which pipefail makes an error
port=$(( 20000 + SLURM_JOB_ID % 20000 ))
export JAXRL_COORDINATOR="$first:$port"
# The task number is known only inside srun. --kill-on-bad-exit: a failed task ends the others.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 --label bash -c '
  exec .venv/bin/python -m jaxrl.train "$@" \
    --config.distributed.coordinator="$JAXRL_COORDINATOR" \
    --config.distributed.num_processes="$SLURM_NTASKS" \
    --config.distributed.process_id="$SLURM_PROCID"' jaxrl "$@"
