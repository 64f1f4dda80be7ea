#!/bin/bash
# Runs a config on a TPU slice of GKE with XPK (https://github.com/AI-Hypercomputer/xpk), which writes the JobSet.
#
#   IMAGE=REGION-docker.pkg.dev/PROJECT/REPOSITORY/jaxrl:tpu docker/kubernetes/xpk.sh CLUSTER grpo-7b v5p-128 \
#     --config=configs/grpo_7b.py --config.run_dir=/runs/grpo_7b --config.checkpoint.every=20
#
# CLUSTER was made by `xpk cluster create`; IMAGE is the pushed image of docker/tpu.Dockerfile; --config.run_dir must be on
# a storage that `xpk storage attach` mounts on all hosts. Name and TPU type are XPK's.
#
# Tried: its syntax and its example are checked by tests/test_cluster_files.py. Not tried: a run on a cluster.
set -euo pipefail
if (( $# < 4 )); then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
cluster=$1 workload=$2 type=$3
shift 3
command=$(printf '%q ' python -m jaxrl.train "$@")
exec xpk workload create --cluster="$cluster" --workload="$workload" --tpu-type="$type" --num-slices=1 \
  --docker-image="$IMAGE" --max-restarts=10 --command="$command"
