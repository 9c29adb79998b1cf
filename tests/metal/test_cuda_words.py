"""The words of ``cuda_matrix.h``, executed: all types of queries and pool, and faults caught."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.launch import Kernel
from tests.metal.cases import Variant
from tests.metal.cuda_map import with_cuda_map
from tests.metal.execute import ExecutionError
from tests.metal.launcher import FiberLauncher
from tests.metal.test_kernels import SMALL as SMALL_DECODE
from tests.metal.test_prefill import MAX_DEVIATION, SMALL, Setting
from tests.support.attention import TOLERANCES

# Loads of 4 and of 2 elements; tiles of 32, 16 and, in float32, 8 tokens.
WIDE = replace(SMALL, head_dims=(96, 64), factor=3, window=5, spans=((20, 19),))
NARROW = replace(SMALL, head_dims=(80, 112), columns=2, spans=((30, 9),))
# Tiles that are on their way before the one before is done; blocks larger than a tile, or smaller
# than what a thread copies side by side.
MANY_TILES = replace(SMALL, spans=((0, 100), (70, 40)))
LARGE_BLOCKS = replace(MANY_TILES, block_size=64)
SMALL_BLOCKS = replace(MANY_TILES, block_size=2)
LARGE = replace(SMALL, head_dims=(256, 192), softcap=20.0, sinks=True, spans=((9, 9),))


def deviation(setting: Setting, dtype: str, launcher: FiberLauncher) -> float:
    """As ``Setting.deviation`` with queries of some type: in CUDA factors are of the pool's."""
    case = setting.make_case(launcher)
    case = replace(case, queries=case.queries.astype(getattr(mx, dtype)), dtype=dtype)
    output, expected = setting.run(launcher, case), case.expected(setting.params())
    tolerance = max(TOLERANCES[dtype], TOLERANCES[setting.dtype])
    error = np.abs(output - expected) / (tolerance * (1 + np.abs(expected)))
    return float(np.where(np.isnan(error), np.inf, error).max())


@pytest.mark.parametrize(
    ("setting", "pool_dtype", "dtype"),
    [
        ((WIDE, NARROW, LARGE)[(i + j) % 3], pool_dtype, dtype)
        for i, pool_dtype in enumerate(TOLERANCES)
        for j, dtype in enumerate(TOLERANCES)
    ],
    ids=str,
)
def test_they_give_the_answer(
    setting: Setting, pool_dtype: str, dtype: str, count: Counter[str]
) -> None:
    setting = replace(setting, dtype=pool_dtype)
    assert deviation(setting, dtype, FiberLauncher(change=with_cuda_map)) < MAX_DEVIATION
    count["variants of prefill executed in CUDA's words"] += 1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("setting", [MANY_TILES, LARGE_BLOCKS, SMALL_BLOCKS], ids=str)
def test_tiles_of_many_and_of_parts_of_blocks_give_the_answer(
    setting: Setting, split: bool
) -> None:
    setting = replace(setting, split=split)
    assert setting.deviation(FiberLauncher(change=with_cuda_map)) < MAX_DEVIATION


@pytest.mark.parametrize("order", list(AxisOrder))
@pytest.mark.parametrize("dim", [16, 32])
def test_rows_of_few_elements_are_read_from_their_own_blocks(dim: int, order: AxisOrder) -> None:
    setting = replace(
        SMALL, head_dims=(dim, dim), block_size=64, order=order, spans=((60, 70), (100, 40))
    )
    for seed in (1, 4, 11):  # with the last block of the pool among theirs
        launcher = FiberLauncher(change=with_cuda_map)
        setting.run(launcher, setting.make_case(launcher, seed))
    assert setting.deviation(FiberLauncher(change=with_cuda_map)) < MAX_DEVIATION


DECODED = replace(SMALL_DECODE, head_dims=(96, 64), factor=7, rows=2, decode="matrices")
FAULTS: dict[str, list[tuple[Setting | Variant, str]]] = {
    # Only one kernel of two, or one type, takes its words at each of these places.
    "w < W / 2 ? first : second": [(WIDE, "first"), (DECODED, "first")],
    "&load)[w % (W / 2)]": [(WIDE, "&load)[0]")],
    "0x5410u : 0x7632u": [(DECODED, "0x7632u : 0x5410u")],
    "= movmatrix(": [(WIDE, "= ("), (DECODED, "= (")],
    "&a[2].elements": [(WIDE, "&a[3].elements")],
    "&b[1].elements": [(WIDE, "&b[0].elements")],
    "int(lane & 3u) * 2 + e": [(DECODED, "int(lane & 3u) * 2"), (LARGE, "int(lane & 3u) * 2")],
    "words[w / 2].z": [(WIDE, "words[w / 2].y")],
    "vector + w * 8 + right_row(lane, 0)": [(WIDE, "vector + w * 8")],
    "(lane >> 4) * 8": [(WIDE, "0")],
    "lane >> 4 << 3 | lane & 7u": [(WIDE, "lane & 15u")],
    "(lane & 8u)": [(WIDE, "0")],
    "(AHEAD ? 2 : 1) * KEYS": [(MANY_TILES, "KEYS")],
    "uint(base) % BS : 0u": [(LARGE_BLOCKS, "0u : 0u")],
    "BS % APART == 0 && ": [(SMALL_BLOCKS, "")],
    "base / KEYS % BUFFERS": [(MANY_TILES, "0")],
    "return w * 8 + row;": [(WIDE, "return w * 8 + (row ^ 1);")],
}


@pytest.mark.parametrize(
    ("old", "case", "new"), [(old, *each) for old, some in FAULTS.items() for each in some], ids=str
)
def test_planted_fault_is_caught(
    old: str, case: Setting | Variant, new: str, count: Counter[str]
) -> None:
    dtype = "float32" if case is LARGE else "float16"
    launcher = FiberLauncher(change=lambda kernel, text: _changed(kernel, text, old, new))
    caught = "result"
    try:
        if replace(case, dtype=dtype).deviation(launcher) < MAX_DEVIATION:
            caught = "nothing"
    except ExecutionError as error:
        caught = error.kind
    assert caught in ("result", "race", "uninitialised", "out_of_bounds")
    count["planted faults of CUDA's words caught"] += 1


def test_keys_by_words_and_queries_by_elements_must_come_in_one_order() -> None:
    pair = "load[w % (W / 2) * 2], load[w % (W / 2) * 2 + 1]"
    launcher = FiberLauncher(
        change=lambda kernel, text: _changed(kernel, text, pair, "first[w], second[w]")
    )
    assert WIDE.deviation(launcher) < MAX_DEVIATION, "of one type all come by words"
    assert not deviation(WIDE, "float32", launcher) < MAX_DEVIATION


def _changed(kernel: Kernel, source: str, old: str, new: str) -> str:
    text = with_cuda_map(kernel, source)
    assert old in text or text == source
    return text.replace(old, new)
