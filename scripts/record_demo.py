"""Takes the pictures of the chat that the README shows, as SVG, without a terminal.

    python scripts/record_demo.py --to assets [--model smollm2 | --demo] [--sizes 80x24,120x40]

Someone uses the chat: two conversations at once, a branch that shares blocks, candidates side by
side. With ``--model`` a real engine answers; with ``--demo`` what was written beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from textual.pilot import Pilot

from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.client import ChatClient
from pagedmlx.chat.demo import DemoClient
from pagedmlx.chat.engine_client import EngineClient
from pagedmlx.chat.options import ChatOptions
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams

QUESTIONS = (
    "Why is the sky blue? Answer in a few sentences.",
    "Write a short Python function that pages through a list, and explain it.",
    "Think of a name for a small program and say why.",
)
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.S)
_WAIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of the chat.")
    parser.add_argument("--to", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--demo", action="store_true", help="no model; a scripted client")
    parser.add_argument("--num-blocks", type=int, default=192, help="blocks in the pool")
    parser.add_argument("--sizes", default="120x40", help="such as 80x24,120x40,200x60")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    for text in arguments.sizes.split(","):
        width, height = map(int, text.split("x"))
        asyncio.run(record(client_of(arguments), (width, height), arguments.to))


def client_of(arguments: argparse.Namespace) -> ChatClient:
    if arguments.demo:
        return DemoClient(0.02)
    return EngineClient(EngineConfig(model=arguments.model, num_blocks=arguments.num_blocks))


async def record(client: ChatClient, size: tuple[int, int], folder: Path) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=160)
    options = ChatOptions(lambda _name: client, client.name, params=params, given=GIVEN)
    app = ChatApp(options)
    # The README's size has the plain names.
    prefix = "chat-" if size == (120, 40) else f"chat-{size[0]}x{size[1]}-"
    async with app.run_test(size=size, notifications=False) as pilot:
        await until(pilot, lambda: app.client is not None)
        first = app.pane
        await first.send(QUESTIONS[0])
        await until(pilot, lambda: tokens(app) > 15)
        second = await app.open(app.new_conversation())
        await second.send(QUESTIONS[1])
        await until(pilot, lambda: tokens(app) > 60 or not second.is_busy)
        picture(app, folder / f"{prefix}two-at-once.svg")
        await until(pilot, lambda: not (first.is_busy or second.is_busy))
        await second.branch()
        branch = app.pane
        await branch.send(QUESTIONS[2], 3)
        await second.send("How would you test it?")
        await until(pilot, lambda: tokens(app) > 20 or not branch.is_busy)
        app.action_focus_map()
        await pilot.press("right")
        await pilot.pause(0.3)
        picture(app, folder / f"{prefix}branch.svg")
        app.action_leave()
        await until(pilot, lambda: app.return_code is not None)


GIVEN = frozenset({"temperature", "top_p", "seed", "max_tokens"})


def tokens(app: ChatApp) -> int:
    return app.pane.conversation.path()[-1].num_tokens


async def until(pilot: Pilot[int], happens: Callable[[], object]) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not happens():
            await pilot.pause(0.05)


def picture(app: ChatApp, path: Path) -> None:
    # Readers have no font of ours; any fixed-width one will do.
    svg = _FONT_FACE.sub("", app.export_screenshot(title="pagedmlx chat"))
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, DejaVu Sans Mono, monospace")
    lines = [line.rstrip() for line in svg.splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
