"""Rules of the optimizer's name, options, moments and parameter patterns."""

import math
import re

from jaxrl.config.choices import OPTIMIZERS, OPTIMIZERS_WITH_MOMENTS
from jaxrl.config.keys import LearnerConfig, RunConfig
from jaxrl.config.keys.optimizer import OPTIMIZER_OPTIONS, OptimizerOptions
from jaxrl.config.plugins import read_options
from jaxrl.config.schema import did_you_mean, is_import_path


def optimizer_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    learner = run.learner
    return [
        *_name_errors(learner),
        *_moment_errors(learner),
        *_master_errors(run),
        *pattern_errors("learner.lr_factors", learner.lr_factors),
        *pattern_errors("learner.weight_decays", learner.weight_decays),
    ]


def optimizer_options(spec: str) -> tuple[OptimizerOptions, list[str]]:
    """(options of the built-in optimizer "NAME?OPTION=VALUE&...", one line per invalid option)."""
    schema = OPTIMIZER_OPTIONS[spec.partition("?")[0]]
    elsewhere = "none; b1, b2, eps and weight_decay are keys of learner"
    found, errors = read_options(schema, spec, elsewhere)
    return found, [f"learner.optimizer={line}" for line in errors]


def pattern_errors(key: str, patterns: tuple[str, ...]) -> list[str]:
    """One line per entry that is not REGEX=NUMBER with a number of at least 0."""
    errors = []
    for entry in patterns:
        pattern, separator, number = entry.rpartition("=")
        try:
            re.compile(pattern)
            valid = bool(separator and pattern) and 0 <= float(number) < math.inf
        except (re.error, ValueError):
            valid = False
        if not valid:
            errors.append(
                f"{key} has {entry!r}; set 'REGEX=NUMBER' with a regular expression over the names "
                r"of parameters and a number of at least 0, such as 'layers\.0\.=0.1'"
            )
    return errors


def _name_errors(learner: LearnerConfig) -> list[str]:
    name = learner.optimizer.partition("?")[0]
    if is_import_path(name):
        return []
    if name in OPTIMIZERS:
        return optimizer_options(learner.optimizer)[1]
    hint = did_you_mean(name, OPTIMIZERS)
    return [
        f"learner.optimizer has {name!r}, which is not known; {hint}set one of "
        f"{', '.join(OPTIMIZERS)}, or 'package.module:function' such as 'optax:adabelief'"
    ]


def _master_errors(run: RunConfig) -> list[str]:
    if run.learner.master_weights or run.model.dtype != "float32":
        return []
    return [
        "learner.master_weights=False has no effect on float32 parameters, which have no master "
        "weights; set model.dtype='bfloat16', or leave it out"
    ]


def _moment_errors(learner: LearnerConfig) -> list[str]:
    name = learner.optimizer.partition("?")[0]
    if learner.moment_dtype == "float32" or name in OPTIMIZERS_WITH_MOMENTS:
        return []
    return [
        f"learner.moment_dtype={learner.moment_dtype!r} has no effect on learner.optimizer="
        f"{learner.optimizer!r}; set it to 'float32', or the optimizer to one of "
        f"{', '.join(OPTIMIZERS_WITH_MOMENTS)}"
    ]
