"""A chunk that is its sequence's whole context attends K and V as they were just computed."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from pagedmlx.kv.store import KVStore
from pagedmlx.kv.writer import FunctionalWriter
from pagedmlx.ops.base import AttentionBackend, AttentionParams
from pagedmlx.ops.gather import GatherBackend
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from tests.metal.launcher import FiberLauncher
from tests.support.attention import Case, make_case, write_step
from tests.support.batches import slots_of

WHOLE = ((0, 20), (0, 33))
MIXED = ((40, 1), (17, 1), (0, 20), (16, 20), (0, 33), (7, 3))
SETTINGS = (
    AttentionParams(scale=0.3),
    AttentionParams(scale=0.3, window=6),
    AttentionParams(scale=0.3, softcap=0.7),
    AttentionParams(scale=0.3, window=19, sinks=mx.array([-1.0, 0.0, 2.0, 3.0])),
)


def step_case(
    spans: Sequence[tuple[int, int]], launcher: FiberLauncher | None = None, dtype: str = "float32"
) -> Case:
    """A case whose step's rows are written as a model writes them: all at once, not waited for."""
    writer = FunctionalWriter() if launcher is None else InPlaceWriter(launcher)
    case = make_case(spans, factor=2, k_head_dim=16, v_head_dim=8, dtype=dtype, writer=writer)
    write_step(case)
    return case


def backends(launcher: FiberLauncher) -> list[tuple[AttentionBackend, FiberLauncher | None]]:
    return [(GatherBackend(), None), (KernelBackend(launcher, prefill="gather"), launcher)]


@pytest.mark.parametrize("spans", [WHOLE, MIXED], ids=["whole", "mixed"])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_answers_agree_with_float64(spans, params: AttentionParams) -> None:
    for backend, launcher in backends(FiberLauncher()):
        step_case(spans, launcher).check(backend, params)


def test_kernels_gather_only_what_was_there_before() -> None:
    launcher = FiberLauncher()
    backend = KernelBackend(launcher, prefill="gather")
    for spans, gathers in ((WHOLE, 0), (MIXED, 1)):
        case = step_case(spans, launcher)
        launcher.executed.clear()
        case.check(backend, SETTINGS[0])
        assert sum(n for name, n in launcher.executed.items() if "gather" in name) == gathers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_read_from_the_pool(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, launcher in backends(FiberLauncher()):
        case = step_case(WHOLE, launcher, dtype)
        with monkeypatch.context() as patch:
            for reader in ("bind", "gather", "gather_slots"):
                patch.delattr(KVStore, reader)
            case.check(backend, SETTINGS[0])


def test_the_rows_are_written_all_the_same() -> None:
    for backend, launcher in backends(FiberLauncher()):
        case = step_case(WHOLE, launcher)
        case.attend(backend, SETTINGS[0])
        case.store.submit()
        for sequence, keys in enumerate(case.keys):
            slots = mx.array(slots_of(case.batch.host, 0, sequence, 16))
            found, _ = case.store.gather_slots(0, slots[None])
            np.testing.assert_array_equal(np.array(found[0].swapaxes(0, 1)), keys)


def test_a_pool_of_another_type_has_its_rounding_in_the_answer() -> None:
    launcher = FiberLauncher()
    for backend, its in backends(launcher):
        case = step_case(WHOLE, its, "float16")
        write_step(case, mx.float32)
        assert case.store.newest(0, case.batch.groups[0].slot_mapping) is None
        case.check(backend, SETTINGS[0])


def test_only_the_step_that_was_written_last_is_known() -> None:
    case = step_case(WHOLE)
    slots = case.batch.groups[0].slot_mapping
    assert case.store.newest(0, slots) is not None
    assert case.store.newest(0, slots + 0) is None
    case.store.commit()
    assert case.store.newest(0, slots) is None
