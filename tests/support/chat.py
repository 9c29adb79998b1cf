"""Clients that need no model, and a hand on the application, for tests of the chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from pagedmlx.chat.app import ChatApp
from pagedmlx.chat.client import ChatClient, ChatRequest, Delta
from pagedmlx.chat.engine_client import EngineClient
from pagedmlx.chat.options import ChatOptions
from pagedmlx.config import EngineConfig
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.snapshot import EngineSnapshot
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import PagedMLXError
from pagedmlx.progress import ProgressCallback
from tests.support.engines import Choose, FakeRunner, make_engine, spelled

WAIT_S = 60.0

MARKDOWN = """# Title *x*

Some `code` and **bold** [link](http://x.y) text [red]x[/red] <b>hi</b> ![pic](u).

1. one
2. two
   - nested
   - more

     para
3. three

   ```python
   def f(x):
       return "s" + 1  # c
   ```

- a
- b

  c
* other

> quote
> more

```js
let x = 1;

```

| a | b |
|---|---|
| 1 | 2 |
| long cell here | y |

---

end

"""
"""Some of everything, as models write it."""


class FakeClient:
    """Says what the test wants, piece by piece.

    ``pieces`` are said in order; ``gate``, when it is there, is waited for before each of them.
    """

    def __init__(self, pieces: Sequence[str] = ("Hello ", "there."), name: str = "fake") -> None:
        self.name = name
        self.max_len: int | None = 100
        self.notes: tuple[str, ...] = ("a note",)
        self.defaults: Mapping[str, float] = {}
        self.pieces = list(pieces)
        self.gate: asyncio.Semaphore | None = None
        self.start_gate: asyncio.Event | None = None
        self.start_error: Exception | None = None
        self.error: Exception | None = None
        self.requests: list[ChatRequest] = []
        self.num_aborted = 0
        self.num_closes = 0

    async def start(self, on_progress: ProgressCallback) -> None:
        on_progress("weights", 0.4)
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta]:
        self.requests.append(request)
        try:
            for place, piece in enumerate(self.pieces, 1):
                if self.gate is not None:
                    await self.gate.acquire()
                else:
                    await asyncio.sleep(0)
                ends = place == len(self.pieces) and self.error is None
                for index in range(request.params.n):
                    text = piece if request.params.n == 1 else f"{piece}[{index}]"
                    yield Delta(index, text, "stop" if ends else None, 7, 3, place, 0.25)
            if self.error is not None:
                raise self.error
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise

    async def snapshot(self) -> EngineSnapshot | None:
        return None

    async def close(self) -> bool:
        self.num_closes += 1
        return True


def engine_client(
    text: str = "One two three.", *, choose: Choose | None = None, **settings: Any
) -> EngineClient:
    """The real client over an engine without a model."""

    def make_worker(on_progress: ProgressCallback) -> EngineWorker:
        runner = FakeRunner(choose or spelled(text))

        def build(report: ProgressCallback) -> Any:
            report("fake weights", 1.0)
            return make_engine(runner, **settings)

        return EngineWorker(build, on_progress)

    return EngineClient(EngineConfig(model="fake"), make_worker)


@asynccontextmanager
async def running(
    client: ChatClient | Callable[[str], ChatClient],
    *,
    size: tuple[int, int] = (120, 40),
    model: str | None = "fake",
    store_path: Path | None = None,
    **options: Any,
) -> AsyncIterator[tuple[ChatApp, Pilot[int]]]:
    """The application on a screen of its own, with its model loaded unless the test holds it."""
    options.setdefault("params", SamplingParams(temperature=0.7, max_tokens=None))
    make = client if callable(client) else lambda _name: client
    app = ChatApp(ChatOptions(make, model, store_path, **options))
    async with app.run_test(size=size) as pilot:
        await calm(pilot)
        yield app, pilot
        if app.is_running:
            app.action_leave()
            app.action_leave()  # even if something could not be saved
            await until(pilot, lambda: not app.is_running or app._exit)


async def until(pilot: Pilot[int], happens: Callable[[], object]) -> None:
    """Wait for something to happen, or fail and tell what is on the screen instead."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    try:
        async with asyncio.timeout(WAIT_S):
            while not happens():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it never happened; the screen:\n{screen_text(app)}") from None


async def shows(pilot: Pilot[int], *texts: str) -> str:
    """Wait until all these texts are on the screen; what else is on it."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: all(text in screen_text(app) for text in texts))
    return screen_text(app)


async def told(pilot: Pilot[int], text: str) -> None:
    """Wait until the user is told something in a notice."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: any(text in each for each in notices(app)))


async def calm(pilot: Pilot[int]) -> None:
    """Wait until every widget has done what it was told so far, and the screen shows it.

    Unlike ``Pilot.pause`` it doesn't guess from the processor's load.
    """
    for _ in range(3):
        await pilot._wait_for_screen()
        pilot.app.screen._on_timer_update()


async def say(pilot: Pilot[int], text: str) -> None:
    """Type a text into the prompt and send it."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.pane.prompt.focus()
    app.pane.prompt.put(text)
    await pilot.press("enter")


async def settle(pilot: Pilot[int]) -> None:
    """Wait until no answer is under way and everything is drawn."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    await until(pilot, lambda: not any(pane.is_busy for pane in app.panes))
    await calm(pilot)


def screen_text(app: ChatApp) -> str:
    """What is on the screen, line by line."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def notices(app: ChatApp) -> list[str]:
    """What the user is being told."""
    return [each.message for each in app._notifications]


def failed(message: str, hint: str = "") -> PagedMLXError:
    """An error of ours."""
    return PagedMLXError(message, hint=hint)
