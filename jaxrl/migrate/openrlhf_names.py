"""Names and defaults of OpenRLHF, and the keys here."""

from typing import Any

from jaxrl.migrate.migration import UNNEEDED, Reasons

PROGRAMS = {
    "train_ppo_ray": "jaxrl.train",
    "train_sft": "jaxrl.sft",
    "train_dpo": "jaxrl.dpo",
    "train_rm": "jaxrl.reward_model",
}
# Names before version 0.10 that the table does not pair with their present ones.
EARLIER = {
    "output_key": "data.output_key",
    "prompt_max_len": "data.prompt_max_len",
    "learning_rate": "adam.lr",
    "wandb_run_name": "logger.wandb.run_name",
}
OFFLINE = {  # settings of one model, which have the actor's names in reinforcement learning
    name: f"actor.{name.removeprefix('model.')}"
    for name in (
        "model.model_name_or_path",
        "model.gradient_checkpointing_enable",
        "model.aux_loss_coef",
        "optim",
        "adam.lr",
        "adam.betas",
        "adam.eps",
        "adam.weight_decay",
        "lr_scheduler",
        "lr_warmup_ratio",
        "min_lr_ratio",
        "max_norm",
    )
}
DEFAULTS: dict[str, Any] = {
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 16192,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "data.max_len": 2048,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.optim": "adam",
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.max_norm": 1.0,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "algo.advantage.estimator": "gae",
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_gating": "ratio",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.dynamic_filtering_range": [0, 1],
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.horizon": 10000,
    "critic.adam.lr": 9e-6,
    "critic.adam.weight_decay": 0.0,
    "critic.optim": "adam",
    "critic.value_clip": 0.5,
    "reward.clip_range": [-10, 10],
    "train.ema_beta": 0.992,
    "eval.n_samples_per_prompt": 4,
    "eval.temperature": 0.6,
    "ckpt.max_num": 3,
}
RATES = {"jaxrl.sft": 5e-6, "jaxrl.dpo": 1e-5, "jaxrl.reward_model": 9e-6}
LENGTHS = {"jaxrl.sft": 2048, "jaxrl.dpo": 512, "jaxrl.reward_model": 512}
TRAINING = {
    "actor.model_name_or_path": "model.path",
    "actor.adam.lr": "learner.lr",
    "actor.adam.weight_decay": "learner.weight_decay",
    "actor.adam.eps": "learner.eps",
    "actor.min_lr_ratio": "learner.min_lr_ratio",
    "actor.max_norm": "learner.clip_norm",
    "actor.aux_loss_coef": "learner.router_aux_coef",
    "ds.ring_attn_size": "mesh.sequence",
    "ds.tensor_parallel_size": "mesh.tensor",
    "ckpt.output_dir": "run_dir",
    "ckpt.max_num": "checkpoint.keep",
    "logger.wandb.project": "log.project",
    "logger.wandb.run_name": "name",
    "train.seed": "seed",
    "eval.n_samples_per_prompt": "eval.n",
    "eval.temperature": "eval.sampling.temperature",
}
REINFORCEMENT = {
    "rollout.batch_size": "data.prompts_per_step",
    "rollout.n_samples_per_prompt": "rollout.n",
    "rollout.temperature": "rollout.sampling.temperature",
    "rollout.top_p": "rollout.sampling.top_p",
    "train.max_epochs": "learner.epochs",
    "train.num_episodes": "total_epochs",
    "vllm.tensor_parallel_size": "rollout.tensor",
    "vllm.enable_sleep": "rollout.release_kv",
    "reward.model_name_or_path": "reward_model.path",
    "reward.normalize_enable": "reward.normalize",
    "reward.stop_properly_penalty_coef": "reward.truncated_coef",
    "reward.overlong_buffer_len": "reward.overlong_buffer",
    "reward.overlong_penalty_factor": "reward.overlong_penalty",
    "actor.entropy_coef": "algorithm.entropy_coef",
}
CRITIC = {
    "critic.model_name_or_path": "critic.path",
    "critic.adam.lr": "critic.lr",
    "critic.adam.weight_decay": "critic.weight_decay",
    "critic.value_clip": "critic.value_clip",
    "algo.advantage.lambd": "algorithm.lam",
}
ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean_token_mean"}
UNBIASED_KLS = {"k1": "k1+", "k2": "k2", "k3": "k3+"}  # the value of each, the gradient of k2
NEUTRAL: dict[str, tuple[Any, str, tuple[str, ...]]] = {  # name: value without effect, reason, keys
    "actor.optim": ("adam", "DeepSpeed's Muon scales its updates in its own way",
                    ("learner.optimizer",)),
    "model.nll_loss_coef": (0, "jaxrl's preference losses have no such term", ()),
    "model.pretrain_mode_enable": (False, "rows of the column `text` are trained on whole", ()),
    "ref.model_name_or_path": (None, "the reference of preference pairs is the initial policy", ()),
}  # fmt: skip
REASONS: Reasons = (
    (r"(ref|reward|critic|actor)\.num_.*|ds\.zero_stage|zero_stage|.*_num_(nodes|gpus.*)", UNNEEDED,
     "JAX uses all devices; mesh.fsdp shards weights, gradients and optimizer over them"),
    (r"data\.(disable_fast.*|dataloader.*|tokenizer.*)|(logger\.)?logging_steps", UNNEEDED,
     "rows are rendered in one way, and every step is logged"),
    (r"ds\.(attn_impl.*|packing.*|param_dtype|use_liger.*|grad_accum.*|deepcompile|experts.*)"
     r"|flash_attn|bf16|packing_samples|.*reentrant", UNNEEDED,
     "kernels and dtype are chosen by backend, rows are always packed"),
    (r"(train\.colocate_.*|ds\.ring_attn_head_stride|colocate_.*)", UNNEEDED,
     "roles share the devices"),
    (r"algo\.kl\..*", UNNEEDED, "no KL term uses it"),
    (r"algo\.advantage\.is_correction_(?!enable).*", UNNEEDED, "this correction is off"),
    (r"critic\..*", UNNEEDED, "this run has no critic, or its key is the learner's"),
    (r"(actor\.|critic\.)?muon\..*", UNNEEDED, "the optimizer does not read it"),
    (r"ds\.lora\..*", UNNEEDED, "the rank is 0"),
    (r"eval\.split|ckpt\.(disable_ds|max_mem|path)|disable_ds_ckpt", UNNEEDED,
     "one folder has the run"),
)  # fmt: skip
