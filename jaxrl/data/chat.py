"""The tokenizer of a checkpoint folder and its chat template: messages to tokens and back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from transformers import AutoTokenizer, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = Path(__file__).parent / "templates"
_MARK = "@@turn@@"  # stands for a turn of the assistant
_BATCH = 1024  # conversations tokenized in one call


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in a checkpoint folder. Reads the folder only, never a hub."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; set model.path to a checkpoint folder in Hugging Face format"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy "
            "tokenizer.json and tokenizer_config.json of the model into it"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # foreign code, many kinds of failure
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded ({_first_line(error)}); copy tokenizer.json "
            "and tokenizer_config.json of the model into it anew"
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """Raises ValueError if the tokenizer can emit a token that a model of `vocab` rows has not."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(
            f"the tokenizer has token ids up to {largest} ({token!r}), the model only {vocab} "
            "embedding rows (ids below it); use the tokenizer that belongs to the model in "
            "model.path, or resize the model's embeddings"
        )


def check_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: str | Path, key: str, vocab: int
) -> None:
    """Raises ValueError if the model in `folder`, which `key` of the config names, reads other tokens than
    `tokenizer` writes, or has fewer than its ids."""
    theirs, ours = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    differ = [token for token, i in ours.items() if theirs.get(token) != i]
    differ += [token for token in theirs if token not in ours]
    if differ:
        raise ValueError(
            f"{key}: the model in {folder} has another tokenizer than the policy ({len(differ)} tokens differ, for "
            f"example {differ[0]!r}); take a model of the policy's family"
        )
    if max(ours.values()) >= vocab:
        raise ValueError(
            f"{key}: the model in {folder} has {vocab} embedding rows, but the policy's tokenizer ids up to "
            f"{max(ours.values())}; take a model of the policy's family"
        )


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response, ascending: the tokenizer's end-of-sequence token and
    eos_token_id of generation_config.json (one id or a list; config.json where that file is absent)."""
    found = _id_set(tokenizer.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            found |= _id_set(json.loads(path.read_text()).get("eos_token_id"))
            break
    if not found:
        raise ValueError(
            f"neither the tokenizer nor generation_config.json in {folder} names an end-of-sequence "
            "token, so no response could end; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))


def padding_id(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """A token to fill rows with that ends no response: the tokenizer's own, else another special one; None
    where there is none."""
    stop = stop_ids(folder, tokenizer)
    known = [tokenizer.pad_token_id, *sorted(tokenizer.all_special_ids)]
    known += sorted(tokenizer.added_tokens_decoder)
    return next((i for i in known if i is not None and i not in stop), None)


class ChatRenderer:
    """Renders conversations with the checkpoint's chat template, or with another one.

    `template` is "" (the checkpoint's), the path of a Jinja file, or the name of a file in
    jaxrl/data/templates ("chatml": <|im_start|>role ... <|im_end|>, no default system message).
    `system_prompt` is put before every conversation that has no system message.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str = "", system_prompt: str = ""
    ):
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template = _read_template(template) if template else _own_template(tokenizer)

    def render(self, messages: Sequence[dict[str, str]]) -> Int32[np.ndarray, " prompt_len"]:
        """Tokens of the conversation and of the header that asks the model to answer."""
        return self.render_all([messages])[0]

    def render_all(
        self, conversations: Sequence[Sequence[dict[str, str]]]
    ) -> list[Int32[np.ndarray, " _"]]:
        """render() of each; one call of the tokenizer, which uses all cores, for many."""
        rendered = []
        for first in range(0, len(conversations), _BATCH):
            texts = [self.text(c) for c in conversations[first : first + _BATCH]]
            # the template already holds the special tokens
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            rendered += [np.array(row, np.int32) for row in ids]
        return rendered

    def render_reply(
        self, messages: Sequence[dict[str, str]], *, stop: Sequence[int], ended: bool
    ) -> Int32[np.ndarray, " n"]:
        """What stands between a turn of the model and its next one: the end of the turn, unless the model wrote
        it (`ended`), the messages that answer it, and the header that asks again.

        It is tokenized by itself, so the tokens before it stay those that the model wrote, whatever their text
        would be tokenized to. Raises ValueError where the template does not end a turn with one of `stop`.
        """
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        text = self.text([*asked, *messages]).partition(_MARK)[2]
        tokens = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        ends = np.flatnonzero(np.isin(tokens, stop))
        if not len(ends) or self.decode(tokens[: ends[0]]).strip():
            raise ValueError(
                f"the chat template goes on after an answer with {text[:40]!r}, which does not begin with an "
                "end-of-sequence token, so turns could not be told apart; set data.chat_template"
            )
        return tokens[ends[0] + 1 :] if ended else tokens

    def render_turns(
        self, messages: Sequence[dict[str, str]], stop: Sequence[int]
    ) -> list[tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]]:
        """A finished conversation as (tokens, which of them the assistant writes).

        A turn of the assistant ends with the first of the `stop` tokens after it, and it is the model's to
        say that. Some templates write a turn otherwise once others follow it, for instance without its
        thoughts. Then each turn comes by itself, after what the model would see before it.

        Raises ValueError where the template does not end an answer with one of `stop`, or does not
        begin it where it asks for one.
        """
        turns = [
            self._turn(messages, i) for i, m in enumerate(messages) if m["role"] == "assistant"
        ]
        whole = self.text(messages, ask=False)
        if all(whole.startswith(answered) for _, answered in turns):
            return [self._mark(whole, [(len(asked), len(done)) for asked, done in turns], stop)]
        return [self._mark(done, [(len(asked), len(done))], stop) for asked, done in turns]

    def _turn(self, messages: Sequence[dict[str, str]], i: int) -> tuple[str, str]:
        """The text that asks for turn i, and the text with its answer."""
        asked, answered = self.text(messages[:i]), self.text(messages[: i + 1], ask=False)
        if not answered.startswith(asked):
            raise ValueError(
                f"the chat template does not write turn {i} as a continuation of what asks for it; "
                "set data.chat_template to one that does"
            )
        return asked, answered

    def _mark(self, text: str, turns: Sequence[tuple[int, int]], stop: Sequence[int]):
        """(tokens up to the end of the last turn, true where they are of a turn). A turn is given by the
        characters at which it starts and at which the template is done with it."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.array(encoded["input_ids"], np.int32)
        first = np.array([start for start, _ in encoded["offset_mapping"]], int)
        own = np.zeros(len(tokens), bool)
        for start, end in turns:
            begin, behind = np.searchsorted(first, [start, end])
            ends = np.flatnonzero(np.isin(tokens[begin:behind], stop))
            if not len(ends):
                raise ValueError(
                    f"the chat template ends an answer with {text[start:end][-20:]!r}, which holds no "
                    "end-of-sequence token, so the model could not learn to stop; set data.chat_template"
                )
            own[begin : begin + ends[0] + 1] = True
        length = int(np.flatnonzero(own)[-1]) + 1
        return tokens[:length], own[:length]

    def text(self, messages: Sequence[dict[str, str]], *, ask: bool = True) -> str:
        """The conversation as the template writes it, before tokenization; `ask` adds the header after
        which the model answers."""
        messages = list(messages)
        if self.system_prompt and not any(m["role"] == "system" for m in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:  # a template is foreign code
            roles = [m["role"] for m in messages]
            raise ValueError(
                f"the chat template refuses a conversation with the roles {roles} "
                f"({_first_line(error)}); change the data or set data.chat_template"
            ) from error
        return str(text)

    def decode(
        self, tokens: Sequence[int] | Int32[np.ndarray, " n"], *, skip_special: bool = True
    ) -> str:
        """The text of tokens, by default without the special ones."""
        ids = np.asarray(tokens).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special))


def _id_set(ids: Any) -> set[int]:
    """Of None, one id or a list of ids."""
    return set() if ids is None else set(ids if isinstance(ids, list) else [ids])


def _read_template(template: str) -> str:
    for path in (_TEMPLATES / f"{template}.jinja", Path(template)):
        if path.is_file():
            return path.read_text()
    raise FileNotFoundError(
        f"chat template {template!r} is neither a file nor one of {', '.join(_template_names())}; "
        "set data.chat_template to the path of a Jinja file"
    )


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template; set "
            "data.chat_template to a Jinja file or to one of " + ", ".join(_template_names())
        )
    return tokenizer.get_chat_template()


def _template_names() -> list[str]:
    return sorted(path.stem for path in _TEMPLATES.glob("*.jinja"))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
