"""Runs of verl: which of its programs a command starts, and the config that its settings mean."""

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence

from jaxrl.migrate import verl_names, verl_ppo, verl_sft
from jaxrl.migrate.migration import DECIDE, Migration
from jaxrl.migrate.settings import Settings, hydra, yaml_file
from jaxrl.migrate.shell_expansion import causes
from jaxrl.migrate.verl_reasons import REASONS

KEY = re.compile(
    r"(\+\+|\+|~)?(data|actor_rollout_ref|critic|reward|reward_model|custom_reward_function"
    r"|algorithm|trainer|async_training|distillation|model|optim|engine)\.[\w.]+(=.*)?",
    re.DOTALL,
)
SHIPPED = re.compile(
    r"(ppo|sft|fully_async|one_step_off|rm|evaluation|generation)\w*?(trainer\w*|config)?(\.yaml)?"
)
OPTIONAL = (
    r"trainer\.(?!total_|critic_warmup).*|.*(offload|parallel_size|fsdp_size|checkpointing|use_dynamic_bsz"
    r"|max_token_len_per_gpu|micro_batch_size_per_gpu|max_num_seqs|recompute_\w+)|rollout\.n\w+"
    r"|.*\.(free_cache_engine|enable_prefix_caching|default_agent_loop)|data\.\w+_samples"
)
# Modules whose training steps are the ones that their settings say.
TRAINERS = re.compile(
    r"(.*\.)?verl\.(trainer\.\w+|experimental\.(fully_async|one_step_off)_policy\.\w+)|verl_mlite\.\w+"
    r"|(.*\.)?recipe\.(dapo|entropy|fully_async_policy|one_step_off_policy)\.\w+|"
)
OTHER_PROGRAMS = {
    "generation": "it generates responses: python -m jaxrl.evaluate samples and scores a dataset",
    "eval": "it scores responses: python -m jaxrl.evaluate",
    "model_merger": "it converts a checkpoint: python -m jaxrl.convert",
}


def is_command(words: Sequence[str]) -> bool:
    """Whether a command trains, or does something else, with a program of verl."""
    module = module_of(words)
    names = [word for word in words if KEY.fullmatch(word)]
    return module.startswith("verl.") or len(names) >= 3


def module_of(words: Sequence[str]) -> str:
    """The module after `-m`, or the file, that a command runs; "" if there is none."""
    for before, word in itertools.pairwise(words):
        if before in ("-m", "--module"):
            return word
    return next((word for word in words if word.endswith(".py")), "")


def command(
    words: Sequence[str], folder: pathlib.Path, environment: Mapping[str, str]
) -> tuple[Settings, str]:
    """The settings of a command line, and the module that it runs."""
    module = module_of(words)
    start = list(words).index(module) + 1 if module else 0
    given = hydra(words[start:])
    options = {}
    for at, word in enumerate(given.words):
        if match := re.fullmatch(r"--config-(name|path|dir)(?:=(.*))?", word):
            following = given.words[at + 1] if at + 1 < len(given.words) else ""
            options[match[1]] = match[2] if match[2] is not None else following
    flags = {*options.values()}
    given.words = [w for w in given.words if not w.startswith("-") and w not in flags]
    name = options.get("name", "")
    if not name or SHIPPED.fullmatch(name):
        return given, module
    path = (
        folder / options.get("path", options.get("dir", "")) / f"{name.removesuffix('.yaml')}.yaml"
    )
    if not causes(str(path)) and path.is_file():
        return yaml_file(path.read_text(), environment).below(given), module
    given.words.append(f"--config-name={name}: {path} is not there, so its settings are not read")
    return given, module


def translate(settings: Settings, module: str, reasons: Mapping[str, str]) -> Migration:
    """The migration of a run. Raises ValueError for a program that does not train."""
    for part, answer in OTHER_PROGRAMS.items():
        if part in module and "train" not in module.rsplit(".", 1)[-1]:
            raise ValueError(f"{module} does not train; {answer}")
    names = {*settings.values, *settings.unresolved}
    is_sft = "sft" in module or not any(
        n.startswith(("actor_rollout_ref.", "algorithm.")) for n in names
    )
    if is_sft:
        found = Migration(
            settings,
            framework="verl",
            defaults=verl_sft.DEFAULTS,
            program="jaxrl.sft",
            optional=OPTIONAL,
        )
        found.apply(verl_sft.sft)
        found.require("model.path", "model.path", reasons)
    else:
        found = _ppo(settings, module)
        if settings.values.get("trainer.v1.trainer_mode", "sync") != "sync":
            found.note(DECIDE, "trainer.v1.trainer_mode", "set schedule.mode")
        found.require(verl_names.MODEL + "path", "model.path", reasons)
        if "algorithm.adv_estimator" in settings.unresolved:
            found.require("algorithm.adv_estimator", "algorithm.advantage", reasons)
    found.require("data.train_files", "data.train", reasons)
    if not TRAINERS.fullmatch(module.removesuffix(".py").strip("./").replace("/", ".")):
        found.refuse(
            module,
            "this program is not one of verl's own trainers, so its step may have another loss or "
            "other rewards than its settings say; if it has not, give the loss",
            "algorithm.policy_loss",
        )
    found.finish(REASONS, reasons)
    return found


def _ppo(settings: Settings, module: str) -> Migration:
    names = {*settings.values, *settings.unresolved}
    defaults, run = verl_names.DEFAULTS, verl_ppo.ppo
    if "fully_async" in module or any(name.startswith("async_training.") for name in names):
        defaults, run = defaults | verl_names.FULLY_ASYNC_DEFAULTS, verl_ppo.fully_async
    elif "one_step_off" in module:
        defaults, run = defaults | verl_names.ASYNC_DEFAULTS, verl_ppo.one_step_off
    found = Migration(
        settings,
        framework="verl",
        defaults=defaults,
        program="jaxrl.train",
        optional=OPTIONAL,
    )
    found.apply(run)
    return found
