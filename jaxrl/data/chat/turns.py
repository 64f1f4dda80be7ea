"""Finished conversations as tokens with a loss mask: which text the model is trained to generate.

A chat template renders a conversation for reading. The tokens of a turn that the model generates
are what follows the generation prompt, up to the end-of-sequence token. So each assistant turn is
rendered as the last one, and its text is compared with the generation prompt before it:

  messages before the turn  |  generation prompt  |  turn, end of sequence  |
  ---------------- not in the loss ---------------- ------- in the loss -----
"""

import re
from collections.abc import Collection, Sequence

from jaxrl.data.chat.encoding import ChatRenderer, Tools
from jaxrl.data.chat.masking import CharSpan, MaskedTokens, TurnText, tokenize_turns
from jaxrl.json_text import Message

_PLACEHOLDER = "@@turn@@"  # content of a message, to find its place in the rendered text


def render_turns(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    stop: Sequence[int],
    tools: Tools = (),
    *,
    given: Collection[int] = (),
) -> list[MaskedTokens]:
    """(tokens, loss mask) of a finished conversation; the mask is True on assistant tokens.

    The messages with the indices `given` are not learned. An assistant turn ends with the first of
    the `stop` tokens after it, and that token is in the loss. If the template marks the model's
    text with {% generation %} blocks, only that text is. The tokens before a turn are those of a
    rollout's prompt, also if the tokenizer would merge the turn's first characters with them.

    Some templates render a turn differently once others follow it, for example without its
    reasoning. Then the next turn begins another sequence, with the context that the model would
    see.

    Raises ValueError, with the turn and the reason, if the template does not render it as a
    continuation of its generation prompt, leaves out its text, or does not end it with a stop
    token.
    """
    ends = [text for i in stop if (text := renderer.decode([i], skip_special=False))]
    messages = renderer.hidden(messages)
    sequences: list[list[TurnText]] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i not in given:
            try:
                turn = _render_turn(renderer, messages, i, ends, tools)
            except ValueError as error:
                raise ValueError(f"turn {i} ({_shortened(message)}): {error}") from error
            if sequences and turn.text.startswith(sequences[-1][-1].text):
                sequences[-1].append(turn)
            else:
                sequences.append([turn])
    return [tokenize_turns(renderer, turns, stop) for turns in sequences]


def _render_turn(
    renderer: ChatRenderer, messages: Sequence[Message], i: int, ends: Sequence[str], tools: Tools
) -> TurnText:
    text, start = _continuation(renderer, messages, i, tools)
    text, end = _ended(renderer, messages, i, text, start, ends, tools)
    learned: tuple[CharSpan, ...] = ((start, len(text)),)
    if renderer.marks_generation:
        learned = _marked(renderer, messages[: i + 1], text, start, end, tools)
    return TurnText(text, learned, end)


def _continuation(
    renderer: ChatRenderer, messages: Sequence[Message], i: int, tools: Tools
) -> tuple[str, int]:
    """(text up to turn i, where the model's part of it begins)."""
    head = renderer.text(messages[:i], tools=tools)
    done = renderer.text(messages[: i + 1], generation_prompt=False, tools=tools)
    parts = _parts(messages[i])
    if done.startswith(head) and _has(done[len(head) :], parts):
        return done, len(head)
    before = renderer.text(messages[:i], generation_prompt=False, tools=tools)
    region = _n_shared(before, done)  # where the turn begins, with its header
    if done.startswith(head) and _has(done[region:], parts):
        return done, len(head)  # the generation prompt opens the reasoning of the content
    if (generated := _alone(renderer, messages[i])) and not renderer.marks_generation:
        return head + generated, len(head)
    plain = {k: v for k, v in messages[i].items() if k != "reasoning_content"}
    plain["content"] = _PLACEHOLDER
    bare = renderer.text([*messages[:i], plain], generation_prompt=False, tools=tools)
    shared = _n_shared(head, bare)
    if not _has(done[region:], parts):
        reasoned = "" if renderer.marks_generation else _reasoned(messages[i], head, bare, shared)
        if not reasoned:
            raise ValueError(
                f"the chat template leaves out a part of its text, {_missing(done[region:], parts)}"
                ", so the model would not learn it; set data.chat_template to one that renders it, "
                "or change the turn"
            )
        return reasoned, len(head)
    follows = done.startswith(head[:shared]) and shared >= len(before)
    if follows and _squeezed(done[shared:]).startswith(_squeezed(parts[0])):
        return done, shared  # a turn without the reasoning that its generation prompt opens
    if renderer.marks_generation:
        return done, region
    raise ValueError(
        "the chat template does not render it as a continuation of its generation prompt, "
        f"{head[region:]!r}, but as {done[region:][:80]!r}; set data.chat_template or "
        "data.template_kwargs so that both agree, or change the turn"
    )


def _alone(renderer: ChatRenderer, message: Message) -> str:
    """The text that the model generates for a turn if it answers a single question.

    For templates that change the context once the turn is there: Mistral's write the system prompt
    into the last question, if no turn follows. "" if the turn does not continue its generation
    prompt.
    """
    question: Message = {"role": "user", "content": "?"}
    head = renderer.text([question], system_prompt=False)
    done = renderer.text([question, message], generation_prompt=False, system_prompt=False)
    tail = done.removeprefix(head)
    return tail if done.startswith(head) and _has(tail, _parts(message)) else ""


def _reasoned(message: Message, head: str, bare: str, shared: int) -> str:
    """The text of a turn as the model generates it, if the template leaves out its reasoning.

    `head` ends with the generation prompt, which may open the reasoning ("<think>"). `bare` is the
    turn with a placeholder as its content; it agrees with `head` up to `shared`. "" if the content
    does not continue `head`.
    """
    opening = head[shared:].strip()
    content = message["content"]
    if opening and content.lstrip().startswith(opening):
        content = content.lstrip().removeprefix(opening).lstrip()
    elif opening and not (re.fullmatch(r"<\w+>", opening) and f"</{opening[1:]}" in content):
        return ""
    if message.get("reasoning_content") or _PLACEHOLDER not in bare:
        return ""
    return head + content + bare.rpartition(_PLACEHOLDER)[2]


def _ended(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    i: int,
    text: str,
    start: int,
    ends: Sequence[str],
    tools: Tools,
) -> tuple[str, int]:
    """(text up to the first end-of-sequence token after `start`, where that token begins).

    Some templates end a turn with the role of the next message (GLM-4).
    """
    found = _first(text, ends, start)
    if found is None:
        role = "tool" if messages[i].get("tool_calls") else "user"
        later = messages[i + 1 : i + 2] or [{"role": role, "content": _PLACEHOLDER}]
        more = renderer.text([*messages[: i + 1], *later], generation_prompt=False, tools=tools)
        found = _first(more, ends, len(text)) if more.startswith(text) else None
        if found is not None and not more[len(text) : found[0]].strip():
            text = more
        else:
            found = None
    if found is None:
        raise ValueError(
            f"the chat template ends it with {text[start:][-20:]!r}, which has no end-of-sequence "
            f"token ({', '.join(map(repr, ends))}), so the model could not learn to stop; set "
            "data.chat_template, or eos_token_id in the model's generation_config.json"
        )
    return text[: found[1]], found[0]


def _first(text: str, ends: Sequence[str], start: int) -> CharSpan | None:
    """The first occurrence of one of the `ends` in the text."""
    found = [(at, at + len(end)) for end in ends if (at := text.find(end, start)) >= 0]
    return min(found, default=None)


def _marked(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    text: str,
    start: int,
    end: int,
    tools: Tools,
) -> tuple[CharSpan, ...]:
    """The parts of a turn in {% generation %} blocks, and its end-of-sequence token."""
    marks = renderer.generated_spans(messages, tools)
    clipped = [(max(start, a), min(end, b)) for a, b in marks if b > start and a < end]
    if not clipped:
        raise ValueError(
            "the chat template has {% generation %} blocks, but none in this turn; mark its text "
            "in the template, or set data.chat_template to one without such blocks"
        )
    return *clipped, (end, len(text))


def _parts(message: Message) -> tuple[str, ...]:
    """Content and reasoning of a message."""
    return message["content"], message.get("reasoning_content") or ""


def _has(text: str, parts: Sequence[str]) -> bool:
    """Whether the text contains the parts. Templates may change white space."""
    if all(part.strip() in text for part in parts):
        return True
    squeezed = _squeezed(text)
    return all(_squeezed(part) in squeezed for part in parts)


def _missing(text: str, parts: Sequence[str]) -> str:
    """The first of the parts that the text lacks, for a message."""
    part = next(part for part in parts if not _has(text, [part]))
    return repr(part if len(part) <= 60 else part[:57] + "...")


def _n_shared(a: str, b: str) -> int:
    """Number of characters at the start of both texts that are equal."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _shortened(message: Message) -> str:
    text = message["content"] or "a tool call"
    return repr(text if len(text) <= 40 else text[:37] + "...")
