"""Whether the kernels are right on this GPU: variants, long contexts, and the order of writes.

python scripts/check_kernels.py --json FILE [--full] [--jobs N] [--only ..]    (- is stdout)
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launcher, MLXLauncher, gpu_platform
from pagedmlx.ops.most_likely import MostLikely
from pagedmlx.sampling.greedy import most_likely, num_different
from scripts.kernel_layers import find_platform
from scripts.report import add_json_option, note, save, save_so_far
from scripts.token_chains import check_token, largest
from tests.metal.cascades import SETTINGS
from tests.metal.cases import covering_variants, every_variant
from tests.metal.greedy import GreedyCase, every_case
from tests.metal.ropes import RopeCase, covering_ropes
from tests.support.attention import TOLERANCES, make_case, write_step

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
# Around the borders of blocks, of tiles and of pieces, decode rows beside.
CHUNKS = ((40, 1), (0, 9), (47, 16), (0, 17), (33, 31), (1, 32), (14, 33), (17, 64), (300, 200))
BORDERS = (1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 16383, 17000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the kernels against float64.")
    add_json_option(parser)
    parser.add_argument("--full", action="store_true", help="every variant, not a covering set")
    parser.add_argument("--only", default="", help="sections by name, with commas between")
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile and run")
    options = parser.parse_args()
    if gpu_platform() is None:
        sys.exit("check_kernels.py: the default device is no GPU")
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "token": check_token,
        "copies": check_copies,
        "rope": lambda: check_rope(options.jobs),
        "sampling": lambda: check_sampling(options.jobs),
        "prefill": lambda: check_prefill(options.jobs),
        "cascade": lambda: _shares(SETTINGS, options.jobs),
        "long": check_long,
        "ragged": check_ragged,
        "even": check_even,
        "variants": lambda: check_variants(options.full, options.jobs),
    }
    result: dict[str, Any] = {"device": {k: str(v) for k, v in mx.device_info().items()}}
    wanted = options.only.split(",") if options.only else list(sections)
    for name in wanted:
        start = time.perf_counter()
        try:
            result[name] = sections[name]()
        except RuntimeError as error:  # what MLX raises; the other sections are still wanted
            result[name] = {"ok": False, "error": str(error)[:2000]}
        seconds = time.perf_counter() - start
        summary = {key: value for key, value in result[name].items() if key != "deviations"}
        note(f"{name} ({seconds:.0f} s): {summary}")
        save_so_far(result, options.json)
    result["ok"] = all(result[name]["ok"] for name in wanted)
    save(result, options.json)
    sys.exit(not result["ok"])


def check_variants(full: bool, jobs: int) -> dict[str, Any]:
    """Each variant over lengths around the borders of blocks and chunks, NaN in dead slots."""
    return _shares(every_variant() if full else covering_variants(), jobs)


class Checkable(Protocol):
    """Something that a kernel may get wrong; its text is its name."""

    def deviation(self, launcher: Launcher) -> float:
        """Largest error, as a share of the tolerance."""
        ...


def _shares(cases: Sequence[Checkable], jobs: int) -> dict[str, Any]:
    """Check cases in some processes at once, because compiling takes most of the time."""
    shares: dict[str, float | str] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # A process has its own launcher, so it takes many cases.
        for part in pool.map(_check_all, [cases[start::jobs] for start in range(jobs)]):
            shares |= part
    bad = {n: v for n, v in shares.items() if isinstance(v, str) or not v <= 1.0}
    worst = max((v for v in shares.values() if isinstance(v, float)), default=None)
    return {
        "ok": not bad,
        "checked": len(shares),
        "worst_share_of_tolerance": worst,
        "bad": bad,
        "deviations": shares,
    }


def _check_all(cases: Sequence[Checkable]) -> dict[str, float | str]:
    launcher = _launcher()
    found: dict[str, float | str] = {}
    for case in cases:
        try:
            found[str(case)] = round(case.deviation(launcher), 4)
        except Exception as error:  # one that doesn't compile must not hide the others
            found[str(case)] = f"{type(error).__name__}: {error}"[:400]
    return found


def check_long() -> dict[str, Any]:
    """Contexts around the lengths at which anything switches, together and with a window."""
    launcher = _launcher()
    spans = [(length - 1, 1) for length in BORDERS]
    errors = {}
    for dtype, factor in (*((dtype, 4) for dtype in TOLERANCES), ("float16", 8), ("bfloat16", 8)):
        decode = "matrices" if factor == 8 else "lanes"
        case = make_case(
            spans,
            k_head_dim=128,
            v_head_dim=128,
            factor=factor,
            dtype=dtype,
            writer=InPlaceWriter(launcher),
        )
        for window in (None, 1000):
            params = AttentionParams(scale=128**-0.5, window=window)
            expected = case.expected(params)
            for fixed in (False, True):
                backend = KernelBackend(launcher, deterministic=fixed, decode=decode)
                error = np.abs(case.attend(backend, params) - expected).max()
                errors[f"{dtype} {decode} window {window} fixed {fixed}"] = float(error)
    limits = {name: TOLERANCES[name.split(maxsplit=1)[0]] for name in errors}
    return {"ok": all(errors[n] <= limits[n] for n in errors), "errors": errors}


def check_even() -> dict[str, Any]:
    """Sequences of like lengths, so many that they are left whole, by threadgroups of any width."""
    errors, merged = {}, []
    for (count, length), (factor, dim, decode) in product(
        ((16, 1500), (15, 1300), (32, 1100), (64, 600)), ((4, 128, "lanes"), (8, 64, "matrices"))
    ):
        launcher, params = _launcher(), AttentionParams(scale=dim**-0.5)
        case = make_case(
            [(length - place, 1) for place in range(count)],
            num_kv_heads=8,
            k_head_dim=dim,
            v_head_dim=dim,
            factor=factor,
            dtype="bfloat16",
            writer=InPlaceWriter(launcher),
        )
        output = case.attend(KernelBackend(launcher, 528, decode=decode), params)
        name = f"{count} x {length} {decode}"
        errors[name] = float(np.abs(output - case.expected(params)).max())
        if any("merge" in kernel for kernel in launcher.kernel_names):
            merged.append(name)
    is_right = max(errors.values()) <= TOLERANCES["bfloat16"]
    return {"ok": is_right and not merged, "errors": errors, "merged": merged}


def check_ragged() -> dict[str, Any]:
    """33 sequences of unequal lengths, some with several rows."""
    launcher, rng = _launcher(), np.random.default_rng(1)
    lengths = rng.integers(9, 2500, 33)
    rows = sorted(rng.choice([1, 1, 1, 2, 5, 8], 33).tolist())
    spans = [(int(length) - n, n) for length, n in zip(lengths, rows, strict=True)]
    case = make_case(
        spans,
        k_head_dim=128,
        v_head_dim=128,
        factor=4,
        dtype="bfloat16",
        writer=InPlaceWriter(launcher),
    )
    params = AttentionParams(scale=128**-0.5)
    expected = case.expected(params)
    errors = {
        decode: float(
            np.abs(case.attend(KernelBackend(launcher, decode=decode), params) - expected).max()
        )
        for decode in ("lanes", "matrices")
    }
    return {"ok": max(errors.values()) <= TOLERANCES["bfloat16"], "errors": errors}


PREFILLS = ("kernel", "narrow", "split", "gather", "written")
"""``narrow`` is the kernel with one column; ``written`` a gather of rows that were just written."""


def check_prefill(jobs: int) -> dict[str, Any]:
    """Chunks of prompts, by the tiled kernel, whole and in parts, and by gather, whichever is
    chosen here by itself; and by gather where their rows were just written, which needs none for
    whole prompts.
    """
    rng = random.Random(0)
    cases = [
        PrefillCase(
            *case, rng.choice((None, 40)), rng.choice((None, 20.0)), rng.choice((False, True))
        )
        for case in product(PREFILLS, TOLERANCES, HEAD_DIMS, (1, 3, 8))
    ]
    # Without MLX's own products in float32, which are inexact on some GPUs.
    return _shares(
        [c for c in cases if c.path in ("kernel", "narrow", "split") or c.dtype != "float32"], jobs
    )


@dataclass(frozen=True)
class PrefillCase:
    """One way to attend some chunks."""

    path: str
    dtype: str
    dims: tuple[int, int]
    factor: int
    window: int | None
    softcap: float | None
    sinks: bool

    def deviation(self, launcher: Launcher) -> float:
        """See ``Checkable``."""
        sinks = mx.array(np.linspace(-2.0, 3.0, 2 * self.factor, dtype=np.float32))
        params = AttentionParams(
            scale=self.dims[0] ** -0.5,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks if self.sinks else None,
        )
        return prefill_share(launcher, self.path, self.dtype, self.dims, self.factor, params)


def prefill_share(
    launcher: Launcher,
    path: str,
    dtype: str,
    dims: tuple[int, int],
    factor: int,
    params: AttentionParams,
    spans: Sequence[tuple[int, int]] = CHUNKS,
) -> float:
    """Largest error of some chunks against float64, as a share of the tolerance."""
    case = make_case(
        spans,
        factor=factor,
        k_head_dim=dims[0],
        v_head_dim=dims[1],
        dtype=dtype,
        writer=InPlaceWriter(launcher),
    )
    expected = case.expected(params)
    if path == "written":
        write_step(case)
    paths = {"written": "gather", "narrow": "kernel"}
    columns = 1 if path == "narrow" else None
    backend = KernelBackend(launcher, prefill=paths.get(path, path), columns=columns)
    error = np.abs(case.attend(backend, params) - expected)
    return float((error / (TOLERANCES[dtype] * (1 + np.abs(expected)))).max())


def check_copies() -> dict[str, Any]:
    """Copied blocks hold the same bits."""
    launcher = _launcher()
    wrong = [
        f"{dtype} {order.name}"
        for dtype, order in product(TOLERANCES, AxisOrder)
        if not copies_are_equal(launcher, dtype, order)
    ]
    return {"ok": not wrong, "wrong": wrong}


def copies_are_equal(launcher: Launcher, dtype: str, order: AxisOrder) -> bool:
    """Copy two blocks, the second onto the first, and compare with the dense K and V."""
    case = make_case(
        [(99, 1)],
        k_head_dim=64,
        v_head_dim=80,
        dtype=dtype,
        order=order,
        writer=InPlaceWriter(launcher),
    )
    table = case.batch.host.groups[0].block_tables[0].copy()
    (free, *_) = sorted(set(range(case.store.num_blocks[0])) - set(table.tolist()))
    case.store.copy_blocks(0, table[:1].copy(), np.array([free], np.int32))
    # Right only after the copy before.
    case.store.copy_blocks(0, table[1:2].copy(), table[:1].copy())
    table[0], table[1] = free, table[0]
    length = len(case.keys[0])
    at = np.arange(length)
    slots = mx.array(table[at // 16].astype(np.int64) * 16 + at % 16)
    keys, values = case.store.gather_slots(0, slots[None])
    case.store.commit(keys, values)
    return np.array_equal(_tokens(keys), case.keys[0]) and np.array_equal(
        _tokens(values), case.values[0]
    )


def _tokens(gathered: mx.array) -> npt.NDArray[np.float64]:
    """(1, heads, N, D) as (N, heads, D)."""
    return np.array(gathered[0].swapaxes(0, 1).astype(mx.float32)).astype(np.float64)


def check_rope(jobs: int) -> dict[str, Any]:
    """Rows that are rotated and written in one launch, against float64; and rotated queries at
    positions up to 131,071 against MLX's own.
    """
    result = _shares(covering_ropes(), jobs)
    for dtype in ("bfloat16", "float32"):
        result[f"difference_from_mlx_{dtype}"] = _difference_from_mlx(dtype)
    # In float32 it is what either makes of large angles, and no matter for a model.
    result["ok"] = result["ok"] and result["difference_from_mlx_bfloat16"] <= TOLERANCES["bfloat16"]
    return result


def _difference_from_mlx(dtype: str) -> float:
    """Largest difference of a rotated element, as a share of 1 and the element."""
    case = RopeCase(
        dtype, dtype, (128, 128), 16, 4, 8, AxisOrder.HEAD_MAJOR, "all", False, "base", 1.0,
        "joined", 40,
    )  # fmt: skip
    store, rows = case.make(_launcher())
    positions = mx.array(np.geomspace(1, 131071, case.num_rows).astype(np.int32))
    rotated = store.write_rotated(0, replace(rows, positions=positions), case.rope)
    expected = case.rope.rotate(rows.queries, positions)
    found, wanted = rotated.astype(mx.float32), expected.astype(mx.float32)
    store.commit(found, wanted)
    return largest(mx.abs(found - wanted) / (1 + mx.abs(wanted)))


def check_sampling(jobs: int) -> dict[str, Any]:
    """The most likely tokens are those of numpy and of MLX, also for rows that begin anywhere."""
    result = _shares([*every_case(), *(GreedyCase(dtype, 128256) for dtype in TOLERANCES)], jobs)
    find = MostLikely(_launcher())
    result["rows_unlike_mlx"] = {
        f"{dtype} {num_logits}": num_different(find, dtype, num_logits)
        for dtype, num_logits in product(TOLERANCES, (5001, 128256))
    } | {
        f"{dtype} from row {first}": _num_unlike_mlx(find, GreedyCase(dtype, 4097).logits[first:])
        for dtype, first in product(TOLERANCES, (1, 2, 3))
    }
    result["ok"] = result["ok"] and not any(result["rows_unlike_mlx"].values())
    return result


def _num_unlike_mlx(find: MostLikely, logits: mx.array) -> int:
    return int(np.count_nonzero(np.array(find(logits) != most_likely(logits))))


def _launcher() -> MLXLauncher:
    return MLXLauncher(find_platform())


if __name__ == "__main__":
    main()
