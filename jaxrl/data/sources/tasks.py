"""Generated questions: arithmetic with given digit counts, and datasets of packages.

A source is "task:addition?digits=1,2&size=4096&split=train&seed=0" or
"reasoning_gym:chain_sum?min_terms=2&size=1000&seed=0". reasoning-gym has no splits, so use another
seed for validation.
"""

import dataclasses
import importlib
import itertools
import operator
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

from jaxrl.config.packages import install_advice
from jaxrl.data.sources.harbor import harbor_rows
from jaxrl.data.sources.nemo_gym import gym_rows
from jaxrl.data.sources.verifiers_tasks import task_rows

PREFIXES = ("task:", "reasoning_gym:", "verifiers:", "nemo_gym:", "harbor:")
_MAX_ENUMERATED = 20_000  # questions; larger pools are sampled instead of shuffled
_VAL_FRACTION = 0.1  # of all questions
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclasses.dataclass(frozen=True)
class Question:
    """One generated question, before the chat template."""

    text: str
    answer: str
    source: str  # "addition/2": task and digit count; groups the metrics
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Task:
    signs: Callable[[random.Random, int], tuple[str, ...]]  # (rng, terms) -> terms - 1 operators
    commutes: bool  # if so, a + b and b + a are in the same split


_TASKS = {
    "addition": _Task(lambda rng, terms: ("+",) * (terms - 1), commutes=True),
    "subtraction": _Task(lambda rng, terms: ("-",) * (terms - 1), commutes=False),
    "multiplication": _Task(lambda rng, terms: ("*",) * (terms - 1), commutes=True),
    "chain_sum": _Task(
        lambda rng, terms: tuple(rng.choice("+-") for _ in range(terms - 1)), commutes=False
    ),
}


def question_rows(source: str) -> list[dict[str, Any]]:
    """The rows of a source with one of PREFIXES. Raises as the function that reads them."""
    readers = {"verifiers": task_rows, "nemo_gym": gym_rows, "harbor": harbor_rows}
    if (kind := source.partition(":")[0]) in readers:
        return readers[kind](source)
    return [question_row(question) for question in make_questions(source)]


def make_questions(source: str) -> list[Question]:
    """The questions of a "task:" or "reasoning_gym:" source.

    Raises ValueError for an unknown task or option, ImportError if reasoning-gym is missing.
    """
    kind, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if kind == "reasoning_gym":
        return _reasoning_gym(name, options)
    if name not in _TASKS:
        raise ValueError(f"unknown task {name!r} in {source!r}; choose one of {', '.join(_TASKS)}")
    known = {"digits", "terms", "size", "split", "seed"}
    if unknown := set(options) - known:
        raise ValueError(
            f"unknown option {', '.join(sorted(unknown))} in {source!r}; "
            f"a task has {', '.join(sorted(known))}"
        )
    return arithmetic(
        name,
        digits=_integers(options.get("digits", "1,2"), "digits", source),
        terms=_integers(options.get("terms", "3" if name == "chain_sum" else "2"), "terms", source)[
            0
        ],
        size=_integers(options.get("size", "4096"), "size", source)[0],
        split=options.get("split", "train"),
        seed=_integers(options.get("seed", "0"), "seed", source)[0],
    )


def question_row(question: Question) -> dict[str, Any]:
    """The question as a row of a dataset."""
    return {
        "prompt": question.text,
        "answer": question.answer,
        "data_source": question.source,
        "extra_info": question.extra,
    }


def arithmetic(
    name: str,
    *,
    digits: tuple[int, ...] = (1, 2),
    terms: int = 2,
    size: int = 4096,
    split: str = "train",
    seed: int = 0,
) -> list[Question]:
    """`size` questions "What is 12 + 34?", equally many per digit count, in random order.

    All terms of a question have the same number of digits (one digit: 0-9, two: 10-99, ...). A
    tenth of all possible questions is held out for split="val". The split depends only on the
    question, so train and val are disjoint for all seeds, and a + b is in the split of b + a.

    Training questions repeat only after all have been used. Validation questions never repeat, so
    there are fewer than `size` if the digit counts have fewer.
    """
    if split not in ("train", "val"):
        raise ValueError(f"a task has no split {split!r}; write split=train or split=val")
    if min(digits) < 1 or terms < 2 or size < 1:
        raise ValueError(
            f"digits={digits}, terms={terms}, size={size} of a task; set at least one digit, two "
            "terms and one question"
        )
    rng = random.Random(f"{name} {digits} {terms} {split} {seed}")
    questions: list[Question] = []
    for i, n_digits in enumerate(digits):
        share = size // len(digits) + (i < size % len(digits))
        pool = _questions(name, n_digits, terms, split, rng)
        questions += itertools.islice(pool, share)
    rng.shuffle(questions)
    return questions


def _questions(
    name: str, n_digits: int, terms: int, split: str, rng: random.Random
) -> Iterator[Question]:
    """Questions of one digit count and split; train starts over when all have been used."""
    low, high = (0 if n_digits == 1 else 10 ** (n_digits - 1)), 10**n_digits
    task = _TASKS[name]

    def in_split(numbers: tuple[int, ...]) -> bool:
        key = sorted(numbers) if task.commutes else numbers
        is_val = zlib.crc32(f"{name} {key}".encode()) < _VAL_FRACTION * 2**32
        return is_val == (split == "val")

    def question(numbers: tuple[int, ...]) -> Question:
        return _question(name, numbers, task.signs(rng, terms), n_digits)

    if (high - low) ** terms <= _MAX_ENUMERATED:
        pool = [n for n in itertools.product(range(low, high), repeat=terms) if in_split(n)]
        while pool:
            rng.shuffle(pool)
            yield from map(question, pool)
            if split == "val":
                break
        return
    seen = set()
    while True:  # the pool is far larger than any dataset drawn from it
        numbers = tuple(rng.randrange(low, high) for _ in range(terms))
        if in_split(numbers) and numbers not in seen:
            seen.add(numbers)
            yield question(numbers)


def _question(
    name: str, numbers: tuple[int, ...], signs: tuple[str, ...], n_digits: int
) -> Question:
    text, value = str(numbers[0]), numbers[0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        text, value = f"{text} {sign} {number}", _OPERATORS[sign](value, number)
    return Question(text=f"What is {text}?", answer=str(value), source=f"{name}/{n_digits}")


def _reasoning_gym(name: str, options: dict[str, str]) -> list[Question]:
    """A reasoning-gym dataset; `extra` has the entry for rewards/verifiers/reasoning_gym.py."""
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            f"the dataset reasoning_gym:{name} needs reasoning-gym; install it with "
            f"{install_advice('reasoning-gym')}"
        ) from error
    settings = {key: _literal(value) for key, value in options.items()}
    settings = {"size": 1000, "seed": 0} | settings
    try:
        entries = list(gym.create_dataset(name, **settings))
    except Exception as error:  # foreign code
        raise ValueError(
            f"reasoning_gym:{name} with {settings} cannot be created ({error}); see "
            "reasoning-gym's gallery for names and options"
        ) from error
    return [
        Question(
            text=entry["question"],
            answer=str(entry["answer"]),
            source=f"reasoning_gym/{name}",
            extra={"reasoning_gym": {"name": name, "entry": entry}},
        )
        for entry in entries
    ]


def _integers(text: str, option: str, source: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{option}={text!r} in {source!r} is not an integer or a list of integers; write for "
            f"example {option}=2"
        ) from None


def _literal(text: str) -> bool | int | float | str:
    """The value of an option: true, false, a number, or else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
