"""A tiny model and the config of a run of it on eight devices."""

from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, resolve
from jaxrl.models.config import uniform_decoder

TINY = uniform_decoder(
    "qwen2", L=2, D=64, N=4, K=2, H=16, F=128, V=256, tied=True, qkv_bias=True, stacked=True
)

JUDGE = dict(  # a second model that judges, of 256 tokens at a time
    reward__functions=("judge",),
    reward__judge__weights="checkpoint",
    reward__judge__path="judge",
    reward__judge__rubric="rubric.yaml",
    reward__judge__max_prompt_len=192,
    reward__judge__max_verdict_len=64,
    reward__judge__max_num_seqs=4,
)


def run(**changes) -> RunConfig:
    """The config with changes such as `rollout__n=2`."""
    config = default_config()
    config.model.path, config.model.layers = "tiny", "stacked"
    config.data.train = ("task:addition",)
    config.mesh.fsdp, config.mesh.tensor = 4, 2
    config.data.prompts_per_step, config.rollout.n = 8, 4
    config.data.max_prompt_len = config.data.max_response_len = 64
    config.learner.token_budget, config.learner.buckets = 256, (128,)
    config.learner.mini_batch_prompts = 4
    config.rollout.max_num_seqs, config.rollout.max_num_batched_tokens = 8, 512
    config.algorithm.kl_coef = 0.01
    for name, value in changes.items():
        section, (*path, key) = config, name.split("__")
        for part in path:
            section = section[part]
        section[key] = value
    return resolve(config, n_devices=8)
