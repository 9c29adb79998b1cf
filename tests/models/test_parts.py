from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedmlx.core.batch import BatchArrays
from pagedmlx.core.request import Request
from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.models.parts import Part, sequence_rows, token_rows
from pagedmlx.ops.base import PagedBatch
from tests.support.batches import make_batch

BLOCK_SIZE, NUM_BLOCKS = 4, 40


def make_host(spans: list[tuple[int, int]], n: int = 1, num_prompt_tokens: int = 9) -> BatchArrays:
    host = make_batch(
        spans, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, rng=np.random.default_rng(0)
    )
    request = Request("a", tuple(range(num_prompt_tokens)), SamplingParams(n=n))
    sequences = tuple(Sequence(i, request, i, [], ()) for i in range(len(spans)))
    return replace(host, sequences=sequences)


def cut(host: BatchArrays, **settings: Any) -> list[Part]:
    usual = {"gathers": True, "mask_ndim": 4, "max_tokens": None, "fork_points": False}
    return list(sequence_rows(PagedBatch(host), **{**usual, **settings}))


def shapes(parts: list[Part]) -> list[tuple[int, int]]:
    return [(part.num_sequences, part.length) for part in parts]


def test_token_rows_are_the_whole_step_with_a_position_for_each_row() -> None:
    host = make_host([(7, 1), (2, 3)])
    part = token_rows(PagedBatch(host))
    assert (part.num_sequences, part.length, part.gathers) == (4, 1, False)
    assert part.token_ids[:, 0].tolist() == host.token_ids.tolist()
    assert part.offset.tolist() == [7, 2, 3, 4]  # type: ignore[union-attr]


def test_sequences_that_decode_go_together_and_each_chunk_by_itself() -> None:
    host = make_host([(7, 1), (3, 1), (0, 5), (6, 4)])
    parts = cut(host)
    assert shapes(parts) == [(2, 1), (1, 5), (1, 4)]
    assert [part.offset if isinstance(part.offset, int) else part.offset.tolist() for part in parts]
    assert parts[0].offset.tolist() == [7, 3]  # type: ignore[union-attr]
    assert [part.offset for part in parts[1:]] == [0, 6]


def test_the_parts_together_are_the_step() -> None:
    host = make_host([(7, 1), (3, 1), (0, 5), (6, 4)])
    parts = [part.batch.host for part in cut(host)]
    for name in ("token_ids", "positions", "context_lens"):
        together = np.concatenate([getattr(part, name) for part in parts])
        assert together.tolist() == getattr(host, name).tolist()
    slots = np.concatenate([part.groups[0].slot_mapping for part in parts])
    assert slots.tolist() == host.groups[0].slot_mapping.tolist()
    assert [part.sequences for part in parts] == [
        host.sequences[:2],
        host.sequences[2:3],
        host.sequences[3:],
    ]
    assert [part.sample_rows.tolist() for part in parts] == [[0, 1], [4], [3]]
    assert [part.num_decodes for part in parts] == [2, 0, 0]


def test_a_step_of_one_part_is_passed_on_as_it_is() -> None:
    batch = PagedBatch(make_host([(7, 1), (3, 1)]))
    (part,) = sequence_rows(batch, gathers=True, mask_ndim=4, max_tokens=None, fork_points=False)
    assert part.batch is batch


@pytest.mark.parametrize(("max_tokens", "counts"), [(None, [3]), (16, [2, 1]), (8, [1, 1, 1])])
def test_what_is_gathered_at_once_has_a_limit(max_tokens: int | None, counts: list[int]) -> None:
    host = make_host([(7, 1), (5, 1), (9, 1)])
    assert [part.num_sequences for part in cut(host, max_tokens=max_tokens)] == counts


def test_no_limit_is_so_low_that_a_sequence_does_not_run() -> None:
    host = make_host([(7, 1), (5, 1), (0, 3)])
    assert shapes(cut(host, max_tokens=0)) == [(1, 1), (1, 1), (1, 3)]


@pytest.mark.parametrize(
    ("span", "n", "expected"),
    [
        ((4, 5), 2, [(1, 4), (1, 1)]),
        ((0, 12), 2, [(1, 8), (1, 4)]),
        ((8, 3), 2, [(1, 3)]),
        ((0, 8), 2, [(1, 8)]),
        ((4, 5), 1, [(1, 5)]),
    ],
)
def test_a_chunk_ends_where_outputs_fork(
    span: tuple[int, int], n: int, expected: list[tuple[int, int]]
) -> None:
    parts = cut(make_host([span], n=n), fork_points=True)
    assert shapes(parts) == expected
    ends = np.cumsum([part.length for part in parts]) + span[0]
    assert [int(part.batch.host.context_lens[0]) for part in parts] == ends.tolist()
    assert [len(part.batch.host.sample_rows) for part in parts] == [0] * (len(parts) - 1) + [1]
