"""Gauges: how fast it goes and how full it is, as numbers, bars and small curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from textual.content import Content
from textual.widget import Widget

from pagedmlx.chat.blocks import Savings
from pagedmlx.core.stats import EngineStats
from pagedmlx.errors import readable_bytes

_BARS = " ▁▂▃▄▅▆▇█"
_WINDOW_S = 1.5
_SAMPLE_S = 0.5
_MAX_SAMPLES = 200


def bar(share: float, width: int) -> str:
    """A bar of eighths of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = "▏▎▍▌▋▊▉"[rest - 1] if rest else ""
    return ("█" * full + partial).ljust(width, "·")


def curve(values: Sequence[float], width: int, top: float) -> str:
    """The last values as a row of small bars."""
    scale = (len(_BARS) - 1) / top if top > 0 else 0.0
    shown = list(values)[-width:]
    return "".join(_BARS[min(8, max(0, round(each * scale)))] for each in shown).rjust(width)


class Rates:
    """What changes with time, sampled from the counts."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.speed: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.fill: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._recent: deque[tuple[float, int]] = deque()
        self._sampled_s = float("-inf")

    def add(self, stats: EngineStats, now_s: float) -> None:
        """Take in the counts at a moment."""
        if self._recent and stats.num_output_tokens < self._recent[-1][1]:
            self._recent.clear()
        self._recent.append((now_s, stats.num_output_tokens))
        while len(self._recent) > 2 and self._recent[1][0] < now_s - _WINDOW_S:
            self._recent.popleft()
        (began_s, began), (ended_s, ended) = self._recent[0], self._recent[-1]
        self.tokens_per_s = (ended - began) / (ended_s - began_s) if ended_s > began_s else 0.0
        if now_s - self._sampled_s >= _SAMPLE_S:
            self._sampled_s = now_s
            self.speed.append(self.tokens_per_s)
            self.fill.append(stats.num_used_blocks / max(1, stats.num_blocks))


class Gauges(Widget):
    """The numbers; one line when there is no room for more."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates()
        self._ttft_s: float | None = None
        self._stats = EngineStats()
        self._savings = Savings(0, 0, 0)

    def show(
        self, stats: EngineStats, savings: Savings, ttft_s: float | None, now_s: float
    ) -> None:
        """Show the counts of a moment."""
        self._stats, self._savings, self._ttft_s = stats, savings, ttft_s
        self.rates.add(stats, now_s)
        self.refresh()

    def render(self) -> Content:
        """The lines that there is room for."""
        lines = self.lines(self.size.width)
        return Content("\n").join(lines) if self.size.height > 1 else self._line()

    def lines(self, width: int) -> list[Content]:
        """All of it, in lines."""
        stats, rates = self._stats, self.rates
        room = max(4, width - 24)
        fill = stats.num_used_blocks / max(1, stats.num_blocks)
        kept = (stats.num_used_blocks + stats.num_cached_blocks) / max(1, stats.num_blocks)
        fastest, fullest = max(rates.speed, default=0.0), max(rates.fill, default=0.0)
        first = "-" if self._ttft_s is None else f"{self._ttft_s * 1000:.0f} ms"
        rows = [
            ("speed", f"{rates.tokens_per_s:.0f} tok/s", curve(rates.speed, room, fastest)),
            ("first token", first, ""),
            ("in use", f"{stats.num_used_blocks}/{stats.num_blocks}", bar(fill, room)),
            ("with cached", f"{kept:.0%}", bar(kept, room)),
            ("history", f"peak {fullest:.0%}", curve(rates.fill, room, fullest)),
        ]
        lines = [
            Content.assemble((f"{name:<11}", "dim"), f"{value:>11}  ", (graph, "$accent"))
            for name, value, graph in rows
        ]
        used, whole = readable_bytes(self._savings.used_bytes), readable_bytes(stats.pool_bytes)
        lines.append(Content.assemble(("memory     ", "dim"), f"{used:>11} of {whole}"))
        saved = readable_bytes(self._savings.paging_bytes)
        shared = readable_bytes(self._savings.shared_bytes)
        lines.append(
            Content.assemble(
                ("paging saves ", "dim"), (saved, "$text-success"),
                (", sharing ", "dim"), (shared, "$text-success"),
            )
        )  # fmt: skip
        return lines

    def _line(self) -> Content:
        stats, savings = self._stats, self._savings
        waiting = f"{stats.num_waiting} waiting · " if stats.num_waiting else ""
        return Content.assemble(
            (waiting, "$text-warning"),
            f"{self.rates.tokens_per_s:.0f} tok/s",
            (f"  {bar(stats.num_used_blocks / max(1, stats.num_blocks), 8)} ", "$accent"),
            f"{stats.num_used_blocks}/{stats.num_blocks} blocks",
            f" · {stats.num_cached_blocks} cached · {stats.num_shared_blocks} shared",
            (f" · saves {readable_bytes(savings.paging_bytes)}", "$text-success"),
        )
