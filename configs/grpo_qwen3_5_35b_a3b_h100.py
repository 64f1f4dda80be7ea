"""GRPO of Qwen3.5-35B-A3B, a mixture of experts, on GSM8K and MATH, on 64 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_qwen3_5_35b_a3b_h100.py \\
        --config.run_dir=/shared/runs/moe

Hardware: 8 nodes of 8 H100. The run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_qwen3_5_35b_a3b.py.

Mesh: replica 8 x fsdp 8. The weights are sharded within a node and gathered over NVLink; only
gradients cross the nodes' network. The rollout has 16 replicas of 4 GPUs.

Memory: backward keeps the output of attention (learner.remat=attention), and the KV pages and
states are freed during updates (rollout.release_kv). An update needs 59.2 of the 67.7 GiB that
rollout.memory_utilization allows. Layers are stacked (model.layers), so that programs compile in a
tenth of the time.

Minutes and result: not measured yet. By its plan
(docs/plans/grpo_qwen3_5_35b_a3b_h100.h100-64.txt) a step takes 71 s or more at the chips' peak
rates, and 78 s with kernels one after the other.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("grpo_qwen3_5_35b_a3b.py")))
    config.name = "grpo_qwen3_5_35b_a3b_h100"
    config.mesh.replica = 8
    config.mesh.fsdp = 8
    config.model.layers = "stacked"
    config.rollout.release_kv = True
    config.learner.xla = ()
    return config
