"""What tells how the server is: health, readiness, metrics, statistics, version and models."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedmlx import __version__
from pagedmlx.core.snapshot_json import snapshot_to_json
from pagedmlx.errors import EngineClosedError, EngineDeadError
from pagedmlx.server.errors import JsonResponse
from pagedmlx.server.metrics import CONTENT_TYPE
from pagedmlx.server.service import Service


async def health(request: Request) -> Response:
    """200 while the engine works; 503 while the model loads and once the engine has failed."""
    state = _service(request).state
    return JsonResponse({"status": state}, 503 if state in ("loading", "dead") else 200)


async def ready(request: Request) -> Response:
    """200 while new requests are taken."""
    state = _service(request).state
    return JsonResponse({"status": state}, 200 if state == "ready" else 503)


async def version(request: Request) -> Response:
    """The package's version."""
    return JsonResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Counts and times for Prometheus."""
    service = _service(request)
    stats = None
    if service.engine is not None:
        try:
            stats = await service.engine.stats()
        except (EngineDeadError, EngineClosedError):
            stats = None
    return Response(service.metrics.exposition(stats), headers={"Content-Type": CONTENT_TYPE})


async def stats(request: Request) -> Response:
    """The engine's counts, where each request is, and for ``?blocks=true`` who holds each block."""
    service = _service(request)
    body: dict[str, Any] = {
        "status": service.state,
        "model": service.model_names[0],
        "version": __version__,
        "uptime_s": time.time() - service.created,
    }
    if service.engine is not None and service.engine.is_healthy:
        counts, progress = await service.engine.stats(), await service.engine.progress()
        body |= {
            "engine": dataclasses.asdict(counts),
            "requests": [dataclasses.asdict(each) for each in progress],
        }
        if request.query_params.get("blocks", "").lower() in ("1", "true"):
            body["blocks"] = snapshot_to_json(await service.engine.snapshot())
    return JsonResponse(body)


async def models(request: Request) -> Response:
    """The served model, as a list that OpenAI's and Anthropic's clients understand."""
    service = _service(request)
    name = service.model_names[0]
    return JsonResponse(
        {
            "object": "list",
            "data": [_model(service, name)],
            "first_id": name,
            "last_id": name,
            "has_more": False,
        }
    )


async def model(request: Request) -> Response:
    """One model by its name.

    Raises:
        HttpError: There is no such model.
    """
    service = _service(request)
    return JsonResponse(_model(service, service.check_model(request.path_params["model"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    length = None if service.engine is None else service.engine.limits.max_model_len
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "owned_by": "pagedmlx",
        "max_model_len": length,
    }


def _service(request: Request) -> Service:
    return request.app.state.service
