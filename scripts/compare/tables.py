"""The comparison as tables: live ones for a terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

T = TypeVar("T")

SIMULATED = (
    *("workload", "scheme", "at once", "needed", "reserved", "internal", "external"),
    *("peak MiB", "MiB each", "redone"),
)
"""Means over time: sequences at once where somebody waits, what memory holds, its largest size,
that of a sequence, and tokens computed again after their sequence had lost its memory."""

REAL = (
    *("workload", "system", "KV", "needed", "active", "cached", "peak", "process"),
    *("tokens/s", "TTFT s", "ITL ms", "max ms"),
)
"""KV: most bytes of K and V held. Needed: tokens' share of what is held, over time. Active, cached,
peak: MLX's, the last above the weights. Process: the most in RAM. Then medians, and the longest gap
between two tokens."""


class Board:
    """What is known so far, with a bar for what runs.

    Args:
        token_bytes: K and V of one token.
        console: Where it is shown; one that is no terminal gets a line for each part instead.
    """

    def __init__(self, token_bytes: int, console: Console) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(TextColumn("{task.description}"), *columns, console=console)
        self._console = console
        self._token_bytes = token_bytes
        self._simulated: list[Sequence[str]] = []
        self._real: list[Sequence[str]] = []
        self._now: Sequence[str] | None = None

    def track(self, items: Iterable[T], total: int, description: str) -> Iterator[T]:
        """Pass items on with a bar for them."""
        self.note(description)
        bar = self.progress.add_task(description, total=total)
        for item in items:
            self.progress.advance(bar)
            yield item
        self.progress.remove_task(bar)

    def note(self, line: str) -> None:
        """Say what starts, to whoever sees no bars."""
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False)

    def add_scheme(self, workload: str, scheme: str, row: dict[str, Any]) -> None:
        """One scheme is done."""
        self._simulated.append(scheme_cells(workload, scheme, row, self._token_bytes))

    def show_running(self, workload: str, system: str, line: dict[str, Any]) -> None:
        """A real system is under way."""
        share = f"{line['needed'] / line['held']:.0%}" if line["held"] else ""
        self._now = (
            *(workload, f"{system} …", mib(line["held"]), share, mib(line["active"])),
            *(mib(line["cached"]), "", "", f"{line['done'] / line['t_s']:.1f}", "", "", ""),
        )

    def add_real(self, workload: str, rows: dict[str, dict[str, Any]]) -> None:
        """Both systems are done."""
        self._now = None
        self._real.extend(real_cells(workload, system, row) for system, row in rows.items())

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        rows = [*self._real, *([self._now] if self._now else [])]
        for title, header, body in (
            ("Computed by the core on whole traces", SIMULATED, self._simulated),
            ("Measured, each system in a process of its own (MiB)", REAL, rows),
        ):
            if body:
                table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
                for index, name in enumerate(header):
                    justify = "left" if index < 2 else "right"
                    table.add_column(name, justify=justify, no_wrap=True)
                for before, cells in zip([None, *body], body, strict=False):
                    if is_new := before is None or before[0] != cells[0]:
                        table.add_section()
                    style = "green" if cells[1].startswith("pagedmlx") else ""
                    table.add_row(cells[0] if is_new else "", *cells[1:], style=style)
                parts.append(table)
        return Group(*parts, self.progress)


def scheme_cells(
    workload: str, scheme: str, row: dict[str, Any], token_bytes: int
) -> tuple[str, ...]:
    """One row of the first table."""
    shares = (f"{share:.1%}" for share in row["shares"].values())
    return (
        *(workload, scheme, f"{row['sequences_at_once']:.1f}", *shares),
        mib(row["peak_held_slots"] * token_bytes),
        mib(row["held_slots_per_sequence"] * token_bytes),
        f"{row['recomputed_share']:.0%}" if row["recomputed_share"] else "",
    )


def real_cells(workload: str, system: str, row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the second table; bytes in MiB."""
    return (
        *(workload, system, mib(row["kv_held_peak_bytes"]), f"{row['kv_needed_share']:.1%}"),
        *(mib(row[f"{name}_bytes"]) for name in ("active_peak", "cached_peak")),
        *(mib(row[f"{name}_bytes"]) for name in ("peak_above_weights", "resident_peak")),
        f"{row['tokens_per_s']:.1f}",
        f"{row['ttft_s']['median']:.2f}",
        *(f"{row['itl_s'][name] * 1e3:.0f}" for name in ("median", "max")),
    )


def mib(size: float) -> str:
    """Bytes in MiB, with a decimal where it says something."""
    value = size / 2**20
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def markdown(report: dict[str, Any]) -> str:
    """All tables of a report."""
    size = report["token_bytes"]
    lines = [
        f"Model {report['model']}: {size:,} bytes of K and V for each token. "
        f"Seed {report['seed']}.\n",
        "### Computed by the core on whole traces\n",
    ]
    for name, workload in report["workloads"].items():
        lines.append(f"- `{name}`: {workload['what']}; maximum {workload['max_len']:,}, ")
        lines[-1] += f"memory for {workload['budget_slots']:,} tokens"
    rows = (
        scheme_cells(name, scheme, row, size)
        for name, workload in report["workloads"].items()
        for scheme, row in workload["schemes"].items()
    )
    lines += ["", *_table(SIMULATED, rows)]
    if report["fanout"]:
        first, *_ = report["fanout"].values()
        lines += ["\n### Agents: largest KV held, by how many at a time, MiB\n"]
        lines += _table(
            ("at a time", *first),
            (
                (count, *(f"{row['peak_held_slots'] * size / 2**20:,.0f}" for row in rows.values()))
                for count, rows in report["fanout"].items()
            ),
        )
    if report["block_sizes"]:
        lines += ["\n### Block sizes, on the chat workload\n"]
        lines += _table(
            *(("block size", "waste", "unfilled", "at once", "table, bytes/sequence", "Python"),),
            (
                (
                    *(str(row["block_size"]), f"{row['waste']:.1%}", f"{row['unfilled']:.1%}"),
                    f"{row['sequences_at_once']:.1f}",
                    f"{row['table_bytes_per_sequence']:.0f}",
                    f"{row['python_us_per_sequence_step']:.0f} µs",
                )
                for row in report["block_sizes"]
            ),
        )
    if report["real"]:
        lines += ["\n### Measured, each system in a process of its own; MiB\n"]
        lines += [f"- `{name}`: {each['what']}" for name, each in report["real"].items()]
        rows = (
            real_cells(name, system, row)
            for name, each in report["real"].items()
            for system, row in each["systems"].items()
        )
        lines += ["", *_table(REAL, rows), ""]
        lines += [_check(name, each) for name, each in report["real"].items()]
    return "\n".join(lines) + "\n"


def _check(name: str, each: dict[str, Any]) -> str:
    ours = each["systems"]["pagedmlx"]
    equal = {True: "equal to", False: "NOT equal to", None: "not comparable with"}
    return (
        f"- `{name}`: the engine's counts are {equal[ours['counts_equal_core']]} the core's; "
        f"{ours['outputs_equal_mlx_lm']} of {ours['num_outputs']} outputs are mlx-lm's, token by "
        "token"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = [" | ".join(header), "|".join("---" if i < 1 else "---:" for i in range(len(header)))]
    return [f"| {head[0]} |", f"|{head[1]}|", *(f"| {' | '.join(row)} |" for row in rows)]
