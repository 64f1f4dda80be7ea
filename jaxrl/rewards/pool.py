"""Runs reward functions in worker processes, so that none of them can stop or crash a run.

A worker is a fresh Python process (not a fork: the parent has JAX's threads) without JAX. It leads
a separate session, so Ctrl-C reaches the parent only. If an answer exceeds the time limit, the
worker and all that it has started are killed and the call becomes an error. Workers that died, in a
call or idle, are replaced (rewards/call_runner.py). A function gets verl's arguments, or TRL's with
the columns of the dataset.

Functions that the caller of the trainer passes as objects run in threads of this process instead
(rewards/worker_thread.py).
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.call_runner import CallKey, CallRunner, FunctionCall, TimedResult
from jaxrl.rewards.calls import FORMS, CallSignature, RewardResult, is_score
from jaxrl.rewards.functions import check_passed, check_start, metric_names
from jaxrl.rewards.sandbox.folder import remove_left
from jaxrl.rewards.settings import call_settings
from jaxrl.rewards.worker_thread import OwnFunctions
from jaxrl.subprocesses.output import OutputLog, print_line
from jaxrl.types import Decode, Episode, Prompt, Reward, Rollout

_REMOVAL_S = 10.0  # for folders that programs of killed workers left
_GRACE_S = 2.0  # in which a worker reports responses of an async function that are late
# Columns that the dataset may have under another name: TRL's functions name them as their dataset.
_ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "label")


class RewardPool:
    """The reward functions of a run. Use as a context manager, or call close().

    The constructor starts the workers and returns once all have imported the functions. It raises
    ValueError for an unknown name, a module that cannot be imported, a function of no known form
    (rewards/calls.py), a wrong number of weights, or a reward that cannot run on this machine.
    `decode` turns tokens into text with special tokens, for functions that declare prompt_str or
    query_str. `own` has the functions of this process that cfg.functions names: all of them, or
    None. `run_folder` is where the verdicts of a judge are kept; None: nowhere. `write` gets each
    line that the functions print. Not thread-safe.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        decode: Decode | None = None,
        *,
        own: OwnFunctions | None = None,
        run_folder: Path | None = None,
        write: Callable[[str], None] = print_line,
    ):
        self.names = metric_names(cfg.functions)
        self._weights = cfg.weights or (1.0,) * len(self.names)
        if len(self._weights) != len(self.names):
            raise ValueError(
                f"{len(cfg.functions)} reward functions and {len(cfg.weights)} weights; set "
                "reward.weights to one number per function, or to () for 1.0 each"
            )
        check_passed(cfg.functions, own or {})
        self._settings = call_settings(cfg, run_folder)
        for function, settings in zip(cfg.functions, self._settings, strict=True):
            check_start(function, settings.options)
        self._cfg = cfg
        self._decode = decode
        self._runner = CallRunner(cfg, self._settings, OutputLog(write), own)
        self._n_items = 0  # responses so far
        self._submitted: dict[int, tuple[range, list[CallKey]]] = {}  # by ticket
        self._tickets = itertools.count()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Kills all workers, waits for them, and removes the folders of their programs."""
        self._runner.close()
        remove_left(_REMOVAL_S)

    def score(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One reward per rollout, in order.

        The value is the weighted sum of the functions. `parts` has the score of each function by
        name, and its further numbers as "name/key"; `counts` has what it counts, also where it
        failed; `feedback` the texts of all. If a function raises, hangs, kills its process
        or does not return a finite number, the value is cfg.error_value and `error` has the reason.

        Functions get verl's or TRL's arguments. extra_info has the prompt's `extra`, "finish" (as
        in Rollout), "response_len" (tokens) and, with an environment, "episode". Raises
        ChildProcessError if no worker is left and none can be started.
        """
        ticket = self.submit(rollouts)
        while (rewards := self._take(ticket)) is None:
            self._runner.advance(wait=True)
        return rewards

    def submit(self, rollouts: Sequence[Rollout]) -> int:
        """Has rollouts scored as `score` does, without waiting. Returns a ticket for `collect`."""
        items = range(self._n_items, self._n_items + len(rollouts))
        self._n_items = items.stop
        ticket = next(self._tickets)
        self._submitted[ticket] = items, self._runner.submit(self._calls(rollouts, items.start))
        return ticket

    def collect(self, *, wait: bool) -> dict[int, list[Reward]]:
        """The rewards that are known by now, by ticket.

        With `wait`, it first waits until something happens in the workers, for a second at most.
        """
        self._runner.advance(wait=wait)
        found = {ticket: self._take(ticket) for ticket in list(self._submitted)}
        return {ticket: rewards for ticket, rewards in found.items() if rewards is not None}

    def _take(self, ticket: int) -> list[Reward] | None:
        """The rewards of a ticket; None until all are known."""
        items, keys = self._submitted[ticket]
        results = self._runner.take(keys)
        if results is None:
            return None
        del self._submitted[ticket]
        functions = range(len(self.names))
        return [self._combine([results[item, f] for f in functions]) for item in items]

    def score_with(self, name: str, rollouts: Sequence[Rollout]) -> list[RewardResult]:
        """The results of one function alone, by its name in `names`."""
        items = range(self._n_items, self._n_items + len(rollouts))
        self._n_items = items.stop
        function = self.names.index(name)
        calls = [c for c in self._calls(rollouts, items.start) if c.function == function]
        keys = self._runner.submit(calls)
        while (results := self._runner.take(keys)) is None:
            self._runner.advance(wait=True)
        return [results[item, function].result for item in items]

    def check_columns(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError if a function of TRL's form requires a column that no row has."""
        for name, signature in zip(self.names, self._runner.signatures, strict=True):
            lacking = [set(missing_columns(signature, prompt)) for prompt in prompts]
            missing: set[str] = set.intersection(*lacking) if lacking else set()
            if missing:
                raise ValueError(
                    f"the reward function {name} requires {', '.join(sorted(missing))}, which is "
                    f"no column of the data ({', '.join(columns(prompts))}); add it to the data, "
                    "or give the parameter a default"
                )

    def _calls(self, rollouts: Sequence[Rollout], first: int) -> list[FunctionCall]:
        """All calls of all functions; batches come first because they take longest.

        `first` is the number of the first response.
        """
        calls = []
        for function, signature in enumerate(self._runner.signatures):
            for items in self._split(function, signature, rollouts):
                found = [rollouts[item] for item in items]
                n = len(items) if signature.batched or signature.is_async else None
                limit_s = self._settings[function].limit_s
                arguments = (
                    single_arguments(found[0], signature, limit_s, self._decode)
                    if n is None
                    else batch_arguments(found, signature, limit_s, self._decode)
                )
                if n_limits := _n_limits(signature, len(items)):
                    rounds = -(-n_limits // self._settings[function].concurrency)
                    limit_s = limit_s * rounds + _GRACE_S
                numbers = tuple(first + item for item in items)
                calls.append(FunctionCall(numbers, function, n, arguments, limit_s))
        return sorted(calls, key=lambda call: call.n is None)

    def _split(
        self, function: int, signature: CallSignature, rollouts: Sequence[Rollout]
    ) -> Iterable[Sequence[int]]:
        """The responses of each call of a function, by index."""
        items = range(len(rollouts))
        if signature.form == "verl_group":
            groups = itertools.groupby(items, lambda item: rollouts[item].prompt.id)
            return [list(group) for _, group in groups]
        return itertools.batched(items, self._call_size(function, signature, len(rollouts)))

    def _call_size(self, function: int, signature: CallSignature, n: int) -> int:
        """Responses per call; one if the function takes one at a time."""
        per_worker = max(1, -(-n // self._cfg.workers))
        if signature.batched:
            return min(self._settings[function].batch_size, per_worker)
        # so many that a slow response rarely leaves the worker idle
        n_calls = 4 * self._settings[function].concurrency
        return min(n_calls, per_worker) if signature.is_async else 1

    def _combine(self, timed: list[TimedResult]) -> Reward:
        """The reward from the results of all functions for one rollout."""
        results = [result for result, _ in timed]
        parts: dict[str, float] = {}
        counts: dict[str, float] = {}
        errors: list[str] = []
        feedback = "\n\n".join(r.feedback for r in results if r.feedback.strip())
        for name, result in zip(self.names, results, strict=True):
            counts |= {f"{name}/{key}": value for key, value in result.counts.items()}
            if result.error:
                errors.append(f"{name}: {result.error}")
                continue
            if result.score is not None:
                parts[name] = result.score
            parts |= {f"{name}/{key}": value for key, value in result.parts.items()}
        reward = self._cfg.error_value
        if not errors:
            weighted = zip(self._weights, results, strict=True)
            reward = sum(w * r.score for w, r in weighted if r.score is not None)
        if not is_score(reward):  # the scores are not, but their weighted sum is
            errors.append(f"the sum {reward:g} of the rewards is beyond the range of float32")
            reward = self._cfg.error_value
        seconds = max((seconds for _, seconds in timed), default=0.0)
        return Reward(float(reward), parts, "; ".join(errors), counts, feedback, seconds)


def _n_limits(signature: CallSignature, n: int) -> int:
    """How often an async call of `n` responses has the time limit: per response, or per pair.

    0 for other functions, whose call has the limit once.
    """
    if not signature.is_async or signature.form in ("verl_batch", "trl"):
        return 0
    return n * n if signature.form == "verl_group" else n


def single_arguments(
    rollout: Rollout, signature: CallSignature, limit_s: float, decode: Decode | None
) -> dict[str, Any]:
    """The arguments of a function that takes one response; `decode` is for rendered texts."""
    known = {"timeout_s": limit_s}
    return {n: known[n] if n in known else _value(rollout, n, decode) for n in signature.names}


def batch_arguments(
    rollouts: Sequence[Rollout], signature: CallSignature, limit_s: float, decode: Decode | None
) -> dict[str, Any]:
    """The arguments of a call for several responses: a list per name."""
    if signature.form == "trl":
        return _trl_arguments(rollouts, signature, limit_s)
    if signature.form == "verl_group":
        return _group_arguments(rollouts, signature, limit_s, decode)
    single = signature._replace(names=tuple(map(_singular, signature.names)))
    each = [single_arguments(rollout, single, limit_s, decode) for rollout in rollouts]
    found = {name: [one[_singular(name)] for one in each] for name in signature.names}
    is_batch = signature.batched and "timeout_s" in found
    return found | {"timeout_s": limit_s} if is_batch else found


def missing_columns(signature: CallSignature, prompt: Prompt) -> list[str]:
    """Columns that a function requires and the row of a prompt does not have."""
    return [name for name in signature.required if name not in _columns(prompt)]


def columns(prompts: Sequence[Prompt]) -> list[str]:
    """The columns that functions of TRL's form can name."""
    return sorted({name for prompt in prompts for name in _columns(prompt)})


def _singular(name: str) -> str:
    """verl's name of an argument for one response: solution_strs is solution_str."""
    return name if name in FORMS["verl"] else name.removesuffix("s")


def _value(rollout: Rollout, name: str, decode: Decode | None) -> Any:
    prompt = rollout.prompt
    match name:
        case "data_source":
            return prompt.source
        case "solution_str":
            return rollout.text
        case "ground_truth":
            return prompt.answer
        case "extra_info":
            return prompt.extra | _outcome(rollout)
        case "conversation":
            return list(rollout.prompt_messages)
    assert decode is not None, f"{name} needs a tokenizer"
    tokens = prompt.tokens
    return decode(tokens if name == "prompt_str" else np.concatenate([tokens, rollout.tokens]))


def _outcome(rollout: Rollout) -> dict[str, Any]:
    """The fields of extra_info about the response."""
    outcome = {"finish": rollout.finish, "response_len": len(rollout.tokens)}
    if rollout.episode is None:
        return outcome
    branches = [_messages(b.episode) for b in rollout.branches if b.episode is not None]
    return outcome | {"episode": _info(rollout.episode) | {"branches": branches}}


def _group_arguments(
    rollouts: Sequence[Rollout], signature: CallSignature, limit_s: float, decode: Decode | None
) -> dict[str, Any]:
    """The arguments of a call for all responses to a prompt: lists of what differs."""
    differ = {"group_strs": "solution_str", "extra_infos": "extra_info"}
    shared = signature._replace(names=tuple(n for n in signature.names if n not in differ))
    lists = {
        name: [_value(rollout, one, decode) for rollout in rollouts]
        for name, one in differ.items()
        if name in signature.names
    }
    return single_arguments(rollouts[0], shared, limit_s, decode) | lists


def _trl_arguments(
    rollouts: Sequence[Rollout], signature: CallSignature, limit_s: float
) -> dict[str, Any]:
    rows = [_columns(r.prompt) for r in rollouts]
    known: dict[str, Any] = {
        "timeout_s": limit_s,
        "prompts": [_prompt(r.prompt) for r in rollouts],
        "completions": [_completion(r) for r in rollouts],
        "completion_ids": [r.tokens.tolist() for r in rollouts],
    }
    names = dict.fromkeys(signature.names)
    if signature.all_columns:
        names |= dict.fromkeys(name for row in rows for name in row)
    arguments = {}
    for name in names:
        if name in known:
            arguments[name] = known[name]
        elif name in signature.required or any(name in row for row in rows):
            arguments[name] = [row.get(name) for row in rows]
    return arguments


def _columns(prompt: Prompt) -> dict[str, Any]:
    """The columns of the row, as a function of TRL's form names them."""
    names = () if prompt.answer is None else _ANSWER_COLUMNS
    return dict.fromkeys(names, prompt.answer) | {"data_source": prompt.source} | prompt.extra


def _prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
    """The prompt as the row has it, text or messages."""
    return prompt.messages[-1]["content"] if prompt.is_text else list(prompt.messages)


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    """The response: text for a prompt that is text, messages for messages."""
    if rollout.prompt.is_text:
        return rollout.text
    if rollout.episode is not None:
        return list(rollout.episode.completion_messages)
    return [{"role": "assistant", "content": rollout.text}]


def _info(episode: Episode) -> dict[str, Any]:
    """The value of extra_info["episode"] of reward functions; the keys are a public interface."""
    return _messages(episode) | {
        "n_turns": episode.n_turns,
        "reward": episode.reward,
        "counts": episode.counts,
        "error": episode.error,
    }


def _messages(episode: Episode) -> dict[str, Any]:
    return {"asked": episode.prompt_messages, "said": episode.completion_messages}


def count_sums(rewards: Iterable[Reward]) -> dict[str, float]:
    """Sum of each count of the reward functions, over all rewards, also failed ones."""
    sums: dict[str, float] = collections.defaultdict(float)
    for reward in rewards:
        for name, value in reward.counts.items():
            sums[name] += value
    return dict(sums)
