"""Scores of a reward model: a sequence classifier that reads whole conversations.

It has its own tokenizer, chat template, mesh layout and token budget.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

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
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.models.files.tensor_shapes import SCORE
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.types import Reward, Rollout, TrainingSample
from sharding import to_device, to_host

SCORE_BIAS = "score.bias"
PART = "reward_model"  # key of the score in Reward.parts


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
            steps, score, error = (), 0.0, ""
            if isinstance(sequence, TrainingSample):
                steps, score, error = self._read(rollout, next(scores))
            else:
                error = sequence
            scored = with_score(reward, score, error, cfg)
            found.append(dataclasses.replace(scored, step_rewards=steps))
        return found

    def _read(
        self, rollout: Rollout, scores: np.ndarray
    ) -> tuple[tuple[tuple[int, float], ...], float, str]:
        """(rewards of steps as Reward.step_rewards, score, error) of a response."""
        kind = self.scorer.cfg.reward_model.step_reward
        if not np.isfinite(scores).all():
            return (), 0.0, f"the score is {scores[~np.isfinite(scores)][0]}"
        if not kind:
            return (), float(scores[0]), ""
        right = probabilities(scores)
        score = STEP_SCORES[kind](right)
        if self._policy_steps is None:
            return (), score, ""
        ends = self._policy_steps.ends(rollout.tokens)
        if len(ends) != len(right):
            reason = (
                f"the response has {len(ends)} steps, and {len(right)} in the reward model's chat "
                "template; set reward_model.chat_template to one that renders all of its text, or "
                "reward_model.step_reward='min'"
            )
            return (), 0.0, reason
        pairs = zip(ends, right.tolist(), strict=True)
        return tuple((end + 1, reward) for end, reward in pairs), score, ""

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
    with one label, or if its layout is invalid.
    """
    tensors = find_tensors(folder)
    if SCORE not in tensors:
        raise ValueError(
            f"{folder} has no {SCORE}, so it is not a sequence classifier; set "
            "config.reward_model.path to a reward model, or train one with "
            "python -m jaxrl.reward_model"
        )
    if (n_labels := tensors[SCORE].shape[0]) != 1 or SCORE_BIAS in tensors:
        bias = f" and a {SCORE_BIAS}" if SCORE_BIAS in tensors else ""
        raise ValueError(
            f"config.reward_model.path={str(folder)!r} has a classifier of {n_labels} labels{bias};"
            " set it to one of 1 label without a bias. Of a head of two logits (TRL's process "
            "reward models) that is the difference of its rows, if its biases are equal"
        )
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    scorer, decoder = reward_model_scorer(cfg, model_config(folder), dtype)
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


def sequence_scores(
    scorer: ValueScorer,
    params: Decoder,
    sequences: Sequence[TrainingSample],
    on_batch: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """Scores of samples made by `scored_sequence`, float32 [number of places] each."""
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
    """Scores of samples made by `scored_sequence` at their last token, float32 [N]."""
    found = sequence_scores(scorer, params, sequences, on_batch)
    return np.array([scores[-1] for scores in found], np.float32)


def with_score(reward: Reward, score: float, error: str, cfg: RunConfig) -> Reward:
    """The reward with the score of the reward model added, or with its error."""
    if error:
        errors = [*filter(None, [reward.error]), f"{PART}: {error}"]
        return dataclasses.replace(reward, value=cfg.reward.error_value, error="; ".join(errors))
    value = reward.value if reward.error else reward.value + cfg.reward_model.weight * score
    return dataclasses.replace(reward, value=value, parts=reward.parts | {PART: score})
