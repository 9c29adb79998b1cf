"""The checks bite: faults planted in the package's own kernels are caught, and by which rung."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedmlx.kv.layout import AxisOrder
from tests.metal.greedy import GreedyCase
from tests.metal.mutate import STRICT_CHECK, WRONG_RESULT, Checkable, Mutation, caught_by, mutate
from tests.metal.ropes import RopeCase
from tests.metal.test_kernels import MAX_DEVIATION, SMALL

WHOLE = replace(SMALL, rows=2, window=20, softcap=20.0)
SPLIT = replace(WHOLE, split=True)
LONG = replace(SPLIT, window=None, chunks=18)
MATRICES = replace(WHOLE, decode="matrices", factor=3, head_dims=(64, 96))
# Without a window there are several tiles to each SIMD-group.
SINGLE_ROWS = replace(MATRICES, rows=1, factor=5, window=None, head_dims=(128, 128))
ROPE = RopeCase(
    dtype="float16",
    pool_dtype="float16",
    head_dims=(64, 64),
    block_size=16,
    factor=2,
    num_kv_heads=2,
    order=AxisOrder.HEAD_MAJOR,
    part="half",
    traditional=False,
    wavelengths="base",
    scale=0.25,
    layout="joined",
    num_rows=9,
)

GREEDY = GreedyCase("float16", 1025)

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BLOCK = "first_block), last_block)"
WRONG = (WRONG_RESULT,)
OUTSIDE = ("out_of_bounds",)
STRICT = (STRICT_CHECK,)
# The thread that comes first finds nothing written; a later one finds the race.
RACE = ("race", "uninitialised")


# What is planted, the variant that runs it, and the rungs of which one must catch it.
FAULTS: list[tuple[Mutation, Checkable, tuple[str, ...]]] = [
    (Mutation("write", "wrong index", "slot % BS", "(slot + 1) % BS"), WHOLE, WRONG),
    (Mutation("write", "beyond the pool", "= slots[row]", "= slots[row] + 100000"), WHOLE, OUTSIDE),
    (Mutation("write", "one slot for all", "= slots[row]", "= slots[0]"), WHOLE, RACE),
    (
        Mutation("write", "no bounds of the grid", "if (row >= uint(keys_shape[0])) return;", ""),
        WHOLE,
        OUTSIDE,
    ),
    (
        Mutation("write", "swapped address space", "const_cast<device", "const_cast<threadgroup"),
        WHOLE,
        STRICT,
    ),
    (
        Mutation("rope_write", "wrong sign", "old_x * cosine - old_y", "old_x * cosine + old_y"),
        ROPE,
        WRONG,
    ),
    (
        Mutation("rope_write", "missing check of the slot", "(is_key && slot < 0)", "false"),
        ROPE,
        OUTSIDE,
    ),
    (
        Mutation("rope_write", "no bounds of the grid", "if (row >= queries_shape[0]) return;", ""),
        ROPE,
        OUTSIDE,
    ),
    (
        Mutation("rope_write", "strides ignored", "row * keys_strides[0]", "row * long(H * DK)"),
        ROPE,
        WRONG,
    ),
    (Mutation("rope_write", "one position", "positions[row]", "positions[0]"), ROPE, WRONG),
    (Mutation("rope_write", "too many dims", "pair < DIMS / 2;", "pair < DK / 2;"), ROPE, RACE),
    (
        Mutation(
            "rope_write",
            "a head left out",
            "head >= H * (1 + FACTOR) ||",
            "head >= H * FACTOR ||",
        ),
        ROPE,
        WRONG,
    ),
    (
        Mutation("rope_write", "swapped address space", "device KT* to =", "threadgroup KT* to ="),
        ROPE,
        STRICT,
    ),
    (Mutation("decode", "wrong index", BLOCK, f"{BLOCK} ^ 1"), WHOLE, WRONG),
    (Mutation("decode", "wrong head", "id * H + kv_head", "id * H"), WHOLE, WRONG),
    (Mutation("decode", "beyond the table", BLOCK, f"{BLOCK} + 1000"), WHOLE, OUTSIDE),
    (Mutation("decode", "missing barrier", BARRIER, ""), WHOLE, RACE),
    (
        Mutation("decode", "barrier too small", BARRIER, BARRIER.replace("thread", "simd", 1)),
        WHOLE,
        RACE,
    ),
    (
        Mutation("decode", "swapped address space", "device int* table", "constant int* table"),
        WHOLE,
        STRICT,
    ),
    (Mutation("decode", "dropped causal mask", "position >= my_end", "false"), WHOLE, WRONG),
    (Mutation("decode", "dropped window", "position < my_start ||", ""), WHOLE, WRONG),
    (
        Mutation(
            "decode",
            "dropped mask past the end",
            "if (position < start || position >= end) score = MASKED;",
            "",
        ),
        WHOLE,
        WRONG,
    ),
    (Mutation("decode", "dropped mask of V", "clear_row<KT, VW, VJ>(v[u])", ""), WHOLE, WRONG),
    (
        Mutation(
            "decode",
            "maximum of some lanes",
            "const float tile_top = max_above<ACROSS>(score);",
            "float tile_top = score; if (lane < 16) tile_top = max_above<ACROSS>(score);",
        ),
        WHOLE,
        ("divergence",),
    ),
    (Mutation("decode_matrix", "wrong index", BLOCK, f"{BLOCK} ^ 1"), MATRICES, WRONG),
    (Mutation("decode_matrix", "wrong head", "id * H + kv_head", "id * H"), MATRICES, WRONG),
    (Mutation("decode_matrix", "beyond the table", BLOCK, f"{BLOCK} + 1000"), MATRICES, OUTSIDE),
    (Mutation("decode_matrix", "missing barrier", BARRIER, ""), MATRICES, RACE),
    (
        Mutation(
            "decode_matrix",
            "swapped address space of the pool",
            "const device vec<KT",
            "const threadgroup vec<KT",
        ),
        MATRICES,
        STRICT,
    ),
    (
        Mutation("decode_matrix", "dropped causal mask", "|| position >= my_end[e]", ""),
        MATRICES,
        WRONG,
    ),
    (
        Mutation("decode_matrix", "dropped window", "position < my_end[e] - plan[1] ||", ""),
        MATRICES,
        WRONG,
    ),
    (
        Mutation(
            "decode_matrix",
            "dropped mask past the end",
            "if (partial && (position < start || position >= end)) score = MASKED;",
            "",
        ),
        SINGLE_ROWS,
        WRONG,
    ),
    (
        Mutation("decode_matrix", "dropped mask of V", "[e] = vec<KT, W>(KT(0));", "[e];"),
        MATRICES,
        WRONG,
    ),
    (
        Mutation("decode_matrix", "rescale dropped", "acc[i].thread_elements()[e] *= shrink;", ";"),
        SINGLE_ROWS,
        WRONG,
    ),
    (
        Mutation("decode_matrix", "lanes mixed up", "COLUMN_BIT_2 16", "COLUMN_BIT_2 8"),
        MATRICES,
        WRONG,
    ),
    (
        Mutation("decode_matrix", "vectors beside each other", "[col8 + e] = top", "[col8] = top"),
        MATRICES,
        (*WRONG, *RACE),
    ),
    (
        Mutation(
            "decode_matrix",
            "products of some lanes",
            "set_right(right, scores[n]);",
            "set_right(right, scores[n]); if (row8 < 4)",
        ),
        MATRICES,
        ("divergence",),
    ),
    (Mutation("most_likely", "missing barrier", BARRIER, ""), GREEDY, RACE),
    (
        Mutation("most_likely", "last elements left out", "num_logits + 3) / 4", "num_logits) / 4"),
        GREEDY,
        WRONG,
    ),
    (
        Mutation("most_likely", "alignment ignored", "/ sizeof(T) % 4", "/ sizeof(T) % 1"),
        GREEDY,
        ("misaligned",),
    ),
    (
        Mutation("most_likely", "beyond the row", "index < num_logits ?", "true ?"),
        GREEDY,
        (*WRONG, *OUTSIDE),
    ),
    (Mutation("most_likely", "NaN ignored", "|| logit != logit", ""), GREEDY, WRONG),
    (Mutation("most_likely", "last of a thread's", "logit > top", "logit >= top"), GREEDY, WRONG),
    (Mutation("most_likely", "last of all", "simd_min(", "simd_max("), GREEDY, WRONG),
    (
        Mutation("most_likely", "infinity taken", "fabs(highest) < INFINITY", "true"),
        GREEDY,
        WRONG,
    ),
    (
        Mutation("most_likely", "maximum of some lanes", "if (simdgroup > 0)", "if (lane > 7)"),
        GREEDY,
        ("divergence", *WRONG),
    ),
    (
        Mutation("most_likely", "swapped address space", "device T* from", "threadgroup T* from"),
        GREEDY,
        STRICT,
    ),
    (Mutation("merge", "missing barrier", BARRIER, ""), LONG, RACE),
    (
        Mutation("merge", "sinks counted twice", "sum += exp2(sink", "sum += 2.0f * exp2(sink"),
        SPLIT,
        WRONG,
    ),
    (
        Mutation("merge", "a chunk left out", "int i = simdgroup;", "int i = simdgroup + 1;"),
        LONG,
        WRONG,
    ),
]


@pytest.mark.parametrize("variant", [WHOLE, SPLIT, LONG, MATRICES, ROPE, GREEDY])
def test_without_a_fault_nothing_is_found(variant):
    nothing = Mutation("decode", "none", "const int group", "const int group")
    if variant is ROPE:
        nothing = Mutation("rope_write", "none", "const int pair", "const int pair")
    if variant is GREEDY:
        nothing = Mutation("most_likely", "none", "const uint row", "const uint row")
    assert caught_by(nothing, variant, MAX_DEVIATION) == []


@pytest.mark.parametrize(
    ("mutation", "variant", "rungs"), FAULTS, ids=[str(planted[0]) for planted in FAULTS]
)
def test_planted_fault_is_caught(mutation, variant, rungs, count):
    found = caught_by(mutation, variant, MAX_DEVIATION)
    assert set(found) & set(rungs)
    count[f"planted fault caught by {', '.join(found)}: {mutation}"] += 1


def test_fault_whose_text_is_gone_is_told():
    with pytest.raises(ValueError, match="no 'gone'"):
        list(mutate("text", [Mutation("decode", "wrong index", "gone", "there")]))
