"""Jinja sources of chat templates: the built-in ones, the arguments they read, and their date."""

import datetime
import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

_FOLDER = Path(__file__).parent / "templates"
_GIVEN = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
_DIRECTIVES = (*"aAbBcCdDeFgGhHIjklmMnpPrRsSTuUVwWxXyYzZ", "-d", "-m", "-H", "-I", "-M", "-S", "-j")


class _GenerationBlock(Extension):
    """Parses {% generation %} ... {% endgeneration %}, transformers' marks of the model's text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(template: str) -> str:
    """The source of a built-in template or of a Jinja file. Raises FileNotFoundError."""
    for path in (_FOLDER / f"{template}.jinja", Path(template)):
        if path.is_file():
            return path.read_text()
    raise FileNotFoundError(
        f"chat template {template!r} is neither a file nor one of {', '.join(template_names())}; "
        "set data.chat_template to the path of a Jinja file"
    )


def template_names() -> list[str]:
    """The names of the built-in templates."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


@functools.lru_cache(maxsize=64)
def variables(source: str) -> frozenset[str]:
    """Names that the template reads and does not define. Raises ValueError for invalid Jinja."""
    environment = jinja2.Environment(extensions=[loopcontrols, _GenerationBlock])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not valid Jinja (line {error.lineno}: {error.message}); set "
            "data.chat_template to one that is"
        ) from error


def prints_date(source: str) -> bool:
    """Whether the template prints the date of the day."""
    return "strftime_now" in variables(source)


def check_arguments(source: str, arguments: Mapping[str, Any], special: Iterable[str]) -> None:
    """Raises ValueError for an argument that the template does not read, or that is not free.

    `special` are the names of the special tokens, which the tokenizer gives to the template.
    """
    readable = sorted(variables(source) - _GIVEN - set(special)) if arguments else []
    for name in arguments:
        if name not in readable:
            guess = difflib.get_close_matches(name, readable, n=1)
            hint = f"did you mean {guess[0]}? " if guess else ""
            raise ValueError(
                f"the chat template has no argument {name!r}; {hint}It reads: "
                f"{', '.join(readable) or 'none'}. Correct data.template_kwargs, or the "
                "chat_template_kwargs of a request"
            )


def with_date(source: str, date: datetime.date) -> str:
    """The template with a fixed date for strftime_now(format), at midnight.

    transformers gives templates a strftime_now of the clock. A macro of that name takes precedence.
    """
    midnight = datetime.datetime.combine(date, datetime.time())
    known = {f"%{name}": midnight.strftime(f"%{name}") for name in _DIRECTIVES}
    replaced = "".join(f' | replace("{name}", {text!r})' for name, text in known.items())
    macro = f"{{%- macro strftime_now(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro %}}"
    return f"{macro}\n{source}"  # trim_blocks, which transformers sets, removes the line's end
