"""EngineConfig: every setting of an engine, once, with its default and its check.

The command line, the server and Python map onto this class; nothing else holds defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pagedmlx.errors import InvalidRequestError

BLOCK_SIZES = (8, 16, 32, 64)
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")
FUTURE_KV_CACHE_DTYPES = ("int8", "int4")
DTYPES = ("auto", "float16", "bfloat16", "float32")
ATTENTION_BACKENDS = ("auto", "kernels", "gather", "reference")
STREAM_GAP_MS = 250


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: ``smollm2``, a folder or ``.gguf`` file, or a Hugging Face id.
        revision: Branch, tag or commit of a Hugging Face model.
        offline: Never use the network; what isn't on this machine is not found.
        trust_remote_code: Run Python code that comes with the model; off unless asked.
        dtype: Type of the weights; ``auto`` keeps the file's, and is float32 on the CPU.
        block_size: Tokens in one block: 8, 16, 32 or 64 (2 and 4 are taken for tests).
        num_blocks: Blocks in the pool of each KV group; overrides ``kv_cache_memory``.
        kv_cache_memory: Bytes for the pool; None derives it from ``gpu_memory_utilization``.
        gpu_memory_utilization: Share of the device's memory that weights and pool may take.
        max_model_len: Longest prompt plus output in tokens; None is the model's own limit.
        max_num_seqs: Most sequences that run in one step.
        max_num_batched_tokens: Token budget of one step: by default 2,048 tokens of prompts beside
            64 streams.
        prefill_chunk_size: Most tokens of one prompt that one step computes; None is as many as a
            step takes, or 512 with sliding windows and where attention keeps all scores of a chunk
            (on the CPU, and on a GPU where the kernels don't serve the prompts of a model).
        max_stream_gap_ms: Longest time that a running stream should wait for its next token while
            prompts are computed; 0 is no limit. None is no limit either, except ``for_streams``.
        enable_prefix_caching: Share the blocks of equal prompt beginnings.
        kv_cache_dtype: Type of the pool's elements; ``auto`` is the model's.
        attention_backend: ``auto``, ``kernels`` (on a GPU), ``gather`` or ``reference``.
        idle_release_s: Seconds after which memory of blocks that nobody has used goes back to the
            system, cached ones included; 0 keeps it.
        max_overtakes: How often later requests may pass one that doesn't fit; then it is next.
        max_num_waiting: Most requests that may wait; None is no limit.
        seed: Source of the seeds of requests that give none; None takes a fresh one.
        pool_fill: Value that fills the pool at the start; for tests of masking.
        check_integrity: Check every invariant of the core after every step; for tests.

    Raises:
        InvalidRequestError: A value is outside its limits; names the field and the limit.
    """

    model: str = "smollm2"
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.85
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2112
    prefill_chunk_size: int | None = None
    max_stream_gap_ms: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    idle_release_s: float = 300.0
    max_overtakes: int = 64
    max_num_waiting: int | None = None
    seed: int | None = None
    pool_fill: float = 0.0
    check_integrity: bool = False

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size not in (2, 4, *BLOCK_SIZES):
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise InvalidRequestError("block_size", f"{self.block_size!r} must be one of {sizes}")
        if self.kv_cache_dtype in FUTURE_KV_CACHE_DTYPES:
            raise InvalidRequestError(
                "kv_cache_dtype",
                f"{self.kv_cache_dtype} doesn't exist yet",
                hint="use auto, float16, bfloat16 or float32",
            )
        _check_types(self)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        for field, low in (
            ("num_blocks", 1),
            ("kv_cache_memory", 1),
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("prefill_chunk_size", 1),
            ("max_stream_gap_ms", 0),
            ("max_overtakes", 0),
            ("max_num_waiting", 1),
        ):
            value = getattr(self, field)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < low
            ):
                raise InvalidRequestError(field, f"{value!r} must be a whole number from {low}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise InvalidRequestError(
                "gpu_memory_utilization", f"{share!r} must be above 0 and at most 1"
            )

        seconds = self.idle_release_s
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not (0.0 <= seconds < math.inf)
        ):
            raise InvalidRequestError(
                "idle_release_s", f"{seconds!r} must be a number of seconds from 0"
            )

    @property
    def max_chunk(self) -> int:
        """Most tokens of a sequence that one step computes."""
        limit = self.prefill_chunk_size
        return min(limit or self.max_num_batched_tokens, self.max_num_batched_tokens)

    def for_streams(self) -> EngineConfig:
        """The same for people who watch answers come, as with a server or a chat."""
        if self.max_stream_gap_ms is not None:
            return self
        return replace(self, max_stream_gap_ms=STREAM_GAP_MS)


def _check_types(config: EngineConfig) -> None:
    for field in ("offline", "trust_remote_code", "enable_prefix_caching", "check_integrity"):
        value = getattr(config, field)
        if not isinstance(value, bool):
            raise InvalidRequestError(field, f"{value!r} is not true or false")
    for field, kinds, what in (
        ("model", str, "text"),
        ("revision", str | None, "text"),
        ("seed", int | None, "a whole number"),
        ("pool_fill", int | float, "a number"),
    ):
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidRequestError(field, f"{value!r} is not {what}")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequestError(field, f"{value!r} must be one of {', '.join(choices)}")
