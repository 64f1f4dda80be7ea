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
        "router_aux_loss_coef": 0.001,
    },
    "rloo": ONLINE_DEFAULTS | {"num_generations": 2, "beta": 0.05},
    "sft": {"learning_rate": 2e-5, "max_length": 1024},
    "dpo": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "sigmoid"},
    "kto": {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "kto"},
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
}
RENAMED = {
    "model_name_or_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template_path": "data.chat_template",
    "chat_template_kwargs": "data.template_kwargs",
    "shuffle_dataset": "data.shuffle",
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
}
ONLINE = {
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
}
CORRECTIONS = {
    "token_truncate": "token_tis",
    "token_mask": "icepop",
    "sequence_truncate": "seq_tis",
    "sequence_mask": "seq_icepop",
}
