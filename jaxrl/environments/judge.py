"""Judges an answer in an episode by a reward function."""

from typing import Any

from jaxrl.rewards.calls import read_signature
from jaxrl.rewards.functions import load_reward


class Judge:
    """Scores the last turn of an episode as reward.functions would score a whole response.

    Raises ValueError for a reward function of another signature than verl's.
    """

    def __init__(self, reward: str):
        self.function = load_reward(reward)
        signature = read_signature(self.function)
        if signature.form != "verl" or signature.is_async:
            raise ValueError(
                f"the reward {reward!r} takes batches or is async; set one with verl's signature "
                "for one response"
            )

    def score(self, prompt: dict[str, Any], completion: str) -> float:
        """The score of an answer to the prompt that `reset` got."""
        value = self.function(
            data_source=prompt["source"],
            solution_str=completion,
            ground_truth=prompt["answer"],
            extra_info=prompt["extra"] | {"finish": "stop"},
        )
        return float(value["score"] if isinstance(value, dict) else value)
