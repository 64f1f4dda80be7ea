"""Groups in flight in the checkpoint: their place in the data, tokens, logprobs and versions.

Prompts are not saved but drawn again: each draw has the state of the data iterator before it.
Episodes in an environment cannot be saved; they begin again.
"""

import base64
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.routing import join_experts
from jaxrl.data.support import join
from jaxrl.rollout.schedule.buffer import NOT_STARTED, PromptGroup
from jaxrl.rollout.turns import FIELDS, Response
from jaxrl.types import Prompt, Reward, TokenSets

# The model has sampled all tokens of a response in flight, so their loss mask is not saved.
SAVED = {name: dtype for name, dtype in FIELDS.items() if name != "loss_mask"}


@dataclasses.dataclass(frozen=True)
class GroupState:
    """A group at one moment. Responses only grow, so their lengths are enough to keep it."""

    group: PromptGroup
    version: int
    lengths: tuple[int, ...]  # tokens of the responses; none if it was not started
    finish: tuple[str, ...]
    rewards: list[Reward] | None

    @property
    def responses(self) -> list[Response]:
        """Those that the group had; it may have been started since."""
        return self.group.responses[: len(self.lengths)]

    def json(self) -> dict[str, Any]:
        """Everything except the arrays of the responses."""
        return {
            "draw": self.group.draw,
            "index": self.group.index,
            "seed": self.group.seed,
            "version": self.version,
            "lengths": self.lengths,
            "finish": self.finish,
            "restricted": [bool(r.support) for r in self.responses],
            "routed": [bool(r.experts) for r in self.responses],
            "rewards": self.rewards and [dataclasses.asdict(r) for r in self.rewards],
        }


def group_states(groups: Iterable[PromptGroup]) -> list[GroupState]:
    """The groups as they are now."""
    return [
        GroupState(
            group,
            group.version if group.responses else NOT_STARTED,
            tuple(len(r.tokens) for r in group.responses),
            tuple(r.finish for r in group.responses),
            group.rewards if group.responses else None,
        )
        for group in groups
    ]


def encode(states: Sequence[GroupState]) -> dict[str, Any]:
    """JSON of the groups. The arrays are a compressed npz file in base64."""
    pairs = [(r, n) for s in states for r, n in zip(s.responses, s.lengths, strict=True)]
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate(
            [np.zeros(0, t), *(np.array(getattr(r, name)[:n], t) for r, n in pairs)]
        )
        for name, t in SAVED.items()
    }
    sets = [join(r.support, n) for r, n in pairs if r.support]
    arrays["counts"] = np.concatenate([np.zeros(0, np.int64), *(s.counts for s in sets)])
    arrays["ids"] = np.concatenate([np.zeros(0, np.int32), *(s.ids for s in sets)])
    if routed := [join_experts(r.experts, n) for r, n in pairs if r.experts]:
        arrays["experts"] = np.concatenate(routed)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return {
        "groups": [state.json() for state in states],
        "arrays": base64.b64encode(file.getvalue()).decode(),
    }


def decode(saved: Mapping[str, Any], prompt_of: Callable[[int, int], Prompt]) -> list[PromptGroup]:
    """The groups of `encode`; `prompt_of` gives the prompt of (draw, index in the draw)."""
    with np.load(io.BytesIO(base64.b64decode(saved["arrays"])), allow_pickle=False) as file:
        reader = _Reader(dict(file))
    groups = []
    for entry in saved["groups"]:
        prompt = prompt_of(entry["draw"], entry["index"])
        routed = entry.get("routed", [False] * len(entry["lengths"]))  # none in older checkpoints
        names = "lengths", "finish", "restricted"
        columns = zip(*(entry[name] for name in names), routed, strict=True)
        groups.append(
            PromptGroup(
                prompt,
                seed=entry["seed"],
                draw=entry["draw"],
                index=entry["index"],
                responses=[
                    reader.response(prompt, sample, *column)
                    for sample, column in enumerate(columns)
                ],
                version=entry["version"],
                rewards=entry["rewards"] and [_reward(reward) for reward in entry["rewards"]],
            )
        )
    return groups


def _reward(saved: Mapping[str, Any]) -> Reward:
    steps = tuple((end, score) for end, score in saved.get("step_rewards", ()))
    return Reward(**{**saved, "step_rewards": steps})


class _Reader:
    """Reads the responses from the joined arrays, in order."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays, self._n, self._n_sets, self._n_ids = arrays, 0, 0, 0
        self._n_routed = 0

    def response(
        self, prompt: Prompt, sample: int, n: int, finish: str, restricted: bool, routed: bool
    ) -> Response:
        first, self._n = self._n, self._n + n
        fields = {name: self.arrays[name][first : self._n].tolist() for name in SAVED}
        support = [self._sets(n)] if restricted else []
        first, self._n_routed = self._n_routed, self._n_routed + n * routed
        experts = [self.arrays["experts"][first : self._n_routed]] if routed else []
        kept: dict[str, Any] = {"support": support, "experts": experts, "finish": finish}
        return Response(prompt, sample, **fields, loss_mask=[True] * n, **kept)

    def _sets(self, n: int) -> TokenSets:
        first, self._n_sets = self._n_sets, self._n_sets + n
        counts = self.arrays["counts"][first : self._n_sets]
        first, self._n_ids = self._n_ids, self._n_ids + int(counts.sum())
        return TokenSets(counts, self.arrays["ids"][first : self._n_ids])
