"""MemoryPanel: the block map with its legend, what is selected, the gauges and the queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content

from pagedmlx.chat.blocks import NO_SLOT, BlockHistory, holders, savings
from pagedmlx.chat.widgets.block_map import BlockMap, colour, legend, letter
from pagedmlx.chat.widgets.gauges import Gauges
from pagedmlx.chat.widgets.line import Line
from pagedmlx.core.snapshot import EngineSnapshot, SequenceSnapshot
from pagedmlx.text.visible import visible

_NO_MAP = "This endpoint does not tell what is in its memory, so there is no block map."
_MAX_WAITING = 4
_MAX_HOLDERS = 3


class MemoryPanel(Vertical):
    """Everything about the pool.

    Args:
        slot_of: Tells the conversation's slot for a request id; ``NO_SLOT`` for others'.
        title_of: Tells the title of the conversation in a slot.
    """

    def __init__(self, slot_of: Mapping[str, int], title_of: Callable[[int], str]) -> None:
        super().__init__()
        self.history = BlockHistory()
        self._slot_of, self._title_of = slot_of, title_of

    def compose(self) -> ComposeResult:
        """Build the parts."""
        yield Gauges()
        yield BlockMap()
        yield Line(wraps=True, classes="legend")
        yield Line(wraps=True, classes="detail")
        yield Line(wraps=True, classes="queue")

    def show(self, snapshot: EngineSnapshot | None, now_s: float) -> bool:
        """Show whose blocks are whose, and tell whether that has changed.

        Args:
            snapshot: What the engine says; None says that it never will.
            now_s: Any clock that goes on.
        """
        if snapshot is None:
            self.show_silence(_NO_MAP)
            return False
        self.remove_class("-silent")
        self.history.add(snapshot, self._slot_of, now_s)
        return self.query_one(BlockMap).show(self.history)

    def show_silence(self, why: str) -> None:
        """Show why there is nothing to show."""
        self.add_class("-silent")
        self.query_one(".legend", Line).say(Content(visible(why)))

    def show_numbers(self, max_len: int | None, ttft_s: float | None, now_s: float) -> None:
        """Show all but the map.

        Args:
            max_len: Tokens of the longest sequence, if that is known.
            ttft_s: How long the last answer took to begin.
            now_s: Any clock that goes on.
        """
        snapshot = self.history.snapshot
        if snapshot is None or self.has_class("-silent"):
            return
        blocks = self.query_one(BlockMap)
        self.query_one(".legend", Line).say(
            legend(blocks.per_cell, blocks.num_hidden, blocks.size.width)
        )
        self.query_one(Gauges).show(snapshot.stats, savings(snapshot, max_len), ttft_s, now_s)
        self._show_detail()
        self._show_queue(snapshot)

    def on_descendant_focus(self) -> None:
        """The map is looked at; Textual's own ``focus-within`` styles no parts of the panel."""
        self.add_class("-focused")

    def on_descendant_blur(self) -> None:
        """It no longer is."""
        self.remove_class("-focused")

    def on_block_map_selected(self) -> None:
        """Tell about another cell."""
        self._show_detail()

    def _show_detail(self) -> None:
        detail = self.query_one(".detail", Line)
        blocks, snapshot = self.query_one(BlockMap).selected_blocks, self.history.snapshot
        if blocks is None or snapshot is None:
            detail.say(Content("F3 goes to the map, arrows select a block").stylize("dim"))
        elif len(blocks) == 1:
            detail.say(self._block(snapshot, blocks[0]))
        else:
            detail.say(self._blocks(snapshot, blocks))

    def _block(self, snapshot: EngineSnapshot, block_id: int) -> Content:
        group = self.query_one(BlockMap).group
        pool, size = snapshot.pools[group], snapshot.stats.block_size
        start = Content.assemble((f"block {block_id}", "bold"))
        if len(snapshot.pools) > 1:
            start += Content(f" of pool {group + 1}/{len(snapshot.pools)} (g)")
        slot = self.history.slot(block_id, group)
        if pool.is_cached[block_id]:
            owner = f" from {self._named(slot)}" if slot != NO_SLOT else ""
            return start + Content(f" · cached{owner}: kept until its room is needed")
        found = holders(snapshot, block_id, group)
        if not found:
            return start + Content(" · free")
        lines = [start + Content(f" · held by {len(found)}")]
        for holder in found[:_MAX_HOLDERS]:
            first, asked = holder.position * size, holder.sequence.request_id
            slot = self._slot(holder.sequence)
            is_alone = sum(each.request_id == asked for each in snapshot.sequences) == 1
            number = "" if is_alone else f"[{holder.sequence.index + 1}]"
            lines.append(
                Content.assemble(
                    (letter(slot) + number, self._colour(slot)),
                    f" place {holder.position}, tokens {first}-{first + size - 1}, "
                    f"{holder.num_tokens} of {size} filled",
                )
            )
        if len(found) > _MAX_HOLDERS:
            lines.append(Content(f"and {len(found) - _MAX_HOLDERS} more"))
        return Content("\n").join(lines)

    def _blocks(self, snapshot: EngineSnapshot, blocks: range) -> Content:
        pool = snapshot.pools[self.query_one(BlockMap).group]
        part = slice(blocks.start, blocks.stop)
        refs, cached = pool.ref_counts[part], int(pool.is_cached[part].sum())
        used = int((refs > 0).sum())
        return Content.assemble(
            (f"blocks {blocks.start}-{blocks.stop - 1}", "bold"),
            f"\n{used} in use, {int((refs > 1).sum())} of them shared, {cached} cached, "
            f"{len(blocks) - used - cached} free",
        )

    def _show_queue(self, snapshot: EngineSnapshot) -> None:
        waiting = [each for each in snapshot.sequences if each.status != "running"]
        queue = self.query_one(".queue", Line)
        queue.display = bool(waiting)
        lines = [Content.assemble((f"{len(waiting)} waiting", "bold $warning"))]
        for each in waiting[:_MAX_WAITING]:
            slot = self._slot(each)
            why = "its turn comes soon"
            if each.num_missing_blocks:
                why = f"{each.num_missing_blocks} blocks are missing"
            if each.status == "preempted":
                why = f"gave its blocks to others, {why}"
            lines.append(Content.assemble((f"{self._named(slot)}: ", self._colour(slot)), why))
        queue.say(Content("\n").join(lines))

    def _slot(self, sequence: SequenceSnapshot) -> int:
        return self._slot_of.get(sequence.request_id, NO_SLOT)

    def _colour(self, slot: int) -> str:
        return colour(slot, self.app.current_theme.dark)

    def _named(self, slot: int) -> str:
        title = self._title_of(slot) if slot != NO_SLOT else "another program"
        return f"{letter(slot)} “{visible(title[:16])}”" if slot != NO_SLOT else title
