"""The comparison as pictures: PNG files drawn from a report, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from scripts.compare.tables import mib

PARTS = {
    "needed": ("tokens' K and V", "#1b7f79"),
    "reserved": ("reserved for tokens to come", "#f2c14e"),
    "internal": ("held and never filled", "#e4572e"),
    "external": ("rounding, or holes too small to use", "#b8b8b8"),
}
OURS, THEIRS, PALE = "#1b7f79", "#e4572e", "#9fb4c0"
TITLES = {
    "chat": "chat-like",
    "instructions": "instructions",
    "long": "one long beside many short",
    "cliff": "30,000 + 5,000 + 10 tokens",
    "uneven": "one of 1,500 beside seven of 60",
    "fanout": "agents",
    "candidates": "8 candidates each",
    "shared": "shared system prompt",
    "own": "own requests",
}
PUBLISHED = {"maximum": 0.204, "power of two": 0.268, "oracle": 0.382, "pagedmlx": 0.963}
"""Shares of token states in the PagedAttention paper's figure 2; the last is vLLM's."""

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "legend.frameon": False,
}


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write every picture that the report has numbers for."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with mpl.rc_context(STYLE):
        for name, figure in _figures(report):
            path = folder / f"memory-{name}.png"
            figure.savefig(path, dpi=144, bbox_inches="tight")
            plt.close(figure)
            paths.append(path)
    return paths


def _figures(report: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    workloads = report["workloads"]
    if workloads:
        yield "waste", waste(workloads)
        yield "over-time", over_time(report)
    if any(_is_short(workload) for workload in workloads.values()):
        yield "fit", fit(workloads)
    if report["real"]:
        yield "real", real(report)


def waste(workloads: dict[str, Any]) -> Figure:
    """What memory holds, a bar for each scheme, as in the paper's figure."""
    rows = -(-len(workloads) // 2)
    columns = min(2, len(workloads))
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.6 * columns, 2.1 * rows + 0.7), sharex=True, squeeze=False
    )
    for axis, (name, workload) in zip(axes.flat, workloads.items(), strict=False):
        schemes = workload["schemes"]
        for place, row in enumerate(schemes.values()):
            left = 0.0
            for part, (_, colour) in PARTS.items():
                share = row["shares"][part]
                axis.barh(place, share, left=left, color=colour, height=0.74)
                if share > 0.055:
                    dark = part in ("needed", "internal")
                    _label(axis, left + share / 2, place, f"{share:.0%}", dark)
                left += share
        if name == "chat":
            places = [i for i, scheme in enumerate(schemes) if scheme in PUBLISHED]
            published = [PUBLISHED[scheme] for scheme in schemes if scheme in PUBLISHED]
            axis.plot(published, places, "D", color="white", markeredgecolor="black", ms=5)
        axis.set_title(TITLES.get(name, name))
        axis.set_yticks(range(len(schemes)), schemes)
        _bold_ours(axis)
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.tick_params(axis="y", length=0)
    for axis in list(axes.flat)[len(workloads) :]:
        axis.set_visible(False)
    handles: list[Any] = [Patch(color=colour, label=what) for what, colour in PARTS.values()]
    if "chat" in workloads:
        diamond = Line2D([], [], marker="D", color="white", markeredgecolor="black", ls="")
        diamond.set_label("published: Orca's three, vLLM")
        handles.append(diamond)
    figure.suptitle("What the memory for K and V holds", x=0.02, ha="left", weight="bold", size=14)
    figure.legend(handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.07))
    figure.tight_layout()
    return figure


def fit(workloads: dict[str, Any]) -> Figure:
    """How many sequences run at once in the same memory, where it was short for somebody."""
    shown = {name: each for name, each in workloads.items() if _is_short(each)}
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 1.55 * len(shown) + 0.6), squeeze=False)
    for axis, (name, workload) in zip(axes.flat, shown.items(), strict=True):
        schemes = workload["schemes"]
        counts = [row["sequences_at_once"] for row in schemes.values()]
        colours = [OURS if scheme == "pagedmlx" else PALE for scheme in schemes]
        axis.barh(range(len(counts)), counts, color=colours, height=0.74)
        for place, (scheme, count) in enumerate(zip(schemes, counts, strict=True)):
            all_of_them = "" if schemes[scheme]["memory_was_short"] else " (all)"
            times = f"   {count / counts[0]:.1f} times" if scheme == "pagedmlx" else ""
            text = f" {count:.0f}{all_of_them}{times}"
            weight = "bold" if times else "normal"
            axis.text(count, place, text, va="center", weight=weight)
        axis.set_yticks(range(len(schemes)), schemes)
        _bold_ours(axis)
        axis.invert_yaxis()
        axis.set_xlim(0, max(counts) * 1.25)
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.set_title(f"{TITLES.get(name, name)}: memory for {workload['budget_slots']:,} tokens")
    title = "Sequences that run at once in the same memory"
    figure.suptitle(title, x=0.02, ha="left", weight="bold", size=14)
    figure.tight_layout()
    return figure


def over_time(report: dict[str, Any]) -> Figure:
    """Memory held and filled while the same requests are served, scheme by scheme."""
    name = "chat" if "chat" in report["workloads"] else next(iter(report["workloads"]))
    workload = report["workloads"][name]
    schemes, scale = workload["schemes"], report["token_bytes"] / 2**20
    figure, axes = plt.subplots(
        len(schemes), 1, figsize=(9, 1.35 * len(schemes) + 1), sharex=True, sharey=True
    )
    budget = workload["budget_slots"] * scale
    for axis, (scheme, row) in zip(axes, schemes.items(), strict=True):
        series, colour = row["series"], OURS if scheme == "pagedmlx" else THEIRS
        times = [*series["t_s"], row["clock_s"]]
        held, needed = (
            [*(slots * scale for slots in series[key]), 0.0] for key in ("held", "needed")
        )
        axis.fill_between(times, held, step="post", color=colour, alpha=0.28, lw=0)
        axis.fill_between(times, needed, step="post", color=colour, lw=0)
        axis.axhline(budget, color="black", lw=0.8, ls=":")
        axis.set_title(scheme, size=10)
        text = f"done after {row['clock_s']:.0f} s"
        axis.annotate(text, (row["clock_s"], budget * 0.1), (4, 0), textcoords="offset points")
        axis.set_ylim(0, budget * 1.06)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_locator(MaxNLocator(3))
    axes[-1].set_xlabel("seconds on the simulation's clock, on which all have the same speed")
    figure.supylabel("MiB", size=10)
    longest = max(row["clock_s"] for row in schemes.values())
    axes[-1].set_xlim(0, longest * 1.17)
    title = f"Memory while the same requests are served ({TITLES.get(name, name)})"
    figure.suptitle(title, x=0.02, ha="left", weight="bold", size=14)
    handles = [
        Patch(color="#555555", label="filled with tokens' K and V"),
        Patch(color="#555555", alpha=0.28, label="held, not filled"),
        Line2D([], [], color="black", lw=0.8, ls=":", label="all the memory there is"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.04))
    figure.tight_layout()
    return figure


def real(report: dict[str, Any]) -> Figure:
    """Measured: K and V over time, and the peaks of memory, for both systems."""
    runs = report["real"]
    figure, axes = plt.subplots(
        len(runs), 2, figsize=(11, 3.1 * len(runs) + 0.5), squeeze=False, width_ratios=(1.7, 1)
    )
    for (left, right), (name, each) in zip(axes, runs.items(), strict=True):
        systems = {"mlx-lm": THEIRS, "pagedmlx": OURS}
        for system, colour in systems.items():
            row = each["systems"][system]
            times = [0.0, *row["series"]["t_s"]]
            # What a step leaves behind was there while it ran.
            held, needed = (
                [*(size / 2**20 for size in row["series"][key]), 0.0] for key in ("held", "needed")
            )
            left.fill_between(times, needed, step="post", color=colour, alpha=0.25, lw=0)
            left.step(times, held, where="post", color=colour, lw=2, label=f"{system} holds")
        left.fill_between([], [], color="#555555", alpha=0.25, lw=0, label="filled with tokens")
        left.set_title(TITLES.get(name, name))
        left.set_xlabel("seconds")
        left.set_ylabel("MiB of K and V")
        left.set_ylim(0)
        left.set_xlim(0)
        left.legend()
        measures = {
            "K and V held, peak": "kv_held_peak_bytes",
            "MLX above the weights, peak": "peak_above_weights_bytes",
            "process, peak": "resident_peak_bytes",
        }
        largest = max(each["systems"][s][key] for s in systems for key in measures.values())
        for index, key in enumerate(measures.values()):
            for offset, (system, colour) in zip((-0.19, 0.19), systems.items(), strict=True):
                size = each["systems"][system][key]
                right.barh(index + offset, size, 0.36, color=colour)
                right.text(size, index + offset, f" {mib(size)} MiB", va="center", size=9)
        right.set_yticks(range(len(measures)), measures)
        right.invert_yaxis()
        right.set_xlim(0, largest * 1.3)
        right.set_xticks([])
        right.spines["bottom"].set_visible(False)
        right.tick_params(axis="y", length=0)
    title = f"Measured with {report['model']}, each system in a process of its own"
    figure.suptitle(title, x=0.02, ha="left", weight="bold", size=14)
    figure.tight_layout()
    return figure


def _label(axis: Axes, x: float, y: float, text: str, on_dark: bool) -> None:
    axis.text(x, y, text, ha="center", va="center", size=9, color="white" if on_dark else "black")


def _bold_ours(axis: Axes) -> None:
    for label in axis.get_yticklabels():
        if label.get_text() == "pagedmlx":
            label.set_fontweight("bold")


def _is_short(workload: dict[str, Any]) -> bool:
    return any(row["memory_was_short"] for row in workload["schemes"].values())
