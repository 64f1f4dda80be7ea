"""RL of DeepSeek-R1-Distill-Qwen-1.5B on mathematics with 28k tokens, as AReaL's boba release.

    python -m jaxrl.train --config=configs/boba_1p5b.py --config.run_dir=/shared/runs/boba_1p5b

Hardware: 16 nodes of 8 GPUs with 80 GB (128 GPUs), AReaL's cluster. HSDP: 16 replicas, one per
node, of 8 FSDP shards; every GPU decodes 64 of the 8192 sequences of a step.

Data: AReaL-boba-106k (huggingface.co/datasets/inclusionAI/AReaL-RL-Data) and AIME 2024, as JSONL
with the columns prompt and answer.

Published settings (github.com/inclusionAI/AReaL, blog/AReaL_v0_2.md): 512 prompts x 16 responses of
at most 27k tokens, four mini-batches, learning rate 2e-5, Adam epsilon 1e-5, token-mean loss, no
critic, gamma = lambda = 1, advantages normalized over all tokens, no KL, temperature 1.0.

Published figures (blog/AReaL_v0_3.md, table 2; AIME 2024 is the mean of 32 samples): base model
29.3; synchronous AReaL 42.0 after 1000 PPO steps in 41.0 hours on these 16 nodes, asynchronous
AReaL 42.2 in 14.8 hours. This run is synchronous.

Minutes and result here: not measured.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.boba import boba


def get_config() -> ConfigDict:
    config = boba()
    config.name = "boba_1p5b"
    config.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    config.mesh.replica = 16
    config.mesh.fsdp = 8
    return config
