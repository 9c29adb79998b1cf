"""What the engine has counted, in words and units for people. Pure."""

from __future__ import annotations

from pagedmlx.core.stats import EngineStats
from pagedmlx.errors import readable_bytes


def stats_page(stats: EngineStats) -> dict[str, tuple[tuple[str, str], ...]]:
    """The counts in sections of a ``PageScreen``."""
    reused = stats.num_cached_tokens / max(1, stats.num_prompt_tokens)
    fill = stats.mean_fill_while_waiting
    return {
        "Now": (
            ("answers", f"{stats.num_running} running, {stats.num_waiting} waiting"),
            (
                "blocks",
                f"{stats.num_used_blocks:,} in use, {stats.num_shared_blocks:,} of them shared; "
                f"{stats.num_cached_blocks:,} cached, {stats.num_free_blocks:,} free",
            ),
            (
                "memory",
                f"{readable_bytes(stats.allocated_bytes)} taken of "
                f"{readable_bytes(stats.pool_bytes)}; {readable_bytes(stats.state_bytes)} beside",
            ),
            ("one block", f"{stats.block_size} tokens, {readable_bytes(stats.block_bytes)}"),
            ("not filled yet", f"room for {stats.waste_slots:,} tokens"),
        ),
        "Since it was loaded": (
            ("requests", f"{stats.num_requests:,}, {stats.num_finished_requests:,} have ended"),
            (
                "tokens of prompts",
                f"{stats.num_prompt_tokens:,}, {stats.num_cached_tokens:,} reused ({reused:.0%})",
            ),
            ("tokens of answers", f"{stats.num_output_tokens:,}"),
            (
                "through the model",
                f"{stats.num_computed_tokens:,} tokens in {stats.num_steps:,} steps",
            ),
            ("most blocks in use", f"{stats.peak_used_blocks:,} of {stats.num_blocks:,}"),
            ("blocks copied", f"{stats.num_copies:,} because somebody wrote into a shared one"),
            ("cached blocks given up", f"{stats.num_evictions:,} for others"),
        ),
        "When memory was short": (
            ("had to wait", f"{stats.num_waits:,} answers, in {stats.num_waiting_steps:,} steps"),
            ("pool was filled then", "-" if fill is None else f"{fill:.0%} on average"),
            ("were overtaken", f"{stats.num_overtakes:,} times by one that fitted"),
            ("lost their blocks", f"{stats.num_preemptions:,} times, to begin again later"),
            ("waited for a block", f"{stats.num_deferrals:,} times that another was computing"),
        ),
    }
