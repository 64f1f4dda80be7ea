"""Scores of a reward model: a sequence classifier that reads whole conversations.

It has its own tokenizer, chat template, mesh layout and token budget.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.turns import render_turns
from jaxrl.data.packing import gather, pack_samples
from jaxrl.data.steps import StepFinder
from jaxrl.data.tokenizer import check_tokenizer, load_tokenizer, stop_ids
from jaxrl.learner.critic import ValueScorer, reward_model_scorer
from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import classifier_config, load_params
from jaxrl.models.files.tensor_shapes import SCORE
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.types import Demonstration, Reward, Rollout, TrainingSample
from sharding import to_device, to_host

SCORE_BIAS = "score.bias"
PART = "reward_model"  # key of the score in Reward.parts


class ResponseScore(NamedTuple):
    """The score of a response."""

    value: float = 0.0
    error: str = ""  # why there is none
    steps: tuple[tuple[int, float], ...] = ()  # as Reward.step_rewards
    labels: Mapping[str, float] = {}  # the outputs of a classifier with label_weights


class RewardModel:
    """A sequence classifier. Its scores are outputs at the last token, or at the ends of steps."""

    def __init__(
        self,
        scorer: ValueScorer,
        params: Decoder,
        renderer: ChatRenderer,
        stop: Sequence[int],
        policy_renderer: ChatRenderer | None = None,
    ):
        """`policy_renderer` finds the steps in responses, with reward_model.step_reward=tokens."""
        self.scorer, self.params = scorer, params
        cfg = scorer.cfg.reward_model
        self._steps = StepFinder(renderer, cfg.step_separator) if cfg.step_reward else None
        self._policy_steps = None
        if cfg.step_reward == "tokens":
            assert policy_renderer is not None
            self._policy_steps = StepFinder(policy_renderer, cfg.step_separator)
        self.labels: tuple[str, ...] = params.cfg.labels if cfg.label_weights else ()
        self._renderer, self._stop = renderer, stop
        self._mesh = jax.sharding.get_mesh()  # of training; callers may run on the engine's mesh

    def add_scores(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[Reward],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[Reward]:
        """Adds reward_model.weight times the score to each reward, and the score to its `parts`.

        The score of steps is as reward_model.step_reward says. A reward gets an error if the
        conversation is too long for a row, if the chat template rejects it or changes its steps, if
        its environment failed, or if the score is not finite. `on_batch` is called before each
        device call.
        """
        cfg = self.scorer.cfg
        sequences = [self._sequence(r) for r in rollouts]
        valid = [s for s in sequences if isinstance(s, TrainingSample)]
        with jax.set_mesh(self._mesh):
            params = to_device(self.params)
            scores = iter(sequence_scores(self.scorer, params, valid, on_batch))
        found = []
        for rollout, reward, sequence in zip(rollouts, rewards, sequences, strict=True):
            if isinstance(sequence, TrainingSample):
                score = self._read(rollout, next(scores))
            else:
                score = ResponseScore(error=sequence)
            found.append(with_score(reward, score, cfg))
        return found

    def _read(self, rollout: Rollout, scores: np.ndarray) -> ResponseScore:
        """The score of a response from the outputs of the model, [places] or [1, labels]."""
        cfg = self.scorer.cfg.reward_model
        if not np.isfinite(scores).all():
            return ResponseScore(error=f"the score is {scores[~np.isfinite(scores)][0]}")
        if self.labels:
            return weighted_score(scores.reshape(-1), self.labels, cfg.label_weights)
        if not cfg.step_reward:
            return ResponseScore(float(scores[0]))
        right = probabilities(scores)
        score = STEP_SCORES[cfg.step_reward](right)
        if self._policy_steps is None:
            return ResponseScore(score)
        ends = self._policy_steps.ends(rollout.tokens)
        if len(ends) != len(right):
            reason = (
                f"the response has {len(ends)} steps, and {len(right)} in the reward model's chat "
                "template; set reward_model.chat_template to one that renders all of its text, or "
                "reward_model.step_reward='min'"
            )
            return ResponseScore(error=reason)
        pairs = zip(ends, right.tolist(), strict=True)
        return ResponseScore(score, steps=tuple((end + 1, reward) for end, reward in pairs))

    def _sequence(self, rollout: Rollout) -> TrainingSample | str:
        """The conversation as tokens of the reward model, or an error message.

        The tokens include the end token of the last turn.
        """
        if rollout.episode is not None and rollout.episode.error:
            return "the environment failed before the conversation ended"
        messages = [*rollout.prompt_messages, *rollout.completion_messages]
        try:
            last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
            [(tokens, mask)] = render_turns(self._renderer, messages, self._stop, given=range(last))
        except ValueError as error:  # a template may reject the text of a response
            return str(error)
        longest = self.scorer.cfg.learner.row_lens[-1]
        if len(tokens) > longest:
            return (
                f"{len(tokens)} tokens in the reward model's tokenizer, more than a row of "
                f"{longest}; raise reward_model.token_budget"
            )
        if self._steps is None:
            return scored_sequence(tokens, rollout.prompt.id)
        of_answer = np.flatnonzero(mask)
        ends = of_answer[self._steps.ends(tokens[of_answer])]
        return scored_sequence(tokens, rollout.prompt.id, ends)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """float64: σ(score), the probability that a step is right."""
    return np.exp(-np.logaddexp(0.0, -scores.astype(np.float64)))


# reward_model.step_reward -> the score of a response by the probabilities of its steps
STEP_SCORES: dict[str, Callable[[np.ndarray], float]] = {
    "min": lambda right: float(right.min()),
    "mean": lambda right: float(right.mean()),
    "product": lambda right: float(right.prod()),
    "last": lambda right: float(right[-1]),
    "tokens": lambda right: float(right.sum()),  # each at its step
}


def open_reward_model(
    cfg: RunConfig,
    folder: Path,
    dtype: jnp.dtype,
    *,
    policy_renderer: ChatRenderer | None = None,
) -> RewardModel:
    """Loads the model of config.reward_model from `folder` to the devices of the current mesh.

    `policy_renderer` is as in `RewardModel`. Raises ValueError if it is not a sequence classifier
    without a bias, if reward_model.label_weights are not those of its labels, or if its layout is
    invalid.
    """
    tensors = find_tensors(folder)
    if SCORE not in tensors:
        raise ValueError(
            f"{folder} has no {SCORE}, so it is not a sequence classifier; set "
            "config.reward_model.path to a reward model, or train one with "
            "python -m jaxrl.reward_model"
        )
    backbone = classifier_config(folder)
    check_labels(cfg, folder, backbone.labels, has_bias=SCORE_BIAS in tensors)
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    scorer, decoder = reward_model_scorer(cfg, backbone, dtype)
    check_tokenizer(tokenizer, decoder.V)
    renderer = ChatRenderer(
        tokenizer,
        template=cfg.reward_model.chat_template,
        system_prompt=cfg.data.system_prompt,
        today=cfg.data.date,
    )
    with scorer.layout.on_mesh():
        params = load_params(folder, scorer.layout.rules, decoder, dtype)
        if "reward_model" in cfg.learner.offload:
            params = to_host(params)
    return RewardModel(scorer, params, renderer, stop_ids(folder, tokenizer), policy_renderer)


def check_labels(cfg: RunConfig, folder: Path, labels: Sequence[str], *, has_bias: bool) -> None:
    """Raises ValueError for a bias, or if reward_model.label_weights do not fit the labels."""
    head = f"config.reward_model.path={str(folder)!r} has a classifier of {len(labels)} labels"
    if has_bias:
        raise ValueError(
            f"{head} and a {SCORE_BIAS}; set it to one without a bias. Of a head of two logits "
            "(TRL's process reward models) that is one label with the difference of its rows, if "
            "its biases are equal"
        )
    model = cfg.reward_model
    if model.step_reward and len(labels) > 1:
        raise ValueError(
            f"{head}, and config.reward_model.step_reward={model.step_reward!r} reads one label at "
            "each step; set a process reward model of one label"
        )
    if len(model.label_weights or (1.0,)) != len(labels):
        raise ValueError(
            f"{head} ({', '.join(labels)}), but config.reward_model.label_weights="
            f"{model.label_weights} has {len(model.label_weights)} weights; give one weight for "
            f"each label in this order, for example {(1.0,) + (0.0,) * (len(labels) - 1)}"
        )


def weighted_score(
    outputs: np.ndarray, labels: Sequence[str], weights: Sequence[float]
) -> ResponseScore:
    """Σ_k w_k s_k of the outputs s [K] of K labels."""
    value = float(np.asarray(weights, np.float64) @ outputs.astype(np.float64))
    return ResponseScore(value, labels=dict(zip(labels, outputs.tolist(), strict=True)))


def scored_sequence(
    tokens: np.ndarray, prompt_id: int, places: Sequence[int] | np.ndarray = ()
) -> TrainingSample:
    """A conversation as a sample whose loss mask is true after each token with a score.

    These tokens have the ascending indices `places`, or are the last one alone. A packed row omits
    the last token of a sequence, so a dummy token follows the conversation.
    """
    at = np.array([len(tokens) - 1] if len(places) == 0 else places)
    mask = np.zeros(len(tokens) - at[0], bool)
    mask[at - at[0]] = True
    return TrainingSample(
        prompt_tokens=tokens[: at[0] + 1],
        tokens=np.append(tokens[at[0] + 1 :], 0).astype(np.int32),
        loss_mask=mask,
        prompt_id=prompt_id,
    )


def to_sequence(item: Demonstration) -> TrainingSample:
    """Prompt and completion as one sequence, scored at its last token."""
    return scored_sequence(np.concatenate([item.prompt_tokens, item.tokens]), item.id)


def sequence_scores(
    scorer: ValueScorer,
    params: Decoder,
    sequences: Sequence[TrainingSample],
    on_batch: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """Scores of samples made by `scored_sequence`, float32 [number of places] each.

    [number of places, K] if the model has K > 1 labels.
    """
    packed = pack_samples(sequences, scorer.cfg, scorer.n_ranks)
    found = gather(scorer.values(params, packed, on_batch), packed)
    return [
        np.asarray(scores, np.float32)[s.loss_mask]
        for scores, s in zip(found, sequences, strict=True)
    ]


def last_scores(
    scorer: ValueScorer,
    params: Decoder,
    sequences: Sequence[TrainingSample],
    on_batch: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Scores of samples made by `scored_sequence` at their last token, float32 [N] or [N, K]."""
    found = sequence_scores(scorer, params, sequences, on_batch)
    return np.array([scores[-1] for scores in found], np.float32)


def with_score(reward: Reward, score: ResponseScore, cfg: RunConfig) -> Reward:
    """The reward with the score of the reward model added, or with its error."""
    if score.error:
        errors = [*filter(None, [reward.error]), f"{PART}: {score.error}"]
        return dataclasses.replace(reward, value=cfg.reward.error_value, error="; ".join(errors))
    value = reward.value if reward.error else reward.value + cfg.reward_model.weight * score.value
    parts = reward.parts | {PART: score.value}
    parts |= {f"{PART}/{label}": output for label, output in score.labels.items()}
    return dataclasses.replace(reward, value=value, parts=parts, step_rewards=score.steps)
