"""Pooling: which hidden states make the embedding of a prompt, and what a model gives of those."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pooling(StrEnum):
    """Over which tokens of a prompt the mean of the hidden states is taken."""

    LAST = "last token"
    FIRST = "first token"
    MEAN = "mean"

    def rows(self, num_tokens: int) -> range:
        """Their positions in a prompt of so many tokens."""
        if self is Pooling.LAST:
            return range(num_tokens - 1, num_tokens)
        return range(1 if self is Pooling.FIRST else num_tokens)


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """How a model's embeddings are made.

    Attributes:
        pooling: Of the hidden states.
        num_dimensions: D, their length.
        is_normalized: Whether they are brought to length 1.
        is_matryoshka: Whether their first dimensions alone are an embedding, too.
        max_len: Most tokens of a text that the model was made for; None is its whole context.
    """

    pooling: Pooling
    num_dimensions: int
    is_normalized: bool
    is_matryoshka: bool = False
    max_len: int | None = None


@dataclass(frozen=True, slots=True)
class NoEmbedding:
    """A model that gives no embeddings.

    Attributes:
        reason: Why.
        hint: What to do about it.
    """

    reason: str
    hint: str = ""
