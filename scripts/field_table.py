"""Writes the tables of request fields of docs/api.md from what the server knows.

python scripts/field_table.py            # rewrites the tables
python scripts/field_table.py --check    # changes nothing; fails when they are out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.server.fields import CHAT_FIELDS, COMPLETION_FIELDS, Use

API = Path(__file__).resolve().parents[1] / "docs" / "api.md"
START, END = "<!-- fields, by scripts/field_table.py -->", "<!-- end of fields -->"
HEADINGS = {
    Use.USED: "Used",
    Use.NO_EFFECT: "Accepted, without effect on the text",
    Use.REFUSED: "Refused by name, unless they ask for nothing",
}


def tables() -> str:
    """A table for each use, with the endpoints that have the field."""
    chat, completion = ({f.name: f for f in each} for each in (CHAT_FIELDS, COMPLETION_FIELDS))
    lines: list[str] = []
    for use, heading in HEADINGS.items():
        lines += ["", f"### {heading}", "", "| field | chat | completions | |", "|---|---|---|---|"]
        for name in dict.fromkeys((*chat, *completion)):
            found = [chat.get(name), completion.get(name)]
            helps = list(dict.fromkeys(f.help for f in found if f is not None and f.use is use))
            if helps:
                marks = ["yes" if f is not None and f.use is use else "" for f in found]
                lines.append(f"| `{name}` | {' | '.join(marks)} | {_text(helps)} |")
    return "\n".join(lines[1:])


def _text(helps: list[str]) -> str:
    text = helps[0] if len(helps) == 1 else f"Chat: {helps[0]} Completions: {helps[1]}"
    return text.replace("|", "\\|")


def with_tables(text: str) -> str:
    """The text of the document with the tables as they should be."""
    before, _, rest = text.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{API.name} lacks the lines {START} and {END}")
    return f"{before}{START}\n\n{tables()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    now = API.read_text(encoding="utf-8")
    wanted = with_tables(now)
    if now == wanted:
        print(f"{API.name}: the tables of fields are up to date", file=sys.stderr)
    elif options.check:
        raise SystemExit(f"{API.name}: the tables of fields are out of date; run this script")
    else:
        API.write_text(wanted, encoding="utf-8")
        print(f"{API.name}: tables of fields written", file=sys.stderr)


if __name__ == "__main__":
    main()
