"""GRPO of DeepSeek-R1-Distill-Qwen-1.5B on AReaL's boba data on 8 H100, as verl 0.5 and RLinf.

    python -m jaxrl.train --config=configs/bench/boba_1p5b_8h100.py \\
        --config.run_dir=/shared/runs/boba_1p5b_8h100

Hardware: one node of 8 H100 SXM. FSDP 8; every GPU decodes 64 of the 512 sequences of a step.

Published (blog/compare_with_verl.rst of the English documentation in github.com/RLinf/RLinf):
512 sequences of at most 1,024 + 27,648 tokens, 14,255 on average (verl) and 13,975 (RLinf).
Seconds of verl and RLinf: generation 260.9 and 266.1, logprobs before the update 17.5 and 17.8,
training 66.5 and 61.1, a step 363.6 and 346.3. verl's step has the logprobs of a reference model.

Where the page says nothing, the values are RLinf's (examples/reasoning/config/math): 16 responses
per prompt, four mini-batches.

Result: not measured. Its plan, phase by phase, is in docs/benchmarks.md.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import boba_step


def get_config() -> ConfigDict:
    config = boba_step("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", prompts=32)
    config.name = "boba_1p5b_8h100"
    config.mesh.fsdp = 8
    return config
