"""A judge on the devices of the run: the engine of the rollouts, or that of a second model.

While rewards are computed the engine answers the requests of the reward workers, with the verdicts
held by the grammar of their JSON schema. The engine of the rollouts is free then, and reads the
policy's current or initial weights.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import queue
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.engine.api import Generated, LogitAdjustments, Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.engine.json_grammar import JsonGrammar
from jaxrl.engine.json_matcher import build_matcher, make_tokenizer
from jaxrl.json_text import Json
from jaxrl.rollout.judge_endpoint import JudgeCall, JudgeEndpoint
from jaxrl.rollout.judge_model import JudgeModel
from jaxrl.types import Tree

_POLL_S = 0.02  # for requests, while the engine is idle
_SEED_BYTES = 4


@dataclasses.dataclass(frozen=True)
class PendingVerdict:
    """A verdict that the engine writes."""

    call: JudgeCall
    n_prompt_tokens: int
    tokens: list[int]


class LocalJudge:
    """Answers the requests of an endpoint with an engine. Not thread-safe."""

    def __init__(
        self,
        endpoint: JudgeEndpoint,
        engine: PagedEngine,
        renderer: ChatRenderer,
        eos_ids: tuple[int, ...],
        model: JudgeModel | None = None,
    ):
        """The engine must be adjustable; `model` has its weights, unless they are the run's.

        Raises ValueError if the engine has no stop token.
        """
        if not eos_ids:
            raise ValueError(
                "the judge's model has no end-of-sequence token, so its verdicts on the run's "
                "devices do not end; set reward.judge.weights='server'"
            )
        self._endpoint, self._engine, self._renderer = endpoint, engine, renderer
        self._eos_ids, self.model = eos_ids, model
        self._pending: dict[int, PendingVerdict] = {}  # by slot of the engine

    def serve(self, params: Tree, version: int, done: Callable[[], bool]) -> None:
        """Answers requests until `done`, with weights of this version.

        An exception fails the requests in the engine.
        """
        self._engine.set_version(version)
        try:
            while not done():
                self._start_calls()
                if self._pending:
                    for generated in self._engine.generate(params):
                        self._take(generated)
        finally:
            for slot, pending in self._pending.items():
                self._engine.free(slot)
                pending.call.fail(503, "the rewards of this step are complete, or the run stops")
            self._pending.clear()

    def _start_calls(self) -> None:
        """Queues the requests that have come; waits for a moment if the engine is idle."""
        while True:
            try:
                call = self._endpoint.calls.get(timeout=0.0 if self._pending else _POLL_S)
            except queue.Empty:
                return
            try:
                request = self._request(call.body)
                slot = self._engine.submit(request)
            except (LookupError, TypeError, ValueError) as error:
                call.fail(400, str(error))
                continue
            self._pending[slot] = PendingVerdict(call, len(request.tokens), [])

    def _take(self, generated: Generated) -> None:
        pending = self._pending[generated.slot]
        pending.tokens.extend(generated.tokens.tolist())
        if not generated.finish:
            return
        del self._pending[generated.slot]
        if generated.finish == "error":
            pending.call.fail(400, f"the grammar of the verdict failed: {generated.error}")
        else:
            pending.call.reply.set_result(self._completion(pending, generated.finish))

    def _completion(self, pending: PendingVerdict, finish: str) -> Json:
        tokens = pending.tokens
        text = tokens[:-1] if tokens and tokens[-1] in self._eos_ids else tokens
        message = {
            "role": "assistant",
            "content": self._renderer.decode(np.array(text, np.int32)),
        }
        usage = {"prompt_tokens": pending.n_prompt_tokens, "completion_tokens": len(tokens)}
        return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}

    def _request(self, body: Json) -> Request:
        """The request of a chat completion; the random numbers are a function of its content."""
        tokens = self._renderer.render(body["messages"])
        schema = json.dumps(body["response_format"]["json_schema"]["schema"])
        room = self._engine.max_len - len(tokens)
        if room < body["max_tokens"]:
            raise ValueError(
                f"the judge's prompt of {len(tokens)} tokens and a verdict of "
                f"{body['max_tokens']} are longer than {self._engine.max_len}; raise "
                "reward.judge.max_prompt_len"
            )
        content = json.dumps(body, sort_keys=True).encode()
        return Request(
            tokens=tokens,
            max_tokens=body["max_tokens"],
            sampling=SamplingConfig(temperature=body["temperature"]),
            seed=int.from_bytes(hashlib.sha256(content).digest()[:_SEED_BYTES]) >> 1,
            adjustments=LogitAdjustments(grammar=self._grammar(schema)),
        )

    @functools.cached_property
    def _grammar(self) -> Callable[[str], JsonGrammar]:
        """Makes the grammar of a schema; those of rubrics are few, small and from the user."""
        n_vocab = self._engine.cfg.V
        tokenizer: Any = self._renderer.tokenizer
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        own = make_tokenizer(backend.to_str(), n_vocab, list(self._eos_ids))

        @functools.cache
        def grammar(schema: str) -> JsonGrammar:
            return JsonGrammar(schema, "response_format", n_vocab, build_matcher(own, schema))

        return grammar
