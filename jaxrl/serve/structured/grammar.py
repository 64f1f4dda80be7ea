"""JSON grammars: which tokens may follow, so that a response matches a JSON schema.

llguidance (https://github.com/guidance-ai/llguidance) follows the grammar on the host and gives one
bit per token; the engine's sampler applies them on the device.

Compiling a schema can take hours, and a thread cannot be ended. So a process with limits compiles
it first, and the server only what has compiled there.
"""

import collections
import copy
import dataclasses
import importlib.util
import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl.config.packages import install_advice
from jaxrl.engine.json_grammar import JsonGrammar
from jaxrl.engine.json_matcher import build_matcher, make_tokenizer
from jaxrl.http.errors import RequestError
from jaxrl.serve.structured.schema_checker import SchemaChecker
from jaxrl.subprocesses.process import WorkerFailed

log = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 64 << 10
MAX_QUEUED = 16  # schemas that wait to be compiled
MAX_CACHED = 16  # compiled schemas that are kept, at most 64 MiB each
MAX_REFUSED = 256  # refused schemas that are kept


class GrammarCompiler:
    """Compiles JSON schemas for one tokenizer, one at a time. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n_vocab: int, stop_ids: Sequence[int]):
        """Converts the tokenizer, about a second for 150,000 tokens. Any of `stop_ids` may end."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer")
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        self._n_vocab = n_vocab
        self._tokenizer = make_tokenizer(backend.to_str(), n_vocab, list(stop_ids))
        self._checker = SchemaChecker(backend.to_str(), n_vocab, stop_ids)
        self._executor = ThreadPoolExecutor(1, "grammar")
        self._lock = threading.Lock()  # of the fields below
        self._n_queued = 0
        # By schema, the last used at the end: its matcher, and the reason why it is refused.
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._refused: collections.OrderedDict[str, str] = collections.OrderedDict()

    def start(self) -> None:
        """Starts the process that compiles, in the background."""
        self._executor.submit(self._checker.start)

    def stop(self) -> None:
        """Fails the schemas that wait, and all others until `close`."""
        self._checker.stop()

    def close(self) -> None:
        """Ends the process. The next schema starts another one."""
        self._checker.stop()
        executor, self._executor = self._executor, ThreadPoolExecutor(1, "grammar")
        executor.shutdown()
        self._checker.close()

    def compile(self, schema: dict[str, Any], *, param: str) -> JsonGrammar:
        """The grammar of a JSON schema, to be built by `build`.

        Raises RequestError (400), with the field `param`, if the schema is too large.
        """
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_BYTES:
            raise _invalid(f"has {len(text)} bytes, at most {MAX_SCHEMA_BYTES} are accepted", param)
        return JsonGrammar(text, param, self._n_vocab)

    def build(self, grammar: JsonGrammar) -> Future[JsonGrammar]:
        """The grammar with a matcher; it can be cancelled.

        Raises RequestError, or the future does: 400 if the schema is invalid, has keywords that a
        grammar cannot express, or takes too much time or memory, 429 if too many schemas wait, 503
        if the process that compiles has failed.
        """
        with self._lock:
            known = self._known(grammar)
            if not known:
                if self._n_queued >= MAX_QUEUED:
                    raise RequestError(
                        429,
                        f"{self._n_queued} JSON schemas wait to be compiled; try again later",
                        param=grammar.param,
                        code="overloaded",
                    )
                self._n_queued += 1
        if known:
            future: Future[JsonGrammar] = Future()
            future.set_result(known)
            return future
        future = self._executor.submit(self._build, grammar)
        future.add_done_callback(self._dequeue)
        return future

    def _dequeue(self, _: Future) -> None:
        with self._lock:
            self._n_queued -= 1

    def _known(self, grammar: JsonGrammar) -> JsonGrammar | None:
        """The grammar if it was built before. Raises RequestError (400) if it was refused."""
        schema = grammar.schema
        if schema in self._refused:
            self._refused.move_to_end(schema)
            raise _invalid(self._refused[schema], grammar.param)
        if schema not in self._compiled:
            return None
        self._compiled.move_to_end(schema)
        return dataclasses.replace(grammar, start=self._compiled[schema])

    def _build(self, grammar: JsonGrammar) -> JsonGrammar:
        with self._lock:
            if known := self._known(grammar):
                return known
        try:
            refusal = self._checker.check(grammar.schema)
        except WorkerFailed as error:
            raise RequestError(
                503, f"JSON schemas cannot be compiled now ({error}); try again later"
            ) from error
        start = None if refusal else build_matcher(self._tokenizer, grammar.schema)
        with self._lock:
            if refusal:
                _keep(self._refused, grammar.schema, refusal, MAX_REFUSED)
                raise _invalid(refusal, grammar.param)
            _keep(self._compiled, grammar.schema, start, MAX_CACHED)
        return dataclasses.replace(grammar, start=start)


def _keep(cache: collections.OrderedDict[str, Any], schema: str, value: Any, most: int) -> None:
    cache[schema] = value
    if len(cache) > most:
        cache.popitem(last=False)


def grammar_compiler(
    tokenizer: PreTrainedTokenizerBase, n_vocab: int, stop_ids: Sequence[int]
) -> GrammarCompiler | None:
    """The compiler; None without the extra, or for a model without a way to end a response.

    A tokenizer that llguidance cannot read is logged.
    """
    if importlib.util.find_spec("llguidance") is None or not stop_ids:
        return None
    try:
        return GrammarCompiler(tokenizer, n_vocab, stop_ids)
    except Exception as error:  # of the library, for a tokenizer without a fast implementation
        log.warning("no JSON schemas and demanded tool calls with this tokenizer: %s", error)
        return None


def missing_compiler(param: str) -> RequestError:
    return RequestError(
        400,
        f"{param} needs the package llguidance ({install_advice('grammar')}), and a model with a "
        "fast tokenizer and an end-of-sequence token; this server lacks one of them",
        param=param,
    )


def _invalid(reason: str, param: str) -> RequestError:
    return RequestError(400, f"the JSON schema of {param} {reason}", param=param)
