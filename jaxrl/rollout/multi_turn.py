"""Multi-turn rollouts: episodes of the policy in an environment, through any engine.

The prompt of the next turn is the tokens that the model read and sampled so far, followed by the
tokens of the observation. No text of the model is tokenized again, so training uses exactly the
tokens that were sampled, and the prefix cache has the KV of all earlier turns. An episode waits for
its environment while the engine decodes the others.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.engine.api import Request, RequestEngine
from jaxrl.environments.api import Turn
from jaxrl.environments.pool import EnvironmentPool, episode_task
from jaxrl.json_text import Message
from jaxrl.rollout.request_images import EpisodeImages, features_of
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.rollout.turns import ActiveTurn, ActiveTurns, Response
from jaxrl.tool_calls.calls import MalformedCall, ParsedTurn, ToolCall, call_ids, template_form
from jaxrl.tool_calls.formats import ToolFormat
from jaxrl.tool_calls.parser import parse_turn
from jaxrl.types import Decode, Episode, ImageInput, Rollout

POLL_TIMEOUT_S = 0.2  # wait for environments when idle, between two reports of progress


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """Length limits of an episode."""

    prompt_len: int  # tokens of the conversation that reset returns
    max_tokens: int  # tokens after it: all turns and observations
    max_turns: int


@dataclasses.dataclass(eq=False)
class ActiveEpisode:
    """An unfinished episode. Its response has all tokens after the prompt."""

    response: Response
    seed: int
    episode: Episode = dataclasses.field(default_factory=Episode)
    id: int = 0  # in the environment pool
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # offered to the model
    call_ids: Iterator[str] = dataclasses.field(default_factory=call_ids)
    calls: tuple[ToolCall | MalformedCall, ...] = ()  # of the last turn
    added_at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def ended(self) -> bool:
        return self.response.ended

    def end_span(self, phase: str) -> None:
        """Records that the time since the last span, or the start, was spent in a phase."""
        spans = self.episode.spans
        start = spans[-1][2] if spans else 0.0
        span = (phase, start, time.monotonic() - self.added_at)
        self.episode = dataclasses.replace(self.episode, spans=(*spans, span))

    def freeze(self, decode: Decode) -> Rollout:
        return self.response.freeze(decode, self.episode)


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
        images: EpisodeImages | None = None,
    ):
        """`images` is None in a run without images."""
        self.pool, self.renderer, self.eos_ids = pool, renderer, eos_ids
        self.sampling, self.limits, self.tool_format = sampling, limits, tool_format
        self.images = images
        self.turns: ActiveTurns[ActiveEpisode] = ActiveTurns(engine, renderer.decode)
        self.waiting: collections.deque[ActiveEpisode] = collections.deque()
        self.started: dict[int, ActiveEpisode] = {}  # by id

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.started)

    def add(self, group: PromptGroup, sample: int) -> ActiveEpisode:
        """A new episode, which waits to start."""
        self.waiting.append(ActiveEpisode(Response(group.prompt, sample), group.seed))
        return self.waiting[-1]

    def start_waiting(self) -> None:
        """Starts waiting episodes while the pool has free environments."""
        while self.waiting and self.pool.n_free:
            active = self.waiting.popleft()
            prompt = active.response.prompt
            task = episode_task(prompt, active.seed)
            active.end_span("queue")
            active.id = self.pool.start(task | {"tools": list(prompt.tools)})
            self.started[active.id] = active

    def poll(self, *, idle: bool) -> None:
        """Handles the results of environments; waits for the first if the engine is idle."""
        for episode_id, turn in self.pool.collect(POLL_TIMEOUT_S if idle else 0.0):
            active = self.started[episode_id]
            active.end_span("environment")
            if turn.error:
                del self.started[episode_id]  # the pool has ended it
                active.response.finish = "error"
                active.episode = dataclasses.replace(active.episode, error=turn.error)
            else:
                self._continue(active, turn)

    def postpone(self, seconds: float) -> None:
        self.pool.postpone(seconds)

    def cancel(self, episode: ActiveEpisode) -> None:
        if episode in self.waiting:
            self.waiting.remove(episode)
        else:
            self.turns.cancel(lambda owner: owner is episode)
            self._end(episode, "error")

    def _continue(self, active: ActiveEpisode, turn: Turn) -> None:
        """Handles what reset or step returned."""
        try:
            images = self._read_images(turn)
        except ValueError as error:
            return self._fail(active, str(error))
        if active.episode.n_turns == 0:
            return self._after_reset(active, turn, images)
        return self._after_step(active, turn, images)

    def _read_images(self, turn: Turn) -> tuple[ImageInput, ...]:
        """The images of the messages. Raises ValueError if they cannot be used."""
        if not turn.images:
            return ()
        if self.images is None:
            raise ValueError(
                "the environment returned an image, and the run reads text; set data.images=True"
            )
        return self.images.reader.read_references(turn.images, "the environment")

    def _after_reset(self, active: ActiveEpisode, turn: Turn, images: Sequence[ImageInput]) -> None:
        """Starts the first turn of the model with the messages that `reset` returned."""
        prompt = active.response.prompt
        messages = tuple(prompt.messages if turn.messages is None else turn.messages)
        active.episode = dataclasses.replace(active.episode, prompt_messages=messages)
        active.tools = turn.tools
        if turn.messages is not None or turn.tools:
            if turn.messages is None:
                images = [placed.image for placed in prompt.images]
            (tokens,) = self.renderer.render_all([messages], [turn.tools])
            placed = self.renderer.place_images(tokens, images)
            prompt = dataclasses.replace(prompt, **placed.fields)
        n, limit = len(prompt.tokens), self.limits.prompt_len
        if n > limit:  # the rollout keeps the tokens of the dataset's prompt, which fit a row
            error = f"reset returned a prompt of {n} tokens, data.max_prompt_len is {limit}"
            return self._fail(active, error)
        active.response.prompt = prompt
        return self._queue(active)

    def _queue(self, active: ActiveEpisode) -> None:
        """Queues a turn of the model."""
        prompt, placed = active.response.prompt, active.response.placed
        turn = Response(prompt, active.response.sample)
        request = Request(
            tokens=placed.tokens,
            max_tokens=self.limits.max_tokens - len(active.response.tokens),
            sampling=self.sampling,
            prompt_id=prompt.id,
            sample=turn.sample,
            seed=active.seed,
            images=features_of(self.images, placed.images),
        )
        self.turns.submit(ActiveTurn(active, request, turn, self.sampling.stop))

    def after_turn(self, turn: ActiveTurn[ActiveEpisode]) -> None:
        """Sends a finished turn of the model to its environment, unless it was truncated."""
        active, response = turn.owner, turn.response
        active.end_span("engine")
        parsed = self._parse(active, turn)
        active.response.extend(response)
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

    def _parse(self, active: ActiveEpisode, turn: ActiveTurn[ActiveEpisode]) -> ParsedTurn:
        """The tool calls of a turn; none in an episode without tools."""
        if not active.tools or self.tool_format is None:
            return ParsedTurn()
        thinks = self.renderer.opens_thought(turn.request.tokens)
        tokens = turn.response.tokens
        text = self.renderer.decode(
            tokens[:-1] if tokens[-1] in self.eos_ids else tokens, skip_special=False
        )
        return parse_turn(
            text,
            self.tool_format,
            tools=active.tools,
            ids=active.call_ids,
            in_thought=thinks,
        )

    def _after_step(self, active: ActiveEpisode, turn: Turn, images: Sequence[ImageInput]) -> None:
        """Adds the reward of `step`, and ends the episode or appends the observation."""
        episode, response = active.episode, active.response
        counts = {
            k: episode.counts.get(k, 0.0) + turn.counts.get(k, 0.0)
            for k in episode.counts | turn.counts
        }
        rewards = (*episode.step_rewards, (len(response.tokens), turn.reward))
        active.episode = dataclasses.replace(episode, step_rewards=rewards, counts=counts)
        if turn.done:
            return self._end(active, "stop")
        if episode.n_turns == self.limits.max_turns:
            return self._end(active, "turns")
        assert turn.messages is not None
        ended = response.tokens[-1] in self.eos_ids
        tokens = self.renderer.render_reply(
            turn.messages, stop=self.eos_ids, ended=ended, calls=active.calls
        )
        observation = self.renderer.place_images(tokens, images)
        if len(response.tokens) + len(observation) >= self.limits.max_tokens:
            return self._end(active, "length")  # no room for another turn
        response.append_given(observation)
        messages = (*episode.completion_messages, *turn.messages)
        active.episode = dataclasses.replace(active.episode, completion_messages=messages)
        return self._queue(active)

    def _fail(self, active: ActiveEpisode, error: str) -> None:
        active.episode = dataclasses.replace(active.episode, error=error)
        self._end(active, "error")

    def _end(self, active: ActiveEpisode, finish: str) -> None:
        active.response.finish = finish
        del self.started[active.id]
        self.pool.end(active.id)


def _turn_message(text: str, parsed: ParsedTurn) -> Message:
    """The turn for rewards and logs; the text of a malformed call stays text."""
    if not parsed.calls or parsed.malformed:
        return {"role": "assistant", "content": text}
    calls = [template_form(call) for call in parsed.calls]
    return {"role": "assistant", "content": parsed.content, "tool_calls": calls}
