"""llguidance's matcher of a JSON schema. Imports neither jax nor transformers."""

import json
import re
from typing import Any

from jaxrl.json_text import parse_json

MAX_LEXER_STATES = 20_000  # of one response, about 2 kB each
NO_VALUE = "no value matches it"
# Up to 16 blanks between two parts of a value: a model could write blanks forever otherwise.
BLANKS = r"[ \n\r\t]{1,16}"
# Without it every mask searches all of the text that the grammar prescribes from here on, so that a
# long constant takes quadratic time.
NO_FORCING = '%llguidance {"no_forcing": true}'
_PLACE = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| |$)", re.S)


def make_tokenizer(tokenizer: str, n_vocab: int, stop_ids: list[int]) -> Any:
    """llguidance's tokenizer, from the text of a tokenizer.json. Takes a second for 150,000 tokens.

    Any of `stop_ids` may end a response.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=stop_ids)


def build_matcher(tokenizer: Any, schema: str) -> Any:
    """The matcher at the start of a response, for the JSON text of a schema.

    Neither time nor memory is limited. Raises ValueError if a grammar cannot express the schema, or
    if no value matches it.
    """
    from llguidance import LLMatcher, LLParserLimits

    options = {"whitespace_pattern": BLANKS, "lenient": False}
    value = json.dumps(parse_json(schema) | {"x-guidance": options})
    grammar = {"grammars": [{"lark_grammar": f"{NO_FORCING}\nstart: %json {value}"}]}
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, json.dumps(grammar), log_level=0, limits=limits)
    check(matcher)
    first = matcher.deep_copy()
    tokens = first.compute_bitmask()
    check(first)
    if matcher.is_accepting() or not any(tokens):
        raise ValueError(NO_VALUE)
    return matcher


def check(matcher: Any) -> None:
    """Raises ValueError if the matcher has failed."""
    if matcher.is_error():
        raise ValueError(reason(matcher.get_error()))


def reason(error: str) -> str:
    """An error of the matcher without its place in the grammar."""
    if "NoExtension" in error:
        return NO_VALUE
    found = _PLACE.match(error)
    return found[1].strip() if found else error.partition("\n")[0]
