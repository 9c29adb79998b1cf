"""Tokenizer: text to token ids and back, the end-of-output tokens and the model's chat template.

A thin wrapper over a fast tokenizer of transformers, which is imported only when one is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pagedmlx.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError, first_line
from pagedmlx.text.answer_style import AnswerStyle, ToolSyntax, find_style
from pagedmlx.text.template import RenderedChat, render_chat
from pagedmlx.text.token_stream import ByteStream, TokenBytes, TokenStream, WindowStream

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
)
_FILES = ("tokenizer*.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_PROBE = "a"


class Tokenizer:
    """One model's tokenizer; safe to use from several threads.

    Args:
        inner: A fast tokenizer of transformers.
        eos_token_ids: The model configuration's end-of-output tokens. To these are added the
            tokenizer's own and the end-of-turn tokens that the chat template writes.

    Attributes:
        joins_bytes: Whether text is its tokens' ``token_bytes`` joined, but for its beginning.

    Raises:
        UnsupportedModelError: The tokenizer isn't a fast one.
    """

    def __init__(self, inner: Any, *, eos_token_ids: Iterable[int] = ()) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(
                f"tokenizer {type(inner).__name__} has no fast (tokenizers) form",
                hint="A model folder with a tokenizer.json can be used.",
            )
        self._inner = inner
        # The backend is used directly: transformers' wrapper changes its settings at each call,
        # which other threads would see.
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._spelling = TokenBytes.from_decoder(_state(backend.decoder))
        self.joins_bytes: bool = self._spelling is not None or _is_metaspace(backend.decoder)
        self.special_token_ids: frozenset[int] = frozenset(self._special)
        self.bos_token_id: int | None = inner.bos_token_id
        self.vocab_size: int = len(inner)
        self.eos_token_ids: frozenset[int] = self._end_tokens(eos_token_ids)
        prefix = backend.encode(_PROBE, add_special_tokens=True).ids
        self._adds_bos = self.bos_token_id is not None and prefix[:1] == [self.bos_token_id]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return bool(self._inner.chat_template)

    def find_style(self, find_syntax: Callable[[str, Any], ToolSyntax | None]) -> AnswerStyle:
        """How the model marks reasoning and calls of tools in its answers.

        Args:
            find_syntax: Tells from a chat template that knows tools, and the tokenizer of
                transformers, how calls are written.
        """
        return find_style(
            self._template,
            list(self._special.values()),
            lambda token: self.token_to_id(token) is not None,
            lambda template: find_syntax(template, self._inner),
        )

    @property
    def _template(self) -> str:
        """The chat template; of several the one for tools."""
        template = self._inner.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return str(template or "")

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its exact string, or None."""
        return self._backend.token_to_id(token)

    def special_token_id(self, token: str) -> int | None:
        """Id of a special token by its spelling, or None."""
        found = self.token_to_id(token)
        return found if found in self.special_token_ids else None

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Ids of those of the tokens that there are."""
        ids = map(self.token_to_id, tokens)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Spellings of special tokens in it become those tokens, as in a raw completion prompt. A
        text that already begins with the beginning-of-sequence token gets no second one.

        Raises:
            InvalidRequestError: The text has characters that can't be encoded (lone surrogates).
        """
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character are U+FFFD. Spaces are never tidied."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: object,
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, written as the model's chat template says.

        Special tokens spelled inside messages are encoded as plain text, so that a message can't
        end its own turn. If the tokenizer begins texts with a beginning-of-sequence token, the
        prompt begins with exactly one, whether or not the template writes it.

        Args:
            messages: Objects with ``role`` and ``content``, see ``normalize_messages``.
            add_generation_prompt: End with the opening of the assistant's answer.
            template_kwargs: Further variables for the template, ``tools`` among them.

        Raises:
            InvalidRequestError: There is no template, or it refuses the messages.
        """
        chat = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        ids = [
            token
            for segment in chat.segments
            for token in self._encode(segment, add_special_tokens=False, field="messages")
        ]
        bos = self.bos_token_id
        if bos is not None and self._adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def render_chat(
        self,
        messages: object,
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> RenderedChat:
        """The text of a conversation, of which ``apply_chat_template`` gives the tokens.

        Raises:
            InvalidRequestError: There is no template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "messages",
                "the model has no chat template",
                hint="Give the whole prompt as text to the completions call instead.",
            )
        return render_chat(
            self._inner.apply_chat_template,
            messages,
            special_tokens=self._special.values(),
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def token_stream(
        self,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> TokenStream:
        """A fresh stream that turns ids into text one by one; ``Detokenizer`` is built on it.

        Args:
            skip_special_tokens: Leave special tokens out.
            shown: Special tokens that are not left out.
            context: Ids that come before the first one.
        """
        skipped = self._skipped(shown, skip_special_tokens=skip_special_tokens)
        if self._spelling is None:
            # The skipped ones never reach it.
            return WindowStream(
                lambda ids: self.decode(ids, skip_special_tokens=False),
                skipped=skipped,
                context=context,
            )
        at_start = all(token in skipped for token in context)
        return ByteStream(
            self._spelling, self._backend.id_to_token, skipped=skipped, at_start=at_start
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text; a special token's are its name's.

        Where the tokenizer's text is not its tokens' joined bytes, this is what the token adds
        after itself.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def spelling(
        self,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> Callable[[int], bytes]:
        """A fresh function that is given ids one by one and tells what bytes each adds to the text.

        Args:
            skip_special_tokens: Special tokens add nothing.
            shown: Special tokens that do.
            context: Ids that come before the first one.
        """
        stream = self.token_stream(
            skip_special_tokens=skip_special_tokens, shown=shown, context=context
        )
        if isinstance(stream, ByteStream):
            return stream.spell
        skipped = self._skipped(shown, skip_special_tokens=skip_special_tokens)
        return lambda token_id: b"" if token_id in skipped else self.token_bytes(token_id)

    def _skipped(self, shown: frozenset[int], *, skip_special_tokens: bool) -> frozenset[int]:
        if not skip_special_tokens:
            return frozenset()
        return self.special_token_ids - shown if shown else self.special_token_ids

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return self._special[token_id].encode()
        if self._spelling is not None:
            return self._spelling.spell(token)
        return self.decode([token_id] * 2).removeprefix(self.decode([token_id])).encode()

    def _encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(
                field, "the text has characters that can't be encoded as UTF-8"
            ) from error

    def _end_tokens(self, given: Iterable[int]) -> frozenset[int]:
        own = self._inner.eos_token_id
        own_ids = own if isinstance(own, list | tuple) else [own]
        template = str(self._inner.chat_template or "")
        turns = [self.token_to_id(token) for token in _END_OF_TURN if token in template]
        if "<|channel|>" in template:
            # <|end|> only closes one of several messages of an answer.
            turns += [self.token_to_id("<|return|>"), self.token_to_id("<|call|>")]
        elif "<|end|>" in template:
            turns.append(self.token_to_id("<|end|>"))
        return frozenset(token for token in (*given, *own_ids, *turns) if token is not None)


def check_tokenizer_files(path: Path, name: str) -> None:
    """Look whether a folder has a tokenizer at all, before anything large is loaded.

    Raises:
        ModelLoadError: There is none of the files that tokenizers are kept in.
    """
    if not any(file for pattern in _FILES for file in path.glob(pattern)):
        raise ModelLoadError(
            f"{name}: no tokenizer in the folder",
            hint="it needs tokenizer.json and tokenizer_config.json, as on the model's page",
        )


def load_tokenizer(
    path: Path, *, eos_token_ids: Iterable[int] = (), trust_remote_code: bool = False
) -> Tokenizer:
    """Load the tokenizer of a model folder, from its files alone.

    Args:
        path: The folder.
        eos_token_ids: The model configuration's end-of-output tokens.
        trust_remote_code: Run Python code that the folder brings along.

    Raises:
        ModelLoadError: No tokenizer there, or its files can't be read.
        UnsupportedModelError: It exists only as Python code.
    """
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such folder", hint="Give the folder of a model.")
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises anything from OSError to KeyError
        reason = first_line(error)
        raise ModelLoadError(
            f"{path}: the tokenizer can't be loaded: {reason}",
            hint="The folder needs tokenizer.json and tokenizer_config.json, whole.",
        ) from error
    return Tokenizer(inner, eos_token_ids=eos_token_ids)


def _is_metaspace(decoder: Any) -> bool:
    state = _state(decoder)
    return state is not None and state["type"] == "Metaspace"


def _state(decoder: Any) -> dict[str, Any] | None:
    return None if decoder is None else json.loads(decoder.__getstate__())
