"""Token ids to text, one id at a time: what each new id adds that later ids can't change.

``ByteStream`` is exact and serves tokenizers whose text is the joined bytes of their tokens
(byte-level BPE, SentencePiece); ``WindowStream`` serves any other by decoding a short window.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW = 32


class TokenStream(Protocol):
    """Turns token ids into text as they come."""

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is now certain."""
        ...

    def flush(self) -> str:
        """The rest, now that no more ids come; a cut character at the end is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """How a token's string spells bytes, read from a tokenizer's decoder.

    Attributes:
        byte_level: Each character of a token's string stands for one byte (GPT-2's table).
        replacements: Pairs applied to a token's string in order, such as a space mark and a space.
        byte_fallback: Tokens such as ``<0x0A>`` are single bytes.
        strip: A character dropped from the front of a text, up to ``num_strip`` times.
        num_strip: See ``strip``.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = " "
    num_strip: int = 0

    @classmethod
    def from_decoder(cls, decoder: Mapping[str, Any] | None) -> TokenBytes | None:
        """Read the JSON form of a ``tokenizers`` decoder; None when it is of another kind."""
        if decoder is None:
            return None
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = " ".join(step["type"] for step in steps)
        if kinds == "ByteLevel":
            return cls(byte_level=True)
        if not re.fullmatch(r"Replace( Replace)*( ByteFallback)?( Fuse( Strip)?)?", kinds):
            return None
        replaces = [step for step in steps if step["type"] == "Replace"]
        if any("String" not in step["pattern"] for step in replaces):
            return None
        strip = steps[-1] if steps[-1]["type"] == "Strip" else {"content": " ", "start": 0}
        if strip.get("stop"):
            return None
        return cls(
            byte_level=False,
            replacements=tuple((step["pattern"]["String"], step["content"]) for step in replaces),
            byte_fallback="ByteFallback" in kinds,
            strip=strip["content"],
            num_strip=strip["start"],
        )

    def spell(self, token: str) -> bytes:
        """The bytes that a token's string stands for."""
        if self.byte_level:
            table = _byte_of_char()
            try:
                return bytes([table[char] for char in token])
            except KeyError:  # an added token that is written as plain text
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


class ByteStream:
    """Joins the tokens' bytes and decodes them as UTF-8 as far as they are whole.

    Bytes that can never become a character are U+FFFD, as in the tokenizer's own decode; bytes
    that begin one are kept until it is whole, and dropped if it never is.

    Args:
        spelling: The tokenizer's rule.
        token_of: The string of a token id; None for an id outside the vocabulary, which is
            passed over.
        skipped: Ids that are left out.
        at_start: Whether the text begins here; if not, no leading character is stripped.
    """

    def __init__(
        self,
        spelling: TokenBytes,
        token_of: Callable[[int], str | None],
        *,
        skipped: frozenset[int],
        at_start: bool,
    ) -> None:
        self._spelling = spelling
        self._token_of = token_of
        self._skipped = skipped
        self._num_strip = spelling.num_strip if at_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is now certain."""
        return self._utf8.decode(self.spell(token_id))

    def spell(self, token_id: int) -> bytes:
        """Take one id; return the bytes that it adds to the text."""
        token = None if token_id in self._skipped else self._token_of(token_id)
        if token is None:
            return b""
        data = self._spelling.spell(token)
        strip = self._spelling.strip.encode()
        while self._num_strip and data:
            if not data.startswith(strip):
                self._num_strip = 0
                break
            data = data[len(strip) :]
            self._num_strip -= 1
        return data

    def flush(self) -> str:
        """Nothing, or what stands for bytes that could never have become a character."""
        rest = self._utf8.decode(b"", final=True)
        # A cut character is one U+FFFD; Python also waits for a third byte after half a
        # surrogate (ED A0), which is two.
        return "" if rest == REPLACEMENT else rest


class WindowStream:
    """Decodes the last few tokens again for each new one; works with any tokenizer.

    Text counts as certain once one more token has left it as it was, so it comes one token late;
    trailing U+FFFD waits for the character to become whole and is dropped if it never does.

    Args:
        decode: The tokenizer's own decode, special tokens already handled.
        skipped: Ids that are left out.
        context: Ids before the first one, which the text continues.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        skipped: frozenset[int],
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window = [token for token in context[-_WINDOW:] if token not in skipped]
        self._text = decode(self._window)
        self._num_shown = len(self._text)

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is now certain."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        before, self._text = self._text, self._decode(self._window)
        piece = self._show(_common_prefix(before, self._text))
        if len(self._window) > 2 * _WINDOW:
            self._forget()
        return piece

    def flush(self) -> str:
        """The rest, without a cut character at the end."""
        return self._show(self._text)

    def _show(self, certain: str) -> str:
        piece = certain[self._num_shown :].rstrip(REPLACEMENT)
        self._num_shown += len(piece)
        return piece

    def _forget(self) -> None:
        """Drop the older half of the window, unless text of it still waits to be shown."""
        window = self._window[_WINDOW:]
        text = self._decode(window)
        num_shown = len(text) - (len(self._text) - self._num_shown)
        if num_shown >= 0:
            self._window, self._text, self._num_shown = window, text, num_shown


def _common_prefix(left: str, right: str) -> str:
    if right.startswith(left):
        return left
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    return right[:length]


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
