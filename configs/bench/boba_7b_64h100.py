"""GRPO of DeepSeek-R1-Distill-Qwen-7B on AReaL's boba data on 64 H100, as verl.

    python -m jaxrl.train --config=configs/bench/boba_7b_64h100.py \\
        --config.run_dir=/shared/runs/boba_7b_64h100

Hardware: 8 nodes of 8 H100 SXM. HSDP: 8 replicas, one per node, of 8 FSDP shards. The rollout has
32 replicas of 2 GPUs with 64 of the 2,048 sequences each.

Published (blog/compare_with_verl.rst of the English documentation in github.com/RLinf/RLinf,
in a comment of the page's source, which does not name the GPU): verl on 8 nodes of 8 GPUs, 128
prompts x 16 responses of at most 27,648 tokens, 10,426 on average, mini-batches of 32 prompts.
Seconds: generation 325.1, reward 5.1, logprobs before the update 21.6, reference 20.7, update
73.0, a step 447.4.

Result: not measured. Its plan, phase by phase, is in docs/benchmarks.md.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import boba_step


def get_config() -> ConfigDict:
    config = boba_step("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", prompts=128)
    config.name = "boba_7b_64h100"
    config.mesh.replica = 8
    config.mesh.fsdp = 8
    config.rollout.tensor = 2
    return config
