"""Which choices of the algorithm go together: every pair of names, checked as a run checks them.

python -m scripts.pages.combinations    prints the section of docs/reference/algorithms.md
"""

import dataclasses
from typing import Any

from jaxrl.config import choices
from jaxrl.config.checks.algorithm import algorithm_errors, algorithm_warnings
from jaxrl.config.keys import RunConfig
from jaxrl.config.preconditions import PRECONDITIONS

# Keys of config.algorithm whose values are names, and the names.
NAMES: dict[str, tuple[str, ...]] = {
    "advantage": choices.ADVANTAGES,
    "policy_loss": choices.POLICY_LOSSES,
    "aggregation": choices.AGGREGATIONS,
    "kl": choices.KLS,
    "kl_in": choices.KL_PLACES,
    "correction": choices.CORRECTIONS,
    "rejection": choices.REJECTIONS,
    "old_logp": choices.OLD_LOGPS,
}
# Other keys that a name needs, or the values of its paper.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("advantage", "distill"): {"algorithm.teacher": "teacher", "algorithm.kl_coef": 1.0},
    ("advantage", "online_dpo"): {"algorithm.kl_coef": 0.1},
    **{
        ("advantage", name): {"env.agent": "agent", "reward.functions": ("environment",)}
        for name in choices.ROLE_ADVANTAGES
    },
    ("advantage", "gdpo"): {"reward.functions": ("math", "format")},
    ("advantage", "gigpo"): {"env.name": "calculator"},
    ("policy_loss", "gspo"): {"algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4},
    ("policy_loss", "gspo_token"): {"algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4},
    ("policy_loss", "kl_cov"): {"learner.epochs": 2},
    ("policy_loss", "dro"): {"algorithm.log_ratio_penalty": 0.05, "learner.epochs": 2},
    ("rejection", "token_k1"): {"algorithm.rejection_low": 0.5, "algorithm.rejection_high": 2.0},
    ("rejection", "seq_sum_k1"): {"algorithm.rejection_low": 0.5, "algorithm.rejection_high": 2.0},
}
PRINTED = (
    ("advantage", "policy_loss"),
    ("advantage", "aggregation"),
    ("policy_loss", "aggregation"),
    ("policy_loss", "correction"),
    ("rejection", "policy_loss"),
    ("kl", "kl_in"),
    ("advantage", "kl_in"),
    ("advantage", "kl"),
    ("correction", "old_logp"),
)
MARKS = {"accepted": "", "warned": "warned", "refused": "refused"}


def example(chosen: dict[str, str]) -> RunConfig:
    """A run with the chosen names, everything else as they require it or at its default."""
    run, algorithm = RunConfig(), dict(chosen)
    for key, name in chosen.items():
        for rule in PRECONDITIONS.get(key, {}).get(name, ()):
            algorithm.setdefault(rule.key, rule.values[0])
    settings: dict[str, Any] = {f"algorithm.{key}": value for key, value in algorithm.items()}
    if chosen.keys() & {"kl", "kl_in"}:
        settings["algorithm.kl_coef"] = 0.1
    for choice in chosen.items():
        settings |= NEEDS.get(choice, {})
    for name, value in settings.items():
        section, key = name.split(".")
        changed = dataclasses.replace(getattr(run, section), **{key: value})
        run = dataclasses.replace(run, **{section: changed})
    return run


def outcome(chosen: dict[str, str]) -> str:
    """The result of the checks for these names together: accepted, warned or refused."""
    run = example(chosen)
    if algorithm_errors(run):
        return "refused"
    return "warned" if algorithm_warnings(run) else "accepted"


def markdown() -> str:
    """One table for each pair of keys with a pair of names that is not accepted."""
    parts = []
    for key, other in PRINTED:
        columns = NAMES[other]
        parts += [f"\n| `algorithm.{key}` | " + " | ".join(columns) + " |\n"]
        parts += ["|---|" + "---|" * len(columns) + "\n"]
        for name in NAMES[key]:
            marks = [MARKS[outcome({key: name, other: value})] for value in columns]
            parts += [f"| {name} | " + " | ".join(marks) + " |\n"]
    return "".join(parts).lstrip("\n")


if __name__ == "__main__":
    print(markdown(), end="")
