"""Runs of OpenRLHF: train_ppo_ray, train_sft, train_dpo and train_rm."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import LR_SCHEDULES
from jaxrl.config.other_frameworks import table
from jaxrl.migrate.migration import (
    DECIDE,
    DIFFERS,
    UNNEEDED,
    Migration,
    Reasons,
    listed,
)
from jaxrl.migrate.settings import Settings, flags

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
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.max_norm": 1.0,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.horizon": 10000,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "reward.clip_range": [-10, 10],
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
    "ckpt.save_hf": "checkpoint.export_hf",
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
    "reward.overlong_buffer_len": "reward.overlong_buffer",
    "reward.overlong_penalty_factor": "reward.overlong_penalty",
    "actor.entropy_coef": "algorithm.entropy_coef",
}
CRITIC = {
    "critic.model_name_or_path": "critic.path",
    "critic.adam.lr": "critic.lr",
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
    (r"eval\.split|ckpt\.(disable_ds|max_mem|path)|disable_ds_ckpt", UNNEEDED,
     "one folder has the run"),
)  # fmt: skip


def is_command(words: Sequence[str]) -> bool:
    return any("openrlhf" in word for word in words) and program_of(words) != ""


def program_of(words: Sequence[str]) -> str:
    """The module of jaxrl for the program that a command runs; "" if none is known."""
    for word in words:
        name = word.removesuffix(".py").replace("/", ".").rsplit(".", 1)[-1]
        if name in PROGRAMS:
            return PROGRAMS[name]
    return ""


@functools.cache
def present_names() -> Mapping[str, str]:
    """The present name for each name before version 0.10; rows have them in the same order."""
    found = dict(EARLIER)
    for row in table():
        names = [name.lstrip("-") for name in row.names if row.framework.startswith("OpenRLHF")]
        dotted, plain = ([n for n in names if ("." in n) == has] for has in (True, False))
        if len(dotted) == len(plain):
            found = dict(zip(plain, dotted, strict=True)) | found
    return found


def command(words: Sequence[str]) -> tuple[Settings, str]:
    """The settings of a command line, under their present names, and the program."""
    at = next(i for i, word in enumerate(words) if program_of([word]))
    program = program_of(words[at : at + 1])
    read = flags(words[at + 1 :])
    found = Settings(words=read.words)
    for old, new in ((read.values, found.values), (read.unresolved, found.unresolved)):
        for name, value in old.items():
            name = present_names().get(name, name)
            new[OFFLINE.get(name, name) if program != "jaxrl.train" else name] = value
    return found, program


def translate(settings: Settings, program: str, reasons: Mapping[str, str]) -> Migration:
    defaults = DEFAULTS
    if program != "jaxrl.train":
        rate = {"actor.adam.lr": RATES[program], "data.max_len": LENGTHS[program]}
        defaults = defaults | rate | ({"train.max_epochs": 2} if program == "jaxrl.sft" else {})
    found = Migration(
        settings,
        framework="OpenRLHF",
        defaults=defaults,
        program=program,
        optional=r"(logger|ckpt|ds|vllm)\..*",
    )
    found.apply(training)
    if program == "jaxrl.train":
        found.apply(reinforcement)
        found.require("data.prompt_dataset", "data.train", reasons)
        if "algo.advantage.estimator" in settings.unresolved:
            found.require("algo.advantage.estimator", "algorithm.advantage", reasons)
    else:
        found.apply(offline)
        found.require("data.dataset", "data.train", reasons)
    model = "actor.model_name_or_path" if program == "jaxrl.train" else "model.model_name_or_path"
    if "actor.model_name_or_path" in settings.unresolved or "model.path" not in found.config:
        model = "actor.model_name_or_path" if found.given("actor.model_name_or_path") else model
        found.require(model, "model.path", reasons)
    found.finish(REASONS, reasons)
    return found


def training(found: Migration) -> None:
    """Settings that all programs share."""
    for theirs, ours in TRAINING.items():
        found.carry(theirs, ours)
    if found.config.get("mesh.sequence", 1) > 1:
        found.config["learner.sequence_parallel"] = "ring"
    schedule = str(found.get("actor.lr_scheduler")).replace("cosine_with_min_lr", "cosine")
    schedule = schedule.removesuffix("_with_warmup")
    if schedule in LR_SCHEDULES:
        found.config["learner.lr_schedule"] = schedule
        if schedule == "constant":
            found.config.pop("learner.min_lr_ratio")
    else:
        found.refuse("actor.lr_scheduler", f"jaxrl has {LR_SCHEDULES}", "learner.lr_schedule")
    if betas := found.get("actor.adam.betas"):
        found.config["learner.b1"], found.config["learner.b2"] = betas
    ratio = found.number("actor.lr_warmup_ratio", 0)
    if ratio:
        found.note(
            DECIDE,
            "actor.lr_warmup_ratio",
            f"{ratio} of all optimizer updates: set learner.warmup_steps",
        )
    for name, ours in (("ckpt.save_steps", "checkpoint.every"), ("eval.steps", "eval.every")):
        found.config[ours] = max(0, found.number(name, 0))
    rank = found.number("ds.lora.rank", 0)
    if rank:
        found.config["lora.rank"] = rank
        found.carry("ds.lora.alpha", "lora.alpha")
        found.carry("ds.lora.target_modules", "lora.target_modules", listed)
        if found.get("ds.load_in_4bit", False):
            found.config["lora.base_dtype"] = "nf4"
    found.config["learner.remat"] = (
        "full" if found.get("actor.gradient_checkpointing_enable", False) else "none"
    )
    found.config["learner.offload"] = ("optimizer",) if found.get("ds.adam_offload", False) else ()
    loggers = ["console", "jsonl", "tensorboard"]
    if found.get("logger.wandb.key"):
        loggers.append("wandb")
    found.get("logger.tensorboard_dir")
    found.config["log.loggers"] = tuple(loggers)
    found.carry("eval.dataset", "data.val", sources)
    if not found.config.get("data.val") and found.config.pop("eval.every"):
        found.note(DIFFERS, "eval.steps", "there is no eval.dataset, so it is left out")


def sources(value: Any) -> tuple[str, ...]:
    """Datasets of OpenRLHF, which are paths or ids of the hub separated by commas."""
    names = [name.strip() for name in str(value).split(",") if name.strip()]
    return tuple(name if _is_path(name) else f"hf:{name}" for name in names)


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.endswith((".jsonl", ".json", ".parquet"))


def token_budget(found: Migration, longest: int) -> None:
    tokens = found.number("train.micro_batch_size", 1) * longest
    if found.get("train.dynamic_batch_enable", False):
        ranks = found.config.get("mesh.sequence", 1)
        tokens = found.number("train.max_tokens_per_gpu", 16192) * ranks
    unit = 512 * found.config.get("mesh.sequence", 1)  # halves of a ring's rows are shared too
    found.config["learner.token_budget"] = -(-max(tokens, longest) // unit) * unit


def lengths(found: Migration) -> int:
    """The longest sequence, divided into prompt and response; returns it."""
    total = found.number("data.max_len", 2048)
    response = found.number("rollout.max_new_tokens", None) or total // 2
    prompt = found.number("data.prompt_max_len", None) or max(1, total - response)
    found.config |= {"data.max_prompt_len": prompt, "data.max_response_len": response}
    return prompt + response


def offline(found: Migration) -> None:
    """Supervised fine-tuning, preference pairs and reward models."""
    found.carry("data.dataset", "data.train", sources)
    found.carry("train.batch_size", "data.prompts_per_step")
    found.carry("train.max_epochs", "total_epochs")
    token_budget(found, lengths(found))
    usual = {"data.input_key": "prompt", "data.output_key": "completion"}
    usual |= {"data.chosen_key": "chosen", "data.rejected_key": "rejected"}
    columns = [(ours, found.get(name)) for name, ours in usual.items()]
    found.config["data.columns"] = tuple(
        f"{ours}:{name}" for ours, name in columns if name not in (None, ours, "input", "output")
    )
    if found.program == "jaxrl.dpo":
        found.carry("model.beta", "preference.beta")
        found.carry("model.label_smoothing", "preference.label_smoothing")
        found.config["preference.loss"] = "ipo" if found.get("model.ipo_enable", False) else "dpo"
    if found.program == "jaxrl.reward_model" and found.get("model.margin_loss_enable", False):
        found.config["preference.margin_weight"] = 1.0


def reinforcement(found: Migration) -> None:
    for theirs, ours in REINFORCEMENT.items():
        found.carry(theirs, ours)
    found.carry("data.prompt_dataset", "data.train", sources)
    found.carry("data.prompt_probs", "data.weights", lambda v: tuple(map(float, str(v).split(","))))
    columns = (("prompt", found.get("data.input_key")), ("answer", found.get("data.label_key")))
    found.config["data.columns"] = tuple(
        f"{ours}:{name}" for ours, name in columns if name not in (None, "input", "label", ours)
    )
    samples = found.number("train.batch_size", 128)
    n, prompts = found.config["rollout.n"], found.config["data.prompts_per_step"]
    found.config["learner.mini_batch_prompts"] = 0 if samples >= n * prompts else samples // n
    if samples % n:
        found.refuse(
            "train.batch_size",
            f"{samples} samples are no whole number of groups of {n}",
            "learner.mini_batch_prompts",
        )
    token_budget(found, lengths(found))
    objective(found)
    kl(found)
    correction(found)
    if url := found.get("reward.remote_url"):
        is_file = str(url).endswith(".py")
        if is_file:
            found.refuse(
                "reward.remote_url",
                "its reward_func takes lists of queries; write one with verl's or TRL's signature "
                "and give it as reward.functions",
                "reward.functions",
            )
        found.config["reward.functions"] = (f"remote?url={url}",)
    elif found.config.get("reward_model.path"):
        found.config["reward.functions"] = ()
    if found.given("train.agent_func_path"):
        found.refuse(
            "train.agent_func_path",
            "write it as an environment (docs/how_to/environments.md) and give its name",
            "env.name",
            "env.agent",
        )
    found.config["reward.clip"] = tuple(map(float, listed(found.get("reward.clip_range"))))
    if found.given("data.image_key"):
        found.refuse("data.image_key", "jaxrl trains on text only")
    if found.get("train.async_enable", False) or found.get("train.partial_rollout_enable", False):
        found.refuse(
            "train.async_enable"
            if found.given("train.async_enable")
            else "train.partial_rollout_enable",
            "set schedule.mode to partial, or to async with schedule.rollout_devices",
            "schedule.mode",
        )


def objective(found: Migration) -> None:
    found.choose("algo.advantage.estimator", ADVANTAGES, "algorithm.advantage")
    name = found.config.get("algorithm.advantage")
    if name == "gae":
        for theirs, ours in CRITIC.items():
            found.carry(theirs, ours)
        found.config["critic.warmup_steps"] = max(0, found.number("critic.freezing_steps", 0))
    if name in ("gae", "reinforce_plus_plus"):
        found.carry("algo.advantage.gamma", "algorithm.gamma")
    low, high = (found.get("actor.eps_clip"),) * 2
    if pair := found.get("actor.eps_clip_low_high"):
        low, high = pair
    found.config |= {"algorithm.clip_low": low, "algorithm.clip_high": high}
    losses = {"ppo": "ppo_clip", "gspo": "gspo"}
    found.choose("actor.policy_loss_type", losses, "algorithm.policy_loss")
    if dual := found.get("actor.dual_clip"):
        found.config |= {"algorithm.policy_loss": "dual_clip", "algorithm.clip_dual": float(dual)}
    if found.config.get("algorithm.policy_loss") == "gspo":
        found.config["algorithm.aggregation"] = "seq_mean_token_mean"
    if found.get("algo.dynamic_filtering_enable", False):
        found.config["algorithm.dynamic_sampling"] = True
        found.carry("algo.dynamic_filtering_range", "algorithm.dynamic_sampling_range", tuple)
    found.config["algorithm.drop_flat_groups"] = False


def kl(found: Migration) -> None:
    coef = found.number("algo.kl.init_coef", 0.01)
    found.config["algorithm.kl_coef"] = coef
    if not coef:
        return
    in_loss = found.get("algo.kl.use_loss", False)
    found.config["algorithm.kl_in"] = "loss" if in_loss else "reward"
    estimators = {name: name for name in ("k1", "k2", "k3")}
    found.choose("algo.kl.estimator", estimators, "algorithm.kl")
    found.config["algorithm.kl_clamp"] = 10.0
    if target := found.get("algo.kl.target"):
        found.config["algorithm.kl_target"] = float(target)
        found.carry("algo.kl.horizon", "algorithm.kl_horizon", float)
    if found.get("ref.offload", False):
        found.config["learner.offload"] = (*found.config["learner.offload"], "reference")


def correction(found: Migration) -> None:
    section = "algo.advantage.is_correction_"
    if not found.get(section + "enable", False):
        return
    kinds = {"tis": "token_tis", "icepop": "icepop"}
    kind = found.get(section + "type", "tis")
    low, high = found.get(section + "threshold", [0.5, 5.0])
    if kind not in kinds:
        found.refuse(
            section + "type", f"jaxrl has {', '.join(kinds)} by these names", "algorithm.correction"
        )
        return
    bound = "algorithm.correction_floor" if kind == "tis" else "algorithm.correction_low"
    found.config |= {"algorithm.correction": kinds[kind], bound: float(low)}
    found.config["algorithm.correction_high"] = float(high)
