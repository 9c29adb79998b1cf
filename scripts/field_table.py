"""Writes the tables of request fields of docs/api.md from what the server knows.

python scripts/field_table.py            # rewrites the tables
python scripts/field_table.py --check    # changes nothing; fails when they are out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagedmlx.server.agent_fields import MESSAGE_FIELDS, RESPONSE_FIELDS
from pagedmlx.server.embeddings import EMBEDDING_FIELDS
from pagedmlx.server.field import Field, Use
from pagedmlx.server.fields import CHAT_FIELDS, COMPLETION_FIELDS

API = Path(__file__).resolve().parents[1] / "docs" / "api.md"
START, END = "<!-- fields, by scripts/field_table.py -->", "<!-- end of fields -->"
HEADINGS = {
    Use.USED: "Used",
    Use.NO_EFFECT: "Accepted, without effect on the text",
    Use.REFUSED: "Refused by name, unless they ask for nothing",
}


ENDPOINTS = {
    "chat": CHAT_FIELDS,
    "completions": COMPLETION_FIELDS,
    "responses": RESPONSE_FIELDS,
    "messages": MESSAGE_FIELDS,
    "embeddings": EMBEDDING_FIELDS,
}


def tables() -> str:
    """A table for each use, with the endpoints that have the field."""
    known = {name: {field.name: field for field in fields} for name, fields in ENDPOINTS.items()}
    names = dict.fromkeys(name for fields in known.values() for name in fields)
    lines: list[str] = []
    for use, heading in HEADINGS.items():
        lines += ["", f"### {heading}", "", f"| field | {' | '.join(ENDPOINTS)} | |"]
        lines.append("|---" * (len(ENDPOINTS) + 2) + "|")
        for name in names:
            found = {
                endpoint: fields[name]
                for endpoint, fields in known.items()
                if name in fields and fields[name].use is use
            }
            if found:
                marks = ["yes" if endpoint in found else "" for endpoint in ENDPOINTS]
                lines.append(f"| `{name}` | {' | '.join(marks)} | {_text(found)} |")
    return "\n".join(lines[1:])


def _text(found: dict[str, Field]) -> str:
    by_help: dict[str, list[str]] = {}
    for endpoint, field in found.items():
        by_help.setdefault(field.help, []).append(endpoint)
    if len(by_help) == 1:
        text = next(iter(by_help))
    else:
        told = [f"{' and '.join(where)}: {help}" for help, where in by_help.items()]
        text = " ".join(each[0].upper() + each[1:] for each in told)
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
