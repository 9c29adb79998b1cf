"""Checks and tokenizes a Job before the engine's thread sees it; safe on any thread."""

from __future__ import annotations

import dataclasses
import operator
import struct
import uuid
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from pagedmlx.core.pooling import EmbeddingSpec, NoEmbedding, Pooling
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.structured import Grammar, GrammarBackend
from pagedmlx.engine.outputs import EmbeddingParams, Job, OutputCollector
from pagedmlx.errors import ContextLengthError, InvalidRequestError, PoolTooSmallError
from pagedmlx.text.tokenizer import Tokenizer

MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one request may ask for.

    Attributes:
        max_model_len: Prompt plus output, by the model or the user's setting.
        capacity_tokens: Tokens whose K and V the whole pool holds.
        block_size: Tokens in one block, for messages.
        vocab_size: Token ids are below this.
    """

    max_model_len: int
    capacity_tokens: int
    block_size: int
    vocab_size: int

    @property
    def max_len(self) -> int:
        """Longest prompt plus output that can run; the last token needs no slot."""
        return min(self.max_model_len, self.capacity_tokens + 1)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that can run.

    Attributes:
        job: As it came.
        request_id: Its id, made up if it had none.
        prompt_token_ids: At least one.
        packed_prompt: The same as int32.
        params: With ``max_tokens`` resolved to a number.
        stop_token_ids: Tokens that end an output.
        bad_words: Token sequences that no output may complete.
        shown_token_ids: Special tokens that are not left out of the text.
        arrival_s: When it came, by the engine's clock; None means when it is added.
        grammar: What each output follows; None is anything.
        pooling: How the prompt's embedding is made, where that is wanted and no output.
    """

    job: Job
    request_id: str
    prompt_token_ids: tuple[int, ...]
    packed_prompt: array[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    shown_token_ids: frozenset[int] = frozenset()
    arrival_s: float | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    def collector(self) -> OutputCollector:
        """What adds up the request's events on the caller's side."""
        return OutputCollector(
            self.request_id, self.job.prompt, self.prompt_token_ids, self.params.n
        )


_NO_EMBEDDING = NoEmbedding("this engine makes none")


def prepare_job(
    job: Job,
    tokenizer: Tokenizer,
    limits: EngineLimits,
    grammars: GrammarBackend | None = None,
    embedding: EmbeddingSpec | NoEmbedding = _NO_EMBEDDING,
) -> PreparedJob:
    """Check every field of a job, tokenize its prompt and compile its grammar.

    Raises:
        InvalidRequestError: A field can't be served; names it and the limit.
    """
    _check_fields(job)
    if job.embedding is not None:
        return _prepare_embedding(job, job.embedding, tokenizer, limits, embedding)
    params = job.sampling_params
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", tuple(token for token, _ in params.logit_bias)),
    ):
        _check_range(name, tokens, limits.vocab_size)
    field, token_ids = _tokenize(job, tokenizer)
    if not token_ids:
        raise InvalidRequestError(field, "is empty; at least one token is needed")
    packed = _pack(field, token_ids, limits.vocab_size)
    stop_token_ids = frozenset(params.stop_token_ids)
    # A grammar says itself where the model's end may be chosen.
    if not params.ignore_eos or params.structured is not None:
        # A tokenizer may know tokens that the model can't give.
        stop_token_ids |= {each for each in tokenizer.eos_token_ids if each < limits.vocab_size}
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and stop_token_ids.issuperset(allowed):
        raise InvalidRequestError(
            "min_tokens",
            f"before {params.min_tokens} tokens none that ends the output can be chosen, but "
            "allowed_token_ids has no others",
        )
    return PreparedJob(
        job=job,
        request_id=job.request_id or f"req-{uuid.uuid4().hex}",
        prompt_token_ids=token_ids,
        packed_prompt=packed,
        params=_with_max_tokens(params, len(token_ids), limits),
        stop_token_ids=stop_token_ids,
        bad_words=_bad_words(params.bad_words, tokenizer, limits.vocab_size),
        shown_token_ids=tokenizer.ids_of(job.shown_tokens),
        grammar=_compile(job, grammars),
    )


def _prepare_embedding(
    job: Job,
    wanted: EmbeddingParams,
    tokenizer: Tokenizer,
    limits: EngineLimits,
    spec: EmbeddingSpec | NoEmbedding,
) -> PreparedJob:
    if isinstance(spec, NoEmbedding):
        raise InvalidRequestError("model", f"it gives no embeddings: {spec.reason}", hint=spec.hint)
    _check_dimensions(wanted.dimensions, spec)
    field, token_ids = _tokenize(job, tokenizer)
    # A tokenizer may make something of no text.
    if not token_ids or job.prompt == "":
        raise InvalidRequestError(field, "is empty; at least one token is needed")
    packed = _pack(field, token_ids, limits.vocab_size)
    max_len = min(limits.max_model_len, spec.max_len or limits.max_model_len)
    if len(token_ids) > max_len:
        raise ContextLengthError(
            field,
            f"has {len(token_ids)} tokens; the model takes at most {max_len}",
            hint="shorten it or cut it in parts",
        )
    _check_capacity(field, len(token_ids), limits)
    return PreparedJob(
        job=job,
        request_id=job.request_id or f"req-{uuid.uuid4().hex}",
        prompt_token_ids=token_ids,
        packed_prompt=packed,
        # None of it matters, but the output's length is counted with the prompt's.
        params=SamplingParams(max_tokens=1, seed=0),
        stop_token_ids=frozenset(),
        pooling=spec.pooling,
    )


def _check_dimensions(dimensions: int | None, spec: EmbeddingSpec) -> None:
    whole = spec.num_dimensions
    if dimensions is None or dimensions == whole:
        return
    if not spec.is_matryoshka:
        raise InvalidRequestError(
            "dimensions",
            f"{dimensions}: the model's embeddings have {whole}, and its config doesn't say that "
            "fewer of them mean anything",
            hint="if they do, put is_matryoshka: true into its config.json",
        )
    if not 1 <= dimensions <= whole:
        raise InvalidRequestError("dimensions", f"{dimensions} must be between 1 and {whole}")


def _compile(job: Job, grammars: GrammarBackend | None) -> Grammar | None:
    structured = job.sampling_params.structured
    if structured is None:
        return None
    if grammars is None:
        raise InvalidRequestError("structured", "this engine follows no grammars")
    try:
        return grammars.compile(structured)
    except InvalidRequestError as error:
        for name, part in job.grammar_parts.items():
            try:
                grammars.compile(part)
            except InvalidRequestError as found:
                reason = str(found).removeprefix(f"{found.field}: ")
                raise InvalidRequestError(
                    error.field, f"{name}: {reason}", hint=found.hint
                ) from found
        raise


def _check_fields(job: Job) -> None:
    given = [
        name
        for name in ("prompt", "messages", "prompt_token_ids")
        if getattr(job, name) is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequestError(
            "prompt", f"exactly one of prompt, messages and prompt_token_ids is needed, not {found}"
        )
    if job.prompt is not None and not isinstance(job.prompt, str):
        raise InvalidRequestError("prompt", f"{type(job.prompt).__name__} is not text")
    if not isinstance(job.sampling_params, SamplingParams):
        raise InvalidRequestError("sampling_params", "is not a SamplingParams")
    if job.request_id is not None and not isinstance(job.request_id, str):
        raise InvalidRequestError("request_id", f"{job.request_id!r} is not text")
    if not isinstance(job.cache_salt, str):
        raise InvalidRequestError("cache_salt", f"{job.cache_salt!r} is not text")
    settings = job.chat_template_kwargs
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise InvalidRequestError("chat_template_kwargs", "is not a mapping of names to values")
    priority = job.priority
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError("priority", f"{priority!r} is not a whole number")
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            "priority", f"{priority} must be between {-MAX_PRIORITY} and {MAX_PRIORITY}"
        )


def _tokenize(job: Job, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    """The field that holds the prompt, and the prompt's tokens."""
    if job.messages is not None:
        token_ids = tokenizer.apply_chat_template(job.messages, **job.chat_template_kwargs)
        return "messages", tuple(token_ids)
    if job.prompt is not None:
        return "prompt", tuple(tokenizer.encode(job.prompt))
    given: object = job.prompt_token_ids
    # An array without axes is a number, and yet iterable by its type.
    is_number = getattr(given, "ndim", 1) == 0
    if isinstance(given, str | bytes) or not isinstance(given, Iterable) or is_number:
        raise InvalidRequestError("prompt_token_ids", f"{type(given).__name__} is not a list")
    token_ids = tuple(given)
    # Prompts are long, and asking each for an interface is slow.
    if list(map(type, token_ids)).count(int) < len(token_ids):
        token_ids = tuple(map(_token_id, token_ids))
    return "prompt_token_ids", token_ids


def _bad_words(
    words: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as tokenized at the beginning of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            try:
                token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    "bad_words", f"{word!r} has characters that can't be encoded as UTF-8"
                ) from error
            # Tokens that the model can't give need not be forbidden.
            if token_ids and max(token_ids) < vocab_size:
                found[token_ids] = None
    return tuple(found)


def _token_id(value: object) -> int:
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidRequestError("prompt_token_ids", f"{value!r} is not a token id")


def _pack(field: str, token_ids: tuple[int, ...], vocab_size: int) -> array[int]:
    """A prompt as int32, all of it checked."""
    try:
        # Quicker than to give the array the tokens themselves.
        packed = array("i", struct.pack(f"{len(token_ids)}i", *token_ids))
    except struct.error:
        _check_range(field, token_ids, vocab_size)
        raise
    ids = np.frombuffer(packed, np.int32)
    _check_range(field, (int(ids.min()), int(ids.max())), vocab_size)
    return packed


def _check_range(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(field, f"{token} must be at least 0 and below {vocab_size}")


def _with_max_tokens(
    params: SamplingParams, num_prompt_tokens: int, limits: EngineLimits
) -> SamplingParams:
    """Resolve ``max_tokens``: an open or huge one is cut to what fits, a definite one is kept.

    A definite number that the context has room for, but the pool doesn't, is left for the
    scheduler to refuse: an answer must not be cut short for lack of memory unannounced.
    """
    if num_prompt_tokens >= limits.max_model_len:
        raise ContextLengthError(
            "prompt",
            f"has {num_prompt_tokens} tokens; the context of {limits.max_model_len} must hold them "
            "and at least one more",
            hint="shorten the prompt",
        )
    _check_capacity("prompt", num_prompt_tokens, limits)
    room = limits.max_model_len - num_prompt_tokens
    max_tokens = params.max_tokens
    if max_tokens is None or max_tokens >= room:
        max_tokens = min(room, limits.max_len - num_prompt_tokens)
    min_tokens = min(params.min_tokens, max_tokens)
    if (max_tokens, min_tokens) == (params.max_tokens, params.min_tokens):
        return params
    return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)


def _check_capacity(field: str, num_tokens: int, limits: EngineLimits) -> None:
    if num_tokens > limits.capacity_tokens:
        raise PoolTooSmallError(
            field,
            f"has {num_tokens} tokens, but the whole pool holds {limits.capacity_tokens} "
            f"({limits.capacity_tokens // limits.block_size} blocks of {limits.block_size})",
            hint="shorten the prompt or give the pool more memory",
        )
