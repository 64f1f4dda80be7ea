"""Rules between the keys of rewards: what contradicts itself is refused before any device work."""

from jaxrl.config.keys import REWARDS, RewardModelConfig, RunConfig
from jaxrl.config.schema import flatten, nearest, to_dict


def reward_problems(run: RunConfig) -> list[str]:
    """A line for every rule that the run breaks, with the values and what to set instead."""
    return [*_function_problems(run), *_model_problems(run)]


def _function_problems(run: RunConfig) -> list[str]:
    problems = []
    if run.reward.weights and len(run.reward.weights) != len(run.reward.functions):
        problems.append(
            f"reward.weights={run.reward.weights} has {len(run.reward.weights)} weights for "
            f"{len(run.reward.functions)} functions {run.reward.functions}; give one weight per function, or () for 1"
        )
    if run.reward.clip and not (
        len(run.reward.clip) == 2 and run.reward.clip[0] < run.reward.clip[1]
    ):
        problems.append(
            f"reward.clip={run.reward.clip} is no range; set (low, high), for example (-10.0, 10.0), or () for none"
        )
    if not run.reward.functions and not run.reward_model.path:
        problems.append(
            "reward.functions is empty; set for example ('math',) or ('package.module:function',), or reward_model.path"
        )
    for name in (function.partition("?")[0] for function in run.reward.functions):
        if ":" not in name and name not in REWARDS:
            guess = nearest(name, REWARDS)
            hint = f"did you mean {guess!r}? " if guess else ""
            problems.append(
                f"reward.functions has {name!r}, which is not known; {hint}set names among "
                f"{', '.join(REWARDS)}, or 'package.module:function'"
            )
    return problems


def _model_problems(run: RunConfig) -> list[str]:
    own, default = flatten(to_dict(run.reward_model)), flatten(to_dict(RewardModelConfig()))
    idle = [
        f"reward_model.{name}={value!r}" for name, value in own.items() if value != default[name]
    ]
    if idle and not run.reward_model.path:
        return [
            f"{', '.join(idle)} but reward_model.path is empty; set it, or leave these keys out"
        ]
    return []
