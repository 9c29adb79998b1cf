"""Log probabilities in the shapes of OpenAI's two endpoints, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagedmlx.engine.outputs import PositionLogprobs, TokenLogprob

# JSON has no infinity.
_LEAST = -9999.0


def chat_logprobs(positions: Iterable[PositionLogprobs] | None) -> dict[str, Any] | None:
    """The ``logprobs`` of a chat choice; None if nobody asked."""
    if positions is None:
        return None
    content = [
        {**_chat_token(each.token), "top_logprobs": [_chat_token(token) for token in each.top]}
        for each in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Iterable[tuple[PositionLogprobs | str, int]],
) -> dict[str, Any]:
    """The ``logprobs`` of a completion.

    Args:
        positions: Each with its place in the text; a prompt's first token, of which nothing can be
            told, as its text.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position, offset in positions:
        offsets.append(offset)
        if isinstance(position, str):
            tokens.append(position)
            logprobs.append(None)
            tops.append(None)
            continue
        token = position.token
        tokens.append(_name(token))
        logprobs.append(_number(token))
        # The token itself is always among them.
        tops.append({_name(each): _number(each) for each in (*position.top, token)})
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """The ``prompt_logprobs`` of vLLM: what is told by token ids, None for the first token."""
    if positions is None:
        return None
    return [
        each
        and {
            str(token.token_id): {
                "logprob": _number(token),
                "rank": token.rank,
                "decoded_token": token.text,
            }
            for token in (each.token, *each.top)
        }
        for each in positions
    ]


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _number(token), "bytes": list(token.bytes)}


def _name(token: TokenLogprob) -> str:
    """Its text; a part of a character as OpenAI writes it, so that two of them differ."""
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _number(token: TokenLogprob) -> float:
    return max(token.logprob, _LEAST)
