"""Names and defaults of TRL, and the keys here."""

from typing import Any

SHARED_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "seed": 42,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "lora_r": 16,
    "lora_alpha": 32,
    "gradient_checkpointing": True,
}
ONLINE_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "num_iterations": 1,
    "epsilon": 0.2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": ONLINE_DEFAULTS
    | {
        "num_generations": 8,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize",
    },
    "rloo": ONLINE_DEFAULTS | {"num_generations": 2, "beta": 0.05},
    "sft": {"learning_rate": 2e-5, "max_length": 1024},
    "dpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "sigmoid"},
    "kto": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "kto"},
    "cpo": {
        "learning_rate": 1e-6,
        "max_length": 1024,
        "beta": 0.1,
        "loss_type": "sigmoid",
        "cpo_alpha": 1.0,
        "simpo_gamma": 0.5,
    },
    "orpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
    "prm": {"learning_rate": 1e-5, "max_length": 1024, "step_separator": "\n"},
}
RENAMED = {
    "model_name_or_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template_path": "data.chat_template",
    "chat_template_kwargs": "data.template_kwargs",
    "learning_rate": "learner.lr",
    "weight_decay": "learner.weight_decay",
    "max_grad_norm": "learner.clip_norm",
    "adam_beta1": "learner.b1",
    "adam_beta2": "learner.b2",
    "adam_epsilon": "learner.eps",
    "seed": "seed",
    "run_name": "name",
    "output_dir": "run_dir",
    "save_total_limit": "checkpoint.keep",
    "router_aux_loss_coef": "learner.router_aux_coef",
    "project": "log.project",
}
ADAPTERS = {
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
}
ONLINE = {
    "shuffle_dataset": "data.shuffle",
    "num_generations": "rollout.n",
    "num_generations_eval": "eval.n",
    "max_prompt_length": "data.max_prompt_len",
    "max_completion_length": "data.max_response_len",
    "num_iterations": "learner.epochs",
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.sampling.top_p",
    "top_k": "rollout.sampling.top_k",
    "min_p": "rollout.sampling.min_p",
    "vllm_tensor_parallel_size": "rollout.tensor",
    "vllm_enable_sleep_mode": "rollout.release_kv",
    "mask_truncated_completions": "algorithm.overlong_filtering",
    "entropy_coef": "algorithm.entropy_coef",
    "top_entropy_quantile": "algorithm.top_entropy",
    "off_policy_mask_threshold": "algorithm.off_policy_threshold",
}
OBJECTIVES = {  # loss_type: policy loss and aggregation
    "dapo": ("ppo_clip", "token_mean"),
    "bnpo": ("ppo_clip", "token_mean"),
    "grpo": ("ppo_clip", "seq_mean_token_mean"),
    "dr_grpo": ("ppo_clip", "seq_mean_token_sum_norm"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
    "luspo": ("gspo", "seq_mean_token_sum"),
    "vespo": ("vespo", "token_mean"),
}
VESPO = {
    "vespo_k_pos": "vespo_k_positive",
    "vespo_lambda_pos": "vespo_lambda_positive",
    "vespo_k_neg": "vespo_k_negative",
    "vespo_lambda_neg": "vespo_lambda_negative",
}
CORRECTIONS = {
    "token_truncate": "token_tis",
    "token_mask": "icepop",
    "sequence_truncate": "seq_tis",
    "sequence_mask": "seq_icepop",
}
# Settings that change the numbers: the value without effect, the reason, keys that settle it.
NEUTRAL: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "repetition_penalty": (1.0, "jaxrl's sampling has no such penalty", ()),
    "generation_kwargs": (None, "jaxrl's sampling has the keys of rollout.sampling", ()),
    "normalize_advantages": (False, "jaxrl's RLOO does not normalize over the batch", ()),
    "label_smoothing_factor": (0.0, "jaxrl's loss has no label smoothing", ()),
    "neftune_noise_alpha": (None, "jaxrl adds no noise to embeddings", ()),
    "lr_scheduler_kwargs": (None, "set learner.min_lr_ratio", ("learner.min_lr_ratio",)),
    "model_revision": ("main", "give the folder of that revision", ("model.path",)),
    "average_tokens_across_devices": (True, "jaxrl's token means are over all devices", ()),
}
PREFERENCES = {  # loss_type of DPO: preference.loss
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo_norm",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust",
    "exo_pair": "exo_pair",
    "nca_pair": "nca_pair",
    "bco_pair": "bco_pair",
    "sppo_hard": "sppo_hard",
    "aot": "aot",
    "aot_unpaired": "aot_unpaired",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "discopop": "discopop",
    "sft": "sft",
}
# loss_type of CPO
REFERENCE_FREE = {"sigmoid": "cpo", "hinge": "cpo_hinge", "ipo": "cpo_ipo", "simpo": "simpo"}
# Losses of DPO that read label_smoothing; TRL ignores it for the others
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
}
OFFLINE_NEUTRAL: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "rpo_alpha": (
        None,
        "older TRL's term of chosen answers is a loss here; set preference.more_losses=('sft',)",
        ("preference.more_losses",),
    ),
    "sync_ref_model": (False, "the reference of preference pairs is the initial policy", ()),
}
