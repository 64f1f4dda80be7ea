"""Runs of TRL: its commands, its YAML files, and the literal arguments in a Python script."""

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import LOGGERS, LR_SCHEDULES
from jaxrl.migrate import trl_preferences
from jaxrl.migrate.migration import (
    DECIDE,
    DIFFERS,
    NONE,
    UNNEEDED,
    Migration,
    Reasons,
    listed,
)
from jaxrl.migrate.settings import Settings, flags, yaml_file
from jaxrl.migrate.trl_names import (
    ADAPTERS,
    CORRECTIONS,
    DEFAULTS,
    NEUTRAL,
    OBJECTIVES,
    OFFLINE_NEUTRAL,
    ONLINE,
    RENAMED,
    SHARED_DEFAULTS,
    VESPO,
)

PROGRAMS = {  # command or script, and the module of jaxrl
    "grpo": "jaxrl.train",
    "rloo": "jaxrl.train",
    "sft": "jaxrl.sft",
    "dpo": "jaxrl.dpo",
    "kto": "jaxrl.dpo",
    "cpo": "jaxrl.dpo",
    "orpo": "jaxrl.dpo",
    "reward": "jaxrl.reward_model",
    "reward_modeling": "jaxrl.reward_model",
    "prm": "jaxrl.reward_model",
}
REASONS: Reasons = (
    (r"logging_.*|disable_tqdm|log_level|logging_first_step|push_to_hub|eval_on_start", UNNEEDED,
     "every step is logged"),
    (r"num_processes|num_machines|accelerate_config|config_file|deepspeed|fsdp.*|ddp_.*|main_.*|mixed_precision|machine_rank",
     UNNEEDED, "JAX uses all devices; mesh.fsdp shards weights, gradients and optimizer over them"),
    (r"dataloader_.*|dataset_num_proc|env|trainer\..*", UNNEEDED, "rows are read in one way"),
    (r"report_to", UNNEEDED, "console, jsonl and tensorboard are on by default"),
    (r"lora_task_type|lora_modules_to_save|bias|task_type", DIFFERS,
     "all adapters are of linear layers"),
)  # fmt: skip


def is_command(words: Sequence[str]) -> bool:
    return kind_of(words) != ""


def kind_of(words: Sequence[str]) -> str:
    """Which of TRL's trainers a command starts; "" if none is known."""
    for before, word in zip(words, [*words[1:], ""], strict=False):
        if before.rsplit("/", 1)[-1] == "trl" and word in PROGRAMS:
            return word
        path = before.removesuffix(".py").replace("/", ".")
        name = path.rsplit(".", 1)[-1]
        if "trl" in path or before.endswith(".py"):
            for kind in PROGRAMS:
                if re.search(rf"(^|_){kind}(_|$)", name):
                    return "reward" if kind == "reward_modeling" else kind
    return ""


def command(
    words: Sequence[str], folder: pathlib.Path, environment: Mapping[str, str]
) -> tuple[Settings, str]:
    """The settings of a command line and of the YAML file that it names."""
    kind = kind_of(words)
    at = next(i for i in range(len(words)) if kind_of(words[: i + 1] if i else words[:1]))
    given = flags([word for word in words[at + 1 :]])
    launcher = flags(words[:at])
    for name in ("num_processes", "nproc_per_node"):
        if name in launcher.values:
            given.values.setdefault("num_processes", launcher.values[name])
    given.words = []
    name = given.values.pop("config", None)
    if name is None:
        return given, kind
    path = folder / str(name)
    if not path.is_file():
        path = pathlib.Path(str(name))
    return yaml_file(path.read_text(), environment).below(given), kind


def translate(settings: Settings, kind: str, reasons: Mapping[str, str]) -> Migration:
    found = Migration(
        settings,
        framework="TRL",
        defaults=SHARED_DEFAULTS | DEFAULTS[kind],
        program=PROGRAMS[kind],
        optional=r"run_name|output_dir|report_to|save_\w+|vllm_\w+|gradient_checkpointing",
    )
    parts = (training, data)
    if kind in ("grpo", "rloo"):
        parts += (generation, rewards, grpo if kind == "grpo" else rloo)
    else:
        parts += (functools.partial(offline, kind=kind),)
    for part in parts:
        found.apply(part)
    found.require("model_name_or_path", "model.path", reasons)
    found.require("dataset_name", "data.train", reasons)
    found.finish(REASONS, reasons)
    return found


def n_processes(found: Migration) -> int:
    """Processes of the run, each with one device; TRL counts batches per device."""
    n = found.number("num_processes", None)
    if n is None:
        found.note(
            DECIDE,
            "per_device_train_batch_size",
            "the number of processes is not in the file, 1 is assumed; give num_processes=N",
        )
        return 1
    return n


def training(found: Migration) -> None:
    for theirs, ours in RENAMED.items():
        found.carry(theirs, ours)
    schedule = str(found.get("lr_scheduler_type")).removesuffix("_with_warmup")
    if schedule in LR_SCHEDULES:
        found.config["learner.lr_schedule"] = schedule
    else:
        found.refuse("lr_scheduler_type", f"jaxrl has {LR_SCHEDULES}", "learner.lr_schedule")
    found.config["learner.warmup_steps"] = int(found.number("warmup_steps", 0))
    if found.number("warmup_ratio", 0):
        found.note(DECIDE, "warmup_ratio", "set learner.warmup_steps, in optimizer updates")
    optimizer = str(found.get("optim", "adamw"))
    if "8bit" in optimizer:
        found.config["learner.moment_dtype"] = "int8"
    elif not optimizer.startswith("adamw"):
        found.refuse("optim", "AdamW is written otherwise", "learner.optimizer")
    if found.get("gradient_checkpointing") is False:
        found.config["learner.remat"] = "none"
    if found.get("activation_offloading", False):
        found.config["learner.remat"] = "offload"
    dtypes(found)
    for name, (value, reason, ours) in NEUTRAL.items():
        found.refuse_unless(name, value, reason, *ours)
    if found.get("use_peft", False):
        adapters(found)
    for what, ours in (("save", "checkpoint.every"), ("eval", "eval.every")):
        strategy = found.get(f"{what}_strategy", "steps" if what == "save" else "no")
        steps = found.number(f"{what}_steps", 500 if what == "save" else 0)
        if strategy == "epoch":
            found.note(DECIDE, f"{what}_strategy", f"set {ours} to the steps of an epoch")
        found.config[ours] = int(steps) if strategy == "steps" else 0
    loggers = [name for name in listed(found.get("report_to")) if name in LOGGERS]
    found.config["log.loggers"] = tuple(
        dict.fromkeys(("console", "jsonl", "tensorboard", *loggers))
    )


def dtypes(found: Migration) -> None:
    """bf16 is the dtype of computation, on by default; dtype is that of the weights."""
    weights = str(found.first("dtype", "torch_dtype") or "float32")
    if found.get("fp16", False):
        found.refuse("fp16", "jaxrl computes in bfloat16 or float32", "model.dtype")
    elif found.get("bf16", True) is False and weights == "float32":
        found.config["model.dtype"] = "float32"
    if weights != "float32":
        name = "dtype" if found.given("dtype") else "torch_dtype"
        reason = (
            "the weights that are updated are float32 here, unless learner.master_weights=False"
        )
        found.note(DIFFERS, name, reason)


def adapters(found: Migration) -> None:
    for theirs, ours in ADAPTERS.items():
        found.carry(theirs, ours)
    if found.get("lora_target_modules"):
        found.carry("lora_target_modules", "lora.target_modules", listed)
    else:
        found.config["lora.target_modules"] = ("q_proj", "v_proj")
        reason = "not given: PEFT chooses by model type; q_proj and v_proj as for Llama and Qwen"
        found.note(DIFFERS, "lora_target_modules", reason)
    if found.number("lora_dropout", 0.05):
        found.note(NONE, "lora_dropout", "adapters are trained without dropout")
    for name, dtype in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        if found.get(name, False):
            found.config["lora.base_dtype"] = dtype


def data(found: Migration) -> None:
    name = found.get("dataset_name")
    if name is None:
        return
    subset, split = found.get("dataset_config"), found.get("dataset_train_split")
    options = {"split": split, "subset": subset}
    found.config["data.train"] = (_source(str(name), options),)
    evaluates = found.config["eval.every"] > 0
    if evaluates:
        options["split"] = found.get("dataset_test_split")
        found.config["data.val"] = (_source(str(name), options),)


def _source(name: str, options: Mapping[str, Any]) -> str:
    if name.startswith(("/", ".", "~")) or name.endswith((".json", ".jsonl", ".parquet")):
        return name
    return f"hf:{name}?" + "&".join(f"{k}={v}" for k, v in options.items() if v is not None)


def length(found: Migration, updates_per_step: int) -> None:
    """max_steps counts optimizer updates."""
    steps = found.number("max_steps", -1)
    if steps and steps > 0:
        found.config["total_steps"] = max(1, steps // updates_per_step)
    else:
        found.config["total_epochs"] = max(1, round(found.number("num_train_epochs", 3)))


def token_budget(found: Migration, longest: int) -> None:
    sequences = max(1, found.number("per_device_train_batch_size", 8))
    found.config["learner.token_budget"] = -(-sequences * longest // 128) * 128


def generation(found: Migration) -> None:
    """Batches. TRL counts completions per device; generation may span several updates."""
    for theirs, ours in ONLINE.items():
        found.carry(theirs, ours)
    n, per_device = found.config["rollout.n"], found.number("per_device_train_batch_size", 8)
    accumulation = found.number("gradient_accumulation_steps", 1)
    update = per_device * n_processes(found) * accumulation
    generated = found.number("generation_batch_size", None)
    steps = found.number("steps_per_generation", None) or accumulation
    generated = generated or update // accumulation * steps
    if update % n or generated % update:
        found.refuse(
            "per_device_train_batch_size",
            f"{update} completions of an update and {generated} of a generation are no whole "
            f"groups of {n}; set prompts",
            "data.prompts_per_step",
        )
    found.config["data.prompts_per_step"] = max(1, generated // n)
    found.config["learner.mini_batch_prompts"] = 0 if generated == update else max(1, update // n)
    length(found, max(1, generated // update) * found.config["learner.epochs"])
    found.config.setdefault("data.max_prompt_len", 512)
    longest = found.config["data.max_prompt_len"] + found.config["data.max_response_len"]
    token_budget(found, longest)


def rewards(found: Migration) -> None:
    found.carry("reward_weights", "reward.weights", lambda v: tuple(map(float, v)))
    found.carry("reward_clip_range", "reward.clip", lambda v: tuple(map(float, v)))
    if model := found.get("reward_model_name_or_path"):
        found.config |= {"reward_model.path": model, "reward.functions": ()}
    elif found.given("reward_funcs"):
        found.refuse(
            "reward_funcs",
            "functions have no name outside of their script; give the file and the name, such as "
            "--config.reward.functions=my_rewards.py:accuracy_reward",
            "reward.functions",
        )
    else:
        found.refuse("reward_funcs", "is not given", "reward.functions")
    if found.settings.values.get("environment_factory") or found.settings.values.get("tools"):
        name = "environment_factory" if found.given("environment_factory") else "tools"
        found.refuse(name, "give an environment (docs/how_to/environments.md)", "env.name")


def grpo(found: Migration) -> None:
    grpo_advantage(found)
    kind = str(found.get("loss_type"))
    if kind not in OBJECTIVES:
        found.refuse("loss_type", f"jaxrl has {', '.join(OBJECTIVES)}", "algorithm.policy_loss")
        return
    loss, aggregation = OBJECTIVES[kind]
    whole = found.get("importance_sampling_level") == "sequence"
    if whole and loss == "ppo_clip":
        loss = "gspo"
    elif whole and loss in ("cispo", "sapo"):
        found.refuse(
            "importance_sampling_level",
            f"jaxrl's {loss} has the ratio of each token",
            "algorithm.policy_loss",
        )
    elif not whole and kind == "luspo":
        found.refuse(
            "loss_type",
            "LUSPO has one ratio per response; set importance_sampling_level='sequence', as its "
            "paper",
            "algorithm.policy_loss",
        )
    low = found.number("epsilon", 0.2)
    high = found.number("epsilon_high", low)
    if kind == "cispo":
        low, high = 1.0, max(high - 1.0, 0.0)
    found.config |= {
        "algorithm.policy_loss": loss,
        "algorithm.aggregation": aggregation,
        "algorithm.clip_low": low,
        "algorithm.clip_high": high,
        "algorithm.drop_flat_groups": False,
    }
    if loss == "ppo_clip" and (delta := found.get("delta")):
        found.config |= {"algorithm.policy_loss": "dual_clip", "algorithm.clip_dual": float(delta)}
    if loss == "sapo":
        found.carry("sapo_temperature_pos", "algorithm.sapo_tau_positive")
        found.carry("sapo_temperature_neg", "algorithm.sapo_tau_negative")
    if loss == "vespo":
        for theirs, ours in VESPO.items():
            found.carry(theirs, f"algorithm.{ours}")
    if found.config.get("algorithm.entropy_coef") and aggregation != "token_mean":
        found.note(DIFFERS, "entropy_coef", "a token mean in TRL, aggregated as the loss here")
    beta = found.number("beta", 0.0)
    if beta:
        unbiased = found.get("use_bias_correction_kl", True)
        found.config |= {
            "algorithm.kl_coef": beta,
            "algorithm.kl_in": "loss",
            "algorithm.kl": "k3_unbiased" if unbiased else "k3",
        }
    reference(found, beta)
    if found.get("use_vllm", False) and found.get("vllm_importance_sampling_correction", True):
        correction(found)


def grpo_advantage(found: Migration) -> None:
    """The estimator: by what the rewards are divided, and whether before or after their sum."""
    scale = str(found.get("scale_rewards")).lower()
    found.config["algorithm.advantage"] = "grpo_batch_std" if scale == "batch" else "grpo"
    order = found.get("multi_objective_aggregation")
    if order == "normalize_then_sum":  # scale_rewards has no effect on it
        found.config["algorithm.advantage"] = "gdpo"
    elif order != "sum_then_normalize":
        found.refuse("multi_objective_aggregation", "is not known", "algorithm.advantage")
    if found.config["algorithm.advantage"] == "grpo":
        found.config["algorithm.norm_adv_by_std"] = scale in ("group", "true")


def correction(found: Migration) -> None:
    """The weights from vLLM to the trainer; VESPO multiplies them into its ratio."""
    mode = str(found.get("vllm_importance_sampling_mode", "sequence_mask"))
    maximum = found.first("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    least = float(found.number("vllm_importance_sampling_clip_min", 0.0))
    if found.config["algorithm.policy_loss"] == "vespo":
        found.config["algorithm.old_logp"] = "rollout"
        found.note(
            DIFFERS,
            "vllm_importance_sampling_mode",
            "the ratio of vespo starts at the engine, without a bound on that of a token",
        )
        return
    found.config["algorithm.correction"] = CORRECTIONS.get(mode, "seq_icepop")
    found.config["algorithm.correction_high"] = float(maximum or 3.0)
    masks = found.config["algorithm.correction"].endswith("icepop")
    found.config[f"algorithm.correction_{'low' if masks else 'floor'}"] = least


def rloo(found: Migration) -> None:
    if found.config["learner.mini_batch_prompts"] or found.config["learner.epochs"] > 1:
        found.refuse(
            "steps_per_generation",
            "TRL's ratio of RLOO is a product over the response, which is equal for one update per "
            "step only",
            "algorithm.policy_loss",
        )
    found.config |= {
        "algorithm.advantage": "rloo",
        "algorithm.policy_loss": "policy_gradient",
        "algorithm.aggregation": "seq_mean_token_sum",
        "algorithm.drop_flat_groups": False,
    }
    beta = found.number("beta", 0.05)
    if beta:
        found.config |= {
            "algorithm.kl_coef": beta,
            "algorithm.kl_in": "reward",
            "algorithm.kl": "k1",
        }
    reference(found, beta)


def reference(found: Migration, beta: float) -> None:
    if beta and found.get("sync_ref_model", False):
        found.config["algorithm.ref_refresh_every"] = found.number("ref_model_sync_steps", 512)
        found.config["algorithm.ref_refresh_rate"] = found.number("ref_model_mixup_alpha", 0.6)


def offline(found: Migration, kind: str) -> None:
    """Supervised fine-tuning, preference pairs and reward models."""
    order = found.get("train_sampling_strategy", "sequential" if kind == "kto" else "random")
    found.config["data.shuffle"] = order != "sequential" or found.get("shuffle_dataset") is True
    for name, (value, reason, ours) in OFFLINE_NEUTRAL.items():
        found.refuse_unless(name, value, reason, *ours)
    longest = max(1, found.number("max_length", 1024) or 1024)
    found.config |= {
        "data.max_prompt_len": max(1, longest // 2),
        "data.max_response_len": longest - max(1, longest // 2),
        "data.prompts_per_step": found.number("per_device_train_batch_size", 8)
        * n_processes(found)
        * found.number("gradient_accumulation_steps", 1),
    }
    length(found, 1)
    token_budget(found, longest)
    if kind == "sft":
        found.refuse_unless(
            "loss_type", "nll", "jaxrl's loss of SFT is the negative log likelihood"
        )
        if found.get("packing", False):
            found.note(
                DECIDE,
                "packing",
                "a step of TRL has packed rows of max_length, a step here conversations: set "
                "data.prompts_per_step",
            )
        if found.get("assistant_only_loss", False) is not True:
            found.note(DIFFERS, "assistant_only_loss", "only the assistant's turns are trained on")
    elif kind == "reward":
        found.carry("center_rewards_coefficient", "preference.center_coef", float)
    elif kind == "prm":
        trl_preferences.process_rewards(found)
    else:
        found.carry("beta", "preference.beta")
        trl_preferences.TRAINERS[kind](found)
