"""Failed rewards: a warning for every new kind of error, and the end of a run with too many."""

import re
from collections.abc import Sequence

import rich
from rich.text import Text

from jaxrl.tracking.console import printable
from jaxrl.types import ScoredRollout
from sharding import hosts

MAX_WARNINGS = 10  # kinds of errors
MAX_CHARS = 300  # of an error in a message
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # differs between errors of one kind


class RewardsFailed(hosts.AgreedError):
    """More than reward.max_error_fraction of the responses of a step have no valid reward."""


class RewardErrors:
    """Looks for failed rewards and environments in each set of responses."""

    def __init__(self, max_fraction: float):
        self.max_fraction = max_fraction
        self._kinds: set[str] = set()

    def warn(self, rollouts: Sequence[ScoredRollout], where: str) -> list[str]:
        """Prints a warning if there is a new kind of error. Returns all errors.

        Args:
          where: for the message, as in "step 3".
        """
        errors = [r.error for r in rollouts if r.error]
        new = [error for error in errors if kind_of(error) not in self._kinds]
        if new and len(self._kinds) < MAX_WARNINGS:
            text = (
                f"warning: {where}: {failures(errors, len(rollouts))}. First error: "
                f"{printable(new[0], MAX_CHARS)}. More in samples.jsonl; each kind of error is "
                "reported once"
            )
            self._kinds |= {kind_of(error) for error in new}
            if hosts.is_main_process():
                rich.get_console().print(Text(text, "bold yellow"), soft_wrap=True)
        return errors

    def check(self, rollouts: Sequence[ScoredRollout], where: str) -> None:
        """Warns, and raises RewardsFailed if more than the allowed fraction has failed."""
        errors = self.warn(rollouts, where)
        if len(errors) > self.max_fraction * len(rollouts):
            raise RewardsFailed(
                f"{where}: {failures(errors, len(rollouts))}, more than "
                f"config.reward.max_error_fraction={self.max_fraction:g} allows. First error: "
                f"{printable(errors[0], MAX_CHARS)}. Correct the reward function, the environment "
                "or the data, then resume the run; or set config.reward.max_error_fraction=1.0 to "
                "train on the other responses (see config.reward.on_error)"
            )


def kind_of(error: str) -> str:
    """The error without the numbers and quoted texts that differ from response to response."""
    return _VARIABLE.sub("*", error)


def failures(errors: Sequence[str], n: int) -> str:
    return f"the rewards of {len(errors)} of {n} responses failed"
