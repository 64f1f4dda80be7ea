"""Several tries at one question, judged by any reward function."""

from typing import Any

from jaxrl.environments.api import StepResult
from jaxrl.environments.judge import Judge


class Retry:
    """Repeats the question until an answer scores `enough` or `tries` answers were given.

    The reward is the last answer's, minus `per_try` for each earlier answer if the last one
    is good enough. `again` is the message after a wrong answer. `reward` is a function as in
    reward.functions.
    """

    def __init__(
        self,
        *,
        reward: str = "by_source",
        tries: int = 3,
        enough: float = 1.0,
        per_try: float = 0.0,
        again: str = "That is not right. Try again.",
    ):
        self.judge, self.tries, self.enough = Judge(reward), tries, enough
        self.per_try, self.again = per_try, again

    def reset(self, prompt: dict[str, Any]) -> None:
        self.prompt, self.n_wrong = prompt, 0

    def step(self, completion: str) -> StepResult:
        score = self.judge.score(self.prompt, completion)
        if score >= self.enough:
            return "", score - self.per_try * self.n_wrong, True
        self.n_wrong += 1
        if self.n_wrong == self.tries:
            return "", score, True
        return self.again, 0.0, False, {"retries": 1}
