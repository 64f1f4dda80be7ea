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
    """Looks for failed rewards and environments in each set of responses.

    `in_file`: whether the run writes samples.jsonl, to which warnings then point.
    """

    def __init__(self, max_fraction: float, *, in_file: bool = True):
        self.max_fraction = max_fraction
        self._hint = "More in samples.jsonl; each" if in_file else "Each"
        self._kinds: set[str] = set()

    def warn(self, rollouts: Sequence[ScoredRollout], where: str) -> list[str]:
        """Prints a warning if there is a new kind of error. Returns all errors.

        Args:
          where: for the message, as in "step 3".
        """
        failed = [r for r in rollouts if r.error]
        errors = [r.error for r in failed]
        new = [r for r in failed if kind_of(r.error) not in self._kinds]
        if new and len(self._kinds) < MAX_WARNINGS:
            headline, details = describe(new[0])
            text = (
                f"warning: {where}: {failures(errors, len(rollouts))}. First error: {headline}. "
                f"{self._hint} kind of error is reported once{details}"
            )
            self._kinds |= {kind_of(r.error) for r in new}
            if hosts.is_main_process():
                rich.get_console().print(Text(text, "bold yellow"), soft_wrap=True)
        return errors

    def check(self, rollouts: Sequence[ScoredRollout], where: str) -> None:
        """Warns, and raises RewardsFailed if more than the allowed fraction has failed."""
        errors = self.warn(rollouts, where)
        if len(errors) > self.max_fraction * len(rollouts):
            headline, details = describe(next(r for r in rollouts if r.error))
            raise RewardsFailed(
                f"{where}: {failures(errors, len(rollouts))}, more than "
                f"config.reward.max_error_fraction={self.max_fraction:g} allows. First error: "
                f"{headline}. Correct the reward function, the environment or the data, then "
                "resume the run; or set config.reward.max_error_fraction=1.0 to train on the other "
                f"responses (see config.reward.on_error){details}"
            )


def describe(failed: ScoredRollout) -> tuple[str, str]:
    """The error of a response in one line; lines with its user code, its response and its row."""
    headline, _, frames = failed.error.partition("\n")
    rollout, prompt = failed.rollout, failed.rollout.prompt
    response = rollout.text[:MAX_CHARS] + ("..." if len(rollout.text) > MAX_CHARS else "")
    columns = f"; extra_info: {', '.join(map(str, prompt.extra))}" if prompt.extra else ""
    row = f"data_source {prompt.source!r}, answer {prompt.answer_text[:MAX_CHARS]!r}{columns}"
    details = [
        *filter(None, [frames]),
        f"  response: {response!r}",
        f"  row {prompt.id + 1} of the data: {row}",
    ]
    return printable(headline, MAX_CHARS), "".join(f"\n{printable(one, 2000)}" for one in details)


def kind_of(error: str) -> str:
    """The error without the numbers and quoted texts that differ from response to response."""
    return _VARIABLE.sub("*", error)


def failures(errors: Sequence[str], n: int) -> str:
    return f"the rewards of {len(errors)} of {n} responses failed"
