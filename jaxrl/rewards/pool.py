"""Runs reward functions in worker processes, so that none of them can stop or crash a run.

A worker is a fresh Python process (not a fork: the parent has JAX's threads) without JAX. It leads
a separate session, so Ctrl-C reaches the parent only. If an answer exceeds the time limit, the
worker and all its children are killed and the call becomes an error. Workers that died, in a call
or idle, are replaced (rewards/call_runner.py).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.call_runner import Call, CallRunner
from jaxrl.rewards.functions import (
    TEXT_ARGUMENTS,
    CallSignature,
    check_start,
    metric_names,
    pool_option,
)
from jaxrl.rewards.messages import Result
from jaxrl.types import Episode, Reward, Rollout
from jaxrl.workers.output import OutputLog, print_line


class RewardPool:
    """The reward functions of a run. Use as a context manager, or call close().

    The constructor starts the workers and returns once all have imported the functions. It raises
    ValueError for an unknown name, a module that cannot be imported, a wrong number of weights, or
    a reward that cannot run on this machine.
    `decode` turns tokens into text with special tokens, for functions that declare TEXT_ARGUMENTS.
    `write` gets each line that the functions print. Not thread-safe.
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
        self._batch_sizes = [int(pool_option(f, "batch_size")) for f in cfg.functions]
        self._runner = CallRunner(cfg, self._limits_s, OutputLog(write))

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Kills all workers and waits for them."""
        self._runner.close()

    def score(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One reward per rollout, in order.

        The value is the weighted sum of the functions. `parts` has the score of each function by
        name, and its further numbers as "name/key". If a function raises, hangs, kills its process
        or does not return a finite number, the value is cfg.error_value and `error` has the reason.

        Functions get verl's arguments. extra_info has the prompt's `extra`, "finish" (as in
        Rollout), "response_len" (tokens) and, with an environment, "episode". Raises
        ChildProcessError if no worker is left and none can be started.
        """
        results = self._runner.run(self._calls(rollouts))
        return [
            self._combine([results[item, f] for f in range(len(self.names))])
            for item in range(len(rollouts))
        ]

    def _calls(self, rollouts: Sequence[Rollout]) -> list[Call]:
        """All calls of all functions; batches come first because they take longest."""
        calls = []
        for function, signature in enumerate(self._runner.signatures):
            per_worker = -(-len(rollouts) // self._cfg.workers)
            size = max(1, min(self._batch_sizes[function], per_worker)) if signature.batched else 1
            for items in itertools.batched(range(len(rollouts)), size):
                found = [self._arguments(rollouts[item], signature) for item in items]
                n: int | None = None
                arguments: dict[str, Any] = found[0]
                if signature.batched:
                    n = len(items)
                    arguments = {f"{name}s": [one[name] for one in found] for name in found[0]}
                if "timeout_s" in signature.optional:
                    arguments["timeout_s"] = self._limits_s[function]
                calls.append(Call(items, function, n, arguments))
        return sorted(calls, key=lambda call: call.n is None)

    def _arguments(self, rollout: Rollout, signature: CallSignature) -> dict[str, Any]:
        """verl's arguments, and the texts that the function declares."""
        prompt = rollout.prompt
        extra = {"finish": rollout.finish, "response_len": len(rollout.tokens)}
        if rollout.episode is not None:
            extra["episode"] = _episode_info(rollout.episode)
        arguments: dict[str, Any] = {
            "data_source": prompt.source,
            "solution_str": rollout.text,
            "ground_truth": prompt.answer,
            "extra_info": prompt.extra | extra,
        }
        if texts := [name for name in TEXT_ARGUMENTS if name in signature.optional]:
            assert self._decode is not None, f"{texts} need a tokenizer"
            query = np.concatenate([prompt.tokens, rollout.tokens])
            known = {"prompt_str": prompt.tokens, "query_str": query}
            arguments |= {name: self._decode(known[name]) for name in texts}
        return arguments

    def _combine(self, results: list[Result]) -> Reward:
        """The reward from the results of all functions for one rollout."""
        parts: dict[str, float] = {}
        errors: list[str] = []
        for name, result in zip(self.names, results, strict=True):
            if result.error:
                errors.append(f"{name}: {result.error}")
                continue
            parts[name] = result.score
            parts |= {f"{name}/{key}": value for key, value in result.parts.items()}
        reward = self._cfg.error_value
        if not errors:
            reward = sum(w * r.score for w, r in zip(self._weights, results, strict=True))
        return Reward(float(reward), parts, "; ".join(errors))


def _episode_info(episode: Episode) -> dict[str, Any]:
    """What reward functions get as extra_info["episode"]; the keys are a public interface."""
    return {
        "asked": episode.prompt_messages,
        "said": episode.completion_messages,
        "n_turns": episode.n_turns,
        "reward": episode.reward,
        "counts": episode.counts,
        "error": episode.error,
    }
