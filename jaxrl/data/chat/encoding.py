"""The chat template: messages to tokens and back."""

import contextlib
import copy
import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from jaxrl.data.chat.special_tokens import SpecialTokens
from jaxrl.data.chat.template import check_arguments, read_template, template_names, with_date
from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.images.placeholders import Placeholders, n_images, with_parts
from jaxrl.json_text import Message
from jaxrl.tool_calls.calls import MalformedCall, ToolCall, template_form
from jaxrl.types import ImageInput

_PLACEHOLDER = "@@turn@@"  # content of an assistant turn, to find its end in the rendered text
_N_LAST = 8  # tokens of a generation prompt that can open the reasoning
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_BATCH = 1024  # conversations tokenized in one call

Tools = Sequence[dict[str, Any]]  # OpenAI's schemas of the functions that the model may call


class ChatRenderer:
    """Renders conversations with the checkpoint's chat template, or with another one.

    `template` is "" (the checkpoint's), the path of a Jinja file, or the name of a file in
    templates/ ("chatml": <|im_start|>role ... <|im_end|>, no default system message).
    `system_prompt` is prepended to every conversation without a system message. `arguments` are
    variables of the template, such as enable_thinking. `today` is the date that templates print;
    None is the date at which they are rendered.

    Raises ValueError for an argument that the template does not read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str = "",
        system_prompt: str = "",
        arguments: Mapping[str, Any] | None = None,
        today: datetime.date | None = None,
        special_tokens: str = "error",
        images: Placeholders | None = None,
    ):
        """`special_tokens` is data.special_tokens: what their text in a message means.

        `images`: how the model's prompts have an image. None is a model that reads text only.
        """
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template = read_template(template) if template else _checkpoint_template(tokenizer)
        self.arguments = dict(arguments or {})
        self.today = today
        self._source = with_date(self.template, today) if today else self.template
        check_arguments(self.template, self.arguments, tokenizer.special_tokens_map)
        self._special_mode = special_tokens
        self.images = images

    @functools.cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that structure a conversation: their text in a message is not one."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]
        skeleton = ""
        with contextlib.suppress(ValueError):  # a template for other conversations
            skeleton = self.text([*turns, *turns[:1]], system_prompt=False)
        return SpecialTokens(self.tokenizer, skeleton)

    @functools.cached_property
    def _generation_prompt(self) -> str:
        """The text between a question and the response, without white space around it."""
        with contextlib.suppress(ValueError):  # a template for other conversations
            text = self.text([{"role": "user", "content": _PLACEHOLDER}], system_prompt=False)
            return text.rpartition(_PLACEHOLDER)[2].strip()
        return ""

    def check_text(self, messages: Sequence[Message], advice: str = "") -> None:
        """Raises ValueError if the text of a message contains a special token's text.

        So does text that ends with the generation prompt, which is rendered already. With
        data.special_tokens="text" it is tokenized as text, which the arguments of tool calls cannot
        be; with "token" a special token is one. An image token of the model is always an error.
        """
        if self.images:
            self.images.check_text(messages)
        if self._special_mode == "token":
            return
        shown = messages
        if self._special_mode == "text":
            shown = self.special_tokens.hide(messages)
        if found := self.special_tokens.first_in(shown):
            i, token = found
            raise ValueError(
                f"the text of turn {i} ({messages[i]['role']}) contains {token!r}, a special token "
                f"of the tokenizer. {advice}Set data.special_tokens=text to tokenize it as "
                "ordinary text, or correct the row"
            )
        ending = self._generation_prompt
        if self._special_mode == "error" and len(ending) > 2:
            for i, message in enumerate(messages):
                if message["role"] == "user" and message["content"].rstrip().endswith(ending):
                    raise ValueError(
                        f"the text of turn {i} (user) ends with {ending!r}, the generation prompt "
                        f"of the chat template, so it is rendered already. {advice}Remove the "
                        "template's text, or set data.special_tokens=text to keep it as text"
                    )

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatRenderer":
        """This renderer with further template arguments, which replace its own of the same name.

        They are `chat_template_kwargs` of a request to the server. Raises ValueError for an
        argument that the template does not read.
        """
        check_arguments(self.template, arguments, self.tokenizer.special_tokens_map)
        changed = copy.copy(self)
        changed.arguments = {**self.arguments, **arguments}
        return changed

    def render(self, messages: Sequence[Message]) -> Int32[np.ndarray, " prompt_len"]:
        """Tokens of a conversation, including the generation prompt."""
        return self.render_all([messages])[0]

    def render_all(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Tools] | None = None
    ) -> list[Int32[np.ndarray, " _"]]:
        """render() for many conversations; each tokenizer call has a batch and uses all cores.

        `tools` are those that each conversation offers to the model.
        """
        tools = [()] * len(conversations) if tools is None else tools
        pairs = list(zip(conversations, tools, strict=True))
        rendered = []
        for first in range(0, len(pairs), _BATCH):
            batch = pairs[first : first + _BATCH]
            rendered += self.tokenize([self.text(self.hidden(c), tools=t) for c, t in batch])
        return rendered

    def hidden(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as tokenize() reads the special tokens in their text as ordinary text."""
        return messages if self._special_mode == "token" else self.special_tokens.hide(messages)

    def tokenize(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Tokens of rendered texts; see hidden()."""
        return [tokens for tokens, _ in self.special_tokens.encode(texts)]

    def render_reply(
        self,
        messages: Sequence[Message],
        *,
        stop: Sequence[int],
        ended: bool,
        calls: Sequence[ToolCall | MalformedCall] = (),
    ) -> Int32[np.ndarray, " n"]:
        """Tokens between two turns of the model.

        They are the end of the first turn, unless the model generated it (`ended`), the reply
        `messages`, and the generation prompt. They are tokenized separately, so the tokens before
        them stay those that the model generated, even if their text tokenizes differently. `calls`
        are those of the first turn, which the reply answers. Raises ValueError if the template
        does not end a turn with one of the `stop` tokens, or rejects the reply.
        """
        text = self._after_turn(self.hidden(messages), calls)
        [tokens] = self.tokenize([text])
        ends = np.flatnonzero(np.isin(tokens, stop))
        if calls and len(ends):  # the rest of the call is before the end of the turn
            return tokens[ends[0] + ended :]
        if not len(ends) or self.decode(tokens[: ends[0]]).strip():
            if self._closes_earlier_turns(int(tokens[0]), stop):
                return tokens[int(ended) :]
            raise ValueError(
                f"the chat template continues after an assistant turn with {text[:40]!r}, which "
                "does not start with an end-of-sequence token, so turns cannot be separated; set "
                "data.chat_template"
            )
        return tokens[ends[0] + 1 :] if ended else tokens

    def place_images(
        self, tokens: Int32[np.ndarray, " _"], images: Sequence[ImageInput]
    ) -> PlacedTokens:
        """Rendered tokens with as many for each image as it has, and the images.

        Raises ValueError for more or fewer placeholders than images.
        """
        if self.images is None:
            return PlacedTokens(tokens)
        tokens = self.images.expand(tokens, images)
        return PlacedTokens(tokens, **self.images.fields(tokens, images))

    def _closes_earlier_turns(self, token: int, stop: Sequence[int]) -> bool:
        """Whether a special token closes turns that others follow, and a stop token the last one.

        So does gpt-oss's template.
        """
        [last] = self.tokenize([self.turn_end()])
        added = self.tokenizer.added_tokens_decoder
        return token in added and added[token].special and len(last) == 1 and last[0] in stop

    def _after_turn(
        self, messages: Sequence[Message], calls: Sequence[ToolCall | MalformedCall]
    ) -> str:
        """The text after a placeholder in a turn, or in its last call, and before the next turn.

        Some templates accept one call per turn only, or none.
        """
        errors = []
        for shown in (calls, calls[:1], ()):
            turns = [{"role": "user", "content": "?"}, _placeholder_turn(shown)]
            try:
                text = self.text([*turns, *messages], system_prompt=False)
            except ValueError as error:
                errors.append(error)
                continue
            return text.split(_PLACEHOLDER, max(len(shown), 1))[-1]
        raise errors[0]

    def turn_end(self) -> str:
        """The text that the template writes after an assistant turn."""
        turns = [{"role": "user", "content": "?"}, _placeholder_turn(())]
        text = self.text(turns, generation_prompt=False, system_prompt=False)
        return text.rpartition(_PLACEHOLDER)[2]

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks the model's text with {% generation %} blocks."""
        return _GENERATION.search(self.template) is not None

    def generated_spans(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> list[tuple[int, int]]:
        """Character ranges of {% generation %} blocks in the text without generation prompt."""
        variables: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.arguments}
        rendered: Any = render_jinja_template(
            [self._with_system_prompt(messages)],
            tools=list(tools) or None,
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            **variables,
        )
        return rendered[1][0]

    def text(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = True,
        system_prompt: bool = True,
        tools: Tools = (),
    ) -> str:
        """The rendered conversation before tokenization.

        `generation_prompt` adds the header of the assistant turn that the model is to generate,
        `system_prompt` the renderer's system prompt if the conversation has none. Raises ValueError
        if the template rejects the conversation, or leaves out tools or calls.
        """
        if system_prompt:
            messages = self._with_system_prompt(messages)
        try:
            text = self._applied(messages, generation_prompt, tools)
        except Exception as error:  # a template is foreign code
            roles = [m["role"] for m in messages]
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the chat template rejects a conversation with the roles {roles} ({reason}); "
                "change the data or set data.chat_template"
            ) from error
        if self.images:
            text = self.images.frame(text, n_images(messages))
        check_rendered_tools(text, messages, tools)
        return text

    def _with_system_prompt(self, messages: Sequence[Message]) -> list[Message]:
        if not self.system_prompt or any(m["role"] == "system" for m in messages):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _applied(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools) -> str:
        def apply(messages: list[Message]) -> str:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.arguments,
            )
            return str(rendered)

        messages = with_parts(messages) if self.images else list(messages)
        try:
            return apply(messages)
        except TypeError:
            if not any(m.get("tool_calls") for m in messages):
                raise
            return apply([_with_text_arguments(m) for m in messages])

    def opens_thought(self, prompt: Sequence[int] | Int32[np.ndarray, " n"]) -> bool:
        """Whether the end of the prompt, of its generation prompt, opens the reasoning."""
        return opens_thought(self.decode(prompt[-_N_LAST:], skip_special=False))

    def learned_parts(
        self,
        prompt_tokens: Int32[np.ndarray, " p"],
        tokens: Int32[np.ndarray, " n"],
        loss_mask: Bool[np.ndarray, " n"],
    ) -> list[tuple[str, bool]]:
        """The text of a sequence, with its special tokens, as (text, whether it is learned)."""
        sequence = np.concatenate([prompt_tokens, tokens])
        mask = np.concatenate([np.zeros(len(prompt_tokens), bool), loss_mask])
        starts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
        return [
            (self.decode(sequence[first:after], skip_special=False), bool(mask[first]))
            for first, after in itertools.pairwise(starts)
        ]

    def decode(
        self, tokens: Sequence[int] | Int32[np.ndarray, " n"], *, skip_special: bool = True
    ) -> str:
        """The text of tokens, by default without special tokens."""
        ids = np.asarray(tokens).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special))


def opens_thought(text: str) -> bool:
    """Whether a rendered prompt ends with the start of the model's reasoning."""
    return text.rstrip().endswith("<think>")


def _with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text, which DeepSeek's templates need."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
        for call in message.get("tool_calls", ())
        for function in (call["function"],)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _placeholder_turn(calls: Sequence[ToolCall | MalformedCall]) -> Message:
    """An assistant turn whose text, or the arguments of whose calls, are the placeholder."""
    if not calls:
        return {"role": "assistant", "content": _PLACEHOLDER}
    names = [call.name if isinstance(call, ToolCall) else "malformed" for call in calls]
    shown = [
        template_form(ToolCall(name, {"value": _PLACEHOLDER}, call.id))
        for name, call in zip(names, calls, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": shown}


def check_rendered_tools(text: str, messages: Sequence[Message], tools: Tools) -> None:
    """Raises ValueError if the template has left out a tool or a tool call."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for what, functions in (("tools", tools), ("tool calls", calls)):
        for function in functions:
            name = function["function"]["name"]
            if name not in text:
                raise ValueError(
                    f"the chat template leaves out {what} ({name!r} is not in the rendered text), "
                    "so the model would not see them; set data.chat_template to one that renders "
                    "them, or remove them from the data"
                )


def _checkpoint_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template; set "
            "data.chat_template to a Jinja file or to one of " + ", ".join(template_names())
        )
    return tokenizer.get_chat_template()
