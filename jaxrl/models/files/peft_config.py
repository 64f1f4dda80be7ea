"""adapter_config.json of PEFT <-> the adapters that it describes.

Every field of PEFT 0.21's LoraConfig is in one of three tables: read, neutral, or refused unless it
is switched off. A field that is in none is refused as well unless it is off, because it may change
what an adapter computes.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxrl.models.config import LoRA, target_name
from jaxrl.models.vision.names import is_of_tower, without_number

TASKS = {"vocab": "CAUSAL_LM", "score": "SEQ_CLS"}
READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules"),
    *("exclude_modules", "init_lora_weights", "modules_to_save", "bias", "task_type"),
    *("base_model_name_or_path", "revision"),
)
# Fields that do not change what an adapter of a given file computes, whatever their value.
NEUTRAL = (
    *("peft_version", "auto_mapping", "inference_mode", "runtime_config", "megatron_core"),
    *("lora_dropout", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),  # of training
    # Of the start of training; those that change the base are refused by init_lora_weights.
    *("eva_config", "loftq_config", "corda_config", "lora_ga_config"),
    *("layers_pattern", "qalora_group_size"),  # of refused fields
)
# Fields that are refused unless they are off, with what they do.
REFUSED = {
    "alora_invocation_tokens": "starts the adapter at certain tokens",
    "alpha_pattern": "gives layers different scales",
    "arrow_config": "routes tokens to several adapters",
    "ensure_weight_tying": "ties the adapters of the two tables",
    "fan_in_fan_out": "transposes weights",
    "kasa_config": "adds singular values to the adapters",
    "layer_replication": "repeats layers of the base model",
    "layers_to_transform": "changes only some layers",
    "lora_bias": "adds biases to the adapters",
    "megatron_config": "selects the layers of another library",
    "monteclora_config": "samples the adapters",
    "rank_pattern": "gives layers different ranks",
    "target_parameters": "changes parameters that are not layers",
    "trainable_token_indices": "trains rows of the embedding",
    "use_bdlora": "makes the adapters block-diagonal",
    "use_qalora": "averages the inputs of the adapters",
    "velora_config": "stores compressed activations",
}
# Starts of training whose A and B belong to the unchanged base model.
PLAIN_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
SAVED_MODULES = {"score", "classifier"}  # PEFT's names of the score head; others are full copies
REMEDY = "merge the adapter into its base model with PEFT"


def read_peft_config(config: Mapping[str, Any], modules: Collection[str]) -> LoRA:
    """The adapters of an adapter_config.json, whose tensors are of the layers `modules`.

    Raises ValueError for a field that changes what they compute and is not supported, and for
    fields of another type.
    """
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={config.get('peft_type')!r}; only LORA is supported")
    check_fields(config)
    check_start(config.get("init_lora_weights", True))
    check_saved_modules(config.get("modules_to_save"))
    targets = target_names(config, modules)
    names = ("r", "lora_alpha", "use_rslora", "use_dora")
    values = [config.get(name) or False for name in names]
    kinds = [type(value) for value in values]
    if kinds in ([int, int, bool, bool], [int, float, bool, bool]) and values[0] > 0:
        rank, alpha, rslora, dora = values
        return LoRA(rank, float(alpha), rslora, dora, targets)
    raise ValueError(
        f"{', '.join(names)} {values}; expected a positive integer, a number and two times true or "
        "false"
    )


def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ValueError for the first field that is on and neither read nor neutral."""
    for name, value in config.items():
        if name in READ or name in NEUTRAL or is_off(value):
            continue
        does = REFUSED.get(name, "is not known to this version and may change the adapter")
        raise ValueError(f"{name}={repr(value)[:80]}, which is not supported: it {does}; {REMEDY}")
    if (bias := config.get("bias", "none")) not in ("none", None):
        raise ValueError(f"bias={bias!r}, which is not supported: it trains biases; {REMEDY}")


def is_off(value: Any) -> bool:
    """Whether a field has a value with which PEFT's features are switched off."""
    return value is None or value is False or value in ("", [], {})


def check_start(start: Any) -> None:
    """Raises ValueError for starts of training that subtract from the base model's weights."""
    if str(start).lower() not in PLAIN_STARTS:
        raise ValueError(
            f"init_lora_weights={start!r}: unless it is one of {', '.join(PLAIN_STARTS)}, PEFT has "
            "subtracted the start of this adapter from its base model; save it again with PEFT's "
            "path_initial_model_for_weight_conversion, for the unchanged base model"
        )


def check_saved_modules(names: Any) -> None:
    """Raises ValueError for trained copies of layers other than the score head."""
    if is_off(names):
        return
    if not is_list_of_names(names):
        raise ValueError(f"modules_to_save={repr(names)[:80]}; expected a list of names")
    if copies := sorted(set(names) - SAVED_MODULES):
        raise ValueError(
            f"modules_to_save={copies}, which is not supported: full copies of these layers were "
            f"trained, only a score head is read; {REMEDY}"
        )


def target_names(config: Mapping[str, Any], modules: Collection[str]) -> tuple[str, ...]:
    """`target_name` of the layers with adapters.

    For a list of names these are the list's. A regular expression, "all-linear", and a list with
    exceptions select the layers that have tensors.
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not (isinstance(targets, str) and targets) and not is_list_of_names(targets):
        raise ValueError(
            f"target_modules={repr(targets)[:80]}; expected a list of names or a regular expression"
        )
    names = targets if isinstance(targets, list) and is_off(excluded) else modules
    # A name such as gate_proj may be that of experts, of a shared expert, or of both.
    by_part: dict[str, set[str]] = {}
    for module in modules:
        by_part.setdefault(module.rpartition(".")[2], set()).add(_layer_name(module))
    found = (by_part.get(name.rpartition(".")[2], {_layer_name(name)}) for name in names)
    return tuple(sorted(set().union(*found)))


def _layer_name(module: str) -> str:
    """The name by which adapters choose a layer: of a vision tower the one in all blocks."""
    return without_number(module) if is_of_tower(module) else target_name(module)


def is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(name) is str for name in value)


def _any_block(name: str) -> str:
    """A regular expression for a layer of a vision tower in all blocks."""
    escaped = re.escape(name.removeprefix("model."))
    numbered = r"(blocks|deepstack_merger_list|layers)\\\."
    return r"(model\.)?" + re.sub(numbered, r"\1\\.\\d+\\.", escaped)


def peft_config(
    lora: LoRA, heads: tuple[str, ...], base: str, *, whole: bool = False
) -> dict[str, Any]:
    """The adapter_config.json of the adapters; `whole` is for the class with a vision tower.

    Towers have layers of the same names, such as q_proj, so a regular expression chooses there.
    """
    targets: list[str] | str = sorted(lora.targets)
    if whole:
        vision = [name for name in targets if is_of_tower(name)]
        names = "|".join(re.escape(name) for name in targets if name not in vision)
        parts = [rf"(.*\.)?language_model\.(.*\.)?({names})"] if names else []
        parts += ["lm_head"] if "lm_head" in lora.targets else []
        parts += map(_any_block, vision)
        targets = "|".join(parts)
    return {
        "peft_type": "LORA",
        "task_type": TASKS["vocab" if "vocab" in heads else "score"],
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": targets,
        "modules_to_save": ["score"] if "score" in heads else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
