"""Text and bytes of single tokens, for logprobs. A token may be part of a character."""

import dataclasses
import re

from jaxrl.data.chat.encoding import ChatRenderer

REPLACEMENT = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 character to
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary is.

    Printable characters of Latin-1 are themselves; the other bytes follow in order from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTE_OF_CHARACTER = _byte_of_character()


@dataclasses.dataclass(frozen=True)
class TokenText:
    """One token."""

    text: str  # with U+FFFD for parts of characters
    bytes: bytes

    @property
    def name(self) -> str:
        """The text; for a part of a character its bytes as in OpenAI's API, `bytes:\\xe6\\xbc`."""
        if REPLACEMENT not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes)


class TokenTexts:
    """The texts of a vocabulary's tokens, each decoded once. Thread-safe."""

    def __init__(self, renderer: ChatRenderer):
        self._renderer = renderer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        if (found := self._known.get(token)) is None:
            text = self._renderer.decode([token], skip_special=False)
            found = self._known[token] = TokenText(text, self._bytes(token, text))
        return found

    def _bytes(self, token: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        entry = str(self._renderer.tokenizer.convert_ids_to_tokens(token))
        if match := _BYTE.fullmatch(entry):
            return bytes([int(match[1], 16)])
        if set(entry) <= set(BYTE_OF_CHARACTER):
            return bytes(BYTE_OF_CHARACTER[character] for character in entry)
        return text.encode()
