"""Cuts Markdown that grows into pieces, of which only the last one can still change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token

from pagedmlx.text.visible import visible


@dataclass(frozen=True, slots=True)
class Piece:
    """A paragraph, a heading, a code block, a table, or one item of a list.

    Attributes:
        tokens: The parser's tokens, whole; an item's are between those of a list of one.
        has_gap: Whether an empty line belongs before it, unless it is the first.
        first_line: Where it begins in the text that was parsed.
        number: An item's number in a list with numbers.
    """

    tokens: tuple[Token, ...]
    has_gap: bool
    first_line: int = 0
    number: int | None = None

    @property
    def code(self) -> str | None:
        """What the first code block in it says, if there is one."""
        codes = (each for each in self.tokens if each.type in ("fence", "code_block"))
        first = next(codes, None)
        return None if first is None else first.content.rstrip("\n")


class GrowingText:
    """Takes a text as it grows, and keeps its pieces.

    Parsing costs as much as the last piece and what is new, however long the text is.
    """

    def __init__(self) -> None:
        # Tags and pictures are shown as they are written: nothing of an answer is lost.
        parser = MarkdownIt("commonmark", {"html": False})
        self._parser = parser.enable(["strikethrough", "table"]).disable("image")
        self._taken = ""
        self._source = ""
        self._open: Piece | None = None
        self.pieces: list[Piece] = []

    def take(self, text: str) -> int | None:
        """Take the text as it is by now.

        Returns:
            The number of pieces at the beginning that are as before; None if nothing changed.
        """
        if text == self._taken:
            return None
        if not self._taken or not text.startswith(self._taken):
            self._taken, self._source, self._open = "", "", None
            self.pieces.clear()
        new = text[len(self._taken) :]
        # The half of a line end stays behind until the other half comes.
        new = new.removesuffix("\r")
        self._taken += new
        self._source += visible(new)
        kept = len(self.pieces) - (self._open is not None)
        found = _cut(self._parser.parse(self._source), self._open)
        self.pieces[kept:] = found
        self._open = found[-1] if found else None
        if self._open is not None and self._open.first_line:
            lines = self._source.split("\n")[self._open.first_line :]
            self._source = "\n".join(lines)
        return kept


def _cut(tokens: Sequence[Token], opened: Piece | None) -> list[Piece]:
    """The pieces of what was parsed; its first one is what ``opened`` has become."""
    pieces: list[Piece] = []
    number = opened.number if opened is not None else None
    start = 0

    def add(whole: Sequence[Token], has_gap: bool, number: int | None = None) -> None:
        if not pieces and opened is not None and opened.tokens[0].type == whole[0].type:
            has_gap = opened.has_gap
        lines = whole[0].map
        pieces.append(Piece(tuple(whole), has_gap, lines[0] if lines else 0, number))

    for place, token in enumerate(tokens):
        if token.level == 0 and token.nesting == 1:
            start = place
            if token.type == "ordered_list_open" and (pieces or number is None):
                number = int(token.attrs.get("start", 1))
            elif token.type != "ordered_list_open":
                number = None
        elif token.level == 1 and token.type == "list_item_open":
            start = place
        elif token.level == 1 and token.type == "list_item_close":
            is_first = tokens[start - 1].level == 0
            add(_list_of(tokens[start : place + 1], number), is_first, number)
            number = None if number is None else number + 1
        elif token.level == 0 and token.type not in ("bullet_list_close", "ordered_list_close"):
            add(tokens[place if token.nesting == 0 else start : place + 1], True)
    return pieces


def _list_of(item: Sequence[Token], number: int | None) -> list[Token]:
    kind = "bullet_list" if number is None else "ordered_list"
    tag = "ul" if number is None else "ol"
    opening = Token(f"{kind}_open", tag, 1, map=item[0].map)
    if number is not None:
        opening.attrs["start"] = number
    return [opening, *item, Token(f"{kind}_close", tag, -1)]
