"""Runs of OpenRLHF: train_ppo_ray, train_sft, train_dpo and train_rm."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import LR_SCHEDULES
from jaxrl.config.other_frameworks import table
from jaxrl.migrate.migration import DECIDE, DIFFERS, Migration, freeze_vision, listed
from jaxrl.migrate.openrlhf_names import (
    ADVANTAGES,
    AGGREGATIONS,
    CRITIC,
    DEFAULTS,
    EARLIER,
    LENGTHS,
    NEUTRAL,
    OFFLINE,
    PROGRAMS,
    RATES,
    REASONS,
    REINFORCEMENT,
    TRAINING,
    UNBIASED_KLS,
)
from jaxrl.migrate.settings import Settings, flags

UNBOUNDED = 1e30  # no weight of a token is larger


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
        sequences = 1 if program == "jaxrl.reward_model" else 8
        rate = {"actor.adam.lr": RATES[program], "data.max_len": LENGTHS[program]}
        rate |= {"train.micro_batch_size": sequences}
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
    if found.get("train.enable_ema", False):
        found.config["learner.ema"] = float(found.number("train.ema_beta"))
    for name, (value, reason, ours) in NEUTRAL.items():
        found.refuse_unless(name, value, reason, *ours)
    found.config["data.val"] = sources(found.get("eval.dataset", ""), found.get("eval.split"))
    if not found.config.get("data.val") and found.config.pop("eval.every"):
        found.note(DIFFERS, "eval.steps", "there is no eval.dataset, so it is left out")


def sources(value: Any, split: Any) -> tuple[str, ...]:
    """Datasets of OpenRLHF, which are paths or ids of the hub separated by commas."""
    names = [name.strip() for name in str(value).split(",") if name.strip()]
    option = "" if split in (None, "train") else f"?split={split}"
    return tuple(name if _is_path(name) else f"hf:{name}{option}" for name in names)


def probabilities(found: Migration, name: str) -> None:
    found.carry(name, "data.weights", lambda v: tuple(map(float, str(v).split(","))))


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
    found.config["data.train"] = sources(
        found.get("data.dataset", ""), found.get("data.dataset_split")
    )
    probabilities(found, "data.dataset_probs")
    found.carry("train.batch_size", "data.prompts_per_step")
    found.carry("train.max_epochs", "total_epochs")
    token_budget(found, lengths(found))
    if found.get("data.apply_chat_template", False) is not True:
        reason = "not given, so OpenRLHF uses text as it is; here the chat template renders it"
        found.note(DIFFERS, "data.apply_chat_template", reason)
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
    names = found.get("data.prompt_dataset", ""), found.get("data.prompt_split")
    found.config["data.train"] = sources(*names)
    probabilities(found, "data.prompt_probs")
    if found.get("data.apply_chat_template", False) is not True:
        rendered_prompts(found)
    columns = (
        ("prompt", found.get("data.input_key")),
        ("answer", found.get("data.label_key")),
        ("images", images(found)),
    )
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
    freeze_vision(found, "actor.freeze_visual_encoder")
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
    if found.has("train.agent_func_path"):
        found.refuse(
            "train.agent_func_path",
            "write it as an environment (docs/how_to/environments.md) and give its name",
            "env.name",
            "env.agent",
        )
    found.config["reward.clip"] = tuple(map(float, listed(found.get("reward.clip_range"))))
    if found.get("train.async_enable", False) or found.get("train.partial_rollout_enable", False):
        found.refuse(
            "train.async_enable"
            if found.given("train.async_enable")
            else "train.partial_rollout_enable",
            "set schedule.mode to partial, or to async with schedule.rollout_devices",
            "schedule.mode",
        )


def images(found: Migration) -> str | None:
    """The column of images, if OpenRLHF reads them: it does for another number than 0."""
    if not found.number("data.max_images_per_prompt", 0):
        return None
    found.config["data.images"] = True
    found.note(
        DIFFERS, "data.max_images_per_prompt", "every image of a row is read, whatever their number"
    )
    return found.get("data.image_key")


def rendered_prompts(found: Migration) -> None:
    """Prompts are used as they are, unless a model or an environment reads them as messages."""
    needs_messages = found.config.get("reward_model.path") or found.has("train.agent_func_path")
    found.config["data.rendered_prompts"] = not needs_messages
    if needs_messages:
        found.note(
            DIFFERS,
            "data.apply_chat_template",
            "not given, so OpenRLHF uses prompts as they are; here the chat template renders them",
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
    else:
        found.choose("actor.loss_agg_mode", AGGREGATIONS, "algorithm.aggregation")
    if found.get("algo.dynamic_filtering_enable", False):
        found.config["algorithm.dynamic_sampling"] = True
        bounds = tuple(map(float, found.get("algo.dynamic_filtering_range")))
        found.config["algorithm.dynamic_sampling_range"] = bounds
    whitened = name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if found.get("algo.advantage.no_std_norm", False) and whitened:
        found.refuse(
            "algo.advantage.no_std_norm",
            f"{name} of jaxrl always divides by the standard deviation of the batch",
            "algorithm.advantage",
        )
    found.config["algorithm.drop_flat_groups"] = False


def kl(found: Migration) -> None:
    coef = found.number("algo.kl.init_coef", 0.01)
    found.config["algorithm.kl_coef"] = coef
    if not coef:
        return
    in_loss = found.get("algo.kl.use_loss", False)
    found.config["algorithm.kl_in"] = "loss" if in_loss else "reward"
    unbiased = found.get("algo.kl.unbiased_gradient", False) and in_loss
    estimators = UNBIASED_KLS if unbiased else {name: name for name in UNBIASED_KLS}
    found.choose("algo.kl.estimator", estimators, "algorithm.kl")
    if unbiased and found.config["learner.mini_batch_prompts"]:
        found.note(
            DIFFERS,
            "algo.kl.unbiased_gradient",
            "OpenRLHF multiplies the gradient by the importance ratio, which is 1 in the first "
            "update of a step only",
        )
    found.config["algorithm.kl_clamp"] = 10.0
    if target := found.get("algo.kl.target"):
        found.config["algorithm.kl_target"] = float(target)
        found.carry("algo.kl.horizon", "algorithm.kl_horizon", float)
    if found.get("ref.offload", False):
        found.config["learner.offload"] = (*found.config["learner.offload"], "reference")


def correction(found: Migration) -> None:
    """Importance weights between engine and trainer: clipped or masked, by token or response."""
    section = "algo.advantage.is_correction_"
    if found.given(section + "enable") or found.given(section + "type"):
        earlier_correction(found)
        return
    level, mode = found.get(section + "level"), found.get(section + "mode")
    if level == "off":
        return
    bounds = found.get(section + "threshold")
    bounds = [float(bound) for bound in (bounds if isinstance(bounds, list) else [bounds])]
    low, high = [0.0, *bounds][-2:]
    gating = found.get(section + "gating")
    if found.config.get("algorithm.policy_loss") == "gspo":  # its ratio is to the engine then
        found.config["algorithm.old_logp"] = "rollout"
    elif gating != "ratio":
        found.refuse(
            section + "gating",
            "jaxrl gates by the ratio, k2 or k3 of a token or response (algorithm.rejection)",
            "algorithm.rejection",
        )
    elif level == "seq":  # rejects responses; the weights of the others have no bound
        found.config |= {
            "algorithm.correction": "token_tis",
            "algorithm.correction_high": UNBOUNDED,
            "algorithm.rejection": "seq_mean_k1",
            "algorithm.rejection_low": low,
            "algorithm.rejection_high": high,
            "algorithm.rejection_scope": "policy_loss",
        }
    else:
        correct_tokens(found, "token_tis" if mode == "clip" else "icepop", low, high)


def correct_tokens(found: Migration, name: str, low: float, high: float) -> None:
    bound = "floor" if name == "token_tis" else "low"
    found.config |= {
        "algorithm.correction": name,
        f"algorithm.correction_{bound}": low,
        "algorithm.correction_high": high,
    }


def earlier_correction(found: Migration) -> None:
    """The settings of versions before 0.11: a switch and a type."""
    section = "algo.advantage.is_correction_"
    if not found.get(section + "enable", False):
        return
    kinds = {"tis": "token_tis", "icepop": "icepop"}
    kind = found.get(section + "type", "tis")
    if kind not in kinds:
        reason = f"jaxrl has {', '.join(kinds)} by these names"
        found.refuse(section + "type", reason, "algorithm.correction")
        return
    low, high = map(float, found.get(section + "threshold"))
    correct_tokens(found, kinds[kind], low, high)
