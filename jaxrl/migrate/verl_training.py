"""Settings that verl's trainers share: optimizer, layout, offload, adapters, checkpoints, logs."""

import math

from jaxrl.config.choices import LOGGERS, LR_SCHEDULES
from jaxrl.migrate.migration import DECIDE, DIFFERS, NONE, UNNEEDED, Migration, listed

# Names of one size in the sections of FSDP, Megatron, VeOmni, Automodel and Megatron Lite.
AXES = {
    "sequence": (
        "ulysses_sequence_parallel_size",
        "ulysses_parallel_size",
        "context_parallel_size",
        "cp_size",
        "cp",
    ),
    "tensor": ("tensor_model_parallel_size", "tp_size", "tp"),
    "stage": ("pipeline_model_parallel_size", "pp_size", "pp"),
    "expert": ("expert_model_parallel_size", "expert_parallel_size", "ep_size", "ep"),
}
SECTIONS = ("fsdp_config.", "fsdp.", "megatron.", "veomni.", "engine.")
COSINE_ENGINES = ("veomni", "automodel")  # whose schedule is cosine by default
RESUMES = "an existing checkpoint in run_dir is always resumed; give another run_dir to start again"


def sizes(found: Migration, prefixes: tuple[str, ...]) -> dict[str, int]:
    """The mesh sizes that the settings below the prefixes name; 1 if none does."""
    return {
        axis: max([1, *(found.number(p + n, 1) for p in prefixes for n in names)])
        for axis, names in AXES.items()
    }


def mesh(found: Migration, prefixes: tuple[str, ...]) -> None:
    """The mesh of training. Megatron's expert groups are inside its data-parallel ones."""
    axes = sizes(found, prefixes)
    n_devices = found.n_devices
    if n_devices is not None and axes["expert"] > 1:
        rest = max(1, n_devices // (axes["sequence"] * axes["tensor"] * axes["stage"]))
        fits = math.gcd(axes["expert"], rest)
        if fits != axes["expert"]:
            name = next(p + n for p in prefixes for n in AXES["expert"] if found.given(p + n))
            found.note(
                DIFFERS,
                name,
                f"mesh.expert={fits}: the product of mesh's sizes is the number of devices, "
                f"{n_devices}; Megatron's expert groups overlap the tensor groups",
            )
            axes["expert"] = fits
    found.config |= {f"mesh.{axis}": size for axis, size in axes.items()}
    fsdp(found, axes, prefixes)


def fsdp(found: Migration, axes: dict[str, int], prefixes: tuple[str, ...]) -> None:
    """Groups of fsdp_size devices. They contain the sequence groups in verl, not here."""
    size = max([-1, *(found.number(p + "fsdp_size", -1) for p in prefixes)])
    if size <= 0 or (found.n_devices is not None and size >= found.n_devices):
        return
    size = max(1, size // axes["sequence"])
    if found.n_devices is not None:
        size = math.gcd(size, max(1, found.n_devices // math.prod(axes.values())))
    found.config |= {"mesh.fsdp": size, "mesh.replica": -1}


def token_budget(found: Migration, tokens: int, longest: int) -> int:
    """A budget in tokens that holds the longest sequence, in rows that the mesh can share."""
    unit = 128 * found.config.get("mesh.sequence", 1) * found.config.get("mesh.stage", 1)
    return -(-max(tokens, longest) // unit) * unit


def recomputation(found: Migration, prefixes: tuple[str, ...], model: str) -> None:
    names = ("granularity", "method", "num_layers")
    granularity, method, n_layers = (
        found.first(*(f"{p}override_transformer_config.recompute_{name}" for p in prefixes))
        for name in names
    )
    remat = None
    if found.get(model + "enable_gradient_checkpointing", True) is False:
        remat = "none"
    elif found.get(model + "enable_activation_offload", False):
        remat = "offload"
    elif granularity == "selective":
        remat = "dots"
    elif granularity == "full" and n_layers and (method == "block" or n_layers > 1):
        remat = f"full?{'first' if method == 'block' else 'group'}={n_layers}"
    if remat is not None:
        found.config["learner.remat"] = remat


def optimizer(found: Migration, prefix: str, updates_per_step: int) -> None:
    """verl's scheduler moves once per step, jaxrl's once per optimizer update."""
    found.carry(prefix + "lr", "learner.lr")
    found.carry(prefix + "weight_decay", "learner.weight_decay")
    found.carry(prefix + "clip_grad", "learner.clip_norm")
    found.carry(prefix + "min_lr_ratio", "learner.min_lr_ratio")
    lr, least = found.number(prefix + "lr", 0), found.number(prefix + "min_lr", None)
    if least is not None and lr:
        found.config["learner.min_lr_ratio"] = least / lr
    names = [prefix + name for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style")]
    engine = found.first("model_engine", "optim", "engine")
    schedule = found.first(*names) or ("cosine" if engine in COSINE_ENGINES else None)
    if schedule in LR_SCHEDULES:
        found.config["learner.lr_schedule"] = schedule
    elif schedule is not None:
        name = next(name for name in names if found.given(name))
        found.refuse(name, f"jaxrl has {', '.join(LR_SCHEDULES)}", "learner.lr_schedule")
    if betas := found.get(prefix + "betas"):
        found.config["learner.b1"], found.config["learner.b2"] = betas
    warmup(found, prefix, updates_per_step)
    name = str(found.get(prefix + "optimizer", "adamw")).lower()
    if "8bit" in name:
        found.config["learner.moment_dtype"] = "int8"
    elif "adam" not in name:
        found.refuse(prefix + "optimizer", "AdamW is written otherwise", "learner.optimizer")


def warmup(found: Migration, prefix: str, updates_per_step: int) -> None:
    steps = found.number(prefix + "lr_warmup_steps", -1)
    ratio = found.number(prefix + "lr_warmup_steps_ratio", 0.0)
    total = found.config.get("total_steps")
    if steps is not None and steps >= 0:
        found.config["learner.warmup_steps"] = steps * updates_per_step
    elif ratio and total:
        found.config["learner.warmup_steps"] = round(ratio * total) * updates_per_step
    elif ratio:
        found.note(
            DECIDE,
            prefix + "lr_warmup_steps_ratio",
            "set learner.warmup_steps to that share of all optimizer updates",
        )


def offload(found: Migration, roles: dict[str, str]) -> None:
    """Optimizer state and the weights of `roles` ({prefix: name here}) in host memory."""
    found_here = found.config.get("learner.offload", ())
    for prefix, role in roles.items():
        for section in SECTIONS:
            is_off = found.get(f"{prefix}{section}param_offload", False)
            if is_off and role and role not in found_here:
                found_here = (*found_here, role)
    found.config["learner.offload"] = found_here


def optimizer_offload(found: Migration, prefixes: tuple[str, ...]) -> None:
    names = ("optimizer_offload", "optim.override_optimizer_config.optimizer_cpu_offload")
    sections = [p + s for p in prefixes for s in ("", *SECTIONS)]
    switches = [section + name for section in sections for name in names]
    if any([found.get(name, False) is True for name in switches]):
        found.config["learner.offload"] = ("optimizer",)


def adapters(found: Migration, model: str) -> None:
    """Low-rank adapters; their other settings count only with a rank."""
    rank = found.first(model + "lora_rank", model + "lora.rank")
    if not rank:
        return
    found.config["lora.rank"] = rank
    alpha = found.first(model + "lora_alpha", model + "lora.alpha")
    if alpha is not None:
        found.config["lora.alpha"] = alpha
    for name in ("target_modules", "exclude_modules"):
        modules = found.first(model + name, f"{model}lora.{name}")
        if modules is not None:
            found.config[f"lora.{name}"] = listed(modules)
    found.carry(model + "lora_adapter_path", "lora.path")
    found.carry(model + "lora.merge", "lora.merge")


def trainer(found: Migration) -> None:
    """Length of the run, checkpoints, validation and logging."""
    for theirs, ours in (("save_freq", "checkpoint.every"), ("test_freq", "eval.every")):
        found.config[ours] = max(0, found.number(f"trainer.{theirs}", 0))
    if not found.config.get("data.val") and found.config.pop("eval.every"):
        found.note(DIFFERS, "trainer.test_freq", "there are no validation files, so it is left out")
    found.carry("trainer.val_before_train", "eval.before_train")
    found.carry("trainer.project_name", "log.project", str)
    found.carry("trainer.experiment_name", "name", str)
    found.carry("trainer.log_val_generations", "log.samples")
    found.carry("trainer.default_local_dir", "run_dir", str)
    for name in ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"):
        found.carry(name, "checkpoint.keep")
    if steps := found.first("global_profiler.steps", "trainer.profile_steps"):
        found.config["profile.steps"] = tuple(steps)
    if "trainer.logger" not in found.settings.unresolved:
        loggers = [n for n in listed(found.get("trainer.logger")) if n != "file"]  # as jsonl
        found.config["log.loggers"] = ("jsonl", *(name for name in loggers if name in LOGGERS))
        if unknown := [name for name in loggers if name not in LOGGERS]:
            found.note(
                NONE, "trainer.logger", f"{unknown} left out: jaxrl has {', '.join(LOGGERS)}"
            )
    if found.get("trainer.resume_mode", "auto") != "auto":
        found.note(DIFFERS, "trainer.resume_mode", RESUMES)


def length(found: Migration) -> None:
    found.carry("trainer.total_training_steps", "total_steps")
    if not found.config.get("total_steps"):
        found.carry("trainer.total_epochs", "total_epochs")
    elif found.given("trainer.total_epochs"):
        found.note(UNNEEDED, "trainer.total_epochs", "total_training_steps is given")


def devices(found: Migration) -> None:
    """The number of devices, if the run says it."""
    names = ("trainer.nnodes", "trainer.n_gpus_per_node")
    n_nodes, per_node = (found.number(name, None) for name in names)
    if n_nodes and per_node:
        found.n_devices = n_nodes * per_node


def data_files(found: Migration) -> None:
    for name, ours in (("train_files", "data.train"), ("val_files", "data.val")):
        found.carry(f"data.{name}", ours, listed)
    if (n := found.number("data.val_max_samples", -1)) > 0:
        found.config["data.val_max_samples"] = n
    if found.number("data.train_max_samples", -1) > 0:
        found.note(NONE, "data.train_max_samples", "write that many rows to a file")
    section = "data.apply_chat_template_kwargs"
    inside = [name for name in found.settings.values if name.startswith(f"{section}.")]
    if arguments := {name.removeprefix(f"{section}."): found.get(name) for name in inside}:
        found.config["data.template_kwargs"] = arguments
    found.carry("data.truncation", "data.truncation")
    found.carry("data.shuffle", "data.shuffle")
