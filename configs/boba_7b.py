"""RL of DeepSeek-R1-Distill-Qwen-7B on mathematics with 28k tokens, as AReaL's boba release.

    python -m jaxrl.train --config=configs/boba_7b.py --config.run_dir=/shared/runs/boba_7b

Hardware: 24 nodes of 8 GPUs with 80 GB (192 GPUs), AReaL's cluster. HSDP: 24 replicas, one per
node, of 8 FSDP shards; every GPU decodes up to 43 of the 8192 sequences of a step.

Data and settings: as configs/boba_1p5b.py.

Published figures: 54.3 on AIME 2024 before training; synchronous AReaL 63.0 after 1000 PPO steps in
57.7 hours on these 24 nodes, asynchronous AReaL 63.1 in 25.4 hours
(github.com/inclusionAI/AReaL, blog/AReaL_v0_3.md, table 2, mean of 32 samples). The released
AReaL-boba-RL-7B has 61.9 on AIME 2024, 48.3 on AIME 2025 and 47.6 on GPQA-Diamond, its base model
55.0, 39.7 and 47.1 (blog/AReaL_v0_2.md, table 1). This run is synchronous.

Minutes and result here: not measured.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.boba import boba


def get_config() -> ConfigDict:
    config = boba()
    config.name = "boba_7b"
    config.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    config.mesh.replica = 24
    config.mesh.fsdp = 8
    config.rollout.max_num_seqs = 48
    return config
