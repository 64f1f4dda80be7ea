"""Translates a verl config into a jaxrl config file.

    python scripts/migrate_config.py VERL.yaml [KEY=VALUE ...] > my_run.py
    python scripts/migrate_config.py run_qwen2-7b.sh > my_run.py

Reads a YAML file, or the `key=value` arguments of a launch script, and further overrides. Keys that
are not given have verl's defaults, so the printed config means what the verl config meant. On
standard error: what has no counterpart, and what to check by hand. The keys are explained in
docs/reference/keys.md.
"""

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from jaxrl.config.choices import RATIO_REJECTIONS, REJECTIONS
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config
from jaxrl.config.schema import flatten, keys

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}." for role in ("actor", "rollout", "ref"))
MODEL, CORRECTION = "actor_rollout_ref.model.", "algorithm.rollout_correction."
PREFIXES = ("data.", "actor_rollout_ref.", "critic.", "reward", "custom_reward", "algorithm.")
PREFIXES += ("trainer.", "ray_kwargs.", "global_profiler.", "distillation.")

# verl's defaults, where they differ from those of jaxrl or decide what other keys mean.
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "use_dynamic_bsz": False,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    ACTOR + "ulysses_sequence_parallel_size": 1,
    ACTOR + "policy_loss.loss_mode": "vanilla",
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "use_kl_loss": False,
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
    ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    ROLLOUT + "n": 1,
    ROLLOUT + "tensor_model_parallel_size": 2,
    ROLLOUT + "val_kwargs.do_sample": False,
    ROLLOUT + "val_kwargs.temperature": 0,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "trainer.total_epochs": 30,
    "trainer.logger": ["console", "wandb"],
}

# The same value under another name.
RENAMED = {
    "data.train_batch_size": "data.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_len",
    "data.max_response_length": "data.max_response_len",
    "data.filter_overlong_prompts": "data.filter_overlong_prompts",
    "data.truncation": "data.truncation",
    "data.shuffle": "data.shuffle",
    "data.seed": "seed",
    MODEL + "path": "model.path",
    MODEL + "custom_chat_template": "data.chat_template",
    ACTOR + "ppo_epochs": "learner.epochs",
    ACTOR + "clip_ratio_c": "algorithm.clip_dual",
    ACTOR + "policy_loss.clip_cov_lb": "algorithm.clip_cov_low",
    ACTOR + "policy_loss.clip_cov_ub": "algorithm.clip_cov_high",
    ACTOR + "tau_pos": "algorithm.sapo_tau_positive",
    ACTOR + "tau_neg": "algorithm.sapo_tau_negative",
    ACTOR + "entropy_coeff": "algorithm.entropy_coef",
    ACTOR + "grad_clip": "learner.clip_norm",
    ACTOR + "optim.clip_grad": "learner.clip_norm",
    ACTOR + "optim.lr": "learner.lr",
    ACTOR + "optim.weight_decay": "learner.weight_decay",
    ACTOR + "optim.min_lr_ratio": "learner.min_lr_ratio",
    ACTOR + "optim.lr_scheduler_type": "learner.lr_schedule",
    ACTOR + "optim.warmup_style": "learner.lr_schedule",
    ACTOR + "ulysses_sequence_parallel_size": "mesh.sequence",
    ACTOR + "megatron.tensor_model_parallel_size": "mesh.tensor",
    ACTOR + "megatron.pipeline_model_parallel_size": "mesh.stage",
    ACTOR + "megatron.context_parallel_size": "mesh.sequence",
    ACTOR + "megatron.expert_model_parallel_size": "mesh.expert",
    REF + "ulysses_sequence_parallel_size": "ref.sequence",
    REF + "megatron.tensor_model_parallel_size": "ref.tensor",
    REF + "model.path": "algorithm.teacher",
    ROLLOUT + "n": "rollout.n",
    ROLLOUT + "temperature": "rollout.sampling.temperature",
    ROLLOUT + "top_p": "rollout.sampling.top_p",
    ROLLOUT + "tensor_model_parallel_size": "rollout.tensor",
    ROLLOUT + "expert_parallel_size": "rollout.expert",
    ROLLOUT + "enable_prefix_caching": "rollout.prefix_cache",
    ROLLOUT + "quantization": "rollout.dtype",
    ROLLOUT + "engine_kwargs.vllm.kv_cache_dtype": "rollout.kv_dtype",
    ROLLOUT + "val_kwargs.n": "eval.n",
    ROLLOUT + "val_kwargs.top_p": "eval.sampling.top_p",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "algorithm.gamma": "algorithm.gamma",
    "algorithm.lam": "algorithm.lam",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "reward_model.normalize": "reward.normalize",
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "reward_model.ulysses_sequence_parallel_size": "reward_model.mesh.sequence",
    "critic.optim.weight_decay": "critic.weight_decay",
    "critic.ppo_epochs": "critic.epochs",
    "critic.cliprange_value": "critic.value_clip",
    "critic.ulysses_sequence_parallel_size": "critic.mesh.sequence",
    "critic.megatron.tensor_model_parallel_size": "critic.mesh.tensor",
    "critic.megatron.pipeline_model_parallel_size": "critic.mesh.stage",
    "trainer.total_epochs": "total_epochs",
    "trainer.total_training_steps": "total_steps",
    "trainer.val_before_train": "eval.before_train",
    "trainer.project_name": "log.project",
    "trainer.experiment_name": "name",
    "trainer.log_val_generations": "log.samples",
    "trainer.default_local_dir": "run_dir",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.critic_warmup": "critic.warmup_steps",
}

# Nothing to set: it always happens, or there is nothing to choose (patterns of whole names).
IMPLIED = (
    r".*\._target_", r"data\.(return_.*|tokenizer|use_shm|.*workers)",
    r"data\.(image_key|video_key|validation_shuffle|val_batch_size|trust_remote_code)",
    r".*\.(strategy|use_torch_compile|use_shm|profiler\..*|checkpoint\..*|trust_remote_code)",
    r".*\.(use_remove_padding|use_liger|use_fused_kernels|fused_kernel_options\..*|shuffle)",
    r".*micro_batch_size(_per_gpu)?", r".*use_dynamic_bsz", r".*\.entropy_checkpointing",
    r".*\.entropy_from_logits_with_chunking", r".*log_prob_max_token_len_per_gpu",
    r".*\.megatron\.grad_offload",
    r".*forward_max_token_len_per_gpu", r".*\.fsdp_config\.(?!optimizer_offload|fsdp_size).*",
    r".*\.optim\.(optimizer|optimizer_impl|num_cycles|total_training_steps|.*override.*)",
    r"actor_rollout_ref\.rollout\.(name|mode|dtype|enforce_eager|free_cache_engine|load_format)",
    r"actor_rollout_ref\.rollout\.(max_num_batched_tokens|max_num_seqs|max_model_len|disable_.*)",
    r"actor_rollout_ref\.rollout\.(gpu_memory_utilization|enable_chunked_prefill|layered_summon)",
    r"actor_rollout_ref\.rollout\.(prompt_length|response_length|do_sample|agent\.num_workers)",
    r"actor_rollout_ref\.rollout\.(data_parallel_size|update_weights.*|cudagraph.*|multi_stage.*)",
    r"actor_rollout_ref\.(hybrid_engine|nccl_timeout)", r"actor_rollout_ref\.rollout\.trace\..*",
    r"actor_rollout_ref\.rollout\.(ignore_eos|over_sample_rate|skip_.*|calculate_log_probs)",
    r"critic\.(enable|rollout_n|ppo_mini_batch_size|grad_clip)",
    r"actor_rollout_ref\.actor\.(rollout_n|use_prefix_grouper)",
    r"critic\.model\.(tokenizer_path|enable_grad.*)",
    r"reward_model\.(model\.input_tokenizer|reward_manager|launch_reward_fn_async|strategy|sandbox_fusion\..*)",
    r"(reward\.)?sandbox_fusion\..*",
    r"reward(_model)?\.(num_workers|reward_manager\..*)", r"algorithm\.filter_groups\.metric",
    r"trainer\.(balance_batch|n_gpus_per_node|nnodes|resume_.*|device|ray_.*|max_critic.*)",
    r"trainer\.(rollout_data_dir|validation_data_dir|use_legacy.*|esi_.*|val_only|del_local.*)",
    r"trainer\.default_hdfs_dir", r"(ray_kwargs|global_profiler)\..*",
    r"algorithm\.(use_pf_ppo|pf_ppo\..*)", r".*\.external_lib",
)  # fmt: skip

ADVANTAGES = {name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "gpg", "grpo_passk")}
ADVANTAGES |= {f"{name}_vectorized": name for name in ("grpo", "rloo")}
ADVANTAGES |= {
    f"reinforce_plus_plus{end}": f"reinforce_plus_plus{end}" for end in ("", "_baseline")
}
LOSSES = {"vanilla": "dual_clip", "geo_mean": "gmpo", "gpg": "policy_gradient"}
LOSSES |= {name: name for name in ("gspo", "sapo", "clip_cov", "kl_cov", "cispo")}
KLS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KLS |= {name: name for name in ("k1", "k2", "k3", "abs", "full")}
# The section has moved between versions of verl.
OVERLONG_BUFFERS = tuple(
    f"{section}.overlong_buffer{end}."
    for section, end in (
        ("reward_model", ""),
        ("reward_model.reward_kwargs", "_cfg"),
        ("reward.reward_kwargs", "_cfg"),
    )
)
LOGGERS = ("console", "wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio")


class Migration:
    """The verl settings, and the jaxrl keys and remarks that they lead to."""

    def __init__(self, given: Mapping[str, Any]):
        self.given = dict(given)
        self._settings = DEFAULTS | self.given
        self.read: set[str] = set()
        self.config: dict[str, Any] = {}
        self.missing: list[str] = []  # without a counterpart
        self.notes: list[str] = []  # to check by hand

    def get(self, name: str, default: Any = None) -> Any:
        """verl's value of a key; marks the key as translated."""
        self.read.add(name)
        value = self._settings.get(name)
        return default if value is None else value

    def choose(self, name: str, table: Mapping[str, str], default: str) -> str:
        """The jaxrl name of verl's choice; `default` and an entry in `missing` if there is none."""
        value = str(self.get(name))
        if value not in table:
            self.missing.append(
                f"{name}={value}: jaxrl has {', '.join(sorted(set(table.values())))}"
            )
        return table.get(value, default)

    def finish(self) -> None:
        """Reports the given keys that no rule has read, unless they are implied."""
        for name, value in self.given.items():
            implied = any(re.fullmatch(pattern, name) for pattern in IMPLIED)
            if name not in self.read and not implied and value not in (None, False, "", 0, {}, []):
                self.missing.append(f"{name}={value}")


def migrate(given: Mapping[str, Any]) -> Migration:
    """Translates verl settings by dotted name."""
    found = Migration(given)
    for name, ours in RENAMED.items():
        value = found.get(name)
        if value is not None:
            found.config[ours] = value
    if "total_steps" in found.config:
        del found.config["total_epochs"]
    for translate in TRANSLATIONS:
        translate(found)
    found.finish()
    return found


def data(found: Migration) -> None:
    for name, ours in (("train_files", "train"), ("val_files", "val")):
        files = found.get(f"data.{name}", ())
        found.config[f"data.{ours}"] = (files,) if isinstance(files, str) else tuple(files)
    names = (("prompt", "prompt_key"), ("data_source", "reward_fn_key"))
    columns = [(ours, found.get(f"data.{key}")) for ours, key in names]
    if renamed := tuple(f"{ours}:{name}" for ours, name in columns if name not in (None, ours)):
        found.config["data.columns"] = renamed
    if (n := found.get("data.val_max_samples", -1)) > 0:
        found.config["data.val_max_samples"] = n
    section = "data.apply_chat_template_kwargs"
    arguments = dict(found.get(section, {}))
    for name in found.given:
        if name.startswith(f"{section}."):
            arguments[name.removeprefix(f"{section}.")] = found.get(name)
    if arguments:
        found.config["data.template_kwargs"] = arguments


def batch(found: Migration) -> None:
    """Mini-batch and token budget. verl counts tokens per GPU, jaxrl per data-parallel rank."""
    prompts, mini = found.get("data.train_batch_size"), found.get(ACTOR + "ppo_mini_batch_size")
    found.config["learner.mini_batch_prompts"] = 0 if mini >= prompts else mini
    n_gpus = found.get(ACTOR + "ulysses_sequence_parallel_size")
    tokens = found.get(ACTOR + "ppo_max_token_len_per_gpu") * n_gpus
    longest = found.get("data.max_prompt_length") + found.get("data.max_response_length")
    sequences = found.get(ACTOR + "ppo_micro_batch_size_per_gpu")
    if not found.get(ACTOR + "use_dynamic_bsz") and sequences:
        tokens = sequences * longest
    found.config["learner.token_budget"] = max(tokens, longest)
    critic = found.get("critic.ppo_max_token_len_per_gpu")
    if critic:
        n_gpus = found.get("critic.ulysses_sequence_parallel_size", 1)
        found.config["critic.token_budget"] = max(critic * n_gpus, longest)


def loss(found: Migration) -> None:
    found.config["algorithm.policy_loss"] = found.choose(
        ACTOR + "policy_loss.loss_mode", LOSSES, "dual_clip"
    )
    both = found.get(ACTOR + "clip_ratio")
    for end in ("low", "high"):
        found.config[f"algorithm.clip_{end}"] = found.get(f"{ACTOR}clip_ratio_{end}", both)
    kl_cov_coef = found.get(ACTOR + "policy_loss.ppo_kl_coef")
    for name in ("clip_cov", "kl_cov"):
        fraction = found.get(f"{ACTOR}policy_loss.{name}_ratio", 0.0002)
        if found.config["algorithm.policy_loss"] == name:
            found.config["algorithm.cov_fraction"] = fraction
            found.config["algorithm.kl_cov_coef"] = kl_cov_coef
    mode = found.get(ACTOR + "loss_agg_mode", "token-mean")
    is_sapo = found.config["algorithm.policy_loss"] == "sapo"  # verl ignores the mode for it
    aggregation = "seq-mean-token-mean" if is_sapo else mode
    found.config["algorithm.aggregation"] = aggregation.replace("-", "_")
    critic_mode = found.get("critic.loss_agg_mode", mode)  # an interpolation of the actor's
    if critic_mode.startswith("${"):
        critic_mode = mode
    if critic_mode != aggregation:
        found.config["critic.aggregation"] = critic_mode.replace("-", "_")
    # verl trains on groups of equal rewards too: their tokens count in the mean.
    found.config["algorithm.drop_flat_groups"] = False
    if found.given.get(ACTOR + "clip_ratio") is not None and not found.given.get(
        ACTOR + "clip_ratio_low"
    ):
        found.notes.append(
            "clip_ratio without clip_ratio_low and clip_ratio_high: recent versions of verl read "
            "only these two; both are set to clip_ratio here"
        )


def advantage(found: Migration) -> None:
    name = found.choose("algorithm.adv_estimator", ADVANTAGES, "grpo")
    found.config["algorithm.advantage"] = name
    if name != "gae":
        for key in [key for key in found.config if key.startswith("critic.")]:
            del found.config[key]
    batches = found.get("algorithm.filter_groups.max_num_gen_batches", 0)
    if found.config.get("algorithm.dynamic_sampling"):
        found.config["algorithm.dynamic_sampling_batches"] = batches or 10
        if not batches:
            found.notes.append(
                "filter_groups.max_num_gen_batches=0 is unlimited in verl; "
                "algorithm.dynamic_sampling_batches is set to 10"
            )


def kl(found: Migration) -> None:
    """The KL term: verl may have one in the loss and one in the reward, jaxrl has one."""
    in_loss, in_reward = found.get(ACTOR + "use_kl_loss"), found.get("algorithm.use_kl_in_reward")
    loss_kind, reward_kind = ACTOR + "kl_loss_type", "algorithm.kl_penalty"
    loss_coef, reward_coef = ACTOR + "kl_loss_coef", "algorithm.kl_ctrl.kl_coef"
    control = [found.get(f"algorithm.kl_ctrl.{name}") for name in ("type", "target_kl", "horizon")]
    values = {key: found.get(key) for key in (loss_kind, reward_kind, loss_coef, reward_coef)}
    table = KLS | {f"{theirs}+": f"{ours}+" for theirs, ours in KLS.items()}
    if in_loss and in_reward:
        found.missing.append(
            f"algorithm.use_kl_in_reward=True with {ACTOR}use_kl_loss=True: jaxrl has one KL term; "
            "the one in the loss is kept"
        )
    if in_loss:
        found.config |= {"algorithm.kl_in": "loss", "algorithm.kl_coef": values[loss_coef]}
        found.config["algorithm.kl"] = found.choose(loss_kind, table, "k3")
        if found.config["algorithm.kl"].startswith("k3"):
            found.config["algorithm.kl_clamp"] = 10.0  # as verl clamps it
    elif in_reward:
        found.config |= {"algorithm.kl_in": "reward", "algorithm.kl_coef": values[reward_coef]}
        found.config["algorithm.kl"] = found.choose(reward_kind, table, "k1")
        kind, target, horizon = control
        if kind == "adaptive":
            found.config |= {"algorithm.kl_target": target, "algorithm.kl_horizon": float(horizon)}
    else:
        found.config["algorithm.kl_coef"] = 0.0


def sampling(found: Migration) -> None:
    for theirs, ours in ((ROLLOUT + "top_k", "rollout"), (ROLLOUT + "val_kwargs.top_k", "eval")):
        found.config[f"{ours}.sampling.top_k"] = max(0, found.get(theirs, -1))
    samples = found.get(ROLLOUT + "val_kwargs.do_sample")
    temperature = found.get(ROLLOUT + "val_kwargs.temperature")
    found.config["eval.sampling.temperature"] = temperature if samples else 0.0


CRITIC_OFFLOAD = (("critic.fsdp_config.param_offload", "critic"),)
REWARD_MODEL_OFFLOAD = (("reward_model.model.fsdp_config.param_offload", "reward_model"),)


def recomputation(found: Migration) -> None:
    megatron = ACTOR + "megatron.override_transformer_config.recompute_"
    granularity, method = found.get(megatron + "granularity"), found.get(megatron + "method")
    n_layers = found.get(megatron + "num_layers", 0)
    if not found.get(MODEL + "enable_gradient_checkpointing", True):
        found.config["learner.remat"] = "none"
    elif found.get(MODEL + "enable_activation_offload", False):
        found.config["learner.remat"] = "offload"
    elif granularity == "selective":
        found.config["learner.remat"] = "dots"
    elif granularity == "full" and n_layers and (method == "block" or n_layers > 1):
        found.config["learner.remat"] = (
            f"full?{'first' if method == 'block' else 'group'}={n_layers}"
        )


def optimizer(found: Migration) -> None:
    betas = found.get(ACTOR + "optim.betas")
    if betas:
        found.config["learner.b1"], found.config["learner.b2"] = betas
    steps = found.get(ACTOR + "optim.lr_warmup_steps", -1)
    ratio = found.get(ACTOR + "optim.lr_warmup_steps_ratio", 0.0)
    total = found.get("trainer.total_training_steps")
    updates = math.ceil(
        found.get("data.train_batch_size") / found.get(ACTOR + "ppo_mini_batch_size")
    ) * found.get(ACTOR + "ppo_epochs", 1)
    if steps >= 0:  # verl's scheduler moves once per step, jaxrl's once per optimizer update
        found.config["learner.warmup_steps"] = steps * updates
    elif ratio and total:
        found.config["learner.warmup_steps"] = round(ratio * total) * updates
    elif ratio:
        found.notes.append(
            f"lr_warmup_steps_ratio={ratio}: set learner.warmup_steps to that share of all "
            "optimizer updates"
        )
    if "8bit" in str(found.get(ACTOR + "optim.optimizer", "")):
        found.config["learner.moment_dtype"] = "int8"
    offload = []
    for name, ours in (
        (ACTOR + "fsdp_config.optimizer_offload", "optimizer"),
        (ACTOR + "megatron.optimizer_offload", "optimizer"),
        ("critic.fsdp_config.optimizer_offload", "optimizer"),
        (REF + "fsdp_config.param_offload", "reference"),
        (REF + "megatron.param_offload", "reference"),
        *(CRITIC_OFFLOAD if found.get("algorithm.adv_estimator") == "gae" else ()),
        *(REWARD_MODEL_OFFLOAD if found.get("reward_model.enable") else ()),
    ):
        if found.get(name) and ours not in offload:
            offload.append(ours)
    found.config["learner.offload"] = tuple(offload)
    recomputation(found)
    size = found.get(ACTOR + "fsdp_config.fsdp_size", -1)
    if size > 0:
        found.config["mesh.fsdp"] = size
        found.notes.append(
            f"fsdp_size={size}: set mesh.replica to the number of devices / "
            "(mesh.fsdp x mesh.sequence x mesh.tensor)"
        )


def adapters(found: Migration) -> None:
    """Low-rank adapters; their other keys count only with a rank."""
    names = {"lora_alpha": "alpha", "lora_adapter_path": "path"}
    lists = {"target_modules": "target_modules", "exclude_modules": "exclude_modules"}
    given = {key: found.get(MODEL + key) for key in ("lora_rank", *names, *lists)}
    if not given["lora_rank"]:
        return
    found.config["lora.rank"] = given["lora_rank"]
    for key, ours in (names | lists).items():
        if (value := given[key]) is None:
            continue
        if key in lists:
            value = (value,) if isinstance(value, str) else tuple(value)
        found.config[f"lora.{ours}"] = value


def correction(found: Migration) -> None:
    """Rollout correction: importance weights and rejection between engine and trainer."""
    kinds = {"None": "none", "token": "token_tis", "sequence": "seq_tis"}
    weight = found.choose(CORRECTION + "rollout_is", kinds, "none")
    threshold = float(found.get(CORRECTION + "rollout_is_threshold", 2.0))
    normalize = found.get(CORRECTION + "rollout_is_batch_normalize", False)
    if weight != "none":
        found.config |= {
            "algorithm.correction": weight,
            "algorithm.correction_high": threshold,
            "algorithm.correction_normalize": normalize,
        }
    names = {name: name for name in REJECTIONS} | {"None": "none"}
    rejection = found.choose(CORRECTION + "rollout_rs", names, "none")
    bounds = str(found.get(CORRECTION + "rollout_rs_threshold", ""))
    found.config["algorithm.rejection"] = rejection
    if rejection in RATIO_REJECTIONS:
        low, high = ratio_bounds(bounds)
        found.config |= {"algorithm.rejection_low": low, "algorithm.rejection_high": high}
    elif rejection != "none":
        found.config["algorithm.rejection_max"] = float(bounds or 0.01)
    bypass, kind = found.get(CORRECTION + "bypass_mode"), found.get(CORRECTION + "loss_type")
    if bypass:
        found.config["algorithm.old_logp"] = "rollout"
        if kind == "reinforce":
            found.config["algorithm.policy_loss"] = "policy_gradient"


def ratio_bounds(bounds: str) -> tuple[float, float]:
    """Bounds of the trainer's over the engine's probability.

    verl bounds the engine's over the trainer's, as "low_high" or one number for 1 / high and high.
    """
    low, _, high = bounds.partition("_")
    if not high:
        low, high = str(1 / float(low or 2.0)), low or "2.0"
    return 1 / float(high), 1 / float(low)


def rewards(found: Migration) -> None:
    path = found.get("custom_reward_function.path") or found.get(
        "reward.custom_reward_function.path"
    )
    name = found.get("custom_reward_function.name") or found.get(
        "reward.custom_reward_function.name"
    )
    function = f"{path}:{name or 'compute_score'}" if path else "by_source"
    found.config["reward.functions"] = (function,)
    for prefix in OVERLONG_BUFFERS:
        enabled, length, factor = (
            found.get(prefix + name) for name in ("enable", "len", "penalty_factor")
        )
        if enabled:
            found.config["reward.overlong_buffer"] = length
            found.config["reward.overlong_penalty"] = factor or 1.0
    model_path = found.get("reward_model.model.path")
    if found.get("reward_model.enable"):
        found.config["reward_model.path"] = model_path


def trainer(found: Migration) -> None:
    for theirs, ours in (("save_freq", "checkpoint.every"), ("test_freq", "eval.every")):
        found.config[ours] = max(0, found.get(f"trainer.{theirs}", -1))
    for name in ("global_profiler.steps", "trainer.profile_steps"):
        if steps := found.get(name):
            found.config["profile.steps"] = tuple(steps)
    loggers = found.get("trainer.logger")
    loggers = [loggers] if isinstance(loggers, str) else loggers
    found.config["log.loggers"] = ("jsonl", *(name for name in loggers if name in LOGGERS))
    if unknown := [name for name in loggers if name not in LOGGERS]:
        found.missing.append(f"trainer.logger={unknown}: jaxrl has {', '.join(LOGGERS)}")


TRANSLATIONS: tuple[Callable[[Migration], None], ...] = (
    data, batch, loss, advantage, kl, sampling, optimizer, adapters, correction, rewards, trainer
)  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """The settings of a YAML file or of a shell script, by dotted name.

    Raises ValueError for a file without any.
    """
    text = path.read_text()
    if path.suffix in (".yaml", ".yml"):
        tree = yaml.safe_load(text)
        found = dict(flatten(tree)) if isinstance(tree, Mapping) else {}
    else:
        found = overrides(shlex.split(text.replace("\\\n", " "), comments=True))
    if not any(name.startswith(PREFIXES) for name in found):
        raise ValueError(
            f"{path} has no key of verl such as data.train_files; give a YAML config or a launch "
            "script"
        )
    return found


def overrides(words: list[str]) -> dict[str, Any]:
    """The settings in words of the form KEY=VALUE, with YAML values; other words are ignored."""
    found = {}
    for word in words:
        name, equals, value = word.lstrip("+").partition("=")
        if equals and "." in name and name.startswith(PREFIXES):
            found[name] = yaml.safe_load(value)
    return found


def without_references(given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Resolves environment variables; leaves out values that refer to other keys or variables."""
    kept = {}
    for name, value in given.items():
        if isinstance(value, str):
            value = os.path.expandvars(value)
            if "$" in value:
                notes.append(f"{name}={value}: a reference, not resolved; verl's default is used")
                continue
        kept[name] = value
    return kept


def config_file(config: Mapping[str, Any], source: str) -> str:
    """The text of a config file that sets what differs from the defaults of jaxrl."""
    known, defaults = keys(RunConfig), default_config()
    lines = [f'"""Migrated from {source}; check it with python -m jaxrl.plan."""', ""]
    lines += ["from ml_collections import ConfigDict", ""]
    lines += ["from jaxrl.config.resolve import default_config", "", ""]
    lines += ["def get_config() -> ConfigDict:", "    config = default_config()"]
    for name in known:
        default = value_of(defaults, name)
        value = config.get(name, default)
        if isinstance(default, float) and isinstance(value, str | int):
            value = float(value)  # YAML reads 1e-6 as text
        if value != default:
            lines.append(f"    config.{name} = {literal(value)}")
    return "\n".join([*lines, "    return config", ""])


def literal(value: Any) -> str:
    """Python source of a value, with double quotes as the other config files have them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    return repr(value)


def value_of(config: ConfigDict, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value[part]
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/migrate_config.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="YAML config or launch script of verl")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="further settings of verl"
    )
    options = parser.parse_args(argv)
    notes: list[str] = []
    try:
        given = without_references(read(options.file) | overrides(options.overrides), notes)
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = migrate(given)
    print(config_file(found.config, options.file.name), end="")
    for title, lines in (("no counterpart", found.missing), ("check", notes + found.notes)):
        for line in lines:
            print(f"{title}: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
