"""From prompts to finished episodes: the model takes turns with an environment, through any engine.

The next turn is asked with the tokens that the model saw and wrote, and behind them those of the environment's answer.
No text of the model is tokenized again, so what it saw is what is trained on, and the keys of all turns before are found in
the engine's pages. An episode whose turn has ended waits for its environment while the others are decoded.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.engine.api import Engine, Request
from jaxrl.environments.api import Turn
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.rollout.generate import Response, metrics, take
from jaxrl.types import Episode, Prompt, Rollout, Tree

_PATIENCE_S = (
    0.2  # of a wait for environments while nothing is decoded, between two calls of on_progress
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of an episode."""

    prompt_len: int  # tokens of the conversation that reset gives
    max_tokens: int  # behind it: of all turns and answers
    max_turns: int


@dataclasses.dataclass
class _Talk:
    """An episode under way. Tokens, logp and loss_mask cover the tokens after the prompt."""

    prompt: Prompt
    sample: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    loss_mask: list[bool] = dataclasses.field(default_factory=list)
    episode: Episode = dataclasses.field(default_factory=Episode)
    finish: str = ""
    number: int = 0  # of its episode in the pool

    def extend(self, tokens: Sequence[int], logp: Sequence[float], *, in_loss: bool) -> None:
        self.tokens += tokens
        self.logp += logp
        self.loss_mask += [in_loss] * len(tokens)


class Conversations:
    """All episodes of one call of `converse`, and who has the word in each."""

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        renderer: ChatRenderer,
        eos_ids: tuple[int, ...],
        *,
        sampling: SamplingConfig,
        limits: Limits,
        seed: int,
    ):
        self.engine, self.pool, self.renderer, self.eos_ids = engine, pool, renderer, eos_ids
        self.sampling, self.limits, self.seed = sampling, limits, seed
        self.waiting: collections.deque[_Talk] = collections.deque()
        self.in_engine: dict[int, tuple[_Talk, Response]] = {}  # by slot
        self.begun: dict[int, _Talk] = {}  # by the number of the episode

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.begun)

    def begin(self) -> None:
        """Starts waiting episodes while there is room."""
        while self.waiting and self.pool.n_free:
            talk = self.waiting.popleft()
            prompt = talk.prompt
            entropy = [self.seed, prompt.id]
            talk.number = self.pool.start(
                {
                    "messages": list(prompt.messages),
                    "answer": prompt.answer,
                    "source": prompt.source,
                    "extra": prompt.extra,
                    "seed": int(np.random.SeedSequence(entropy).generate_state(1)[0]),
                }
            )
            self.begun[talk.number] = talk

    def listen(self, timeout_s: float) -> None:
        """Takes in what environments answered, waiting up to `timeout_s` for the first."""
        for number, turn in self.pool.collect(timeout_s):
            talk = self.begun[number]
            if turn.error:
                del self.begun[number]  # the pool has ended it
                talk.finish = "error"
                talk.episode = dataclasses.replace(talk.episode, error=turn.error)
            elif talk.episode.n_turns == 0:
                self._opened(talk, turn)
            else:
                self._answered(talk, turn)

    def decode(self, params: Tree) -> int:
        """One dispatch of the engine. Returns the tokens that it made."""
        n_tokens = 0
        for made in self.engine.generate(params):
            talk, response = self.in_engine[made.slot]
            n_tokens += len(made.tokens)
            take(response, made, self.sampling.stop, self.renderer.decode)
            if response.finish:
                del self.in_engine[made.slot]
                if not made.finish:
                    self.engine.free(made.slot)
                self._said(talk, response)
        return n_tokens

    def cancel(self) -> None:
        """Ends everything that is under way."""
        for slot in self.in_engine:
            with contextlib.suppress(KeyError):  # the engine has lost it
                self.engine.free(slot)
        for number in self.begun:
            self.pool.end(number)

    def _opened(self, talk: _Talk, turn: Turn) -> None:
        """reset answered: the first turn of the model."""
        asked = tuple(talk.prompt.messages if turn.messages is None else turn.messages)
        talk.episode = dataclasses.replace(talk.episode, prompt_messages=asked)
        if turn.messages is not None:
            tokens = self.renderer.render(asked)
            talk.prompt = dataclasses.replace(talk.prompt, tokens=tokens)
        n, most = len(talk.prompt.tokens), self.limits.prompt_len
        if n > most:
            error = f"reset gave a prompt of {n} tokens, data.max_prompt_len is {most}"
            talk.episode = dataclasses.replace(talk.episode, error=error)
            return self._end(talk, "error")
        return self._ask(talk)

    def _ask(self, talk: _Talk) -> None:
        """Queues the next turn of the model."""
        request = Request(
            tokens=np.concatenate([talk.prompt.tokens, np.array(talk.tokens, np.int32)]),
            max_tokens=self.limits.max_tokens - len(talk.tokens),
            sampling=self.sampling,
            prompt_id=talk.prompt.id,
            sample=talk.sample,
            seed=self.seed,
        )
        response = Response(talk.prompt, talk.sample)
        self.in_engine[self.engine.submit(request)] = talk, response

    def _said(self, talk: _Talk, response: Response) -> None:
        """A turn of the model has ended: its environment has the word, unless the turn was cut off."""
        talk.extend(response.tokens, response.logp, in_loss=True)
        text, was = self.renderer.decode(response.tokens), talk.episode
        said = (*was.completion_messages, {"role": "assistant", "content": text})
        talk.episode = dataclasses.replace(was, completion_messages=said, n_turns=was.n_turns + 1)
        if response.finish == "length":
            return self._end(talk, "length")
        return self.pool.step(talk.number, text)

    def _answered(self, talk: _Talk, turn: Turn) -> None:
        """step answered: the end, or what the model reads before its next turn."""
        was = talk.episode
        counts = {
            k: was.counts.get(k, 0.0) + turn.counts.get(k, 0.0) for k in was.counts | turn.counts
        }
        talk.episode = dataclasses.replace(was, reward=was.reward + turn.reward, counts=counts)
        if turn.done:
            return self._end(talk, "stop")
        if was.n_turns == self.limits.max_turns:
            return self._end(talk, "turns")
        assert turn.messages is not None
        ended = talk.tokens[-1] in self.eos_ids
        reply = self.renderer.render_reply(turn.messages, stop=self.eos_ids, ended=ended)
        if len(talk.tokens) + len(reply) >= self.limits.max_tokens:  # no room for another turn
            return self._end(talk, "length")
        talk.extend(reply.tolist(), [0.0] * len(reply), in_loss=False)
        said = (*was.completion_messages, *turn.messages)
        talk.episode = dataclasses.replace(talk.episode, completion_messages=said)
        return self._ask(talk)

    def _end(self, talk: _Talk, finish: str) -> None:
        talk.finish = finish
        del self.begun[talk.number]
        self.pool.end(talk.number)


def converse(
    engine: Engine,
    params: Tree,
    prompts: Sequence[Prompt],
    *,
    pool: EnvironmentPool,
    renderer: ChatRenderer,
    eos_ids: tuple[int, ...],
    n: int,
    sampling: SamplingConfig,
    limits: Limits,
    seed: int,
    version: int,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> tuple[list[Rollout], dict[str, float]]:
    """As `generate`, of episodes in an environment: `n` for each prompt, ordered by prompt, then sample.

    The tokens of a rollout's prompt are those of the conversation that reset gave; `loss_mask` marks the tokens of the model
    among those behind it, and only they have a logprob. time/env_s is the wall time of waiting with nothing to
    decode.
    """
    start = time.perf_counter()
    engine.take_stats()
    engine.set_version(version)
    talks = [_Talk(prompt, i) for prompt in prompts for i in range(n)]
    run = Conversations(
        engine, pool, renderer, eos_ids, sampling=sampling, limits=limits, seed=seed
    )
    run.waiting.extend(talks)
    n_tokens, waited_s = 0, 0.0
    try:
        while run.n_unfinished:
            run.begin()
            before, idle = time.perf_counter(), not run.in_engine
            run.listen(_PATIENCE_S if idle else 0.0)
            waited_s += idle * (time.perf_counter() - before)
            if run.in_engine:
                n_tokens += run.decode(params)
            if on_progress is not None:
                on_progress(n_tokens, len(talks) - run.n_unfinished, len(talks))
    except BaseException:
        run.cancel()
        raise
    rollouts = [_rollout(talk, version, renderer) for talk in talks]
    n_kept = sum(r.n_loss_tokens for r in rollouts)
    found = metrics(engine.take_stats(), n_kept, time.perf_counter() - start)
    return rollouts, found | {"time/env_s": waited_s}


def _rollout(talk: _Talk, version: int, renderer: ChatRenderer) -> Rollout:
    tokens = np.array(talk.tokens, np.int32)
    return Rollout(
        prompt=talk.prompt,
        sample=talk.sample,
        tokens=tokens,
        logp=np.array(talk.logp, np.float32),
        loss_mask=np.array(talk.loss_mask, bool),
        version=version,
        finish=talk.finish,
        text=renderer.decode(tokens),
        episode=talk.episode,
    )
