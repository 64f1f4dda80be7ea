"""Rewards from a sequence classifier: its own tokenizer, chat template, mesh layout and token budget."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.packing import gather
from jaxrl.data.tokenizer import check_tokenizer, load_tokenizer, stop_ids
from jaxrl.learner.critic import Values, reward_values
from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import SCORE, find_tensors, load_params, model_config
from jaxrl.trainer.experience import pack_rollouts
from jaxrl.types import Prompt, Rollout

PART = "reward_model"  # its name among the parts of a reward


class RewardModel:
    """One number for a conversation: the model's score at its last token."""

    def __init__(
        self, values: Values, params: Decoder, renderer: ChatRenderer, stop: Sequence[int]
    ):
        self.values, self.params = values, params
        self._renderer, self._stop = renderer, stop
        self._mesh = jax.sharding.get_mesh()  # training's; a caller may have set the engine's

    def add_rewards(
        self, rollouts: Sequence[Rollout], on_batch: Callable[[], None] = lambda: None
    ) -> list[Rollout]:
        """The rollouts with reward_model.weight times the score added to their rewards, and the score among the
        parts. One that is too long for a row, that the template refuses, whose environment failed, or whose score is not
        finite is an error."""
        cfg = self.values.cfg
        sequences = [self._sequence(r) for r in rollouts]
        whole = [s for s in sequences if isinstance(s, Rollout)]
        with jax.set_mesh(self._mesh):
            scores = iter(last_scores(self.values, self.params, whole, on_batch).tolist())
        found = []
        for rollout, sequence in zip(rollouts, sequences, strict=True):
            if isinstance(sequence, Rollout):
                score = next(scores)
                problem = "" if math.isfinite(score) else f"the score is {score}"
            else:
                score, problem = 0.0, sequence
            found.append(with_score(rollout, score, problem, cfg))
        return found

    def _sequence(self, rollout: Rollout) -> Rollout | str:
        """The conversation in the model's own tokens, up to the end token of the answer; or what is wrong."""
        if rollout.episode is not None and rollout.episode.error:
            return "the environment failed before the conversation ended"
        try:
            turns = self._renderer.render_turns([*rollout.asked, *rollout.said], self._stop)
        except ValueError as problem:  # what a response holds may break a template
            return str(problem)
        tokens = turns[-1][0]
        longest = self.values.cfg.learner.row_lens[-1]
        if len(tokens) > longest:
            return (
                f"{len(tokens)} tokens in the reward model's tokenizer, more than a row of {longest}; raise "
                "reward_model.token_budget"
            )
        return sequence(tokens, rollout.prompt)


def open_reward_model(cfg: RunConfig, folder: Path, dtype: jnp.dtype) -> RewardModel:
    """The model of config.reward_model, which lies in the folder, on the devices of the mesh that is set.

    Raises ValueError where it is no sequence classifier of one label, or its layout does not fit.
    """
    if SCORE not in find_tensors(folder):
        raise ValueError(
            f"{folder} holds no {SCORE}, so it is no sequence classifier; set config.reward_model.path to a reward "
            "model, or train one with python -m jaxrl.reward_model"
        )
    tokenizer = load_tokenizer(folder)
    values, decoder = reward_values(cfg, model_config(folder), dtype)
    check_tokenizer(tokenizer, decoder.V)
    renderer = ChatRenderer(
        tokenizer, template=cfg.reward_model.chat_template, system_prompt=cfg.data.system_prompt
    )
    with values.layout.on_mesh():
        params = load_params(folder, values.layout.rules, decoder, dtype)
    return RewardModel(values, params, renderer, stop_ids(folder, tokenizer))


def sequence(tokens: np.ndarray, prompt: Prompt) -> Rollout:
    """All of a conversation as something to score at its last token: packed rows hold all tokens but the last one
    of a response, so this response is a token that nobody reads."""
    return Rollout(
        prompt=dataclasses.replace(prompt, tokens=tokens),
        sample=0,
        tokens=np.zeros(1, np.int32),
        logp=np.zeros(1, np.float32),
        version=0,
        finish="stop",
    )


def last_scores(
    values: Values,
    params: Decoder,
    sequences: Sequence[Rollout],
    on_batch: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """The score of each `sequence`, [N]."""
    packed = pack_rollouts(sequences, values.cfg, values.n_ranks)
    found = gather(values.of(params, packed, on_batch), packed)
    return np.array([score[0] for score in found], np.float32)


def with_score(rollout: Rollout, score: float, problem: str, cfg: RunConfig) -> Rollout:
    """The rollout with the score in its reward, or with the problem among its errors."""
    if problem:
        errors = [*filter(None, [rollout.reward_error]), f"{PART}: {problem}"]
        return dataclasses.replace(
            rollout, reward=cfg.reward.error_value, reward_error="; ".join(errors)
        )
    parts = rollout.reward_parts | {PART: score}
    reward = rollout.reward
    if not rollout.reward_error:
        reward += cfg.reward_model.weight * score
    return dataclasses.replace(rollout, reward=reward, reward_parts=parts)
