"""Fields of a request that change logits: penalties, logit_bias, min_tokens, and a grammar."""

from typing import Any

from jaxrl.engine.api import Grammar, LogitAdjustments
from jaxrl.engine.device.adjustments import MAX_BIAS
from jaxrl.http.errors import RequestError
from jaxrl.serve.requests.fields import Fields
from jaxrl.serve.requests.prompt import ServerLimits

MAX_BIAS_VALUE = 100  # absolute value, as in OpenAI's API
NONE = LogitAdjustments()


def read_adjustments(
    fields: Fields, logit_bias: Any, grammar: Grammar | None, limits: ServerLimits
) -> LogitAdjustments | None:
    """The adjustments of a request; None if it has none. Raises RequestError (400)."""
    if grammar is not None:
        _check_grammar_fields(fields)
    adjustments = LogitAdjustments(
        repetition_penalty=fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        bias=_read_bias(logit_bias, limits.vocab),
        min_tokens=fields.min_tokens,
        grammar=grammar,
    )
    return None if adjustments == NONE else adjustments


def _check_grammar_fields(fields: Fields) -> None:
    """The grammar alone decides where a response may end."""
    for name, value in (("min_tokens", fields.min_tokens), ("ignore_eos", fields.ignore_eos)):
        if value:
            raise RequestError(
                400,
                f"{name} contradicts response_format and tool_choice, which decide where a "
                "response may end; leave one out",
                param=name,
            )


def _read_bias(logit_bias: Any, n_vocab: int) -> tuple[tuple[int, float], ...]:
    """(token id, bias) of an object that maps token ids, as strings, to numbers."""

    def invalid(reason: str) -> RequestError:
        return RequestError(400, f"logit_bias {reason}", param="logit_bias")

    if logit_bias is None:
        return ()
    if not isinstance(logit_bias, dict):
        raise invalid("must be an object of token ids and numbers")
    if len(logit_bias) > MAX_BIAS:
        raise invalid(f"has {len(logit_bias)} tokens, at most {MAX_BIAS} are accepted")
    biases = {}
    for name, value in logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < n_vocab):
            raise invalid(f"has the token id {name[:64]!r}; ids are 0 to {n_vocab - 1}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= MAX_BIAS_VALUE:
            raise invalid(f"of token {name} must be a number from -100 to 100")
        biases[int(name)] = float(value)
    return tuple(biases.items())
