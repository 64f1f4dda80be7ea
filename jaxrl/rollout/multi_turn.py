"""Multi-turn rollouts: episodes of the policy in an environment, through any engine.

The prompt of the next turn is the tokens that the model read and sampled so far, followed by the
tokens of the observation. No text of the model is tokenized again, so training uses exactly the
tokens that were sampled, and the prefix cache has the KV of all earlier turns. An episode waits for
its environment while the engine decodes the others.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.support import join, unrestricted
from jaxrl.engine.api import Request, RequestEngine
from jaxrl.environments.api import Turn
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.json_text import Message
from jaxrl.rollout.episodes import episode_task
from jaxrl.rollout.generate import Response, append_generated, continued
from jaxrl.tool_calls.calls import MalformedCall, ParsedTurn, ToolCall, call_ids, template_form
from jaxrl.tool_calls.formats import ToolFormat
from jaxrl.tool_calls.parser import parse_turn
from jaxrl.types import Episode, Prompt, Rollout, TokenSets, Tree

POLL_TIMEOUT_S = 0.2  # wait for environments when idle, between two reports of progress


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """Length limits of an episode."""

    prompt_len: int  # tokens of the conversation that reset returns
    max_tokens: int  # tokens after it: all turns and observations
    max_turns: int


@dataclasses.dataclass
class ActiveEpisode:
    """An unfinished episode. Tokens, logprobs and loss_mask cover the tokens after the prompt."""

    prompt: Prompt
    sample: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    behavior_logp: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    support: list[TokenSets] = dataclasses.field(default_factory=list)  # per turn or observation
    loss_mask: list[bool] = dataclasses.field(default_factory=list)
    episode: Episode = dataclasses.field(default_factory=Episode)
    finish: str = ""
    id: int = 0  # in the environment pool
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # offered to the model
    call_ids: Iterator[str] = dataclasses.field(default_factory=call_ids)
    seed: int = 0
    calls: tuple[ToolCall | MalformedCall, ...] = ()  # of the last turn

    @property
    def ended(self) -> bool:
        return bool(self.finish)

    def append_turn(self, response: Response) -> None:
        self.tokens += response.tokens
        self.logp += response.logp
        self.behavior_logp += response.behavior_logp
        self.versions += response.versions
        n = len(response.tokens)
        self.support.append(join(response.support, n) if response.support else unrestricted(n))
        self.loss_mask += [True] * n

    def append_observation(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logp += [0.0] * len(tokens)
        self.behavior_logp += [0.0] * len(tokens)
        self.versions += self.versions[-1:] * len(tokens)
        self.support.append(unrestricted(len(tokens)))
        self.loss_mask += [False] * len(tokens)

    def rollout(self, renderer: ChatRenderer) -> Rollout:
        tokens = np.array(self.tokens, np.int32)
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            tokens=tokens,
            logp=np.array(self.logp, np.float32),
            behavior_logp=np.array(self.behavior_logp, np.float32),
            support=join(self.support, len(tokens)),
            loss_mask=np.array(self.loss_mask, bool),
            versions=np.array(self.versions, np.int32),
            finish=self.finish,
            text=renderer.decode(tokens),
            episode=self.episode,
        )


class EnvironmentRunner:
    """Unfinished episodes in an environment, and where each continues.

    The prompt tokens of a rollout are those of the conversation that `reset` returned, or those of
    the dataset if its environment failed before the first turn. `loss_mask` marks the tokens that
    the model sampled; only they have a logprob. `tool_format` is that of the tool calls in episodes
    whose environment has tools.
    """

    def __init__(
        self,
        engine: RequestEngine,
        pool: EnvironmentPool,
        renderer: ChatRenderer,
        eos_ids: tuple[int, ...],
        *,
        sampling: SamplingConfig,
        limits: EpisodeLimits,
        tool_format: ToolFormat | None = None,
    ):
        self.engine, self.pool, self.renderer, self.eos_ids = engine, pool, renderer, eos_ids
        self.sampling, self.limits = sampling, limits
        self.tool_format = tool_format
        self.waiting: collections.deque[ActiveEpisode] = collections.deque()
        self.in_engine: dict[int, tuple[ActiveEpisode, Response]] = {}  # by slot
        self.started: dict[int, ActiveEpisode] = {}  # by id
        self._paused: list[tuple[ActiveEpisode, Response]] = []

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.started)

    def add(self, prompt: Prompt, sample: int, seed: int) -> ActiveEpisode:
        """A new episode, which waits to start."""
        self.waiting.append(ActiveEpisode(prompt, sample, seed=seed))
        return self.waiting[-1]

    def start_waiting(self) -> None:
        """Starts waiting episodes while the pool has free environments."""
        while self.waiting and self.pool.n_free:
            active = self.waiting.popleft()
            task = episode_task(active.prompt, active.seed)
            active.id = self.pool.start(task | {"tools": list(active.prompt.tools)})
            self.started[active.id] = active

    def poll(self, *, idle: bool) -> None:
        """Handles the results of environments; waits for the first if the engine is idle."""
        for episode_id, turn in self.pool.collect(POLL_TIMEOUT_S if idle else 0.0):
            active = self.started[episode_id]
            if turn.error:
                del self.started[episode_id]  # the pool has ended it
                active.finish = "error"
                active.episode = dataclasses.replace(active.episode, error=turn.error)
            elif active.episode.n_turns == 0:
                self._after_reset(active, turn)
            else:
                self._after_step(active, turn)

    def decode(self, params: Tree) -> int:
        """Runs one dispatch of the engine. Returns the number of tokens that it sampled."""
        n_tokens = 0
        for generated in self.engine.generate(params):
            active, response = self.in_engine[generated.slot]
            n_tokens += len(generated.tokens)
            append_generated(response, generated, self.sampling.stop, self.renderer.decode)
            if response.finish:
                del self.in_engine[generated.slot]
                if not generated.finish:
                    self.engine.free(generated.slot)
                self._after_turn(active, response)
        return n_tokens

    def pause(self) -> None:
        """Takes unfinished turns of the model out of the engine."""
        for slot in self.in_engine:
            with contextlib.suppress(KeyError):  # the engine no longer has it
                self.engine.free(slot)
        self._paused += self.in_engine.values()
        self.in_engine.clear()

    def resume(self, paused_s: float) -> None:
        """Continues the turns, with other weights or not; time limits move by `paused_s`."""
        self.pool.postpone(paused_s)
        paused, self._paused = self._paused, []
        for active, response in paused:
            self._queue(active, response)

    def cancel(self) -> None:
        """Cancels all unfinished episodes."""
        self.pause()
        for episode_id in self.started:
            self.pool.end(episode_id)

    def _after_reset(self, active: ActiveEpisode, turn: Turn) -> None:
        """Starts the first turn of the model with the messages that `reset` returned."""
        messages = tuple(active.prompt.messages if turn.messages is None else turn.messages)
        active.episode = dataclasses.replace(active.episode, prompt_messages=messages)
        active.tools = turn.tools
        tokens = active.prompt.tokens
        if turn.messages is not None or turn.tools:
            (tokens,) = self.renderer.render_all([messages], [turn.tools])
        n, limit = len(tokens), self.limits.prompt_len
        if n > limit:  # the rollout keeps the tokens of the dataset's prompt, which fit a row
            error = f"reset returned a prompt of {n} tokens, data.max_prompt_len is {limit}"
            active.episode = dataclasses.replace(active.episode, error=error)
            return self._end(active, "error")
        active.prompt = dataclasses.replace(active.prompt, tokens=tokens)
        return self._queue(active, Response(active.prompt, active.sample))

    def _queue(self, active: ActiveEpisode, response: Response) -> None:
        """Queues a turn of the model, or the rest of it."""
        request = Request(
            tokens=np.concatenate([active.prompt.tokens, np.array(active.tokens, np.int32)]),
            max_tokens=self.limits.max_tokens - len(active.tokens),
            sampling=self.sampling,
            prompt_id=active.prompt.id,
            sample=active.sample,
            seed=active.seed,
        )
        slot = self.engine.submit(continued(request, response.tokens))
        self.in_engine[slot] = active, response

    def _after_turn(self, active: ActiveEpisode, response: Response) -> None:
        """Sends a finished turn of the model to its environment, unless it was truncated."""
        parsed = self._parse(active, response)
        active.append_turn(response)
        text, episode = self.renderer.decode(response.tokens), active.episode
        active.calls = parsed.attempts
        active.episode = dataclasses.replace(
            episode,
            completion_messages=(*episode.completion_messages, _turn_message(text, parsed)),
            n_turns=episode.n_turns + 1,
        )
        if response.finish == "length":
            return self._end(active, "length")
        return self.pool.step(active.id, parsed if parsed.attempts else text)

    def _parse(self, active: ActiveEpisode, response: Response) -> ParsedTurn:
        """The tool calls of a turn; none in an episode without tools."""
        if not active.tools or self.tool_format is None:
            return ParsedTurn()
        thinks = self.renderer.opens_thought([*active.prompt.tokens.tolist(), *active.tokens])
        tokens = response.tokens
        text = self.renderer.decode(
            tokens[:-1] if tokens[-1] in self.eos_ids else tokens, skip_special=False
        )
        return parse_turn(text, self.tool_format, ids=active.call_ids, in_thought=thinks)

    def _after_step(self, active: ActiveEpisode, turn: Turn) -> None:
        """Adds the reward of `step`, and ends the episode or appends the observation."""
        episode = active.episode
        counts = {
            k: episode.counts.get(k, 0.0) + turn.counts.get(k, 0.0)
            for k in episode.counts | turn.counts
        }
        rewards = (*episode.step_rewards, (len(active.tokens), turn.reward))
        active.episode = dataclasses.replace(episode, step_rewards=rewards, counts=counts)
        if turn.done:
            return self._end(active, "stop")
        if episode.n_turns == self.limits.max_turns:
            return self._end(active, "turns")
        assert turn.messages is not None
        ended = active.tokens[-1] in self.eos_ids
        observation = self.renderer.render_reply(
            turn.messages, stop=self.eos_ids, ended=ended, calls=active.calls
        )
        if len(active.tokens) + len(observation) >= self.limits.max_tokens:
            return self._end(active, "length")  # no room for another turn
        active.append_observation(observation.tolist())
        messages = (*episode.completion_messages, *turn.messages)
        active.episode = dataclasses.replace(active.episode, completion_messages=messages)
        return self._queue(active, Response(active.prompt, active.sample))

    def _end(self, active: ActiveEpisode, finish: str) -> None:
        active.finish = finish
        del self.started[active.id]
        self.pool.end(active.id)


def _turn_message(text: str, parsed: ParsedTurn) -> Message:
    """The turn for rewards and logs; the text of a malformed call stays text."""
    if not parsed.calls or parsed.malformed:
        return {"role": "assistant", "content": text}
    calls = [template_form(call) for call in parsed.calls]
    return {"role": "assistant", "content": parsed.content, "tool_calls": calls}
