"""Scores of a reward model: a sequence classifier that reads whole conversations.

It has its own tokenizer, chat template, mesh layout and token budget.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.turns import render_turns
from jaxrl.data.packing import gather, pack_samples
from jaxrl.data.tokenizer import check_tokenizer, load_tokenizer, stop_ids
from jaxrl.learner.critic import ValueScorer, reward_model_scorer
from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.models.files.tensor_shapes import SCORE
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.types import Reward, Rollout, TrainingSample
from sharding import to_device, to_host

PART = "reward_model"  # key of the score in Reward.parts


class RewardModel:
    """A sequence classifier. The score of a conversation is its output at the last token."""

    def __init__(
        self, scorer: ValueScorer, params: Decoder, renderer: ChatRenderer, stop: Sequence[int]
    ):
        self.scorer, self.params = scorer, params
        self._renderer, self._stop = renderer, stop
        self._mesh = jax.sharding.get_mesh()  # of training; callers may run on the engine's mesh

    def add_scores(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[Reward],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[Reward]:
        """Adds reward_model.weight times the score to each reward, and the score to its `parts`.

        A reward gets an error if the conversation is too long for a row, if the chat template
        rejects it, if its environment failed, or if the score is not finite. `on_batch` is called
        before each device call.
        """
        cfg = self.scorer.cfg
        sequences = [self._sequence(r) for r in rollouts]
        valid = [s for s in sequences if isinstance(s, TrainingSample)]
        with jax.set_mesh(self._mesh):
            params = to_device(self.params)
            scores = iter(last_scores(self.scorer, params, valid, on_batch).tolist())
        found = []
        for reward, sequence in zip(rewards, sequences, strict=True):
            if isinstance(sequence, TrainingSample):
                score = next(scores)
                error = "" if math.isfinite(score) else f"the score is {score}"
            else:
                score, error = 0.0, sequence
            found.append(with_score(reward, score, error, cfg))
        return found

    def _sequence(self, rollout: Rollout) -> TrainingSample | str:
        """The conversation as tokens of the reward model, or an error message.

        The tokens include the end token of the last turn.
        """
        if rollout.episode is not None and rollout.episode.error:
            return "the environment failed before the conversation ended"
        messages = [*rollout.prompt_messages, *rollout.completion_messages]
        try:
            last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
            [(tokens, _)] = render_turns(self._renderer, messages, self._stop, given=range(last))
        except ValueError as error:  # a template may reject the text of a response
            return str(error)
        longest = self.scorer.cfg.learner.row_lens[-1]
        if len(tokens) > longest:
            return (
                f"{len(tokens)} tokens in the reward model's tokenizer, more than a row of "
                f"{longest}; raise reward_model.token_budget"
            )
        return scored_sequence(tokens, rollout.prompt.id)


def open_reward_model(cfg: RunConfig, folder: Path, dtype: jnp.dtype) -> RewardModel:
    """Loads the model of config.reward_model from `folder` to the devices of the current mesh.

    Raises ValueError if it is not a sequence classifier with one label, or if its layout is
    invalid.
    """
    if SCORE not in find_tensors(folder):
        raise ValueError(
            f"{folder} has no {SCORE}, so it is not a sequence classifier; set "
            "config.reward_model.path to a reward model, or train one with "
            "python -m jaxrl.reward_model"
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
    return RewardModel(scorer, params, renderer, stop_ids(folder, tokenizer))


def scored_sequence(tokens: np.ndarray, prompt_id: int) -> TrainingSample:
    """A conversation as a sample whose single response token marks the position of the score.

    A packed row omits the last token of a sequence, so the response is one dummy token.
    """
    return TrainingSample(
        prompt_tokens=tokens,
        tokens=np.zeros(1, np.int32),
        loss_mask=np.ones(1, bool),
        prompt_id=prompt_id,
    )


def last_scores(
    scorer: ValueScorer,
    params: Decoder,
    sequences: Sequence[TrainingSample],
    on_batch: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Scores of samples made by `scored_sequence`, float32 [N]."""
    packed = pack_samples(sequences, scorer.cfg, scorer.n_ranks)
    found = gather(scorer.values(params, packed, on_batch), packed)
    return np.array([score[0] for score in found], np.float32)


def with_score(reward: Reward, score: float, error: str, cfg: RunConfig) -> Reward:
    """The reward with the score of the reward model added, or with its error."""
    if error:
        errors = [*filter(None, [reward.error]), f"{PART}: {error}"]
        return dataclasses.replace(reward, value=cfg.reward.error_value, error="; ".join(errors))
    value = reward.value if reward.error else reward.value + cfg.reward_model.weight * score
    return dataclasses.replace(reward, value=value, parts=reward.parts | {PART: score})
