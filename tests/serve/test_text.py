"""Text in pieces is the text in one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.serve.text import UNFINISHED, Detokenizer, StopStrings


@pytest.fixture(scope="session")
def byte_level(model_folder):
    tokenizer = load_tokenizer(model_folder)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def sentencepiece():
    """As Llama 2 decodes: words begin with a sign for the space, unknown characters are bytes, the
    first space is taken away. 0-255 bytes, 256 "▁", 257.. words."""
    words = ["▁", "▁Hel", "lo", "▁wor", "ld", "é"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer.decode


def pieces(decode, tokens, cuts):
    """The pieces that come of tokens which arrive in groups that end at `cuts`."""
    detokenizer, ends = Detokenizer(decode), [*sorted(cuts), len(tokens)]
    made = [detokenizer.add(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return [*made, detokenizer.end()]


def in_groups(tokens):
    """Token lists, each with the places at which it is cut."""
    return tokens.flatmap(
        lambda t: st.tuples(st.just(t), st.sets(st.integers(0, len(t)), max_size=8))
    )


# That decoder spoils all characters of a run of bytes of which one is broken, so here none is.
CHARACTERS = st.one_of(
    st.integers(256, 261).map(lambda word: [word]),
    st.sampled_from("a\né漢👩").map(lambda character: list(character.encode())),
)


@settings(max_examples=200, deadline=None)
@given(drawn=in_groups(st.lists(st.integers(0, 271), max_size=40)))
def test_pieces_of_byte_level_tokens_are_the_whole_text(byte_level, drawn):
    tokens, cuts = drawn
    assert "".join(pieces(byte_level, tokens, cuts)) == byte_level(tokens)


@settings(max_examples=200, deadline=None)
@given(
    drawn=in_groups(
        st.lists(CHARACTERS, max_size=20).map(lambda parts: [t for p in parts for t in p])
    )
)
def test_pieces_of_sentencepiece_tokens_are_the_whole_text(drawn):
    tokens, cuts = drawn
    decode = sentencepiece()
    assert "".join(pieces(decode, tokens, cuts)) == decode(tokens)


def test_a_character_of_several_tokens_comes_whole(model_folder):
    text = "né 漢字 👩‍👩‍👧 end"
    tokenizer = load_tokenizer(model_folder)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text)  # most characters take several tokens
    made = pieces(tokenizer.decode, tokens, range(len(tokens)))
    assert "".join(made) == text
    assert not any(UNFINISHED in piece for piece in made)
    assert "漢" in made  # by itself, as soon as its last byte is there


def test_a_character_that_never_ends_is_shown_as_broken(byte_level, model_folder):
    tokens = load_tokenizer(model_folder)("a漢", add_special_tokens=False)["input_ids"][:-1]
    assert pieces(byte_level, tokens, range(len(tokens)))[-1] == UNFINISHED


def through(strings, parts):
    """(text let through, whether a string was found)."""
    stop, out = StopStrings(strings), ""
    for part in parts:
        out += stop.add(part)
        if stop.found:
            return out, True
    return out + stop.end(), False


def one_by_one(strings, text):
    """The same from the definition: the first moment at which the text ends with a string."""
    for end in range(1, len(text) + 1):
        if found := [s for s in strings if text[:end].endswith(s)]:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    strings=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    parts=st.lists(st.text("ab\n", max_size=5), max_size=8),
)
def test_stop_strings_cut_the_same_however_the_text_arrives(strings, parts):
    assert through(strings, parts) == one_by_one(strings, "".join(parts))


def test_text_is_held_back_only_while_a_stop_string_may_come():
    stop = StopStrings(("STOP", "\n\n"))
    assert [stop.add(p) for p in ("no S", "T", "ART", "\n", "x\n")] == [
        "no ",
        "",
        "START",
        "",
        "\nx",
    ]
    assert stop.add("\nrest") == "" and stop.found
