"""The chat line by line, for pipes and terminals that can do no more. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from pagedmlx.chat.answers import Progress, write_answers
from pagedmlx.chat.client import ChatClient
from pagedmlx.chat.commands import SETTINGS, message_text, obey_set, parse, setting_text
from pagedmlx.chat.session import ASSISTANT, DONE, FAILED, USER, Conversation
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.errors import PagedMLXError, RequestFailedError
from pagedmlx.progress import ProgressCallback

_COMMANDS = {
    "help": "these commands",
    "system TEXT": "set the system message; - takes it away",
    "set [NAME [VALUE]]": "change how answers are sampled; alone it shows all settings",
    "clear": "begin anew",
    "retry": "answer the last question once more",
    "quit": "leave",
}
_FRAME_S = 0.02


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """Where the chat writes.

    Attributes:
        answer: Takes pieces of answers; they belong on standard output.
        notice: Takes lines that are not part of an answer.
        progress: Told what is being loaded.
        started: Called when it is loaded.
        is_patient: Whether a failed answer is only told, as to someone who can ask again; else
            it ends the chat.
    """

    answer: Callable[[str], None]
    notice: Callable[[str], None]
    progress: ProgressCallback
    started: Callable[[], None] = lambda: None
    is_patient: bool = True


def run_plain(
    client: ChatClient,
    lines: Iterable[str],
    output: PlainOutput,
    *,
    params: SamplingParams,
    given: frozenset[str] = frozenset(),
    system: str = "",
) -> bool:
    """Answer one line after the other; a backslash at a line's end goes on in the next.

    Args:
        client: Writes the answers; it is closed at the end.
        lines: What the user says, without line ends.
        output: Where to write.
        params: How to sample.
        given: Settings of ``params`` that the user gave; the others follow the model.
        system: System message.

    Returns:
        Whether the client has ended; if not, the process should not wait for it.

    Raises:
        PagedMLXError: The model can't be loaded, or an answer failed and nobody can ask again.
    """
    conversation = Conversation(system=system, params=params)
    loop = asyncio.new_event_loop()
    ended = False
    try:
        loop.run_until_complete(client.start(output.progress))
        output.started()
        own = {key: value for key, value in client.defaults.items() if key not in given}
        conversation.params = replace(params, **own, n=1)
        for note in client.notes:
            output.notice(note)
        for text in _joined(lines):
            if not text.strip():
                continue
            try:
                if not _obey(conversation, text, output):
                    break
                if conversation.path() and conversation.path()[-1].role == USER:
                    loop.run_until_complete(_answer(client, conversation, output))
            except PagedMLXError as error:
                if not output.is_patient:
                    raise
                output.notice(f"error: {error}")
    finally:
        with suppress(Exception):
            ended = loop.run_until_complete(client.close())
        loop.close()
    return ended


def _joined(lines: Iterable[str]) -> Iterable[str]:
    begun = ""
    for line in lines:
        if line.endswith("\\"):
            begun += line[:-1] + "\n"
            continue
        yield begun + line
        begun = ""
    if begun:
        yield begun


def _obey(conversation: Conversation, text: str, output: PlainOutput) -> bool:
    """Take in a message or a command; False to leave."""
    command = parse(text)
    if command is None:
        conversation.add(USER, message_text(text))
        return True
    name, rest = command[0].name, command[1]
    match name:
        case "quit":
            return False
        case "system":
            conversation.system = "" if rest == "-" else rest
        case "set" if rest:
            conversation.params, said = obey_set(conversation.params, rest)
            output.notice(said)
        case "set":
            for each, meaning in SETTINGS.items():
                value = setting_text(conversation.params, each)
                output.notice(f"{each:<20}{value:<8}{meaning}")
        case "clear":
            conversation.messages.clear()
            conversation.chosen.clear()
        case "retry":
            asked = [each for each in conversation.path() if each.role == USER]
            if asked:
                conversation.choose(asked[-1].message_id)
                conversation.chosen.pop(asked[-1].message_id, None)
        case "help":
            for usage, meaning in _COMMANDS.items():
                output.notice(f"/{usage:<20}{meaning}")
        case _:
            output.notice(f"/{name} needs the full screen; /help lists what there is here")
    return True


async def _answer(client: ChatClient, conversation: Conversation, output: PlainOutput) -> None:
    message_id = conversation.add(ASSISTANT).message_id
    request_id = f"{conversation.conversation_id}-{message_id}"

    async def ready() -> ChatClient:
        return client

    writing = asyncio.ensure_future(
        write_answers(ready, conversation, [message_id], request_id, Progress())
    )
    told = 0
    try:
        while not writing.done():
            await asyncio.wait([writing], timeout=_FRAME_S)
            text = conversation.messages[message_id].text
            if len(text) > told:
                output.answer(text[told:])
                told = len(text)
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    if told:
        output.answer("\n")
    message = conversation.messages[message_id]
    if message.status == FAILED:
        raise RequestFailedError(message.error)
    if message.status != DONE:
        output.notice(f"({message.status})")
