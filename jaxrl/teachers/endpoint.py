"""A teacher at a server: logprobs of the policy's responses, and of the most likely tokens.

The server is vLLM or `python -m jaxrl.serve` (prompt_logprobs of /v1/completions), or SGLang
(return_logprob of /generate). Which one, the name of its model and its tokenizer are checked at the
start of a run.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from jaxrl.config.keys import TeacherEndpointConfig
from jaxrl.config.teachers import Teacher
from jaxrl.http.client import RequestFailed
from jaxrl.http.reply_cache import content_key
from jaxrl.json_text import parse_json
from jaxrl.teachers.cache import ScoreCache
from jaxrl.teachers.replies import FORMS, GivenScores, read_scores, request_body
from jaxrl.teachers.server import Server
from jaxrl.types import TrainingSample

TEXTS = (
    "The 12 cafés don't wait:\n\n   x = [1, 2];\t",
    "def f(a, b):\n    return a ** b  # 3.14",
    "你好 🙂 Grüße, 10000000 ≤ ∞",
)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Requests of a step: sent ones, responses that were known, and failures."""

    requests: int = 0
    cached: int = 0
    failed: int = 0
    reason: str = ""  # of the last failure


def total_counts(counts: Sequence[Counts]) -> Counts:
    """The counts of several processes together."""
    reasons = [one.reason for one in counts if one.reason]
    return Counts(
        requests=sum(one.requests for one in counts),
        cached=sum(one.cached for one in counts),
        failed=sum(one.failed for one in counts),
        reason=reasons[-1] if reasons else "",
    )


class TeacherEndpoint:
    """Scores of one server's model."""

    def __init__(self, teacher: Teacher, cfg: TeacherEndpointConfig, *, k: int, n_vocab: int):
        """`k` most likely ids are read at each token, below the policy's `n_vocab` logits."""
        self._server, self._cfg, self._k = Server(teacher.path, cfg), cfg, k
        self._key = f"config.{teacher.key}={teacher.path}"
        self._model, self._form, self._n_vocab = teacher.options.model, FORMS[0], n_vocab
        self._cache = ScoreCache(cfg.cache)

    def open(self, tokenizer: PreTrainedTokenizerBase, *, max_len: int) -> None:
        """Finds out what the server is. `max_len` tokens are the longest sequence.

        Raises ValueError if it cannot be reached, serves no or several models, returns no prompt
        logprobs or too few of them, has another tokenizer or a shorter context.
        """
        try:
            self._find_model(max_len)
            probe = tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
            probe += [max(tokenizer.get_vocab().values())]
            found = self._find_form(probe)
            self._check_tokenizer(tokenizer, probe, found)
        except RequestFailed as error:
            raise ValueError(
                f"{self._key}: {error}; start the server before the run, and set its base URL, "
                "such as 'http://host:8000/v1'"
            ) from error

    @property
    def found(self) -> tuple[str, str]:
        """(the name of the model, the form of requests), as `open` found them."""
        return self._model, self._form

    def reopen(self, found: tuple[str, str]) -> None:
        """Takes over what `open` found in another process."""
        self._model, self._form = found

    def read(self, samples: Sequence[TrainingSample]) -> tuple[list[GivenScores | None], Counts]:
        """(the scores of each response, None where the server failed; counts).

        Equal sequences are sent once.
        """
        wanted = [
            ([*map(int, s.prompt_tokens), *map(int, s.tokens)], len(s.tokens)) for s in samples
        ]
        keys = [
            content_key(self._server.url, self._body(self._form, tokens, n), n)
            for tokens, n in wanted
        ]
        found: dict[str, GivenScores | str] = {}
        for key in dict.fromkeys(keys):
            if (known := self._cache.get(key)) is not None:
                found[key] = known
        missing = {k: one for k, one in zip(keys, wanted, strict=True) if k not in found}
        with ThreadPoolExecutor(self._cfg.concurrency, "teacher") as threads:
            for key, scores in zip(
                missing, threads.map(self._score, missing.values()), strict=True
            ):
                found[key] = scores
                if isinstance(scores, GivenScores):
                    self._cache.put(key, scores)
        reasons = [one for key in keys if isinstance(one := found[key], str)]
        counts = Counts(
            requests=len(missing),
            cached=len(keys) - len(missing),
            failed=len(reasons),
            reason=reasons[-1] if reasons else "",
        )
        read = [found[key] for key in keys]
        return [one if isinstance(one, GivenScores) else None for one in read], counts

    def _score(self, wanted: tuple[list[int], int]) -> GivenScores | str:
        """The scores of the last tokens of a sequence, or why there are none."""
        try:
            return self._request(self._form, *wanted)
        except (RequestFailed, ValueError) as error:
            return str(error)

    def _request(self, form: str, tokens: list[int], n: int) -> GivenScores:
        """Raises RequestFailed, and ValueError for a reply without the scores."""
        at_root = form == "sglang"
        url = f"{self._server.root}/generate" if at_root else f"{self._server.url}/completions"
        reply = self._server.send(url, self._body(form, tokens, n))
        scores = read_scores(form, reply, tokens, n, self._k)
        if scores.ids.size and not 0 <= scores.ids.min() <= scores.ids.max() < self._n_vocab:
            raise ValueError(
                f"the server's most likely ids go up to {scores.ids.max()}, and the policy has "
                f"{self._n_vocab} logits"
            )
        return scores

    def _body(self, form: str, tokens: list[int], n: int) -> dict:
        return request_body(form, self._model, tokens, n, self._k)

    def _find_model(self, max_len: int) -> None:
        listed = parse_json(self._server.send(f"{self._server.url}/models"))
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = {
            entry["id"]: entry.get("max_model_len")
            for entry in entries or []
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        }
        wanted = self._model or (next(iter(names)) if len(names) == 1 else "")
        if wanted not in names:
            raise ValueError(
                f"{self._key} serves {', '.join(map(repr, names)) or 'no model'}; write the name "
                "of one of them after the URL, as '?model=NAME'"
            )
        self._model, context = wanted, names[wanted]
        if isinstance(context, int) and context < max_len + 1:
            raise ValueError(
                f"{self._key} serves {wanted!r} with a context of {context} tokens, and a prompt "
                f"with its response may have {max_len}, with one more that the server generates; "
                "start it with a longer context, or lower data.max_prompt_len or "
                "data.max_response_len"
            )

    def _find_form(self, probe: list[int]) -> GivenScores:
        """The scores of `probe` in the first form that the server has."""
        reasons = []
        for form in FORMS:
            try:
                found = self._request(form, probe, len(probe) - 1)
            except ValueError as error:
                reasons.append(f"{form}: {error}")
                continue
            except RequestFailed as error:
                if not error.final:
                    raise
                reasons.append(f"{form}: {error}")
                continue
            self._form = form
            return found
        raise ValueError(
            f"{self._key} does not return the logprobs of a prompt with {self._k} most likely "
            f"tokens and ids up to {probe[-1]} ({'; '.join(reasons)}); use vLLM (--max-logprobs "
            f"at least {max(self._k, 1)}), SGLang or python -m jaxrl.serve with a model that has "
            "the policy's tokenizer, or a teacher in a folder"
        )

    def _check_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, probe: list[int], found: GivenScores
    ) -> None:
        """Compares the token ids of texts, or the texts of the probe's ids without /tokenize."""
        advice = "serve a model of the policy's family"
        try:
            for text in TEXTS:
                body = {"model": self._model, "prompt": text, "add_special_tokens": False}
                reply = parse_json(self._server.send(f"{self._server.root}/tokenize", body))
                ours = tokenizer(text, add_special_tokens=False)["input_ids"]
                if (theirs := reply["tokens"]) != ours:
                    raise ValueError(
                        f"{self._key}: its tokenizer makes {theirs[:8]}... of {text!r}, the "
                        f"policy's {ours[:8]}...; {advice}"
                    )
            return
        except (RequestFailed, LookupError, TypeError) as error:
            if isinstance(error, RequestFailed) and not error.final:
                raise
        texts = [str(tokenizer.decode([token])) for token in probe[1:]]
        pairs = [(a, b) for a, b in zip(texts, found.texts, strict=True) if a.isascii() and b]
        if not pairs:
            raise ValueError(
                f"{self._key} has no /tokenize and returns no texts of tokens, so that its "
                "tokenizer cannot be compared with the policy's; use vLLM, SGLang or python -m "
                "jaxrl.serve"
            )
        if differ := [pair for pair in pairs if pair[0] != pair[1]]:
            raise ValueError(
                f"{self._key}: its tokenizer reads a token as {differ[0][1]!r}, the policy's as "
                f"{differ[0][0]!r}; {advice}"
            )
