"""Rules of the estimators that read the rewards of an agent's conversations."""

from jaxrl.config.choices import ROLE_ADVANTAGES
from jaxrl.config.keys import AlgorithmConfig, RunConfig


def role_errors(run: RunConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    name, default, errors = run.algorithm.advantage, AlgorithmConfig(), []
    readers = {"role_decay": "rae", "episode_roles": "hierarchical_grpo"}
    for key, reader in readers.items():
        if (value := getattr(run.algorithm, key)) != getattr(default, key) and name != reader:
            errors.append(
                f"algorithm.{key}={value!r} has no effect with algorithm.advantage={name!r}; set "
                f"algorithm.{key}={getattr(default, key)!r}, or algorithm.advantage={reader!r}"
            )
    if name not in ROLE_ADVANTAGES:
        return errors
    if not run.env.program:
        errors.append(
            f"algorithm.advantage={name!r} reads the rewards of an agent's conversations, but "
            "there is no agent; set env.agent, or algorithm.advantage='grpo'"
        )
    wanted = {
        "algorithm.branch_credit": (run.algorithm.branch_credit, "all"),
        "algorithm.dynamic_sampling": (run.algorithm.dynamic_sampling, False),
        "reward.functions": (run.reward.functions, ("environment",)),
        "reward.on_error": (run.reward.on_error, "exclude"),
        "reward.normalize": (run.reward.normalize, False),
        "reward.clip": (run.reward.clip, ()),
        "reward.length_penalty": (run.reward.length_penalty, 0.0),
        "reward.overlong_buffer": (run.reward.overlong_buffer, 0),
        "reward.truncated_coef": (run.reward.truncated_coef, 1.0),
        "reward_model.path": (run.reward_model.path, ""),
    }
    errors += [
        f"{key}={value!r} concerns the reward of an episode, but algorithm.advantage={name!r} "
        f"reads those that the agent gives to its conversations; set {key}={needed!r}"
        for key, (value, needed) in wanted.items()
        if value != needed
    ]
    return errors
