"""The ground truths that built-in rewards take, and responses that must score 1 with them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.config.plugins import load_plugin
from jaxrl.rewards.functions import KEY
from jaxrl.rewards.sources import reward_of
from jaxrl.rewards.verifiers.ground_truth import read_expression, read_number, read_text
from jaxrl.types import Prompt

TAGS, BOX, MARK, ALONE = "<answer>{}</answer>", r"\boxed{{{}}}", "#### {}", "{}"


@dataclasses.dataclass(frozen=True)
class TruthKind:
    """The kind of ground truth that a reward takes."""

    takes: str  # for messages
    read: Callable[..., Any]  # of the truth; raises ValueError if no response can match it
    forms: tuple[str, ...]  # of responses with the answer; the best of them must score 1
    reads_columns: bool = False  # `read` also takes the other columns of the row


def _check_tests(ground_truth: Any, extra_info: Mapping[str, Any]) -> None:
    """Checks the tests of a program; the module that runs them is imported only if it is used."""
    check = load_plugin("jaxrl.rewards.verifiers.code:check_truth", built_in={}, key=KEY)
    check(ground_truth, extra_info)


_NUMBER = "a number, alone, with words and units, or after ####"
_KINDS = {
    "code": TruthKind(
        "tests in one of the forms of docs/how_to/code_rewards.md",
        _check_tests,
        (),
        reads_columns=True,
    ),
    "exact": TruthKind("text or a number", read_text, (ALONE, TAGS, BOX, MARK)),
    "gsm8k": TruthKind(_NUMBER, read_number, (MARK,)),
    "last_number": TruthKind(_NUMBER, read_number, (ALONE,)),
    "math": TruthKind(
        r"a number, an expression or a few words, alone, in \boxed{} or after ####",
        read_expression,
        (BOX, TAGS),
    ),
}


def takes(spec: str) -> str:
    """The kind of ground truth of the reward that `spec` names; "" if that is not known."""
    name = spec.partition("?")[0]
    if name == "by_source":
        return "what the reward of the row's data_source takes"
    return _KINDS[name].takes if name in _KINDS else ""


def check_truth(spec: str, prompt: Prompt) -> None:
    """Raises ValueError if no response to a prompt can match its ground truth.

    Rewards that are not built in, or that read no truth, accept all.
    """
    kind = _kind(spec, prompt)
    if kind is None:
        return
    try:
        kind.read(prompt.answer, *([prompt.extra] if kind.reads_columns else ()))
    except Exception as error:  # of a malformed structure: a KeyError, for example
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(text) from error


def answers(spec: str, prompt: Prompt) -> list[str]:
    """Responses with the ground truth as the answer, of which one must score 1.

    None for rewards without such a form: `code` needs a program.
    """
    kind = _kind(spec, prompt)
    if kind is None:
        return []
    return [form.format(kind.read(prompt.answer)) for form in kind.forms]


def _kind(spec: str, prompt: Prompt) -> TruthKind | None:
    name = spec.partition("?")[0]
    return _KINDS.get(reward_of(prompt.source) if name == "by_source" else name)
