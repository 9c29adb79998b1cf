"""The grammar backend of an engine, made from its model's tokenizer when a request needs it."""

from __future__ import annotations

from functools import partial

from pagedmlx.core.structured import GrammarBackend
from pagedmlx.errors import InvalidRequestError
from pagedmlx.sampling.grammar import LLGuidance
from pagedmlx.sampling.vocabulary import Vocabulary
from pagedmlx.text.tokenizer import Tokenizer


def grammar_backend(tokenizer: Tokenizer, vocab_size: int) -> GrammarBackend:
    """What compiles grammars for a model.

    Args:
        tokenizer: The model's.
        vocab_size: V, the model's tokens, be they fewer or more than the tokenizer's.
    """
    return LLGuidance(lambda: _vocabulary(tokenizer, vocab_size))


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    if not tokenizer.joins_bytes:
        raise InvalidRequestError(
            "structured",
            "the text of this model's tokenizer is not its tokens joined, so that no grammar can "
            "follow it",
        )
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
        special=frozenset(each for each in tokenizer.special_token_ids if each < vocab_size),
        ends=frozenset(each for each in tokenizer.eos_token_ids if each < vocab_size),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )
