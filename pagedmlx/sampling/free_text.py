"""FreeText: a grammar that begins only behind a marker, as behind the end of a model's thought."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pagedmlx.core.structured import Grammar, GrammarMatcher


class FreeText:
    """Any text but the model's end, up to and including a marker; then a grammar.

    The marker is found in the tokens' bytes, special tokens by their names among them. Tokens that
    would complete it and go on are not allowed: the grammar begins with a token of its own.

    Args:
        marker: What the free text ends with.
        tokens: The bytes of each of the model's tokens; empty ones are never chosen.
        ends: Tokens by which the model ends an output.
        grammar: What begins behind the marker.
    """

    def __init__(
        self, marker: str, tokens: Sequence[bytes], ends: frozenset[int], grammar: Grammar
    ) -> None:
        self._marker = marker.encode()
        self._tokens = tokens
        self._grammar = grammar
        allowed = to_mask((i for i, token in enumerate(tokens) if token and i not in ends), tokens)
        last = self._marker[-1:]
        risky = [index for index, token in enumerate(tokens) if last in token[:-1]]
        # By how much of the marker the text ends with.
        self._masks = [
            allowed & ~to_mask((i for i in risky if self._overruns(self._marker[:size], i)), tokens)
            for size in range(len(self._marker))
        ]

    def start(self) -> GrammarMatcher:
        """A matcher for an output of its own."""
        return _Matcher(self)

    def mask_after(self, tail: bytes) -> npt.NDArray[np.uint32]:
        """What may come behind a text that ends with these bytes."""
        sizes = range(min(len(tail), len(self._marker) - 1), 0, -1)
        return self._masks[next((n for n in sizes if tail.endswith(self._marker[:n])), 0)]

    def follow(self, tail: bytes, token_id: int) -> tuple[bytes, GrammarMatcher | None]:
        """The text's end with one more token, and a matcher if that completes the marker."""
        text = tail + self._tokens[token_id]
        if self._marker in text:
            return b"", self._grammar.start()
        return text[-len(self._marker) :], None

    def _overruns(self, held: bytes, token_id: int) -> bool:
        text = held + self._tokens[token_id]
        return self._marker in text[:-1]


class _Matcher:
    """Follows one output: its free text, then the grammar."""

    def __init__(self, free_text: FreeText) -> None:
        self._free_text = free_text
        self._tail = b""
        self._inner: GrammarMatcher | None = None

    def mask(self) -> npt.NDArray[np.uint32]:
        """Which tokens may come next."""
        if self._inner is not None:
            return self._inner.mask()
        return self._free_text.mask_after(self._tail)

    def advance(self, token_id: int) -> bool:
        """Take in the next token; whether nothing may follow."""
        if self._inner is not None:
            return self._inner.advance(token_id)
        self._tail, self._inner = self._free_text.follow(self._tail, token_id)
        return False


def to_mask(token_ids: Iterable[int], tokens: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """A mask with the bits of these tokens set, for as many as there are in all."""
    bits = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
