"""Rules between the keys of rewards."""

from collections.abc import Mapping
from typing import Any

from jaxrl.config.choices import REWARDS
from jaxrl.config.keys import JudgeConfig, RewardModelConfig, RunConfig
from jaxrl.config.plugins import options
from jaxrl.config.schema import did_you_mean, flatten, is_import_path, to_dict

_JUDGES = ("judge", "judge_pairs")
_OF_PAIRS = (".against", ".opponents", ".swap")
_JUDGE_EXAMPLES = {
    "url": "http://judge:8000/v1",
    "model": "Qwen/Qwen3-32B",
    "rubric": "rubric.yaml",
}


def reward_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    return [*_function_errors(run), *_model_errors(run), *_judge_errors(run)]


def reward_warnings(run: RunConfig) -> list[str]:
    """A value of failed rewards that training does not use."""
    reward = run.reward
    if reward.error_value == 0 or reward.on_error == "value":
        return []
    return [
        f"reward.error_value={reward.error_value} is not trained on with "
        "reward.on_error='exclude', which leaves failed responses out; set "
        "reward.on_error='value', or omit reward.error_value"
    ]


def calibration_errors(run: RunConfig) -> list[str]:
    """One line if there is no judge to compare with labels."""
    if any(function.partition("?")[0] == "judge" for function in run.reward.functions):
        return []
    return [
        f"eval.judge_labels={run.eval.judge_labels!r} but reward.functions="
        f"{run.reward.functions} has no 'judge'; set reward.functions=('judge',)"
    ]


def only_evaluation_errors(run: RunConfig) -> list[str]:
    """Keys that training does not read."""
    if not run.eval.judge_labels:
        return []
    return [
        f"eval.judge_labels={run.eval.judge_labels!r} is for jaxrl.evaluate; omit it in training"
    ]


def _function_errors(run: RunConfig) -> list[str]:
    errors, reward = [], run.reward
    if reward.weights and len(reward.weights) != len(reward.functions):
        errors.append(
            f"reward.weights={reward.weights} has {len(reward.weights)} weights for "
            f"{len(reward.functions)} functions {reward.functions}; give one weight per function, "
            "or () for 1"
        )
    if reward.clip and not (len(reward.clip) == 2 and reward.clip[0] < reward.clip[1]):
        errors.append(
            f"reward.clip={reward.clip} is no range; set (low, high), for example (-10.0, 10.0), "
            "or () for none"
        )
    if not reward.functions and not run.reward_model.path:
        errors.append(
            "reward.functions is empty; set for example ('math',) or ('package.module:function',), "
            "or reward_model.path"
        )
    for name in (function.partition("?")[0] for function in reward.functions):
        if not is_import_path(name) and name not in REWARDS:
            hint = did_you_mean(name, REWARDS)
            errors.append(
                f"reward.functions has {name!r}, which is not known; {hint}set names among "
                f"{', '.join(REWARDS)}, or 'package.module:function'"
            )
    return errors


def _model_errors(run: RunConfig) -> list[str]:
    unused = _changed("reward_model", run.reward_model, RewardModelConfig())
    if unused and not run.reward_model.path:
        return [f"{', '.join(unused)} but reward_model.path is empty; set it, or omit these keys"]
    return []


def _judge_errors(run: RunConfig) -> list[str]:
    judge, errors = run.reward.judge, []
    judges = [f for f in run.reward.functions if f.partition("?")[0] in _JUDGES]
    changed = _changed("reward.judge", judge, JudgeConfig())
    if changed and not judges:
        return [
            f"{', '.join(changed)} but reward.functions={run.reward.functions} has no 'judge' or "
            "'judge_pairs'; add one, or omit these keys"
        ]
    only_pairs = [text for text in changed if text.split("=")[0].endswith(_OF_PAIRS)]
    if only_pairs and not any(f.startswith("judge_pairs") for f in judges):
        errors.append(
            f"{', '.join(only_pairs)} but reward.functions={run.reward.functions} has no "
            "'judge_pairs'; add it, or omit these keys"
        )
    for function in judges:
        given = {"url": judge.url, "model": judge.model, "rubric": judge.rubric} | options(function)
        errors += [
            f"reward.functions has {function!r} but reward.judge.{name} is empty; set it, for "
            f"example {_JUDGE_EXAMPLES[name]!r}"
            for name in _JUDGE_EXAMPLES
            if not given[name]
        ]
        if given["url"] and not str(given["url"]).startswith(("http://", "https://")):
            errors.append(
                f"reward.judge.url={given['url']!r} is no URL; set one such as "
                f"{_JUDGE_EXAMPLES['url']!r}"
            )
        if function.partition("?")[0] == "judge_pairs":
            errors += _pair_errors(run, to_dict(judge) | options(function))
    return errors


def _pair_errors(run: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """Rules of the comparison of pairs, with the keys and options `given`."""
    errors = []
    if given["opponents"] % 2:
        errors.append(
            f"reward.judge.opponents={given['opponents']} is odd; set an even number, half of it "
            "on each side of a response, or 0 for all others"
        )
    if given["against"] == "reference":
        if not given["reference"]:
            errors.append(
                "reward.judge.against='reference' but reward.judge.reference is empty; set it to "
                "'answer' or a column of the data"
            )
        return errors
    sizes = {"rollout.n": run.rollout.n}
    if run.data.val:
        sizes["eval.n"] = run.eval.n
    if run.algorithm.advantage == "remax":
        sizes["the greedy baseline of algorithm.advantage='remax'"] = 1
    errors += [
        f"{name}={n} gives judge_pairs no opponent; set at least 2, or "
        "reward.judge.against='reference'"
        for name, n in sizes.items()
        if n < 2
    ]
    return errors


def _changed(section: str, values: Any, defaults: Any) -> list[str]:
    """The keys of a section that differ from their defaults."""
    found, default = flatten(to_dict(values)), flatten(to_dict(defaults))
    return [f"{section}.{name}={v!r}" for name, v in found.items() if v != default[name]]
