"""The arguments of reward functions: verl's, TRL's and the columns of the dataset."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.rewards.calls import FORMS, CallSignature
from jaxrl.types import Episode, Prompt, Rollout

Decode = Callable[[np.ndarray], str]
# Columns that the dataset may have under another name: TRL's functions name them as their dataset.
_ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "label")


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
