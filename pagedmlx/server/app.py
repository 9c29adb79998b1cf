"""The ASGI application: which path leads where, and how what goes wrong is answered."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagedmlx.errors import PagedMLXError
from pagedmlx.server import messages, responses, status, tokens
from pagedmlx.server.chat import chat_completions
from pagedmlx.server.completions import completions
from pagedmlx.server.embeddings import embeddings
from pagedmlx.server.errors import ClientGoneError, HttpError, error_response
from pagedmlx.server.middleware import Auth, RequestLog
from pagedmlx.server.service import Service

_OPEN_PATHS = frozenset({"/health", "/ready"})
_GONE = 499


def make_app(service: Service) -> Starlette:
    """The application over a service."""
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses.create_response, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.get_response, methods=["GET"]),
        Route("/v1/responses/{response_id}", responses.delete_response, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", responses.input_items, methods=["GET"]),
        Route("/v1/messages", messages.create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/models", status.models, methods=["GET"]),
        Route("/v1/models/{model:path}", status.model, methods=["GET"]),
        Route("/v1/stats", status.stats, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", status.health, methods=["GET"]),
        Route("/ready", status.ready, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
        Route("/version", status.version, methods=["GET"]),
    ]
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(RequestLog, service=service, paths=paths),
        Middleware(Auth, keys=service.settings.api_keys, open_paths=_OPEN_PATHS),
    ]
    if service.settings.cors_origins:
        # Outermost: a browser asks without a key whether it may ask.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            PagedMLXError: _refused,
            HTTPException: _not_routed,
            ClientGoneError: _gone,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, PagedMLXError)
    request.state.note.update(error=str(error))
    return error_response(error, request.url.path)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is nothing at this path", 405: "this path has other methods"}
    return error_response(
        HttpError(
            error.status_code,
            what.get(error.status_code, error.detail),
            code="not_found" if error.status_code == 404 else "method_not_allowed",
            headers=error.headers,
        ),
        request.url.path,
    )


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; the log shows that the client left."""
    return Response(status_code=_GONE)
