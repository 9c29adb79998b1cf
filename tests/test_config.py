from __future__ import annotations

from typing import Any

import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.errors import InvalidRequestError

COUNTS = (
    "num_blocks",
    "kv_cache_memory",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk_size",
    "max_num_waiting",
)

BAD: list[tuple[str, Any]] = [
    *[("block_size", value) for value in (0, 1, 3, 12, 128, -16, 16.0, "16", None)],
    *[("kv_cache_dtype", value) for value in ("int8", "int4", "float64", "", "FLOAT16")],
    *[("dtype", value) for value in ("int8", "float", "")],
    *[("attention_backend", value) for value in ("flash", "")],
    *[("gpu_memory_utilization", value) for value in (0, -0.1, 1.01, float("nan"), "0.5", True)],
    *[(field, value) for field in COUNTS for value in (0, -1, 1.5, "8", True)],
    ("max_overtakes", -1),
    *[("idle_release_s", value) for value in (-1, float("nan"), float("inf"), "60", True, None)],
    *[("max_stream_gap_ms", value) for value in (-1, 0.5, "250", True)],
    ("model", 5),
    ("model", None),
    ("revision", 5),
    ("seed", "x"),
    ("pool_fill", "nan"),
    ("trust_remote_code", "no"),
    ("enable_prefix_caching", 1),
    ("check_integrity", None),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_setting_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig(**{field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_types_that_are_planned_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(InvalidRequestError, match="doesn't exist yet") as caught:
        EngineConfig(kv_cache_dtype="int8")
    assert "float16" in caught.value.hint


@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 32, 64])
def test_every_block_size_on_offer_is_taken(block_size: int) -> None:
    assert EngineConfig(block_size=block_size).block_size == block_size


def test_unset_limits_are_none_and_overtaking_can_be_switched_off() -> None:
    config = EngineConfig(max_overtakes=0)
    assert config.max_overtakes == 0
    assert config.num_blocks is None
    assert config.max_num_waiting is None
