"""Writes out log probabilities: with the tokens' text and their place in the whole text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pagedmlx.core.step import TokenLogprobs
from pagedmlx.engine.outputs import PositionLogprobs, TokenLogprob
from pagedmlx.text.tokenizer import Tokenizer


class LogprobWriter:
    """Writes out what is told of one text's tokens; it must be given all of them, in order.

    Args:
        tokenizer: The model's.
        skip_special_tokens: They are not part of the text.
        shown: Special tokens that are, all the same.
        context: Tokens that the text goes on from.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._spell = tokenizer.spelling(
            skip_special_tokens=skip_special_tokens, shown=shown, context=context
        )
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def write(self, told: TokenLogprobs) -> PositionLogprobs:
        """Take the next token with what is told of it."""
        start, end, data = self.add(told.token_id)
        return PositionLogprobs(
            token=_token(
                told.token_id,
                told.logprob,
                told.rank,
                # One that is left out of the text is named all the same.
                data if end > start else self._tokenizer.token_bytes(told.token_id),
            ),
            top=tuple(
                _token(token_id, logprob, place, self._tokenizer.token_bytes(token_id))
                for place, (token_id, logprob) in enumerate(told.top, 1)
            ),
            start=start,
            end=end,
        )

    def add(self, token_id: int) -> tuple[int, int, bytes]:
        """Take the next token; return where it is in the text, and the bytes that it adds."""
        data = self._spell(token_id)
        start = self._num_chars
        self._num_chars += len(self._utf8.decode(data))
        is_cut = bool(data and self._utf8.getstate()[0])
        return start, self._num_chars + is_cut, data


class PromptLogprobs:
    """What has been told of a prompt's tokens so far; nothing is told of the first one.

    Args:
        tokenizer: The model's.
        prompt_token_ids: The prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: tuple[int, ...]) -> None:
        self._writer = LogprobWriter(tokenizer, skip_special_tokens=False)
        self._writer.add(prompt_token_ids[0])
        self._written: list[PositionLogprobs | None] = [None]

    def add(self, told: Iterable[TokenLogprobs]) -> None:
        """Take what is told of the next tokens."""
        self._written += map(self._writer.write, told)

    def whole(self) -> tuple[PositionLogprobs | None, ...]:
        """One for each token of the prompt, once all has been told."""
        return tuple(self._written)


def _token(token_id: int, logprob: float, rank: int, data: bytes) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, rank, data.decode(errors="replace"), data)
