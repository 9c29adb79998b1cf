"""The life of ``pagedmlx serve``: port, model, signals; server/run.py does the work."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from functools import partial

from pagedmlx import hub
from pagedmlx.cli import render
from pagedmlx.cli.signals import Terminated, end_at_once, end_later
from pagedmlx.config import EngineConfig
from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.engine import Engine
from pagedmlx.engine.load import load_engine
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.progress import ProgressCallback
from pagedmlx.server.run import listen, run_server
from pagedmlx.server.service import Service
from pagedmlx.server.settings import ServerSettings

# After a drain, whatever still hangs must not.
_LAST_S = 5.0


def run(config: EngineConfig, settings: ServerSettings) -> None:
    """Serve until a signal comes.

    Raises:
        PagedMLXError: The port is taken, or the model can't be loaded.
        KeyboardInterrupt: Ctrl-C ended it, in good order.
        Terminated: SIGTERM did.
    """
    sockets = listen(settings)
    number = asyncio.run(_serve(config, settings, sockets))
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


async def _serve(
    config: EngineConfig, settings: ServerSettings, sockets: Sequence[socket.socket]
) -> int:
    """Serve; returns the number of the signal that ended it."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[float] = loop.create_future()
    caught: list[int] = []

    def on_signal(number: int) -> None:
        caught.append(number)
        if len(caught) > 1:
            end_at_once(128 + number)
        if number == signal.SIGINT:
            # Streams are told at once that the server stops.
            end_later(128 + number)
            stop.set_result(0.0)
        else:
            end_later(128 + number, settings.drain_timeout_s + _LAST_S)
            stop.set_result(settings.drain_timeout_s)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    tell = render.once_each()
    worker = EngineWorker(partial(_load, config), lambda what, _share: tell(what))
    service = Service(config.model, settings)
    try:
        await run_server(
            service, worker, sockets, stop=stop, on_ready=partial(_tell_ready, service, sockets)
        )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return caught[0]


def _load(config: EngineConfig, report: ProgressCallback) -> Engine:
    # Before MLX is imported, so that a wrong name is told at once.
    hub.resolve(config.model, config.revision, config.offline, report)
    return load_engine(config.for_streams(), report)


def _tell_ready(service: Service, sockets: Sequence[socket.socket], engine: AsyncEngine) -> None:
    for note in engine.notes:
        render.notice(note)
    if not engine.tokenizer.has_chat_template:
        render.notice("this model has no chat template: only /v1/completions works")
    names = ", ".join(service.model_names)
    for each in sockets:
        host, port = each.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        render.notice(f"serving {names} at http://{host}:{port}/v1")
