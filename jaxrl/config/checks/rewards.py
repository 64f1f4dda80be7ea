"""Rules between the keys of rewards."""

import dataclasses

from jaxrl.config.checks.judge import judge_errors
from jaxrl.config.choices import REWARDS
from jaxrl.config.keys import RewardModelConfig, RunConfig
from jaxrl.config.schema import changed_keys, did_you_mean, is_import_path


def reward_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    return [*_function_errors(run), *_model_errors(run), *judge_errors(run)]


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
    model, default = run.reward_model, RewardModelConfig()
    if not model.step_separator:
        return ["reward_model.step_separator is empty; set what ends a step, such as '\\n'"]
    if bool(model.attributes) != (model.objective == "attributes"):
        return [
            f"reward_model.objective={model.objective!r} with reward_model.attributes="
            f"{model.attributes}: the objective 'attributes' needs the columns of the ratings, and "
            "others do not read them; set both, for example to ('helpfulness', 'verbosity'), or "
            "neither"
        ]
    if len(set(model.attributes)) < len(model.attributes):
        return [f"reward_model.attributes={model.attributes} has a name twice; give each once"]
    if model.objective == "steps" and not model.path:
        model = dataclasses.replace(model, objective="pairs", step_separator=default.step_separator)
    if model.objective == "attributes" and not model.path:
        model = dataclasses.replace(model, objective="pairs", attributes=())
    unused = changed_keys("reward_model", model, default)
    if unused and not model.path:
        return [f"{', '.join(unused)} but reward_model.path is empty; set it, or omit these keys"]
    if model.step_separator != default.step_separator and not model.step_reward:
        return [
            f"reward_model.step_separator={model.step_separator!r} has no effect without steps; "
            "set reward_model.step_reward, or omit it"
        ]
    return _step_errors(run)


def _step_errors(run: RunConfig) -> list[str]:
    """Keys that scores of steps do not work with."""
    if (model := run.reward_model).step_reward and model.label_weights:
        return [
            f"reward_model.label_weights={model.label_weights} with reward_model.step_reward="
            f"{model.step_reward!r}: steps are scored by a classifier of one label; omit one of "
            "them"
        ]
    if run.reward_model.step_reward and run.env.episodes:
        kinds = ", ".join(f"{key}={value!r}" for key, value in run.env.kinds.items() if value)
        return [
            f"reward_model.step_reward={run.reward_model.step_reward!r} finds the steps of one "
            f"response, but {kinds} has episodes; set reward_model.step_reward=''"
        ]
    return []
