"""The text of a learned turn: special tokens in it, and its first tokens after the prompt."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.turns import render_turns
from jaxrl.data.demonstrations import demonstration_maker
from jaxrl.data.items import load_items
from jaxrl.data.preferences import pair_maker
from jaxrl.data.prompts import prompt_maker

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
START, END = 1, 2
STOP = (END,)
MERGES = [("Ċ", "Ċ"), ("Ċ", "Ġ"), ("ĊĊ", "Ċ"), ("Ġ", "4"), ("<", "|")]
Q = {"role": "user", "content": "2+2?"}


def answer(text, **fields):
    return {"role": "assistant", "content": text} | fields


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer that merges line breaks and blanks, as SmolLM2's does."""
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {c: i for i, c in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def make(tokenizer):
    return lambda mode="error": ChatRenderer(tokenizer, template="chatml", special_tokens=mode)


@pytest.fixture
def load(make, tmp_path):
    def load(kind, row, mode="error"):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row))
        renderer, data = make(mode), DataConfig()
        makers = {
            "rl": lambda: prompt_maker(renderer, data),
            "sft": lambda: demonstration_maker(renderer, data, stop=STOP),
            "dpo": lambda: pair_maker(renderer, data, stop=STOP),
        }
        return load_items([str(path)], makers[kind]())

    return load


WRITES = "It writes <|im_end|> and a newline."


@pytest.mark.parametrize(
    "kind, row, turn",
    [
        pytest.param("sft", {"messages": [Q, answer(WRITES)]}, "turn 1 .assistant.", id="D1"),
        pytest.param("sft", {"prompt": "2+2?", "completion": "4<|im_end|>"}, "turn 1", id="D1-end"),
        pytest.param("sft", {"messages": [Q | {"content": WRITES}, answer("4")]}, "turn 0 .user."),
        pytest.param("dpo", {"prompt": "2+2?", "chosen": WRITES, "rejected": "5"}, "turn 1"),
        pytest.param("rl", {"prompt": WRITES}, "turn 0 .user.", id="A4"),
        pytest.param("rl", {"prompt": "x", "system": "<|im_start|>"}, "turn 0 .system."),
        pytest.param("rl", {"prompt": [Q, answer("<|endoftext|>"), Q]}, "turn 1 .assistant."),
    ],
)
def test_a_special_token_in_the_text_of_a_message_is_an_error_of_the_row(load, kind, row, turn):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{turn}.* contains .*special_tokens=t"):
        load(kind, row)


def test_as_text_it_has_other_tokens_and_the_turn_is_learned_to_its_end(load, make, tokenizer):
    [one] = load("sft", {"messages": [Q, answer(WRITES)]}, mode="text")
    assert tokenizer.decode(one.tokens) == f"{WRITES}<|im_end|>" and one.loss_mask.all()
    assert one.tokens.tolist().count(END) == 1 and one.tokens[-1] == END
    [prompt] = load("rl", {"prompt": WRITES}, mode="text")
    assert prompt.tokens.tolist().count(END) == 1  # that of the user's turn
    assert WRITES in tokenizer.decode(prompt.tokens) and prompt.messages[0]["content"] == WRITES
    [pair] = load("dpo", {"prompt": "2+2?", "chosen": WRITES, "rejected": "5"}, mode="text")
    assert tokenizer.decode(pair.chosen.tokens) == f"{WRITES}<|im_end|>"


def test_an_earlier_turn_with_the_text_is_context_of_the_next_one(make, tokenizer):
    turns = [Q, answer(WRITES), Q, answer("4")]
    [(tokens, mask)] = render_turns(make("text"), turns, STOP)
    assert tokenizer.decode(tokens[mask]) == f"{WRITES}<|im_end|>4<|im_end|>"


def test_as_token_it_is_the_special_token(load):
    [prompt] = load("rl", {"prompt": WRITES}, mode="token")
    assert prompt.tokens.tolist().count(END) == 2


@pytest.mark.parametrize("mode", ["error", "text"])
def test_reasoning_tags_and_plain_angle_brackets_are_no_special_text(load, tokenizer, mode):
    text = "<think>\n1 < 2 |im_end|> <table>\n4"
    [one] = load("sft", {"messages": [Q, answer(text)]}, mode=mode)
    assert tokenizer.decode(one.tokens) == f"{text}<|im_end|>"
    assert SPECIAL.index("<think>") in one.tokens


def test_a_special_token_in_the_arguments_of_a_call_is_an_error_also_as_text(load):
    call = {"function": {"name": "say", "arguments": {"text": "<|im_end|>"}}}
    with pytest.raises(ValueError, match=r"turn 1 .assistant. contains '<\|im_end\|>'"):
        load("sft", {"messages": [Q, answer("", tool_calls=[call])]}, mode="text")


def test_an_observation_of_an_environment_cannot_end_its_turn(make, tokenizer):
    reply = [{"role": "user", "content": WRITES}]
    tokens = make().render_reply(reply, stop=STOP, ended=True)
    assert tokens.tolist().count(END) == 1 and WRITES in tokenizer.decode(tokens)


def test_the_code_point_that_hides_special_tokens_is_no_way_to_remove_text(make, tokenizer):
    [tokens] = make("text").render_all([[{"role": "user", "content": "<|im_end|> a\ufdd0b"}]])
    assert "<|im_end|> a\N{REPLACEMENT CHARACTER}b" in tokenizer.decode(tokens)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\n\n4", id="D2-line-breaks"),
        pytest.param("  4", id="D2-blanks"),
        pytest.param("\n", id="D2-only-a-line-break"),
        pytest.param(" 4", id="one-blank"),
        pytest.param("4", id="no-blank"),
    ],
)
@pytest.mark.parametrize("earlier", [[], [Q, answer("\n\nHm")]], ids=["first", "later"])
def test_a_learned_turn_follows_the_tokens_of_the_rollouts_prompt(make, tokenizer, text, earlier):
    renderer = make()
    prompt = renderer.render([*earlier, Q])
    [(tokens, mask)] = render_turns(renderer, [*earlier, Q, answer(text)], STOP)
    if not earlier:
        np.testing.assert_array_equal(tokens[: len(prompt)], prompt)
        assert not mask[: len(prompt)].any() and mask[len(prompt) :].all()
    learned = tokenizer.decode(tokens[mask])
    assert learned == "\n\nHm<|im_end|>" * bool(earlier) + f"{text}<|im_end|>"
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens[-len(own) - 1 :].tolist() == [*own, END]


def test_without_separate_tokens_the_context_would_differ(tokenizer, make):
    """The case is one: tokenized together, the prompt's last line break is merged with the turn."""
    renderer = make()
    text = renderer.text([Q, answer("\n\n4")], generation_prompt=False)
    together = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = renderer.render([Q]).tolist()
    assert together[: len(prompt)] != prompt


TURNS = (
    "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}:\n{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:\n{% endif %}"
)


def test_a_tokenizer_that_prepends_a_space_does_not_add_one_inside_a_turn(tmp_path):
    """As Llama 2's: the turn continues the line break of its prompt without another space."""
    vocab = {c: i for i, c in enumerate(["<unk>", "</s>", *"▁\n:?2+4AUx.", "\n\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\n", "\n")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens(["</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    (tmp_path / "turns.jinja").write_text(TURNS)
    renderer = ChatRenderer(fast, template=str(tmp_path / "turns.jinja"))
    prompt = renderer.render([Q])
    for text, learned in (("4", ["4", "</s>"]), ("\n4", ["\n", "4", "</s>"])):
        [(found, mask)] = render_turns(renderer, [Q, answer(text)], (1,))
        np.testing.assert_array_equal(found[: mask.argmax()], prompt)
        assert fast.convert_ids_to_tokens(found[mask].tolist()) == learned
