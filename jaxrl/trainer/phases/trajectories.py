"""Trajectories for samples.jsonl and the report: tokens, turns and times of chosen samples."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.packing import gather
from jaxrl.data.token_text import REPLACEMENT, TokenTexts
from jaxrl.json_text import Message
from jaxrl.tool_calls.calls import calls_of
from jaxrl.trainer.phases.mini_batches import MiniBatch
from jaxrl.trainer.phases.turns import token_runs
from jaxrl.types import Rollout, ScoredRollout

MAX_TOKENS = 4096  # of a sequence in a record; the middle of a longer one is left out
MAX_SEQUENCES = 8  # of an episode in a record
MAX_SPANS = 512
MAX_CHARS = 4000  # of a message of the prompt, and of the arguments of a call
MAX_MESSAGES = 64  # of the prompt
DIGITS = 4  # of numbers per token


@dataclasses.dataclass(frozen=True)
class TrainerValues:
    """Numbers of training for the response tokens of a sequence, float32 [response_len]."""

    advantages: np.ndarray | None = None
    policy_logp: np.ndarray | None = None  # of the policy before the step, by the trainer


# By the identity of a sequence's array of tokens, which its rollout and its training sample share
ValuesOf = Mapping[int, TrainerValues]


def token_values(mini_batches: Sequence[MiniBatch], *, scored: bool) -> dict[int, TrainerValues]:
    """The values of all sequences of a step; `scored`: the mini-batches have `old_logp`."""
    found: dict[int, TrainerValues] = {}
    for mini in mini_batches:
        found |= {id(s.tokens): TrainerValues(s.advantages) for s in mini.samples}
        if scored:
            idle = {id(s) for s in mini.idle}
            packed = [s for s in mini.samples if id(s) not in idle]  # demonstrations follow them
            logps = gather([p.batch.old_logp for p in mini.packed], mini.packed)
            pairs = zip(packed, logps, strict=False)
            found |= {id(s.tokens): TrainerValues(s.advantages, logp) for s, logp in pairs}
    return found


def trajectories(
    scored: Sequence[ScoredRollout], values: ValuesOf, renderer: ChatRenderer, n: int
) -> dict[int, dict[str, Any]]:
    """Index of the sample -> JSON-serializable trajectory, of `n` samples at most."""
    texts = TokenTexts(renderer)
    chosen = choose(scored, values, n)
    return {i: _trajectory(scored[i], values, texts, renderer) for i in chosen}


def choose(scored: Sequence[ScoredRollout], values: ValuesOf, n: int) -> list[int]:
    """Indices of `n` samples at most, ascending.

    They are, in turn, the next one with the lowest reward, the largest logprob difference and the
    most tokens.
    """
    orders: list[list[float]] = [
        [math.inf if one.error else -one.reward.value for one in scored],
        [_largest_difference(one.rollout, values) for one in scored],
        [float(sum(len(s.tokens) for s in one.rollout.sequences)) for one in scored],
    ]
    ranked = [sorted(range(len(scored)), key=lambda i: (-order[i], i)) for order in orders]
    turns = itertools.chain.from_iterable(zip(*ranked, strict=True))
    return sorted(itertools.islice(dict.fromkeys(turns), n))


def _largest_difference(rollout: Rollout, values: ValuesOf) -> float:
    """The largest |engine - trainer| logprob of the trained tokens; 0 if none was computed."""
    pairs = [(s, _differences(s, values)) for s in rollout.sequences]
    found = [np.abs(x[s.loss_mask]).max(initial=0.0) for s, x in pairs if x is not None]
    return float(max(found, default=0.0))


def _differences(rollout: Rollout, values: ValuesOf) -> np.ndarray | None:
    policy_logp = values.get(id(rollout.tokens), TrainerValues()).policy_logp
    return None if policy_logp is None else rollout.logp - policy_logp


def _trajectory(
    scored: ScoredRollout, values: ValuesOf, texts: TokenTexts, renderer: ChatRenderer
) -> dict[str, Any]:
    rollout, episode = scored.rollout, scored.rollout.episode
    spans = [] if episode is None else episode.spans[:MAX_SPANS]
    return {
        "reward_s": round(scored.reward.seconds, DIGITS),
        "parts": scored.reward.parts,
        "counts": {} if episode is None else episode.counts,
        "spans": [[phase, round(start, DIGITS), round(end, DIGITS)] for phase, start, end in spans],
        "n_sequences": len(rollout.sequences),
        "sequences": [
            _sequence(one, values, texts, renderer) for one in rollout.sequences[:MAX_SEQUENCES]
        ],
    }


def _sequence(
    rollout: Rollout, values: ValuesOf, texts: TokenTexts, renderer: ChatRenderer
) -> dict[str, Any]:
    """A conversation: its prompt by messages, its tokens with their values, and its turns.

    `kept` says which tokens there are: [[first, end], ...].
    """
    n, half = len(rollout.tokens), MAX_TOKENS // 2
    kept = [(0, n)] if n <= MAX_TOKENS else [(0, half), (n - half, n)]
    index = np.concatenate([np.arange(*span) for span in kept])
    known = values.get(id(rollout.tokens), TrainerValues())

    def numbers(x: np.ndarray | None) -> list[float] | None:
        return None if x is None else [float(f"{v:.{DIGITS}g}") for v in x[index].tolist()]

    messages = rollout.prompt_messages
    return {
        "prompt": [_shown(message) for message in messages[-MAX_MESSAGES:]],
        "n_prompt_messages": len(messages),
        "n_prompt_tokens": len(rollout.prompt.tokens),
        "n_tokens": n,
        "kept": [list(span) for span in kept],
        "tokens": list(_pieces(rollout.tokens[index].tolist(), texts, renderer)),
        "logp": numbers(rollout.logp),
        "difference": numbers(_differences(rollout, values)),
        "advantage": numbers(known.advantages),
        "mask": rollout.loss_mask[index].astype(int).tolist(),
        "turns": list(_turns(rollout)),
    }


def _shown(message: Message) -> list[str]:
    """[role, text]: the content and the calls of a message."""
    calls = [f"{name}({arguments})" for name, arguments in _calls(message)]
    text = "\n".join([str(message.get("content") or ""), *calls]).strip()
    return [message["role"], text[:MAX_CHARS]]


def _calls(message: Message) -> list[list[str]]:
    """[name, arguments as JSON] of the tool calls of a message."""
    return [
        [call.name, json.dumps(call.arguments, ensure_ascii=False)[:MAX_CHARS]]
        for call in calls_of(message)
    ]


def _turns(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """The runs of tokens, with roles, calls and rewards."""
    rewards = dict(rollout.episode.step_rewards) if rollout.episode is not None else {}
    for run in token_runs(rollout):
        turn: dict[str, Any] = {"start": run.start, "end": run.end}
        if run.sampled:
            calls = [call for message in run.messages for call in _calls(message)]
            yield turn | {"role": "assistant", "calls": calls, "reward": rewards.get(run.end)}
        else:
            roles = dict.fromkeys(message["role"] for message in run.messages)
            yield turn | {"role": ", ".join(roles) or "template"}


def _pieces(tokens: Sequence[int], texts: TokenTexts, renderer: ChatRenderer) -> Iterator[str]:
    """The text of each token; a character of several tokens is the text of the first of them."""
    for partial, run in itertools.groupby(tokens, lambda t: REPLACEMENT in texts[t].text):
        run = list(run)
        if partial:
            yield renderer.decode(run, skip_special=False)
            yield from itertools.repeat("", len(run) - 1)
        else:
            yield from (texts[token].text for token in run)
