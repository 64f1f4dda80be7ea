"""On-policy distillation of Qwen2.5-7B-Instruct from Qwen2.5-32B-Instruct, on 64 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/distill_7b_from_32b_h100.py \\
        --config.run_dir=/shared/runs/distill_7b

Hardware: 8 nodes of 8 H100. The run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_7b.py, the mesh is that of
configs/grpo_7b_h100.py. The loss is the reverse KL over the teacher's 64 most likely tokens and one
bucket for all others; rewards are only logged. The teacher scores the responses of a step once,
before the updates, sharded over the 8 GPUs of a node, and is in host memory otherwise
(learner.offload=reference).

Memory: the compiled plan needs 63.3 of the 67.7 GiB that rollout.memory_utilization allows
(docs/plans/distill_7b_from_32b_h100.h100-64.txt), 71.0 with the teacher on the GPUs. The teacher
takes 7.6 GiB per GPU, and 28.0 GiB are live while it scores.

Minutes and result: not measured yet. By the plan a step takes 48 s or more, 84 s calibrated; 18 s
of the 48 are the teacher. Its most likely tokens of a step take up to 6.4 GB of host memory per
process.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("grpo_7b_h100.py")))
    config.name = "distill_7b_from_32b_h100"
    config.algorithm.advantage = "distill"
    config.algorithm.teacher = "Qwen/Qwen2.5-32B-Instruct"
    config.algorithm.kl = "full"
    config.algorithm.kl_top_k = 64
    config.algorithm.kl_coef = 1.0
    config.learner.offload = ("reference",)
    return config
