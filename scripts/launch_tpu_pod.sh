#!/bin/bash
# Starts one training process on every host of a Cloud TPU pod slice; the same command runs everywhere.
#
#   scripts/launch_tpu_pod.sh NAME ZONE FOLDER --config=configs/grpo_7b.py [--config.KEY=VALUE ...]
#
# NAME and ZONE are those of the TPU (gcloud compute tpus tpu-vm list). FOLDER is the clone of this
# repository on its hosts, with `uv sync --inexact --extra tpu` done there. The run folder must be on a disk that
# all hosts share. The hosts join through the TPU's metadata. After a host failure, start it again: the
# run resumes from its newest checkpoint.
set -euo pipefail
if (( $# < 4 )); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 zone=$2 folder=$3
shift 3
arguments=$(printf '%q ' "$@" --config.distributed.start=on)
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="cd $(printf '%q' "$folder") && exec .venv/bin/python -m jaxrl.train $arguments"
