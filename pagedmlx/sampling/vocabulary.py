"""A model's tokens as llguidance sees them: their bytes, and which tokens a text usually is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagedmlx.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as grammars see them.

    Attributes:
        tokens: The bytes of each of the model's V tokens; empty for one that is never chosen. A
            special token's are its name's.
        special: Tokens that are not text; a grammar names them, as in ``<|im_end|>``.
        ends: Tokens by which the model ends an output.
        encode: The tokens that a text usually is. Where a grammar leaves but one text, these alone
            are let through.
    """

    tokens: Sequence[bytes]
    special: frozenset[int]
    ends: frozenset[int]
    encode: Callable[[str], Sequence[int]]


class TokenTable:
    """A vocabulary in the form that llguidance wants."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special)
        self.eos_token_ids = sorted(vocabulary.ends)
        if not self.eos_token_ids:
            # There must be one: it gets the place behind the model's tokens.
            self.eos_token_ids = [len(self.tokens)]
            self.special_token_ids += self.eos_token_ids
            self.tokens.append(b"<end>")
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None
        self._vocabulary = vocabulary
        self._id_of = {
            token: index
            for index, token in reversed(list(enumerate(vocabulary.tokens)))
            if token and index not in vocabulary.special
        }
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes joined are that text's: the usual ones, or else the longest ones."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._usual(data)
        num_tokens = len(self._vocabulary.tokens)
        is_text = all(i < num_tokens and i not in self._vocabulary.special for i in ids)
        # Some tokenizers begin every text with a space, and all read names of special tokens.
        if is_text and b"".join(self.tokens[i] for i in ids) == data:
            return ids
        return list(self._longest_tokens(data))

    def _usual(self, data: bytes) -> list[int]:
        try:
            return list(self._vocabulary.encode(data.decode()))
        except (UnicodeError, InvalidRequestError):
            return []

    def _longest_tokens(self, data: bytes) -> Iterator[int]:
        place = 0
        while place < len(data):
            lengths = range(min(self._longest, len(data) - place), 0, -1)
            pieces = (data[place : place + length] for length in lengths)
            piece = next((piece for piece in pieces if piece in self._id_of), b"")
            if piece:
                yield self._id_of[piece]
            place += len(piece) or 1
