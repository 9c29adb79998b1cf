"""Detokenizer: one output's tokens to text as they come, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.text.stops import StopMatcher
from pagedmlx.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental text of one output; the joined deltas are the text, however tokens are grouped.

    A character is shown when all its bytes are there, and nothing is shown that may still become
    part of a stop string. The text ends right before the stop string that is complete first (see
    ``StopMatcher``), or after it, as ``include_stop_str_in_output`` says; one that a token before
    the ``min_tokens``-th completes doesn't count. A character cut off by the end of the output is
    dropped. Special tokens are left out when ``skip_special_tokens`` says so. Constant work per
    token, amortised.

    The token that ended the output (end of sequence or a stop token) is not text: don't add it,
    unless the text is to include it.

    Args:
        tokenizer: The model's tokenizer.
        params: The request's ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and
            ``skip_special_tokens`` are used.
        prompt_token_ids: Tokens that the output's text goes on from. Give the prompt for a
            completion, so that a leading space that the tokenizer only writes between words is
            kept; leave it out for a chat answer, which is then the decode of the output alone.
            Byte-level tokenizers give the same text both ways.
        shown: Special tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = tokenizer.token_stream(
            skip_special_tokens=params.skip_special_tokens, shown=shown, context=prompt_token_ids
        )
        self._stops = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._finished = False
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """Everything shown so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text; None if none has."""
        return self._stops.match

    def add(self, token_ids: Iterable[int]) -> str:
        """Take new output tokens; return the new text that is safe to show.

        Tokens after the one that completed a stop string are ignored; ``num_tokens`` is the number
        of tokens taken, that one included.
        """
        shown: list[str] = []
        for token_id in token_ids:
            if self.stop_reason is not None or self._finished:
                break
            self.num_tokens += 1
            shown.append(self._feed(self._stream.push(token_id)))
        return self._show("".join(shown))

    def finish(self) -> str:
        """The output has ended, for whatever reason: return the text that was held back.

        A stop string may still turn up here, so look at ``stop_reason`` afterwards.
        """
        if self._finished:
            return ""
        self._finished = True
        return self._show(self._feed(self._stream.flush()) + self._stops.flush())

    def _feed(self, text: str) -> str:
        return self._stops.feed(text, armed=self.num_tokens >= self._min_tokens)

    def _show(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
