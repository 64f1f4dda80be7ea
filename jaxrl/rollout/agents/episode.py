"""The episode of an agent: its conversations, as exactly the tokens that the model saw and wrote.

A request whose messages continue a conversation gets the tokens of that conversation, followed by
those of the new messages alone. A request that continues an earlier point of a conversation, or
none at all, begins a branch. No text of the model is tokenized again within a branch.
"""

import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.images.placeholders import n_images
from jaxrl.environments.api import CONTEXT_CODE, TURNS_CODE
from jaxrl.http.errors import RequestError
from jaxrl.json_text import Message
from jaxrl.rollout.agents.chat import ChatRequest
from jaxrl.rollout.turns import Response
from jaxrl.tool_calls.calls import calls_of
from jaxrl.tool_calls.chat_message import as_message
from jaxrl.types import Decode, Episode, ImageInput, PhaseSpan, Prompt, Rollout

NO_TOKENS = PlacedTokens(np.zeros(0, np.int32))
MAX_TOKEN_CHARS = 32  # larger requests than this per token of the context are not rendered


@dataclasses.dataclass(frozen=True)
class AgentLimits:
    """Limits of an episode."""

    context_len: int  # tokens of a conversation
    max_turns: int  # of all conversations together
    timeout_s: float  # of the whole episode; 0 = none
    needs_reward: bool  # whether an episode without a reward has failed
    needs_role_rewards: bool = False  # the same of each conversation's reward


@dataclasses.dataclass(frozen=True)
class TurnEnd:
    """A point from which a conversation can be continued."""

    n_messages: int  # the turn of the model included
    n_tokens: int  # after the prompt


@dataclasses.dataclass(eq=False)
class Branch:
    """A conversation: one training sample."""

    response: Response  # all tokens after the prompt
    messages: tuple[Message, ...]
    images: tuple[ImageInput, ...]  # of the messages
    tools: tuple[dict[str, Any], ...]
    role: str  # its name
    n_prompt_messages: int  # messages before its first turn of the model
    ends: list[TurnEnd] = dataclasses.field(default_factory=list)
    busy: bool = False  # the model writes its next turn

    def continued_by(self, request: ChatRequest) -> TurnEnd | None:
        """The last turn after which the request's messages continue this conversation."""
        if self.tools != request.tools:
            return None
        for end in reversed(self.ends):
            n = end.n_messages
            if n < len(request.messages) and all(map(same, self.messages[:n], request.messages)):
                return end if self._has_images_of(request, n) else None
        return None

    def _has_images_of(self, request: ChatRequest, n: int) -> bool:
        """Whether the first `n` messages, whose text is equal, have the images of a request."""
        ours = self.images[: n_images(self.messages[:n])]
        pairs = zip(ours, request.images, strict=False)
        return all(own.digest == other.digest for own, other in pairs)

    def conversation(self) -> Episode:
        n = self.n_prompt_messages
        return Episode(prompt_messages=self.messages[:n], completion_messages=self.messages[n:])

    def freeze(self, decode: Decode) -> Rollout:
        """The conversation as a rollout."""
        frozen = self.response.freeze(decode, self.conversation())
        return dataclasses.replace(frozen, role=self.role)

    def tokens(self, end: TurnEnd) -> PlacedTokens:
        """The tokens that the model saw and wrote up to a turn."""
        return self.response.placed.first(len(self.response.prompt.tokens) + end.n_tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedTurn:
    """A turn whose place in the conversations is known; its new messages are not rendered yet."""

    request: ChatRequest
    branch: Branch | None  # that it continues; None: it begins one
    kept: PlacedTokens  # before the new messages
    n_kept: int  # messages that are not new

    def render(self, renderer: ChatRenderer, eos_ids: Sequence[int]) -> PlacedTokens:
        """The tokens of the new messages; on any thread.

        Raises ValueError if the chat template rejects them.
        """
        messages, images = self.request.messages, self.request.images
        if not self.n_kept:
            [tokens] = renderer.render_all([messages], [self.request.tools])
            return renderer.place_images(tokens, images)
        tokens = renderer.render_reply(
            messages[self.n_kept :],
            stop=eos_ids,
            ended=self.kept.tokens[-1] in eos_ids,
            calls=calls_of(messages[self.n_kept - 1]),
        )
        return renderer.place_images(tokens, images[n_images(messages[: self.n_kept]) :])


@dataclasses.dataclass(frozen=True, eq=False)
class PendingTurn:
    """A turn that the model writes next. Nothing of it is kept before it has ended."""

    branch: Branch  # existing or new
    request: ChatRequest
    input: PlacedTokens  # of the model
    observation: PlacedTokens  # the part of it that the branch does not have yet
    max_tokens: int
    seed: int


class AgentEpisode:
    """A running episode of an agent."""

    def __init__(self, prompt: Prompt, sample: int, *, seed: int, limits: AgentLimits):
        self.prompt, self.sample, self.seed, self._limits = prompt, sample, seed, limits
        self.branches: list[Branch] = []  # the last is the one with the latest turn
        self.reward: float | None = None
        self.counts: dict[str, float] = dict.fromkeys(
            ("rejected", "malformed_calls", CONTEXT_CODE, TURNS_CODE), 0.0
        )
        self.error = ""
        self.ended = False
        self._n_started = 0
        self._n_turns = 0
        self._finish = "stop"
        self._limit = ""  # code of the limit that the latest turn or request has reached
        self._n_seen: dict[int, int] = {}  # requests by the hash of their tokens
        self._added_at, self._spans = time.monotonic(), list[PhaseSpan]()

    def place_turn(self, request: ChatRequest) -> PlacedTurn:
        """Where the turn that a request asks for belongs; `begin_turn` or `withdraw` must follow.

        Raises RequestError if the number of turns is exceeded, or the request is too large to be
        rendered.
        """
        if self._n_started == self._limits.max_turns:
            self._finish, self._limit = "turns", TURNS_CODE
            raise RequestError(
                400,
                f"the episode has had its {self._limits.max_turns} turns (env.max_turns)",
                code=TURNS_CODE,
            )
        try:
            placed = self.find_turn(request)
        except RequestError:
            self._finish, self._limit = "length", CONTEXT_CODE
            raise
        if placed.branch is not None:
            placed.branch.busy = True
        self._n_started += 1
        return placed

    def begin_turn(self, placed: PlacedTurn, new: PlacedTokens) -> PendingTurn:
        """The turn, after the rendered tokens of its new messages.

        Raises RequestError if the context is exceeded.
        """
        request, tokens = placed.request, placed.kept.then(new)
        room = self._limits.context_len - len(tokens)
        if room < 1:
            self._finish, self._limit = "length", CONTEXT_CODE
            raise self._too_long(f"{len(tokens)} tokens")
        branch, observation = placed.branch, new
        if branch is None:
            branch, observation = self._new_branch(request, tokens), NO_TOKENS
            branch.busy = True
        self._limit = ""
        seed, n = self._turn_seed(tokens), min(request.max_tokens or room, room)
        return PendingTurn(branch, request, tokens, observation, n, seed)

    def withdraw(self, placed: PlacedTurn) -> None:
        """Forgets a placed turn that cannot begin."""
        if placed.branch is not None:
            placed.branch.busy = False
        self._n_started -= 1

    def _too_long(self, length: str) -> RequestError:
        return RequestError(
            400,
            # clients such as litellm recognize these words, not the code
            f"This model's maximum context length is {self._limits.context_len} tokens "
            "(data.max_prompt_len + data.max_response_len), and this conversation, with its tools, "
            f"has {length}; shorten the messages",
            param="messages",
            code=CONTEXT_CODE,
        )

    def find_turn(self, request: ChatRequest) -> PlacedTurn:
        """Where the turn of a request would belong; changes nothing.

        It continues the branch that shares most messages with its request. If that is at an earlier
        turn of the branch, or the model writes its next one, it begins a branch with the same
        tokens. Raises RequestError if the request is too large to be rendered.
        """
        if request.size > MAX_TOKEN_CHARS * self._limits.context_len:
            raise self._too_long(f"{request.size} characters")
        role = self._role(request)
        named = [b for b in self.branches if b.role == role]
        pairs = [(b, end) for b in named if (end := b.continued_by(request)) is not None]
        if not pairs:
            return PlacedTurn(request, None, NO_TOKENS, 0)

        def is_next(branch: Branch, end: TurnEnd) -> bool:
            return end is branch.ends[-1] and not branch.busy

        branch, end = max(pairs, key=lambda pair: (pair[1].n_messages, is_next(*pair)))
        continued = branch if is_next(branch, end) else None
        return PlacedTurn(request, continued, branch.tokens(end), end.n_messages)

    def _role(self, request: ChatRequest) -> str:
        """The name of the conversation; "" where conversations have no rewards."""
        return request.role if self._limits.needs_role_rewards else ""

    def _new_branch(self, request: ChatRequest, tokens: PlacedTokens) -> Branch:
        prompt = dataclasses.replace(self.prompt, **tokens.fields)
        response, n = Response(prompt, self.sample), len(request.messages)
        given = request.messages, request.images, request.tools, self._role(request)
        return Branch(response, *given, n)

    def _turn_seed(self, tokens: PlacedTokens) -> int:
        """A seed for the turn that does not depend on the order in which requests arrive."""
        key = zlib.crc32(tokens.tokens.tobytes() + "".join(tokens.digests).encode())
        n_equal = self._n_seen[key] = self._n_seen.get(key, -1) + 1
        return int(np.random.SeedSequence([self.seed, key, n_equal]).generate_state(1)[0])

    def cancel_turn(self, turn: PendingTurn) -> None:
        """Forgets a turn whose client has disconnected."""
        turn.branch.busy = False
        self._n_started -= 1

    def end_turn(
        self, turn: PendingTurn, response: Response, message: Message, n_malformed: int = 0
    ) -> None:
        """Keeps the turn that the model wrote; `message` is what the agent gets of it."""
        branch = turn.branch
        branch.busy = False
        if branch in self.branches:
            self.branches.remove(branch)
        self.branches.append(branch)
        if len(turn.observation):
            branch.response.append_given(turn.observation)
        branch.response.extend(response)
        branch.response.finish = response.finish
        canonical = as_message(message)
        assert canonical is not None  # it has a role and text
        branch.messages = (*turn.request.messages, canonical)
        branch.images = turn.request.images
        branch.ends.append(TurnEnd(len(branch.messages), len(branch.response.tokens)))
        self._n_turns += 1
        full = len(turn.input) + len(response.tokens) == self._limits.context_len
        if response.finish == "length" and full:
            self._limit = CONTEXT_CODE
        self.counts["malformed_calls"] += n_malformed

    def begin(self) -> None:
        """Called when the process of the agent starts."""
        self.add_span("queue", self._added_at)

    def add_span(self, phase: str, since: float) -> None:
        """Records that the episode was in a phase from `since`, of time.monotonic(), until now."""
        now = time.monotonic() - self._added_at
        self._spans.append((phase, since - self._added_at, now))

    def reject(self) -> None:
        """Counts a request that was answered with an error."""
        self.counts["rejected"] += 1

    def add_numbers(self, numbers: dict[str, float]) -> None:
        """Sets the reward and the counts that the agent reports; the last value counts."""
        numbers = dict(numbers)
        self.reward = numbers.pop("reward", self.reward)
        self.counts |= numbers

    def end(self, error: str) -> None:
        """Ends the episode; `error` is why the agent failed.

        There is no error if the latest turn or request reached a limit of the run, for clients
        raise then; a reward that is missing is 0.
        """
        if self._limit:
            self.counts[self._limit] = 1.0
        if not self.branches:
            error = error or "the agent ended without a turn of the model"
        elif self._limit:
            error = ""
            self._add_missing_rewards()
        else:
            error = error or self._missing_reward()
        self.error, self.ended = error, True
        if self._spans:
            self.add_span("agent", self._added_at + self._spans[0][2])

    def _add_missing_rewards(self) -> None:
        """Sets the rewards that the run needs and the agent did not report to 0."""
        if self._limits.needs_reward and self.reward is None:
            self.reward = 0.0
        if self._limits.needs_role_rewards:
            self.counts |= dict.fromkeys(self._unrewarded(), 0.0)

    def _missing_reward(self) -> str:
        """The error of an agent that did not report a reward that the run needs; "" if it did."""
        if self._limits.needs_reward and self.reward is None:
            return (
                "the agent returned no reward, which reward.functions=environment needs; return a "
                "number from it, or send one to {base_url}/reward"
            )
        if self._limits.needs_role_rewards and (unrewarded := self._unrewarded()):
            return (
                f"the agent returned no reward of its conversations {', '.join(unrewarded)}; "
                f"return {{'reward': ..., '{unrewarded[0]}': ...}}, a number for each `model` of "
                "its requests"
            )
        return ""

    def _unrewarded(self) -> list[str]:
        """The names of conversations without a reward."""
        return sorted({branch.role for branch in self.branches} - self.counts.keys())

    def freeze(self, decode: Decode) -> Rollout:
        """The conversation with the latest turn, and the others as its branches.

        Their order does not depend on the order in which requests arrived.
        """
        main, role = Response(self.prompt, self.sample), ""
        conversation = Episode(prompt_messages=self.prompt.messages)
        if self.branches:
            main, conversation = self.branches[-1].response, self.branches[-1].conversation()
            role = self.branches[-1].role
        episode = dataclasses.replace(
            conversation,
            n_turns=self._n_turns,
            step_rewards=() if self.reward is None else ((len(main.tokens), self.reward),),
            counts=self.counts | {"branches": float(len(self.branches))},
            error=self.error,
            spans=tuple(self._spans),
        )
        if self.error:
            main.finish = "error"
        elif main.finish != "length":
            main.finish = self._finish
        others = [b.freeze(decode) for b in self.branches[:-1]]
        others.sort(key=_content)
        frozen = main.freeze(decode, episode)
        return dataclasses.replace(frozen, role=role, branches=tuple(others))


def _content(rollout: Rollout) -> tuple[list[int], list[int], list[str], str]:
    """The tokens, images and name of a conversation."""
    digests = [placed.image.digest for placed in rollout.images]
    return rollout.prompt.tokens.tolist(), rollout.tokens.tolist(), digests, rollout.role


def same(ours: Message, theirs: Message) -> bool:
    """Whether a message of a request is one that the conversation has.

    Clients may strip a turn of the model, name it, or give its calls other ids. They may not drop
    its reasoning: that is an edited history.
    """
    return _compared(ours) == _compared(theirs)


def _compared(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parts = {name: message.get(name, "").strip() for name in ("content", "reasoning_content")}
    return {"role": "assistant", "tool_calls": calls} | parts
