"""Published benchmarks of other systems, as runs of this one."""

from ml_collections import ConfigDict

from jaxrl.config import default_config
from jaxrl.config.bases.boba import boba

PROMPT_LEN = 64  # of a training sequence; it trains on the rest


def training(model: str, seq_len: int, sequences: int, n_devices: int) -> ConfigDict:
    """A step of training on `sequences` full rows of `seq_len` tokens per device, with FSDP."""
    config = default_config()
    config.model.path = model
    config.data.train = ("data/train.jsonl",)
    config.data.prompts_per_step = sequences * n_devices
    config.data.max_prompt_len = PROMPT_LEN
    config.data.max_response_len = seq_len - PROMPT_LEN
    config.mesh.fsdp = n_devices
    config.learner.mini_batch_prompts = sequences * n_devices
    config.learner.token_budget = sequences * seq_len
    config.learner.buckets = (seq_len,)
    return config


def tpu_training(model: str, seq_len: int, sequences: int, n_devices: int) -> ConfigDict:
    """`training` with stacked layers and collectives that overlap with compute."""
    config = training(model, seq_len, sequences, n_devices)
    config.model.layers = "stacked"
    config.learner.xla = ("overlap",)
    return config


def decoding(model: str, sequences: int, prompt_len: int, response_len: int) -> ConfigDict:
    """Generation with `sequences` at a time."""
    config = default_config()
    config.model.path = model
    config.data.train = ("data/prompts.jsonl",)
    config.data.prompts_per_step = sequences
    config.data.max_prompt_len = prompt_len
    config.data.max_response_len = response_len
    config.rollout.n = 1
    config.rollout.max_num_seqs = sequences
    config.algorithm.advantage = "reinforce_plus_plus"
    config.learner.mini_batch_prompts = sequences
    config.reward.functions = ("math",)
    return config


def boba_step(model: str, prompts: int) -> ConfigDict:
    """One step of verl's GRPO runs on AReaL's boba data: 16 responses of at most 27,648 tokens."""
    config = boba()
    config.model.path = model
    config.data.prompts_per_step = prompts
    config.learner.mini_batch_prompts = prompts // 4
    config.algorithm.advantage = "grpo"
    config.algorithm.kl_coef = 0.001
    config.learner.lr = 1e-6
    return config
