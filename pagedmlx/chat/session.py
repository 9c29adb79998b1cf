"""Conversations: a tree of messages each, and the path through it that is shown. Pure.

Every version of a message is kept: another answer, an edited question and the candidates of one
question are siblings in the tree, and one of them is chosen.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagedmlx.core.sampling_params import SamplingParams

ROOT = 0
"""Parent of the first messages."""

USER, ASSISTANT = "user", "assistant"
STREAMING, DONE, LENGTH, STOPPED, FAILED = "streaming", "done", "length", "stopped", "failed"

_TITLE_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Message:
    """One message, or one version of it.

    Attributes:
        message_id: Unique in its conversation; later ones are larger.
        parent_id: The message before it; ``ROOT`` for the first.
        role: ``user`` or ``assistant``.
        text: What it says, reasoning included.
        status: ``streaming``, ``done``, ``length``, ``stopped`` or ``failed``.
        error: Why it failed.
        num_tokens: Tokens of an answer.
        created_s: When it began, in seconds since 1970.
    """

    message_id: int
    parent_id: int
    role: str
    text: str = ""
    status: str = DONE
    error: str = ""
    num_tokens: int = 0
    created_s: float = 0.0


def new_id() -> str:
    """A name for a conversation."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class Conversation:
    """One conversation; ``changed`` holds the ids of messages that are not saved yet.

    Attributes:
        conversation_id: Its name in the store and in the ids of its requests.
        title: What the user called it; empty takes the beginning of the first message.
        system: The system message, or nothing.
        params: How its answers are sampled.
        messages: By id.
        chosen: For each message with others after it, the one that is shown.
        changed: Ids of messages that the store doesn't have in this form.
        created_s: When it began, in seconds since 1970.
        next_id: Id of the next message.
    """

    conversation_id: str = field(default_factory=new_id)
    title: str = ""
    system: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    messages: dict[int, Message] = field(default_factory=dict[int, Message])
    chosen: dict[int, int] = field(default_factory=dict[int, int])
    changed: set[int] = field(default_factory=set[int])
    created_s: float = field(default_factory=time.time)
    next_id: int = ROOT + 1

    @property
    def shown_title(self) -> str:
        """The title, else the beginning of the first message."""
        if self.title:
            return self.title
        first = next((each.text for each in self.path() if each.text.strip()), "")
        line = " ".join(first.split())
        return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"

    def path(self) -> list[Message]:
        """The messages that are shown, first to last."""
        shown: list[Message] = []
        at = ROOT
        while (at := self.chosen.get(at, ROOT)) != ROOT:
            shown.append(self.messages[at])
        return shown

    def path_to(self, message_id: int) -> list[Message]:
        """The messages up to and with this one, whether they are shown or not."""
        found: list[Message] = []
        at = message_id
        while at != ROOT:
            found.append(self.messages[at])
            at = self.messages[at].parent_id
        return found[::-1]

    def add(self, role: str, text: str = "", *, parent_id: int | None = None) -> Message:
        """Put a message after ``parent_id``, else after the last shown one, and show it.

        An assistant's message begins as one that is being written.
        """
        if parent_id is None:
            path = self.path()
            parent_id = path[-1].message_id if path else ROOT
        message = Message(
            message_id=self.next_id,
            parent_id=parent_id,
            role=role,
            text=text,
            status=STREAMING if role == ASSISTANT else DONE,
            created_s=time.time(),
        )
        self.next_id += 1
        self.messages[message.message_id] = message
        self.changed.add(message.message_id)
        self.chosen[parent_id] = message.message_id
        return message

    def change(self, message_id: int, **fields: Any) -> Message:
        """Give a message other fields."""
        message = replace(self.messages[message_id], **fields)
        self.messages[message_id] = message
        self.changed.add(message_id)
        return message

    def versions(self, message_id: int) -> list[int]:
        """The message and its siblings of the same role, oldest first."""
        message = self.messages[message_id]
        return [
            other.message_id
            for other in self.messages.values()
            if other.parent_id == message.parent_id and other.role == message.role
        ]

    def choose(self, message_id: int) -> None:
        """Show this version of a message and what comes after it."""
        self.chosen[self.messages[message_id].parent_id] = message_id

    def other_version(self, message_id: int, by: int) -> int:
        """The version so many places further on; the last one stays where it is."""
        versions = self.versions(message_id)
        place = versions.index(message_id) + by
        return versions[min(max(place, 0), len(versions) - 1)]

    def prompt_for(self, message_id: int) -> list[dict[str, str]]:
        """What a model is given to write the answer ``message_id``.

        Answers that have no text are left out; what then stands beside its like is joined, since
        chat templates want the roles to take turns.
        """
        wanted = [("system", self.system)] if self.system else []
        wanted += [(each.role, each.text) for each in self.path_to(message_id)[:-1]]
        prompt: list[dict[str, str]] = []
        for role, text in wanted:
            if role == ASSISTANT and not text.strip():
                continue
            if prompt and prompt[-1]["role"] == role:
                prompt[-1]["content"] += f"\n\n{text}"
            else:
                prompt.append({"role": role, "content": text})
        return prompt

    def branch(self, message_id: int) -> Conversation:
        """A new conversation that has everything up to and with a message of this one."""
        twin = Conversation(title=f"{self.shown_title} ⑂", system=self.system, params=self.params)
        for message in self.path_to(message_id):
            copied = twin.add(message.role, message.text)
            status = STOPPED if message.status == STREAMING else message.status
            twin.change(
                copied.message_id,
                status=status,
                error=message.error,
                num_tokens=message.num_tokens,
            )
        return twin


def restored(messages: Iterable[Message], chosen: Mapping[int, int], **fields: Any) -> Conversation:
    """A conversation as it was saved; an answer that was being written then was stopped.

    Another window may have the same conversation: its messages have other ids than those that
    are added here, and what only one of the two has chosen is shown.
    """
    found = {
        message.message_id: replace(message, status=STOPPED)
        if message.status == STREAMING
        else message
        for message in messages
    }
    # A choice may have been saved without its message, or the file edited.
    kept = {message.parent_id: message_id for message_id, message in sorted(found.items())}
    kept |= {
        parent: child
        for parent, child in chosen.items()
        if child in found and found[child].parent_id == parent
    }
    next_id = max(found, default=ROOT) + random.randint(1, 2**32)
    return Conversation(messages=found, chosen=kept, next_id=next_id, **fields)
