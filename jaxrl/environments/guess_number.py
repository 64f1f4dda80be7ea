"""A game of several turns: find a number by asking."""

import itertools
import random
import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """A number from 0 to `most` is to be found in `tries` turns; each wrong guess is answered with "higher" or "lower".

    The reward is 1 for the number, less `per_try` for each guess before it. The number is that of the prompt's answer
    where it has one, else it is drawn from the seed. With `example` a game that is played well stands before it: a small model
    only talks without.
    """

    def __init__(
        self, *, most: int = 10, tries: int = 5, per_try: float = 0.1, example: bool = False
    ):
        self.most, self.tries, self.per_try, self.example = most, tries, per_try, example

    def reset(self, prompt: dict[str, Any]) -> list[dict[str, str]]:
        answer = _NUMBER.search(prompt["answer"])
        drawn = random.Random(prompt["seed"]).randint(0, self.most)
        self.number = int(answer[0]) if answer else drawn
        self.n_wrong = 0
        text = (
            f"I think of a number from 0 to {self.most}. You have {self.tries} guesses, and after each "
            "I say higher or lower. Write only the number. Your first guess?"
        )
        question = {"role": "user", "content": text}
        return [question, *self._played(), question] if self.example else [question]

    def _played(self) -> list[dict[str, str]]:
        """The turns behind the question where the number is a third of the largest, by halving."""
        low, high, number = 0, self.most, self.most // 3
        said = []
        while (guess := (low + high) // 2) != number:
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            said += [str(guess), self._hint(guess, number)]
        said += [str(number), "Right."]
        roles = itertools.cycle(("assistant", "user"))
        return [{"role": next(roles), "content": text} for text in said]

    @staticmethod
    def _hint(guess: int, number: int) -> str:
        return f"{'Higher' if guess < number else 'Lower'}. Your next guess?"

    def step(self, completion: str) -> tuple:
        guess = _NUMBER.search(completion)
        if guess and int(guess[0]) == self.number:
            return "", 1.0 - self.per_try * self.n_wrong, True, {"found": 1}
        self.n_wrong += 1
        if self.n_wrong == self.tries:
            return "", 0.0, True
        if guess is None:
            return "That is no number. Your next guess?", 0.0, False
        return self._hint(int(guess[0]), self.number), 0.0, False
