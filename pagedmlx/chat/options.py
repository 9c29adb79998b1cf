"""ChatOptions: what the chat begins with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedmlx.chat.client import ChatClient
from pagedmlx.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedmlx.chat.app import ChatApp


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the chat begins with.

    Attributes:
        make_client: Makes the client for a model's name.
        model: The model; None lets the user choose.
        store_path: Where conversations are kept; None keeps them in memory only.
        params: Sampling settings of new conversations.
        given: Those of them that the user gave; the others follow the model.
        system: System message of new conversations.
        can_pick: Whether there are models to choose from on this machine.
        scene: Plays by itself once the model is there.
    """

    make_client: Callable[[str], ChatClient]
    model: str | None = None
    store_path: Path | None = None
    params: SamplingParams = SamplingParams(temperature=0.7, max_tokens=None)  # noqa: RUF009
    given: frozenset[str] = frozenset()
    system: str = ""
    can_pick: bool = True
    scene: Callable[[ChatApp], Awaitable[None]] | None = None
