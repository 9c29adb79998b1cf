"""Grammars for tests: one made of plain strings, and what a mask says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from pagedmlx.core.structured import Grammar, GrammarBackend, GrammarMatcher, StructuredOutputs
from pagedmlx.engine.grammars import grammar_backend
from pagedmlx.errors import NoTokenLeftError
from pagedmlx.sampling.free_text import to_mask
from pagedmlx.text.tokenizer import Tokenizer


def allowed(mask: npt.NDArray[np.uint32]) -> list[int]:
    """The tokens whose bits are set."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@cache
def backend(make: Callable[[], Tokenizer], vocab_size: int | None = None) -> GrammarBackend:
    """The real backend over one of the test tokenizers."""
    tokenizer = make()
    return grammar_backend(tokenizer, vocab_size or tokenizer.vocab_size)


class ListGrammar:
    """Allows some lists of tokens, each whole; written plainly.

    It counts how many matchers there are, and a token in ``bad`` breaks a matcher.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        ends: Sequence[int] = (),
        bad: int | None = None,
    ) -> None:
        self.lists = [list(each) for each in lists]
        self.vocab_size = vocab_size
        self.ends = list(ends)
        self.bad = bad
        self.num_started = 0

    def start(self) -> GrammarMatcher:
        self.num_started += 1
        return _ListMatcher(self)

    def compile(self, structured: StructuredOutputs) -> Grammar:
        return self


class _ListMatcher:
    def __init__(self, grammar: ListGrammar) -> None:
        self.grammar = grammar
        self.tokens: list[int] = []

    def _next(self) -> tuple[set[int], bool]:
        size = len(self.tokens)
        fitting = [each for each in self.grammar.lists if each[:size] == self.tokens]
        return {each[size] for each in fitting if len(each) > size}, self.tokens in fitting

    def mask(self) -> npt.NDArray[np.uint32]:
        tokens, is_whole = self._next()
        if self.grammar.bad in self.tokens:
            raise NoTokenLeftError("a bad token")
        tokens |= set(self.grammar.ends) if is_whole else set()
        return to_mask(tokens, [b""] * self.grammar.vocab_size)

    def advance(self, token_id: int) -> bool:
        tokens, is_whole = self._next()
        if is_whole and token_id in self.grammar.ends:
            return True
        if token_id not in tokens:
            raise NoTokenLeftError(f"no place for {token_id}")
        self.tokens.append(token_id)
        return not self._next()[0]
