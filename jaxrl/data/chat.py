"""The chat template: messages to tokens and back."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from transformers import PreTrainedTokenizerBase

from jaxrl.types import Message

_TEMPLATES = Path(__file__).parent / "templates"
_PLACEHOLDER = "@@turn@@"  # content of an assistant turn, to find its end in the rendered text
_BATCH = 1024  # conversations tokenized in one call

Tools = Sequence[dict[str, Any]]  # OpenAI's schemas of the functions that the model may call


class ChatRenderer:
    """Renders conversations with the checkpoint's chat template, or with another one.

    `template` is "" (the checkpoint's), the path of a Jinja file, or the name of a file in
    jaxrl/data/templates ("chatml": <|im_start|>role ... <|im_end|>, no default system message).
    `system_prompt` is prepended to every conversation without a system message.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str = "", system_prompt: str = ""
    ):
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template = _read_template(template) if template else _checkpoint_template(tokenizer)

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
            texts = [self.text(c, tools=t) for c, t in pairs[first : first + _BATCH]]
            # the template already contains the special tokens
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            rendered += [np.array(row, np.int32) for row in ids]
        return rendered

    def render_reply(
        self, messages: Sequence[Message], *, stop: Sequence[int], ended: bool
    ) -> Int32[np.ndarray, " n"]:
        """Tokens between two turns of the model.

        They are the end of the first turn, unless the model generated it (`ended`), the reply
        `messages`, and the generation prompt. They are tokenized separately, so the tokens before
        them stay those that the model generated, even if their text tokenizes differently. Raises
        ValueError if the template does not end a turn with one of the `stop` tokens.
        """
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        text = self.text([*turns, *messages]).partition(_PLACEHOLDER)[2]
        tokens = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        ends = np.flatnonzero(np.isin(tokens, stop))
        if not len(ends) or self.decode(tokens[: ends[0]]).strip():
            raise ValueError(
                f"the chat template continues after an assistant turn with {text[:40]!r}, which "
                "does not start with an end-of-sequence token, so turns cannot be separated; set "
                "data.chat_template"
            )
        return tokens[ends[0] + 1 :] if ended else tokens

    def render_turns(
        self, messages: Sequence[Message], stop: Sequence[int], tools: Tools = ()
    ) -> list[tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]]:
        """(tokens, loss mask) of a finished conversation; the mask is True on assistant tokens.

        An assistant turn ends with the first of the `stop` tokens after it, and that token is in
        the loss. Some templates render a turn differently once others follow it, for example
        without its reasoning. In that case each turn becomes a separate sequence, after the prompt
        that the model would see.

        Raises ValueError if the template does not end a turn with one of the `stop` tokens, does
        not continue the generation prompt with the turn, or leaves out tool calls.
        """
        turns = [
            self._turn(messages, i, tools)
            for i, m in enumerate(messages)
            if m["role"] == "assistant"
        ]
        full = self.text(messages, generation_prompt=False, tools=tools)
        if all(full.startswith(done) for _, done in turns):
            return [self._with_mask(full, [(len(head), len(done)) for head, done in turns], stop)]
        return [self._with_mask(done, [(len(head), len(done))], stop) for head, done in turns]

    def _turn(self, messages: Sequence[Message], i: int, tools: Tools) -> tuple[str, str]:
        """The text before turn i that is not learned, and the text including the turn.

        The first is the text up to the generation prompt. Some generation prompts open the
        reasoning of the turn, such as "<think>", while the template renders finished turns without
        it. A turn with reasoning then continues the generation prompt, as the model would; a turn
        without reasoning follows the part of the generation prompt that the template renders.
        """
        head = self.text(messages[:i], tools=tools)
        done = self.text(messages[: i + 1], generation_prompt=False, tools=tools)
        if done.startswith(head):
            return head, done
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(head, done, strict=False))
        shared = "".join(a for a, _ in pairs)
        opening, content = head[len(shared) :].strip(), messages[i]["content"].strip()
        before = self.text(messages[:i], generation_prompt=False, tools=tools)
        if not opening or not head.startswith(before) or len(shared) <= len(before):
            raise ValueError(
                f"the chat template does not render turn {i} as a continuation of its generation "
                "prompt; set data.chat_template to a template that does"
            )
        if not content.startswith(opening):
            return shared, done
        bare = [*messages[:i], {"role": "assistant", "content": _PLACEHOLDER}]
        end = self.text(bare, generation_prompt=False, tools=tools).rpartition(_PLACEHOLDER)[2]
        return head, head + content.removeprefix(opening).lstrip() + end

    def _with_mask(
        self, text: str, turns: Sequence[tuple[int, int]], stop: Sequence[int]
    ) -> tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
        """(tokens, loss mask) up to the end of the last turn; `turns` are character ranges."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.array(encoded["input_ids"], np.int32)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], int)
        mask = np.zeros(len(tokens), bool)
        for start, end in turns:
            first, after = np.searchsorted(starts, [start, end])
            ends = np.flatnonzero(np.isin(tokens[first:after], stop))
            if not len(ends):
                raise ValueError(
                    f"the chat template ends an assistant turn with {text[start:end][-20:]!r}, "
                    "which has no end-of-sequence token, so the model could not learn to stop; "
                    "set data.chat_template"
                )
            mask[first : first + ends[0] + 1] = True
        length = int(np.flatnonzero(mask)[-1]) + 1
        return tokens[:length], mask[:length]

    def text(
        self, messages: Sequence[Message], *, generation_prompt: bool = True, tools: Tools = ()
    ) -> str:
        """The rendered conversation before tokenization.

        `generation_prompt` adds the header of the assistant turn that the model is to generate.
        Raises ValueError if the template rejects the conversation, or leaves out tools or calls.
        """
        messages = list(messages)
        if self.system_prompt and not any(m["role"] == "system" for m in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template is foreign code
            roles = [m["role"] for m in messages]
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the chat template rejects a conversation with the roles {roles} ({reason}); "
                "change the data or set data.chat_template"
            ) from error
        check_rendered_tools(str(text), messages, tools)
        return str(text)

    def decode(
        self, tokens: Sequence[int] | Int32[np.ndarray, " n"], *, skip_special: bool = True
    ) -> str:
        """The text of tokens, by default without special tokens."""
        ids = np.asarray(tokens).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special))


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


def _read_template(template: str) -> str:
    for path in (_TEMPLATES / f"{template}.jinja", Path(template)):
        if path.is_file():
            return path.read_text()
    raise FileNotFoundError(
        f"chat template {template!r} is neither a file nor one of {', '.join(_template_names())}; "
        "set data.chat_template to the path of a Jinja file"
    )


def _checkpoint_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template; set "
            "data.chat_template to a Jinja file or to one of " + ", ".join(_template_names())
        )
    return tokenizer.get_chat_template()


def _template_names() -> list[str]:
    return sorted(path.stem for path in _TEMPLATES.glob("*.jinja"))
