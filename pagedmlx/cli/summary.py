"""What a run did: the summary as a value for scripts, and as one line for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedmlx.cli import render
from pagedmlx.cli.results import write_whole
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import readable_bytes

if TYPE_CHECKING:
    from pagedmlx.llm import LLM

CLEAN = "clean"

Summary = dict[str, Any]


def summarize(
    llm: LLM,
    params: SamplingParams,
    *,
    num_prompts: int,
    wall_s: float,
    num_failed: int = 0,
    num_skipped: int = 0,
) -> Summary:
    """Collect what a run did.

    Args:
        llm: The model that ran; its invariants are checked here.
        params: Sampling settings, for prompts without settings of their own.
        num_prompts: Prompts that were read and not skipped.
        wall_s: Seconds from the first prompt's arrival to the last output.
        num_failed: Those among the prompts that have no output.
        num_skipped: Prompts that an earlier run had done.
    """
    stats = llm.stats()
    return {
        "num_prompts": num_prompts,
        "num_failed": num_failed,
        "num_skipped": num_skipped,
        "wall_s": wall_s,
        "output_tokens_per_s": stats.num_output_tokens / wall_s if wall_s > 0 else None,
        "integrity": _integrity(llm),
        "sampling_params": asdict(params),
        "engine": asdict(stats),
    }


def _integrity(llm: LLM) -> str:
    if not __debug__:
        return "unchecked: Python runs without assertions"
    try:
        llm.check_integrity()
    except AssertionError as error:
        return f"broken: {error}"
    return CLEAN


def is_broken(summary: Summary) -> bool:
    """Whether an invariant of the engine didn't hold; a script must not take that for success."""
    return summary["integrity"].startswith("broken")


def summary_line(summary: Summary, *, first_token_s: float | None = None) -> str:
    """The summary for people; for one prompt with the time to its first token."""
    engine = summary["engine"]
    speed = summary["output_tokens_per_s"]
    parts = [f"{engine['num_output_tokens']} tokens in {summary['wall_s']:.1f} s"]
    if speed is not None:
        parts[0] += f", {speed:.1f} tokens/s"
    if first_token_s is not None:
        parts[0] += f", the first after {first_token_s:.2f} s"
    else:
        parts.insert(0, _prompts(summary))
    waste = engine["max_waste_slots"]
    waste_bytes = waste * engine["block_bytes"] / engine["block_size"]
    parts.append(
        f"at most {engine['peak_used_blocks']} of {engine['num_blocks']} blocks used, "
        f"waste at most {waste} of {engine['block_size']} slots a sequence "
        f"({readable_bytes(waste_bytes)})"
    )
    if engine["num_waits"]:
        fill = engine["mean_fill_while_waiting"]
        filled = "" if fill is None else f" with {fill:.0%} of the blocks in use"
        parts.append(f"{engine['num_waits']} waited for blocks{filled}")
    if engine["num_preemptions"]:
        parts.append(f"{engine['num_preemptions']} preempted")
    if summary["integrity"] != CLEAN:
        parts.append(f"integrity {summary['integrity']}")
    return "; ".join(parts)


def _prompts(summary: Summary) -> str:
    text = f"{summary['num_prompts'] - summary['num_failed']} prompts done"
    for key, word in (("num_failed", "failed"), ("num_skipped", "done before")):
        if summary[key]:
            text += f", {summary[key]} {word}"
    return text


def write_summary(summary: Summary, target: str) -> None:
    """Write the summary as JSON to a file, or to stdout when ``target`` is ``-``."""
    if target == "-":
        render.json_line({"summary": summary})
        return
    write_whole(Path(target), json.dumps(summary, indent=2) + "\n")
