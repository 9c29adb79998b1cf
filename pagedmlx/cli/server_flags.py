"""The flags of ``pagedmlx serve``: those of the endpoint, and how they join the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pagedmlx.cli.options import (
    ENGINE_FLAGS,
    MODEL_FLAG,
    Flag,
    FlagGroup,
    size_argument,
    with_flags,
)
from pagedmlx.config import EngineConfig
from pagedmlx.server.settings import ServerSettings

SERVER_FLAGS = (
    Flag("host", "Address to listen on; 0.0.0.0 is every one.", str),
    Flag("port", "Port to listen on; 0 is any free one.", int),
    Flag("api_keys", "A key that opens the server; repeatable.", list[str], [], "api-key"),
    Flag(
        "served_model_names",
        "What clients may call the model; repeatable.",
        list[str],
        [],
        "served-model-name",
    ),
    Flag("strict", "Refuse fields of requests that are not known.", bool),
    Flag(
        "cors_origins",
        "Let web pages of this origin use the server; repeatable, * is all.",
        list[str],
        [],
        "cors-origin",
        metavar="ORIGIN",
    ),
    Flag(
        "max_body_bytes",
        "Longest body of a request.",
        int,
        name="max-body-size",
        parser=size_argument,
        metavar="SIZE",
    ),
    Flag(
        "response_store_bytes",
        "Answers of /v1/responses that are kept, at most this much; 0 is none.",
        int,
        name="response-store",
        parser=size_argument,
        metavar="SIZE",
    ),
    Flag("header_timeout_s", "Seconds for a request's head.", float, name="header-timeout"),
    Flag("body_timeout_s", "Seconds for a request's body.", float, name="body-timeout"),
    Flag("send_timeout_s", "Seconds without reading anything.", float, name="send-timeout"),
    Flag("request_timeout_s", "Seconds in all; 0 is no limit.", float, name="request-timeout"),
    Flag("keep_alive_s", "Seconds between comments in a stream.", float, name="keep-alive"),
    Flag("drain_timeout_s", "Seconds to finish after SIGTERM.", float, name="drain-timeout"),
    Flag("log_requests", "Log a line for each request.", bool),
    Flag("log_contents", "Log what is asked and answered, too.", bool),
)

MODEL_TO_SERVE = dataclasses.replace(MODEL_FLAG, help="Model to serve, instead of the argument.")

# A server must say no before its queue is endless.
_ENGINE_FLAGS = tuple(
    dataclasses.replace(flag, default=256, help="Most requests that may wait.", type=int)
    if flag.field == "max_num_waiting"
    else flag
    for flag in ENGINE_FLAGS
)

SERVE_FLAGS = (MODEL_TO_SERVE, *SERVER_FLAGS, *_ENGINE_FLAGS)


def with_engine_and_server(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these flags, as ``settings``, ``config`` and ``model_flag``."""
    groups = (
        FlagGroup("settings", ServerSettings, SERVER_FLAGS),
        FlagGroup("config", EngineConfig, _ENGINE_FLAGS),
    )
    return with_flags(command, groups, MODEL_TO_SERVE)
