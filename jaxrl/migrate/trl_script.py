"""Python scripts of TRL: the literal arguments of their configs and trainers."""

import ast
from collections.abc import Mapping
from typing import Any

from jaxrl.migrate.settings import Settings
from jaxrl.migrate.shell_expansion import mark

CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "CPOConfig": "cpo",
    "ORPOConfig": "orpo",
    "RewardConfig": "reward",
    "PRMConfig": "prm",
}
MODEL_CONFIGS = ("ModelConfig", "LoraConfig", "ScriptArguments")
LORA_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules"}
PEFT_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # of LoraConfig itself


def script(text: str) -> tuple[Settings, str]:
    """The literal arguments of the config and the trainer in a Python script.

    Raises ValueError for a script without a config of TRL, and for one that reads its arguments
    from the command line.
    """
    tree = ast.parse(text)
    constants = {  # the first value of each variable
        target.id: node.value
        for node in reversed(list(ast.walk(tree)))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            calls.setdefault(name, []).append(node)
    kind = next((kind for name, kind in CONFIGS.items() if name in calls), "")
    if not kind:
        parser = "it reads them from the command line; " if "TrlParser" in calls else ""
        raise ValueError(
            f"it has no {'(...), '.join(CONFIGS)}(...) with arguments; {parser}give the launch "
            "script or the YAML file that has the settings"
        )
    found = Settings()
    if "LoraConfig" in calls:
        for name, default in PEFT_DEFAULTS.items():
            found.put(name, default)
    configs = [name for name in (*CONFIGS, *MODEL_CONFIGS) if name in calls]
    for name in configs:
        for keyword in calls[name][0].keywords:
            theirs = LORA_NAMES.get(keyword.arg or "", keyword.arg or "**")
            _put(found, theirs, keyword.value, constants)
    if "LoraConfig" in calls:
        found.put("use_peft", True)
    trainer = next((c for n, c in calls.items() if n.endswith("Trainer")), [None])[0]
    for keyword in trainer.keywords if trainer is not None else ():
        if keyword.arg == "model":
            _put(found, "model_name_or_path", keyword.value, constants)
        elif keyword.arg in ("reward_funcs", "environment_factory", "tools"):
            found.put(keyword.arg, ast.unparse(keyword.value))
    _dataset(found, calls, trainer, constants)
    return found, kind


def _put(found: Settings, name: str, node: ast.expr, constants: Mapping[str, ast.expr]) -> None:
    """Sets a name to a literal, or to the one that a variable of the script is assigned."""
    for _ in range(len(constants)):
        if isinstance(node, ast.Name) and node.id in constants:
            node = constants[node.id]
        elif isinstance(node, ast.Call) and "from_pretrained" in ast.unparse(node.func):
            node = node.args[0] if node.args else ast.Name("from_pretrained")
        else:
            break
    try:
        found.put(name, ast.literal_eval(node))
    except ValueError:
        found.set(name, mark(f"$({ast.unparse(node)})"))


def _dataset(found: Settings, calls: Mapping, trainer: Any, constants: Mapping) -> None:
    """The dataset of load_dataset("name", split="train"), and whether it is edited after it."""
    loads = calls.get("load_dataset", [])
    if not loads or not loads[0].args:
        return
    _put(found, "dataset_name", loads[0].args[0], constants)
    if len(loads[0].args) > 1:
        _put(found, "dataset_config", loads[0].args[1], constants)
    for keyword in loads[0].keywords:
        if keyword.arg in ("split", "name"):
            theirs = "dataset_train_split" if keyword.arg == "split" else "dataset_config"
            _put(found, theirs, keyword.value, constants)
    if calls.get("map") or calls.get("filter") or len(loads) > 1:
        found.words.append(
            "the script edits its dataset (map, filter, or several): write the result to a file, "
            "and set data.train and data.columns"
        )
