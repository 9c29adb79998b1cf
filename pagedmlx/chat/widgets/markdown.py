"""Text of others on the screen: Markdown that grows, and plain text, both shown as they are."""

from __future__ import annotations

from markdown_it import MarkdownIt
from textual import events
from textual.message import Message as Event
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

# A model's answer could move the cursor or set the title; tabs and line ends are harmless.
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """A text without characters that steer a terminal."""
    return text.replace("\r\n", "\n").translate(_CONTROL)


def _parser() -> MarkdownIt:
    # Tags are shown: an answer about HTML would lose them.
    return MarkdownIt("gfm-like", {"html": False})


class CodeBlock(MarkdownFence):
    """A code block; a double click copies it."""

    class CopyWanted(Event):
        """The user wants the code of a block."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def on_click(self, event: events.Click) -> None:
        """Ask for a copy."""
        if event.chain == 2:
            event.stop()
            self.post_message(self.CopyWanted(self.code))


class GrowingMarkdown(Markdown):
    """Markdown of which only the end is laid out anew when it grows."""

    def __init__(self) -> None:
        super().__init__(parser_factory=_parser, open_links=False)
        self._shown = ""

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """Code blocks are ours."""
        return CodeBlock if block_name in ("fence", "code_block") else self.BLOCKS[block_name]

    async def show(self, text: str) -> None:
        """Show a text; cheap if it goes on from the one before."""
        text = visible(text)
        before, self._shown = self._shown, text
        if text == before:
            return
        if before and text.startswith(before):
            await self.append(text[len(before) :])
        else:
            await self.update(text)
