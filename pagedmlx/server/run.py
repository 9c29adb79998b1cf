"""Runs the endpoint: takes the port, then loads the model, serves, and stops in good order."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn

from pagedmlx.engine.async_engine import AsyncEngine
from pagedmlx.engine.worker import EngineWorker
from pagedmlx.errors import PagedMLXError
from pagedmlx.server.app import make_app
from pagedmlx.server.protocol import TimedProtocol
from pagedmlx.server.service import Service, logger
from pagedmlx.server.settings import ServerSettings

_BACKLOG = 512
_IDLE_S = 75


class PortError(PagedMLXError):
    """The server can't listen where it should."""


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Take the port at every address of the host; nothing heavy has been done before that.

    Raises:
        PortError: It is taken, or there is no such address on this machine.
    """
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise PortError(f"host {host!r}: {_reason(error)}", hint="--host 127.0.0.1") from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _name, address in dict.fromkeys(found):
            each = socket.socket(family, kind, protocol)
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Further addresses take the port that the first one got.
            chosen = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            try:
                each.bind((address[0], chosen, *address[2:]))
            except OSError as error:
                # A name may have addresses that this machine is not set up for.
                if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                    raise
                sockets.remove(each)
                each.close()
                continue
            each.listen(_BACKLOG)
    except OSError as error:
        for each in sockets:
            each.close()
        raise PortError(
            f"can't listen on {host} port {port}: {_reason(error)}",
            hint="another program may have it; --port takes another one, --port 0 any free one",
        ) from error
    if not sockets:
        raise PortError(f"{host} is no address of this machine", hint="--host 127.0.0.1")
    return sockets


async def run_server(
    service: Service,
    worker: EngineWorker,
    sockets: Sequence[socket.socket],
    *,
    stop: asyncio.Future[float],
    on_ready: Callable[[AsyncEngine], None] = lambda _engine: None,
) -> None:
    """Serve until ``stop`` is done; its result is how long requests may still go on.

    While the model loads, clients are told so.

    Args:
        service: What is served.
        worker: Loads the engine and runs it; closed at the end.
        sockets: They listen already; closed at the end.
        stop: Set by whoever wants the server to end.
        on_ready: Called once the model is loaded.

    Raises:
        PagedMLXError: The model can't be loaded.
    """
    settings = service.settings
    server = _Server(
        uvicorn.Config(
            make_app(service),
            http=partial(TimedProtocol, header_timeout_s=settings.header_timeout_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve(list(sockets)))
    loading = asyncio.create_task(AsyncEngine.from_worker(worker))
    try:
        await asyncio.wait({serving, loading, stop}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.engine = loading.result()
            on_ready(service.engine)
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            if service.num_generations:
                logger.info("stopping: %d requests under way", service.num_generations)
            await service.drain(stop.result())
    finally:
        server.should_exit = True
        loading.cancel()
        await asyncio.wait({serving})
        await asyncio.to_thread(worker.close, 1.0)
        for each in sockets:
            each.close()
    serving.result()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs the server."""
        yield


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
