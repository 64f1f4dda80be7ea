"""The data types that packages pass to each other, one per stage of the pipeline.

    Prompt -> Rollout -> ScoredRollout -> TrainingSample -> Batch

SFT and preference training enter the pipeline with a `Demonstration` instead of a `Rollout`.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import struct

from jaxrl.json_text import Message

Tree = Any  # a pytree of arrays, specs, shardings, ...
Array = Any  # in a pytree dataclass: jax.Array, np.ndarray on the host, or a result of tree_map
Decode = Callable[[np.ndarray], str]  # of tokens, with special tokens
Grid = tuple[int, int, int]  # of an image: frames, rows and columns of patches


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """An image as a model reads it. Its patches are made when they are read, not kept."""

    grid: Grid
    n_tokens: int  # placeholders in the prompt
    digest: str  # SHA-256 of patches and grid, for prefix caching
    load: Callable[[], np.ndarray] = dataclasses.field(repr=False, compare=False)
    # A small JPEG for people; None: the image has no picture
    preview: Callable[[], bytes] | None = dataclasses.field(default=None, repr=False, compare=False)
    # The bytes of its file, for environments and agents
    encoded: Callable[[], bytes] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def patches(self) -> np.ndarray:
        """float32 [P, features], in the order of the model's tower."""
        return self.load()


@dataclasses.dataclass(frozen=True)
class PlacedImage:
    """An image in the tokens of a sequence, which has a placeholder for each of its features."""

    start: int  # index of the first placeholder in the tokens
    image: ImageInput

    @property
    def end(self) -> int:
        return self.start + self.image.n_tokens


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of the dataset."""

    id: int  # row in the dataset; part of the random seed of its samples
    messages: tuple[Message, ...]
    tokens: np.ndarray  # int32 [prompt_len], chat template applied
    answer: Any  # ground truth for the reward functions: text or another JSON value
    source: str = "default"  # verl's data_source: selects the reward, groups the metrics
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_text: bool = False  # the row's prompt is text, not messages
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's schemas of what the chat template offers
    images: tuple[PlacedImage, ...] = ()  # in the order of their places
    # int32 [3, prompt_len], positions by axis (data/images/mrope.py); None: one position each
    axis_positions: np.ndarray | None = None

    @property
    def answer_text(self) -> str:
        """The answer; as JSON if it is not text."""
        is_text = isinstance(self.answer, str)
        return self.answer if is_text else json.dumps(self.answer, ensure_ascii=False)


# (what an episode did, start, end), in seconds since it began: "queue", "engine", "environment", or
# "agent", the time of its whole process
PhaseSpan = tuple[str, float, float]


@dataclasses.dataclass(frozen=True)
class Episode:
    """The conversation between the policy and an environment in one rollout."""

    prompt_messages: tuple[Message, ...] = ()  # the messages that reset returned
    completion_messages: tuple[Message, ...] = ()  # assistant turns and observations after them
    n_turns: int = 0  # assistant turns
    # (response tokens up to the end of the turn, reward) of every call of `step`
    step_rewards: tuple[tuple[int, float], ...] = ()
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # the environment's metrics
    error: str = ""  # why the environment failed; "" if it did not
    spans: tuple[PhaseSpan, ...] = dataclasses.field(default=(), compare=False)

    @property
    def reward(self) -> float:
        """Sum over the turns."""
        return sum((reward for _, reward in self.step_rewards), 0.0)


@dataclasses.dataclass(frozen=True)
class TokenSets:
    """One set of token ids per position; an empty set means all tokens."""

    counts: np.ndarray  # int64 [n], ids of each position
    ids: np.ndarray  # int32 [counts.sum()], of the first position first


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled completion of a prompt, as generation returns it."""

    prompt: Prompt
    sample: int  # 0..n-1 within the prompt's group
    tokens: np.ndarray  # int32 [response_len], stop token included
    logp: np.ndarray  # float32 [response_len], of softmax(logits / temperature), without filters
    loss_mask: np.ndarray  # bool [response_len], False at tokens that the model did not sample
    # int32 [response_len], the policy version (training steps before it) that sampled each token;
    # tokens that the model did not sample have the version of the token before them
    versions: np.ndarray
    finish: str  # "stop" | "length"; for episodes also "turns" | "error"
    text: str = ""
    # float32 [response_len], of the distribution that the tokens were sampled from: with top_k,
    # top_p and min_p; None: equal to `logp`
    behavior_logp: np.ndarray | None = None
    support: TokenSets | None = None  # the tokens that the filters kept; None if not recorded
    # uint8 or uint16 [response_len, L, k], of the L layers with experts: those of the forward pass
    # that sampled each token; None if not recorded, 0 at tokens that the model did not sample
    experts: np.ndarray | None = None
    episode: Episode | None = None  # None if the prompt was answered without an environment
    images: tuple[PlacedImage, ...] = ()  # of prompt and response, in the order of their places
    # int32 [3, prompt_len + response_len], as those of prompts
    axis_positions: np.ndarray | None = None
    role: str = ""  # the name of an agent's conversation: `model` of its requests
    # Further sequences of the episode, if it had several conversations (rollout/agents/)
    branches: tuple["Rollout", ...] = ()

    @property
    def sequences(self) -> tuple["Rollout", ...]:
        """This sequence and the branches: each becomes a training sample."""
        return (self, *self.branches)

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages before the first assistant turn."""
        return self.prompt.messages if self.episode is None else self.episode.prompt_messages

    @property
    def completion_messages(self) -> tuple[Message, ...]:
        """All messages after the prompt: assistant turns and, in episodes, observations."""
        if self.episode is None:
            return ({"role": "assistant", "content": self.text},)
        return self.episode.completion_messages

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclasses.dataclass(frozen=True)
class Reward:
    """The reward of one rollout."""

    value: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # score per reward function
    error: str = ""  # why a reward function failed; "" if none did
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # summed over a step
    feedback: str = ""  # text of the reward functions, for a self-distillation teacher
    seconds: float = dataclasses.field(default=0.0, compare=False)  # of the slowest function
    # (response tokens up to the end of a step, the score of the step), if each is a reward
    step_rewards: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its reward."""

    rollout: Rollout
    reward: Reward

    @property
    def error(self) -> str:
        """Why the reward or the environment failed; "" if neither did."""
        episode = self.rollout.episode
        return self.reward.error or ("" if episode is None else episode.error)


@dataclasses.dataclass(frozen=True)
class TeacherTokens:
    """The most likely ids of a teacher at every response token."""

    ids: np.ndarray  # int32 [response_len, k]
    logp: np.ndarray  # float32 [response_len, k], under the teacher; 0 outside the loss mask

    def __getitem__(self, kept: slice) -> "TeacherTokens":
        return TeacherTokens(self.ids[kept], self.logp[kept])


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A given completion, read from an SFT or preference dataset; the policy did not sample it."""

    id: int  # row in the dataset
    prompt_tokens: np.ndarray  # int32 [prompt_len], chat template applied
    tokens: np.ndarray  # int32 [response_len], stop token included
    loss_mask: np.ndarray  # bool [response_len], True at tokens to learn
    source: str = "default"
    images: tuple[PlacedImage, ...] = ()  # in the order of their places
    axis_positions: np.ndarray | None = None  # int32 [3, prompt_len + response_len]
    teacher: TeacherTokens | None = None  # None: its likelihood is learned

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclasses.dataclass(frozen=True)
class TrainingSample:
    """One sequence with everything that the loss needs. Packing turns samples into a `Batch`.

    Optional fields are filled in the order in which a step computes them; None packs as zeros.
    """

    prompt_tokens: np.ndarray  # int32 [prompt_len]
    tokens: np.ndarray  # int32 [response_len]
    loss_mask: np.ndarray  # bool [response_len], True at tokens that are in the loss
    rollout_logp: np.ndarray | None = None  # float32 [response_len]; None if not sampled
    behavior_logp: np.ndarray | None = None  # float32 [response_len]; None: equal to rollout_logp
    support: TokenSets | None = None  # tokens that ratios are restricted to; None: all
    experts: np.ndarray | None = None  # [response_len, L, k], to replay where loss_mask is True
    images: tuple[PlacedImage, ...] = ()  # in the order of their places
    # int32 [3, prompt_len + response_len], as those of prompts
    axis_positions: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None  # float32 [response_len], at the ends of turns
    anchors: tuple[
        bytes, ...
    ] = ()  # hash of the state that each turn answers, if they are compared
    # float32 [response_len], the critic's before the step; [response_len, K] of K labels
    values: np.ndarray | None = None
    # float32 [response_len], |∇ log π(y_t)|² by the logits, 1 - 2 π(y_t) + Σ π²
    score_norms: np.ndarray | None = None
    advantages: np.ndarray | None = None  # float32 [response_len]
    returns: np.ndarray | None = None  # float32, as `values`: targets of the value loss
    selected: np.ndarray | None = None  # bool [response_len], tokens that clip_cov, kl_cov select
    # int32 [response_len], the parts of the objective that a token is in: bit k is set for
    # algorithm.parts[k]
    parts: np.ndarray | None = None
    teacher_prompt: np.ndarray | None = None  # int32, what a self-distillation teacher reads first
    teacher: TeacherTokens | None = None  # None: no teacher has read the response
    # float32 [response_len], of a teacher that scores before packing; None: scored in the batch
    ref_logp: np.ndarray | None = None
    unread: bool = False  # its teacher could not read it, so that it is left out of the update
    role: str = ""  # the name of an agent's conversation
    role_reward: float | None = None  # that the agent gave to this conversation
    role_baseline: float = 0.0  # running mean of the rewards of its role, before the step
    truncated: bool = False  # cut off at the token limit
    source: str = "default"  # of the prompt
    group: int = 0  # index of the prompt in the step; the samples of a group are adjacent
    prompt_id: int = 0  # for error messages
    sample: int = 0  # index in the prompt's group, for error messages
    # Index among the samples of its episode, which are adjacent and have one reward together. An
    # episode without branches is one sample.
    branch: int = 0
    episode_loss_tokens: int | None = None  # of all samples of the episode; None: only this one

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def share(self) -> float:
        """The part of one sequence that it counts as in means over sequences.

        The samples of an episode share it in proportion to their loss tokens.
        """
        return self.n_loss_tokens / self.episode_loss_tokens if self.episode_loss_tokens else 1.0


@struct.dataclass
class TeacherBatch:
    """`TeacherTokens` of packed sequences."""

    ids: Array  # int32 [B, T, k]
    logp: Array  # float32 [B, T, k]
    known: Array  # float32 [B, T], 1 at the responses that a teacher has read


@struct.dataclass
class Batch:
    """Packed sequences.

    In every field, index t describes targets[:, t], the token after tokens[:, t].
    """

    tokens: Array  # int32 [B, T]
    targets: Array  # int32 [B, T]
    segments: Array  # int32 [B, T], 1.. per sequence in its row, 0 = padding
    positions: Array  # int32 [B, T], index in the sequence
    # With shared prefixes a segment starts after the tokens that earlier ones of the row have
    until: Array  # int32 [B, T], last place of the row that attends to the token; -1 at padding
    copies: Array  # int32 [B, T], sequences of the row that contain the token; 0 at padding
    mask: Array  # float32 [B, T], 1 if targets[t] is in the loss
    response_len: Array  # float32 [B, T], loss tokens of the token's episode; 1 at padding
    advantages: Array  # float32 [B, T]
    values: Array  # float32 [B, T], the critic's before the step; [B, T, K] of K labels
    returns: Array  # float32, as `values`: targets of the value loss
    selected: Array  # float32 [B, T], 1 at the tokens that clip_cov, kl_cov, top_entropy select
    rollout_logp: Array  # float32 [B, T], from the engine, without sampling filters
    behavior_logp: Array  # float32 [B, T], from the engine, with them: sampled from it
    old_logp: Array  # float32 [B, T], of the policy at the start of the step
    ref_logp: Array  # float32 [B, T], of the reference policy
    # The tokens that ratios are restricted to: data.support.PackedSets on the host, bitsets
    # uint32 [B, T, W] on the device; None: all
    support: Any = None
    # The experts of tokens[:, t] to replay: data.routing.PackedExperts on the host, int16
    # [B, T, L, k] on the device, negative where the router chooses; None: everywhere
    experts: Any = None
    # The features of images: data.image_places.PackedImages on the host,
    # models.image_features.ImageFeatures on the device; None: no images
    images: Any = None
    axis_positions: Any = None  # int32 [B, T, 3], positions of M-RoPE; None: those of `positions`
    parts: Any = None  # int32 [B, T], as TrainingSample.parts; None: no parts are named
    teacher: Any = None  # TeacherBatch; None: no teacher is compared by its most likely ids


@struct.dataclass
class TrainState:
    """The state that an update changes. The rollout engine reads the same `params` tree."""

    params: Tree  # compute dtype
    # Moments, and float32 master weights if params are narrower; a FlatTree after an update.
    opt_state: Tree
    step: Array  # int32 [], optimizer steps taken
    ref: Tree = None  # only in checkpoints: the reference model, if the run refreshes it
    critic: Tree = None  # only in checkpoints: the state of a separate critic
