"""The reward that the environment gave over the turns of an episode."""

from typing import Any


def environment(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """The sum of the episode's rewards.

    Raises RuntimeError if the environment failed, so that the reward is reward.error_value.
    """
    episode = (extra_info or {}).get("episode")
    if episode is None:
        raise ValueError(
            "the reward 'environment' needs an episode; set env.name, env.agent, env.command or "
            "env.verifiers, or use another reward"
        )
    if episode["error"]:
        raise RuntimeError(episode["error"])
    return episode["reward"]
