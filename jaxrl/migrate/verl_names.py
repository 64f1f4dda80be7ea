"""Names and defaults of verl's reinforcement learning, and the keys here."""

from typing import Any

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}." for role in ("actor", "rollout", "ref"))
MODEL, CORRECTION = "actor_rollout_ref.model.", "algorithm.rollout_correction."
MULTI_TURN, DISTILLATION = ROLLOUT + "multi_turn.", "distillation."

# verl's defaults, where they differ from jaxrl's or decide what other keys mean.
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "use_dynamic_bsz": False,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    ACTOR + "policy_loss.loss_mode": "vanilla",
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "clip_ratio_c": 3.0,
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
    ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    ROLLOUT + "n": 1,
    ROLLOUT + "val_kwargs.temperature": 0,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "distillation.distillation_loss.loss_mode": "k3",
    "trainer.total_epochs": 30,
    "trainer.logger": ["console", "wandb"],
}
ASYNC_DEFAULTS: dict[str, Any] = {
    CORRECTION + "bypass_mode": True,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
FULLY_ASYNC_DEFAULTS = ASYNC_DEFAULTS | {
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "rollout.total_rollout_steps": 100,
}

# The same value under another name.
RENAMED = {
    "data.max_prompt_length": "data.max_prompt_len",
    "data.max_response_length": "data.max_response_len",
    "data.filter_overlong_prompts": "data.filter_overlong_prompts",
    "data.seed": "seed",
    MODEL + "path": "model.path",
    MODEL + "trust_remote_code": "model.trust_remote_code",
    MODEL + "custom_chat_template": "data.chat_template",
    ACTOR + "ppo_epochs": "learner.epochs",
    ACTOR + "entropy_coeff": "algorithm.entropy_coef",
    ACTOR + "grad_clip": "learner.clip_norm",
    ACTOR + "megatron.override_transformer_config.moe_aux_loss_coeff": "learner.router_aux_coef",
    ROLLOUT + "n": "rollout.n",
    ROLLOUT + "temperature": "rollout.sampling.temperature",
    ROLLOUT + "top_p": "rollout.sampling.top_p",
    ROLLOUT + "max_num_seqs": "rollout.max_num_seqs",
    ROLLOUT + "enable_prefix_caching": "rollout.prefix_cache",
    ROLLOUT + "free_cache_engine": "rollout.release_kv",
    ROLLOUT + "engine_kwargs.vllm.kv_cache_dtype": "rollout.kv_dtype",
    ROLLOUT + "val_kwargs.n": "eval.n",
    ROLLOUT + "val_kwargs.top_p": "eval.sampling.top_p",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "reward_model.normalize": "reward.normalize",
}
LOSS_KEYS = {  # of one policy loss each
    "dual_clip": {"clip_ratio_c": "clip_dual"},
    "clip_cov": {
        "policy_loss.clip_cov_lb": "clip_cov_low",
        "policy_loss.clip_cov_ub": "clip_cov_high",
        "policy_loss.clip_cov_ratio": "cov_fraction",
    },
    "kl_cov": {
        "policy_loss.kl_cov_ratio": "cov_fraction",
        "policy_loss.ppo_kl_coef": "kl_cov_coef",
    },
    "dppo_tv": {"clip_ratio_c": "ratio_max"},
    "dppo_kl": {"clip_ratio_c": "ratio_max"},
    "dro": {"policy_loss.dro_beta": "log_ratio_penalty"},
    "sapo": {
        "tau_pos": "sapo_tau_positive",
        "tau_neg": "sapo_tau_negative",
        "policy_loss.tau_pos": "sapo_tau_positive",
        "policy_loss.tau_neg": "sapo_tau_negative",
    },
}
CRITIC = {
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "critic.optim.weight_decay": "critic.weight_decay",
    "critic.ppo_epochs": "critic.epochs",
    "critic.cliprange_value": "critic.value_clip",
    "critic.ulysses_sequence_parallel_size": "critic.mesh.sequence",
    "critic.megatron.tensor_model_parallel_size": "critic.mesh.tensor",
    "critic.megatron.pipeline_model_parallel_size": "critic.mesh.stage",
    "trainer.critic_warmup": "critic.warmup_steps",
}
EPISODES = {
    MULTI_TURN + "max_assistant_turns": "env.max_turns",
    MULTI_TURN + "max_parallel_calls": "env.max_calls_per_turn",
    MULTI_TURN + "max_tool_response_length": "env.max_result_chars",
    MULTI_TURN + "format": "env.tool_format",
}

ADVANTAGES = {name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "gpg", "grpo_passk")}
ADVANTAGES |= {f"{kind}optimal_token_baseline": "optimal_token_baseline" for kind in ("", "tir_")}
ADVANTAGES |= {f"{name}_vectorized": name for name in ("grpo", "rloo")}
ADVANTAGES |= {
    f"reinforce_plus_plus{end}": f"reinforce_plus_plus{end}" for end in ("", "_baseline")
}
LOSSES = {"vanilla": "dual_clip", "geo_mean": "gmpo", "gpg": "policy_gradient"}
LOSSES |= {
    name: name
    for name in ("gspo", "sapo", "clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl", "dro")
}
AGGREGATIONS = {
    name: name.replace("-", "_")
    for name in (
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    )
}
KLS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KLS |= {name: name for name in ("k1", "k2", "k3", "abs", "full")}
KLS |= {f"{theirs}+": f"{ours}+" for theirs, ours in KLS.items()}
# The section has moved between versions of verl.
OVERLONG_BUFFERS = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)
# Settings that change the numbers: the value without effect, the reason, keys that settle it.
NEUTRAL: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "algorithm.use_pf_ppo": (False, "jaxrl does not resample a batch by its rewards", ()),
    ROLLOUT + "ignore_eos": (False, "a response ends with its end-of-sequence token here", ()),
    "trainer.val_only": (False, "it does not train: python -m jaxrl.evaluate validates", ()),
}
# The critic has these of the policy.
SHARED_WITH_CRITIC = {
    "critic.grad_clip": ACTOR + "grad_clip",
    "critic.ppo_mini_batch_size": ACTOR + "ppo_mini_batch_size",
    **{
        f"critic.optim.{name}": f"{ACTOR}optim.{name}"
        for name in (
            "betas",
            "clip_grad",
            "lr_warmup_steps",
            "lr_warmup_steps_ratio",
            "lr_scheduler_type",
            "lr_decay_style",
            "min_lr_ratio",
            "optimizer",
        )
    },
}
