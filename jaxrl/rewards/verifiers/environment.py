"""What the environment gave over the turns of an episode."""

from typing import Any


def environment(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """The sum of the episode's rewards. Raises RuntimeError where the environment failed, so that the response counts
    with reward.error_value."""
    episode = (extra_info or {}).get("episode")
    if episode is None:
        raise ValueError("the response is of no environment; set env.name")
    if episode["error"]:
        raise RuntimeError(episode["error"])
    return episode["reward"]
