"""Ink: draws pieces of Markdown as lines of the screen, in the colours of a theme."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, HorizontalRule, ListItem, Markdown, MarkdownElement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.theme import Theme
from textual.color import Color
from textual.strip import Strip

from pagedmlx.chat.pieces import Piece

_MIN_WIDTH = 8
_PART_LINES = 40
"""Code that still grows is coloured in parts of so many lines, and as a whole at its end."""


class _Heading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Item(ListItem):
    def render_number(
        self, console: Console, options: ConsoleOptions, number: int, last_number: int
    ) -> RenderResult:
        # As it is written: with a full stop.
        label = f" {number}. "
        style = console.get_style("markdown.item.number")
        inner = options.update(width=options.max_width - len(label))
        for place, line in enumerate(console.render_lines(self.elements, inner, style=self.style)):
            yield Segment(" " * len(label) if place else label, style)
            yield from line
            yield Segment.line()


class _Rule(HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr")


class _Code(CodeBlock):
    def __init__(self, ink: Ink, language: str) -> None:
        super().__init__(language, "")
        self.ink = ink

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        assert isinstance(markdown, _Drawn)
        return cls(markdown.ink, token.info.partition(" ")[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.ink.code(str(self.text), self.lexer_name)


class _Drawn(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "list_item_open": _Item,
        "hr": _Rule,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, ink: Ink) -> None:
        super().__init__("", hyperlinks=False)
        self.ink = ink


class Ink:
    """What a theme's colours draw with.

    Args:
        colours: The theme's colours by name, as Textual's style sheets call them.
    """

    def __init__(self, colours: Mapping[str, str]) -> None:
        def style(name: str, *, bold: bool = False, underline: bool = False) -> Style:
            colour = Color.parse(colours[f"text-{name}"]).rich_color
            return Style(color=colour, bold=bold or None, underline=underline or None)

        accent, warm = style("accent"), style("warning")
        heading = style("accent", bold=True)
        styles = {
            **{f"markdown.h{level}": heading for level in range(1, 7)},
            "markdown.h1": heading + Style(underline=True),
            "markdown.code": warm,
            "markdown.link": style("primary", underline=True),
            "markdown.link_url": style("primary", underline=True),
            "markdown.block_quote": Style(italic=True),
            "markdown.item.bullet": accent,
            "markdown.item.number": accent,
            "markdown.hr": Style(dim=True),
            "markdown.table.border": Style(dim=True),
            "markdown.table.header": heading,
        }
        self._console = Console(
            file=io.StringIO(), color_system="truecolor", theme=Theme(styles), width=80
        )
        self._syntax = ANSISyntaxTheme(
            {
                ("Comment",): Style(dim=True, italic=True),
                ("Keyword",): accent,
                ("Literal", "String"): style("success"),
                ("Literal", "Number"): warm,
                ("Name", "Function"): style("primary"),
                ("Name", "Class"): style("primary"),
                ("Name", "Decorator"): style("primary"),
                ("Name", "Builtin"): style("secondary"),
                ("Generic", "Inserted"): style("success"),
                ("Generic", "Deleted"): style("error"),
            }
        )
        surface = Color.parse(colours["surface"])
        self._paper = Style(bgcolor=surface.rich_color) if surface.a else Style.null()
        self._part = lru_cache(maxsize=64)(self._coloured)

        self._markdown = _Drawn(self)

    def draw(self, piece: Piece, width: int, *, is_open: bool = False) -> list[Strip]:
        """The piece's lines, none wider than ``width``.

        Args:
            piece: What to draw.
            width: Cells in a line.
            is_open: Whether it still grows; then what it costs should not grow with it.
        """
        first = piece.tokens[0]
        if is_open and first.type == "fence":
            lines = first.content.rstrip("\n").split("\n")
            parts = (lines[at : at + _PART_LINES] for at in range(0, len(lines), _PART_LINES))
            language = first.info.partition(" ")[0]
            return [line for part in parts for line in self._part("\n".join(part), language, width)]
        # Making one costs a parser.
        self._markdown.parsed = list(piece.tokens)
        return self._strips(self._markdown, width)

    def code(self, text: str, language: str) -> RenderableType:
        """Code in colours, on paper of its own."""
        code = Syntax(
            text.rstrip("\n"), language or "text", theme=self._syntax, word_wrap=True, tab_size=4
        )
        return Padding(code, (0, 1), style=self._paper)

    def _coloured(self, text: str, language: str, width: int) -> list[Strip]:
        return self._strips(self.code(text, language), width)

    def _strips(self, drawn: RenderableType, width: int) -> list[Strip]:
        options = self._console.options.update(width=max(_MIN_WIDTH, width), height=None)
        lines = [Strip(line) for line in self._console.render_lines(drawn, options, pad=False)]
        # Rich puts empty lines around lists and tables; code has paper behind its own.
        while lines and not _has_ink(lines[0]):
            del lines[0]
        while lines and not _has_ink(lines[-1]):
            del lines[-1]
        return [line.crop(0, width) for line in lines]


def _has_ink(line: Strip) -> bool:
    return any(each.text.strip() or (each.style and each.style.bgcolor) for each in line)
