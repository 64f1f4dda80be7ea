"""A game over several turns: guess a number from "higher" and "lower"."""

import itertools
import random
import re
from typing import Any

from jaxrl.environments.api import StepResult
from jaxrl.json_text import Message

_NUMBER = re.compile(r"-?(?<!\d)\d{1,18}(?!\d)")  # int() takes quadratic time


class GuessNumber:
    """Guess a number from 0 to `most` in `tries` turns; wrong guesses get "higher" or "lower".

    The reward is 1 for the number, minus `per_try` for each guess before it. The number is the one
    in the prompt's answer, or is drawn from the seed if the answer has none. `example` puts a
    well-played game before the question: small models only chat without it.
    """

    def __init__(
        self, *, most: int = 10, tries: int = 5, per_try: float = 0.1, example: bool = False
    ):
        self.most, self.tries, self.per_try, self.example = most, tries, per_try, example

    def reset(self, prompt: dict[str, Any]) -> list[Message]:
        answer = _NUMBER.search(str(prompt["answer"]))
        drawn = random.Random(prompt["seed"]).randint(0, self.most)
        self.number = int(answer[0]) if answer else drawn
        self.n_wrong = 0
        text = (
            f"I think of a number from 0 to {self.most}. You have {self.tries} guesses, and after "
            "each I say higher or lower. Write only the number. Your first guess?"
        )
        question = {"role": "user", "content": text}
        return [question, *self._example_game(), question] if self.example else [question]

    def _example_game(self) -> list[Message]:
        """The turns after the question: a third of `most` is found by bisection."""
        low, high, number = 0, self.most, self.most // 3
        texts = []
        while (guess := (low + high) // 2) != number:
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            texts += [str(guess), self._hint(guess, number)]
        texts += [str(number), "Right."]
        roles = itertools.cycle(("assistant", "user"))
        return [{"role": next(roles), "content": text} for text in texts]

    @staticmethod
    def _hint(guess: int, number: int) -> str:
        return f"{'Higher' if guess < number else 'Lower'}. Your next guess?"

    def step(self, completion: str) -> StepResult:
        guess = _NUMBER.search(completion)
        if guess and int(guess[0]) == self.number:
            return "", 1.0 - self.per_try * self.n_wrong, True, {"found": 1}
        self.n_wrong += 1
        if self.n_wrong == self.tries:
            return "", 0.0, True
        if guess is None:
            return "That is no number. Your next guess?", 0.0, False
        return self._hint(int(guess[0]), self.number), 0.0, False
