"""Grammars through llguidance: compiles structured outputs for a model's tokens and follows them.

Work is bounded: by the size of what comes in, by llguidance's own limits (its fuel), and, should
those ever fail, by a time after which a request is refused while the compiler's thread goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagedmlx.core.structured import Grammar, GrammarMatcher, StructuredOutputs
from pagedmlx.errors import (
    InvalidRequestError,
    NoTokenLeftError,
    PagedMLXError,
    QueueFullError,
    first_line,
)
from pagedmlx.sampling.free_text import FreeText
from pagedmlx.sampling.grammar_text import grammar_text, size_of
from pagedmlx.sampling.vocabulary import TokenTable, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS = 128
"""Compiled grammars kept, the least recently used given up first."""

MAX_KEPT_CHARS = 1 << 21
"""Length of what they were compiled from, together."""

COMPILE_TIMEOUT_S = 20.0
"""After this a request is refused; all ends long before by the limits below, as far as known."""

MAX_COMPILING = 2
"""Grammars compiled at once: one that never ends must not take all processors."""

_NUM_PROBES = 2
# llguidance's own limits are meant for trusted grammars: an expression of a few characters may
# take seconds with them.
_INITIAL_FUEL = 300_000
_STEP_FUEL = 100_000
# Each takes one or two kilobytes, in every output that follows the grammar.
_MAX_STATES = 50_000

_logger = logging.getLogger(__name__)


class LLGuidance:
    """Compiles grammars and keeps the last ones.

    Args:
        vocabulary: Makes the model's; called once, when the first grammar comes, and may raise
            ``InvalidRequestError`` where the tokenizer's text is not its tokens' bytes.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_COMPILING)

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The grammar; soon where it was compiled before.

        Raises:
            InvalidRequestError: It makes no sense, allows nothing, or is too much work.
            QueueFullError: Others that take very long are being compiled.
        """
        found = self._find(structured)
        if found is not None:
            return found
        if not self._slots.acquire(timeout=COMPILE_TIMEOUT_S):
            raise QueueFullError("other grammars are being compiled; try again later")
        # While this one waited, the same may have been compiled for another.
        found = self._find(structured)
        if found is not None:
            self._slots.release()
            return found
        done: SimpleQueue[Grammar | PagedMLXError] = SimpleQueue()

        def work() -> None:
            try:
                grammar = self._compile(structured)
                self._keep(structured, grammar)
                done.put(grammar)
            except PagedMLXError as error:
                done.put(error)
            except BaseException as error:  # Rust's panics are no Exceptions
                _logger.exception("a grammar can't be compiled")
                reason = f"can't be compiled: {first_line(error)}"
                done.put(InvalidRequestError(structured.kind, reason))
            finally:
                self._slots.release()

        threading.Thread(target=work, name="pagedmlx-grammar", daemon=True).start()
        try:
            result = done.get(timeout=COMPILE_TIMEOUT_S)
        except Empty:
            raise InvalidRequestError(
                structured.kind, f"takes more than {COMPILE_TIMEOUT_S:g} seconds to compile"
            ) from None
        if isinstance(result, PagedMLXError):
            raise result
        return result

    def _find(self, structured: StructuredOutputs) -> Grammar | None:
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
            return found

    def _keep(self, structured: StructuredOutputs, grammar: Grammar) -> None:
        with self._lock:
            self._kept[structured] = grammar
            total = sum(map(size_of, self._kept))
            while len(self._kept) > MAX_GRAMMARS or total > MAX_KEPT_CHARS:
                total -= size_of(self._kept.popitem(last=False)[0])

    def _compile(self, structured: StructuredOutputs) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        text = grammar_text(structured)
        tokenizer, vocabulary = self._get_tokenizer()
        limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        field = structured.kind
        if matcher.is_error():
            raise InvalidRequestError(field, _reason(matcher), hint=_hint(matcher))
        try:
            grammar = _Compiled(matcher, _Words(len(vocabulary.tokens)), vocabulary.ends)
            _probe(grammar)
        except NoTokenLeftError as error:
            raise InvalidRequestError(field, str(error)) from error
        if structured.after:
            return FreeText(structured.after, vocabulary.tokens, vocabulary.ends, grammar)
        return grammar

    def _get_tokenizer(self) -> tuple[LLTokenizer, Vocabulary]:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            if self._tokenizer is None:
                table = TokenTable(self._vocabulary)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(table), eos_token=table.eos_token_ids
                )
            return self._tokenizer, self._vocabulary


@dataclass(frozen=True, slots=True)
class _Words:
    """The form of a mask: one bit for each of V tokens."""

    num_tokens: int

    def read(self, data: bytes) -> npt.NDArray[np.uint32]:
        """A mask from llguidance's bytes, which may have a few more."""
        return np.frombuffer(data, np.uint32)[: -(-self.num_tokens // 32)]


class _Compiled:
    """A compiled grammar: a matcher at its beginning, of which copies are given out."""

    def __init__(self, matcher: LLMatcher, words: _Words, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._ends = ends
        self._lock = threading.Lock()
        # All outputs begin alike.
        self._first = _Matcher(matcher.deep_copy(), words, ends).mask()

    def start(self) -> GrammarMatcher:
        """A matcher for an output of its own."""
        with self._lock:
            copy = self._matcher.deep_copy()
        return _Matcher(copy, self._words, self._ends, self._first)


class _Matcher:
    """Follows one output."""

    def __init__(
        self,
        matcher: LLMatcher,
        words: _Words,
        ends: frozenset[int],
        first: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._ends = ends
        self._known = first

    def mask(self) -> npt.NDArray[np.uint32]:
        """Which tokens may come next."""
        if self._known is None:
            self._known = self._words.read(self._matcher.compute_bitmask())
            self._check()
        return self._known

    def advance(self, token_id: int) -> bool:
        """Take in the next token; whether nothing may follow."""
        if token_id in self._ends and self._matcher.is_accepting():
            return True
        self._known = None
        if not self._matcher.consume_token(token_id):
            self._check()
            raise NoTokenLeftError(f"the grammar has no place for token {token_id}")
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise NoTokenLeftError(f"{_reason(self._matcher)}")


def _probe(grammar: Grammar) -> None:
    """Go a few tokens into a grammar: some turn out to be too much work only then."""
    matcher = grammar.start()
    for _ in range(_NUM_PROBES):
        token = _any_token(matcher.mask())
        if token is None or matcher.advance(token):
            return
    matcher.mask()


def _any_token(mask: npt.NDArray[np.uint32]) -> int | None:
    words = np.flatnonzero(mask)
    if not len(words):
        return None
    word = int(words[-1])
    return word * 32 + int(mask[word]).bit_length() - 1


_REASONS = {
    "NoExtensionBias": "no text matches it",
    "too many expressions constructed": "it is too complex",
    "too many states": "it is too complex",
    "fuel exhausted": "it is too complex",
    "initial lexer configuration (grammar) too big": "it is too complex",
    "items; max is": "it is too complex",
    "Too many items": "it is too complex",
}


def _reason(matcher: Any) -> str:
    """What llguidance says about an error, in one line."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    for sign, meaning in _REASONS.items():
        if sign in text:
            return meaning
    lines = [line.removeprefix("error: ") for line in text.splitlines() if "error: " in line[:7]]
    line = lines[0] if lines else first_line(ValueError(text))
    return line if len(line) <= 300 else f"{line[:300]}..."


def _hint(matcher: Any) -> str:
    if "oneOf" in matcher.get_error():
        return "use anyOf, or let the alternatives exclude each other by a const or enum"
    return ""
