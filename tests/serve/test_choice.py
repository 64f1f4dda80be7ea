"""Incremental detokenization and stop strings (jaxrl/serve/choice.py)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.serve.choice import REPLACEMENT, Detokenizer, StopStrings


@pytest.fixture(scope="session")
def byte_level(model_folder):
    tokenizer = load_tokenizer(model_folder)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def sentencepiece():
    """Decodes as Llama 2: "▁" marks a space, unknown characters are bytes, the first space is
    stripped. Ids: 0-255 bytes, 256 "▁", 257.. words."""
    words = ["▁", "▁Hel", "lo", "▁wor", "ld", "é"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer.decode


def pieces(decode, tokens, cuts):
    """The pieces of text of tokens that arrive in groups which end at `cuts`."""
    detokenizer, ends = Detokenizer(decode), [*sorted(cuts), len(tokens)]
    texts = [detokenizer.add(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return [*texts, detokenizer.flush()]


def in_groups(tokens):
    """Token lists, each with the positions at which it is split."""
    return tokens.flatmap(
        lambda t: st.tuples(st.just(t), st.sets(st.integers(0, len(t)), max_size=8))
    )


# One invalid byte makes this decoder replace the whole run of bytes, so all bytes are valid here.
CHARACTERS = st.one_of(
    st.integers(256, 261).map(lambda word: [word]),
    st.sampled_from("a\né漢👩").map(lambda character: list(character.encode())),
)


@settings(max_examples=200, deadline=None)
@given(drawn=in_groups(st.lists(st.integers(0, 271), max_size=40)))
def test_pieces_of_byte_level_tokens_join_to_the_text(byte_level, drawn):
    tokens, cuts = drawn
    assert "".join(pieces(byte_level, tokens, cuts)) == byte_level(tokens)


@settings(max_examples=200, deadline=None)
@given(
    drawn=in_groups(
        st.lists(CHARACTERS, max_size=20).map(lambda parts: [t for p in parts for t in p])
    )
)
def test_pieces_of_sentencepiece_tokens_join_to_the_text(drawn):
    tokens, cuts = drawn
    decode = sentencepiece()
    assert "".join(pieces(decode, tokens, cuts)) == decode(tokens)


def test_a_character_of_several_tokens_is_emitted_at_once(model_folder):
    text = "né 漢字 👩‍👩‍👧 end"
    tokenizer = load_tokenizer(model_folder)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text)  # most characters take several tokens
    parts = pieces(tokenizer.decode, tokens, range(len(tokens)))
    assert "".join(parts) == text
    assert not any(REPLACEMENT in piece for piece in parts)
    assert "漢" in parts  # by itself, as soon as its last byte has arrived


def test_an_incomplete_character_is_replaced_at_the_end(byte_level, model_folder):
    tokens = load_tokenizer(model_folder)("a漢", add_special_tokens=False)["input_ids"][:-1]
    assert pieces(byte_level, tokens, range(len(tokens)))[-1] == REPLACEMENT


def emitted(strings, parts):
    """(emitted text, whether a stop string was found)."""
    stop, out = StopStrings(strings), ""
    for part in parts:
        out += stop.add(part)
        if stop.found:
            return out, True
    return out + stop.flush(), False


def emitted_by_definition(strings, text):
    """The same by definition: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        if found := [s for s in strings if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    strings=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    parts=st.lists(st.text("ab\n", max_size=5), max_size=8),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_split(strings, parts):
    assert emitted(strings, parts) == emitted_by_definition(strings, "".join(parts))


def test_text_is_held_back_only_while_a_stop_string_is_possible():
    stop = StopStrings(("STOP", "\n\n"))
    assert [stop.add(p) for p in ("no S", "T", "ART", "\n", "x\n")] == [
        "no ",
        "",
        "START",
        "",
        "\nx",
    ]
    assert stop.add("\nrest") == "" and stop.found
