"""Runs reward functions in worker processes, so that none of them can stop or crash a run.

A worker is a fresh Python process (not a fork: the parent has JAX's threads) without JAX. It leads
a separate session, so Ctrl-C reaches the parent only. If an answer exceeds the time limit, the
worker and all that it has started are killed and the call becomes an error. Workers that died, in a
call or idle, are replaced (rewards/call_runner.py).
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.arguments import batch_arguments, columns, missing_columns, single_arguments
from jaxrl.rewards.call_runner import CallKey, CallRunner, FunctionCall
from jaxrl.rewards.calls import CallSignature, RewardResult, is_score
from jaxrl.rewards.functions import check_start, metric_names, pool_option
from jaxrl.rewards.sandbox.folder import remove_left
from jaxrl.subprocesses.output import OutputLog, print_line
from jaxrl.types import Prompt, Reward, Rollout

_REMOVAL_S = 10.0  # for folders that programs of killed workers left
_GRACE_S = 2.0  # in which a worker reports responses of an async function that are late


class RewardPool:
    """The reward functions of a run. Use as a context manager, or call close().

    The constructor starts the workers and returns once all have imported the functions. It raises
    ValueError for an unknown name, a module that cannot be imported, a function of no known form
    (rewards/calls.py), a wrong number of weights, or a reward that cannot run on this machine.
    `decode` turns tokens into text with special tokens, for functions that declare prompt_str or
    query_str. `write` gets each line that the functions print. Not thread-safe.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        decode: Callable[[np.ndarray], str] | None = None,
        *,
        write: Callable[[str], None] = print_line,
    ):
        self.names = metric_names(cfg.functions)
        self._weights = cfg.weights or (1.0,) * len(self.names)
        if len(self._weights) != len(self.names):
            raise ValueError(
                f"{len(cfg.functions)} reward functions and {len(cfg.weights)} weights; set "
                "reward.weights to one number per function, or to () for 1.0 each"
            )
        for function in cfg.functions:
            check_start(function)
        self._cfg = cfg
        self._decode = decode
        self._limits_s = [pool_option(f, "timeout_s") or cfg.timeout_s for f in cfg.functions]
        self._concurrency = [int(pool_option(f, "concurrency")) for f in cfg.functions]
        self._batch_sizes = [int(pool_option(f, "batch_size")) for f in cfg.functions]
        self._runner = CallRunner(cfg, self._limits_s, OutputLog(write))
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
        name, and its further numbers as "name/key". If a function raises, hangs, kills its process
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
        return [results[item, function] for item in items]

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
            size = self._call_size(function, signature, len(rollouts))
            for items in itertools.batched(range(len(rollouts)), size):
                found = [rollouts[item] for item in items]
                n = len(items) if signature.batched or signature.is_async else None
                limit_s = self._limits_s[function]
                arguments = (
                    single_arguments(found[0], signature, limit_s, self._decode)
                    if n is None
                    else batch_arguments(found, signature, limit_s, self._decode)
                )
                if signature.is_async and not signature.batched:  # each response has the limit
                    limit_s = limit_s * -(-len(items) // self._concurrency[function]) + _GRACE_S
                numbers = tuple(first + item for item in items)
                calls.append(FunctionCall(numbers, function, n, arguments, limit_s))
        return sorted(calls, key=lambda call: call.n is None)

    def _call_size(self, function: int, signature: CallSignature, n: int) -> int:
        """Responses per call; one if the function takes one at a time."""
        per_worker = max(1, -(-n // self._cfg.workers))
        if signature.batched:
            return min(self._batch_sizes[function], per_worker)
        # so many that a slow response rarely leaves the worker idle
        return min(4 * self._concurrency[function], per_worker) if signature.is_async else 1

    def _combine(self, results: list[RewardResult]) -> Reward:
        """The reward from the results of all functions for one rollout."""
        parts: dict[str, float] = {}
        errors: list[str] = []
        for name, result in zip(self.names, results, strict=True):
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
        return Reward(float(reward), parts, "; ".join(errors))
