"""The things that travel between the rooms."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct

Tree = Any  # a pytree of arrays, specs, shardings, ...
Array = Any  # in a pytree dataclass: jax.Array, np.ndarray on the host, or what tree_map puts there
Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, weight); divided once, globally


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question. `id` is its row in the data set and seeds its samples."""

    id: int
    messages: tuple[dict[str, str], ...]
    tokens: np.ndarray  # int32 [prompt_len], chat template applied
    answer: str  # ground truth that the reward compares with
    source: str = "default"  # verl's data_source: picks the reward, groups the metrics
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Episode:
    """What happened between the model and its environment."""

    asked: tuple[dict[str, str], ...] = ()  # the conversation that it began with
    said: tuple[dict[str, str], ...] = ()  # behind it: turns of the model, answers between them
    n_turns: int = 0  # of the model
    reward: float = 0.0  # sum over the turns
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # of the environment
    error: str = ""  # why the environment gave no answer; "" when it did


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled answer to one prompt."""

    prompt: Prompt
    sample: int  # 0..n-1 within the prompt's group
    tokens: np.ndarray  # int32 [response_len], the stop token included
    logp: np.ndarray  # float32 [response_len], of softmax(logits / temperature), unfiltered
    version: int  # optimizer step of the weights that sampled it
    finish: str  # "stop" | "length", of an episode also "turns" | "error"
    text: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    reward_error: str = ""  # why the reward function gave no value; "" when it gave one
    own: np.ndarray | None = None  # bool [response_len], tokens that the model wrote; None = all
    episode: Episode | None = None  # where the prompt was answered in an environment
    baseline: float = 0.0  # reward of the greedy response to the same prompt, where it is needed
    advantages: np.ndarray | None = None  # float32 [response_len]
    values: np.ndarray | None = None  # float32 [response_len], a critic's before the step
    returns: np.ndarray | None = None  # float32 [response_len], what they are to become
    selected: np.ndarray | None = (
        None  # bool [response_len], tokens that clip_cov and kl_cov single out
    )

    @property
    def asked(self) -> tuple[dict[str, str], ...]:
        """The messages that the model answered first."""
        return self.prompt.messages if self.episode is None else self.episode.asked

    @property
    def said(self) -> tuple[dict[str, str], ...]:
        """The messages behind them, of which the model's are the assistant's."""
        answer = {"role": "assistant", "content": self.text}
        return (answer,) if self.episode is None else self.episode.said

    @property
    def own_mask(self) -> np.ndarray:
        """bool [response_len]: tokens that the loss is over; those of others, as a tool's answer, are only read."""
        return np.ones(len(self.tokens), bool) if self.own is None else self.own

    @property
    def n_own(self) -> int:
        return int(self.own_mask.sum())


@struct.dataclass
class Batch:
    """Packed rows. In every field index t speaks about targets[:, t], the token after tokens[:, t]."""

    tokens: Array  # int32 [B, T]
    targets: Array  # int32 [B, T]
    segments: Array  # int32 [B, T], 1.. per sequence in its row, 0 = padding
    positions: Array  # int32 [B, T], restart with every segment
    mask: Array  # float32 [B, T], 1 where targets[t] is a response token that the model wrote
    response_len: Array  # float32 [B, T], such tokens of the token's sequence; 1 at padding
    advantages: Array  # float32 [B, T]
    values: Array  # float32 [B, T], of a critic before the step
    returns: Array  # float32 [B, T], what its values are to become
    selected: Array  # float32 [B, T], 1 at the tokens that clip_cov and kl_cov single out
    rollout_logp: Array  # float32 [B, T], from the engine
    old_logp: Array  # float32 [B, T], of the policy at the start of the step
    ref_logp: Array  # float32 [B, T], of the reference policy


@struct.dataclass
class TrainState:
    """All that an update changes. `params` is the tree that the rollout engine reads, too."""

    params: Tree  # compute dtype
    opt_state: Tree  # float32 moments, and the float32 master weights if params are narrower
    step: Array  # int32 [], optimizer steps taken
    ref: Tree = None  # only in checkpoints: the reference model of a run that refreshes it
    critic: Tree = None  # only in checkpoints: the state of a critic of its own
