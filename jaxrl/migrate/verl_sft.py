"""verl's supervised fine-tuning: sft_trainer, and the earlier fsdp_sft_trainer."""

from typing import Any

from jaxrl.migrate.migration import DECIDE, Migration
from jaxrl.migrate.verl_training import (
    SECTIONS,
    adapters,
    data_files,
    devices,
    length,
    mesh,
    optimizer,
    optimizer_offload,
    recomputation,
    token_budget,
    trainer,
)

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "optim.lr": 1e-3,
    "trainer.total_epochs": 4,
    "trainer.logger": ["console", "wandb"],
    "trainer.seed": 1,
}
COLUMNS = (("messages", "messages_key"), ("prompt", "prompt_key"), ("completion", "response_key"))
FREQUENCIES = ("trainer.save_freq", "trainer.test_freq")


def sft(found: Migration) -> None:
    """Translates a run of supervised fine-tuning."""
    path = found.first("model.path", "model.partial_pretrain")
    if path is not None:
        found.config["model.path"] = path
    found.carry("model.trust_remote_code", "model.trust_remote_code")
    found.carry("model.custom_chat_template", "data.chat_template")
    found.carry("trainer.seed", "seed")
    devices(found)
    data_files(found)
    columns = [(ours, found.get(f"data.{key}")) for ours, key in COLUMNS]
    if renamed := tuple(f"{ours}:{name}" for ours, name in columns if name not in (None, ours)):
        found.config["data.columns"] = renamed
    if found.settings.values.get("data.custom_cls.path"):
        found.refuse(
            "data.custom_cls.path",
            "a dataset class has no counterpart; write its rows to a file, and add "
            "~data.custom_cls.path",
        )
    prefixes = ("engine.", *(f"model.{section}" for section in SECTIONS))
    mesh(found, prefixes)
    batch(found)
    for name in FREQUENCIES:
        if found.settings.values.get(name) == "after_each_epoch":
            ours = "checkpoint.every" if "save" in name else "eval.every"
            found.note(DECIDE, name, f"set {ours} to the steps of an epoch")
            found.settings.put(name, 0)
    length(found)
    optimizer(found, "optim.", 1)
    recomputation(found, prefixes, "model.")
    optimizer_offload(found, ("", "engine."))
    adapters(found, "model.")
    trainer(found)


def batch(found: Migration) -> None:
    """Conversations of a step, and their longest length, of which prompts may have a half."""
    longest = found.number("data.max_length", 1024)
    found.carry("data.train_batch_size", "data.prompts_per_step")
    found.config |= {
        "data.max_prompt_len": max(1, longest // 2),
        "data.max_response_len": longest - max(1, longest // 2),
        "data.filter_overlong_prompts": False,  # verl fails or truncates
    }
    tokens = found.number("data.max_token_len_per_gpu", 8192) * found.config["mesh.sequence"]
    if not found.get("data.use_dynamic_bsz"):
        tokens = found.number("data.micro_batch_size_per_gpu", 4) * longest
    found.config["learner.token_budget"] = token_budget(found, tokens, longest)
