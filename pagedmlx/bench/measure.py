"""What is measured of each request, and what many of them come to: percentiles, rates, goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Served:
    """One request as its client saw it; times in seconds of one clock.

    Attributes:
        started_s: When it was sent.
        times_s: When each piece of its output came; a piece is a token, or a chunk of a stream.
        num_prompt_tokens: Tokens of its prompt.
        num_cached_tokens: Those that weren't computed; None when nobody told.
        num_output_tokens: Tokens of its output.
        error: Why it failed; empty for one that went well.
    """

    started_s: float
    times_s: list[float] = field(default_factory=list[float])
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending it to the first piece of its output."""
        return self.times_s[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece and the next."""
        return np.diff(self.times_s).tolist()

    @property
    def is_ok(self) -> bool:
        """Whether it has an output and no error."""
        return not self.error and bool(self.times_s)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must keep to count as served well.

    Attributes:
        ttft_s: Its first token came within this.
        itl_s: So did 95 of a hundred of its later tokens, each after the one before.
    """

    ttft_s: float
    itl_s: float

    def are_kept_by(self, served: Served) -> bool:
        """Whether a request was served within these bounds."""
        if not served.is_ok or served.ttft_s > self.ttft_s:
            return False
        gaps = served.gaps_s
        return not gaps or float(np.percentile(gaps, 95)) <= self.itl_s


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None when there is nothing."""
    found = np.array(list(values), dtype=float)
    if not len(found):
        return None
    return {
        "mean": float(found.mean()),
        **{f"p{each}": float(np.percentile(found, each)) for each in PERCENTILES},
        "max": float(found.max()),
    }


def summarize(served: Sequence[Served], bounds: Bounds | None = None) -> dict[str, Any]:
    """What a run came to.

    Args:
        served: Its requests, at least one.
        bounds: What counts for the goodput.

    Returns:
        Counts, tokens and requests a second from the first start to the last token, and
        distributions of TTFT and ITL in seconds.
    """
    good = [each for each in served if each.is_ok]
    began = min(each.started_s for each in served)
    wall_s = max((each.times_s[-1] for each in good), default=began) - began
    num_prompt = sum(each.num_prompt_tokens for each in good)
    num_output = sum(each.num_output_tokens for each in good)
    cached = [each.num_cached_tokens for each in good if each.num_cached_tokens is not None]

    def per_second(count: float) -> float | None:
        return count / wall_s if wall_s > 0 else None

    found: dict[str, Any] = {
        "num_requests": len(served),
        "num_failed": len(served) - len(good),
        "wall_s": wall_s,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(cached) if cached else None,
        "num_output_tokens": num_output,
        "requests_per_s": per_second(len(good)),
        "output_tokens_per_s": per_second(num_output),
        "total_tokens_per_s": per_second(num_prompt + num_output),
        "ttft_s": distribution(each.ttft_s for each in good),
        "itl_s": distribution(gap for each in good for gap in each.gaps_s),
        "errors": sorted({each.error for each in served if each.error}),
    }
    if bounds is not None:
        num_kept = sum(map(bounds.are_kept_by, served))
        found |= {"num_within_bounds": num_kept, "goodput_per_s": per_second(num_kept)}
    return found


def hit_rate(served: Iterable[Served]) -> float:
    """Share of the prompts' tokens that weren't computed."""
    good = [each for each in served if each.is_ok]
    total = sum(each.num_prompt_tokens for each in good)
    return sum(each.num_cached_tokens or 0 for each in good) / total if total else 0.0
