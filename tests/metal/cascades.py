"""Which cascades the tests cover: settings of shared and own tokens, and the case of each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import mlx.core as mx
import numpy as np

from pagedmlx.kv.layout import AxisOrder
from pagedmlx.ops.base import AttentionParams, PagedBatch
from pagedmlx.ops.in_place import InPlaceWriter
from pagedmlx.ops.kernels import KernelBackend
from pagedmlx.ops.launch import Launcher
from tests.metal.cases import covering
from tests.support.attention import TOLERANCES, Case, make_case

CUT, WHOLE = 1 << 20, 1
"""Threadgroups at once: chunks of the fewest tokens, or of the most."""


@dataclass(frozen=True)
class Setting:
    """Everything that the launches depend on; ``shared`` tokens of whole blocks for each run."""

    dtype: str = "float16"
    head_dims: tuple[int, int] = (64, 64)
    factor: int = 2
    block_size: int = 16
    num_kv_heads: int = 2
    order: AxisOrder = AxisOrder.HEAD_MAJOR
    softcap: float | None = None
    sinks: bool = False
    decode: str = "lanes"
    wave: int = CUT
    columns: int = 1
    # Of each sequence: its run, and its tokens beside the shared ones. Run 0 shares nothing.
    sequences: tuple[tuple[int, int], ...] = ((1, 1), (0, 70), (1, 66), (2, 3), (1, 17), (2, 90))
    shared: tuple[int, ...] = (0, 9, 2)  # blocks

    def __str__(self) -> str:
        skipped = ("sequences", "shared")
        values = (getattr(self, f.name) for f in fields(self) if f.name not in skipped)
        return "-".join(v.name if isinstance(v, AxisOrder) else str(v) for v in values)

    def make_case(self, launcher: Launcher) -> Case:
        """Sequences of a run hold the first one's blocks; their own copies of them hold NaN."""
        starts = [self.shared[run] * self.block_size + own - 1 for run, own in self.sequences]
        case = make_case(
            [(start, 1) for start in starts],
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            factor=self.factor,
            k_head_dim=self.head_dims[0],
            v_head_dim=self.head_dims[1],
            dtype=self.dtype,
            order=self.order,
            writer=InPlaceWriter(launcher),
        )
        host = case.batch.host
        tables = host.groups[0].block_tables.copy()
        keys, values = list(case.keys), list(case.values)
        firsts: dict[int, int] = {}
        for place, (run, _) in enumerate(self.sequences):
            first, num_blocks = firsts.setdefault(run, place), self.shared[run]
            if first == place or not num_blocks:
                continue
            num_tokens = num_blocks * self.block_size
            slots = np.concatenate(
                [
                    np.arange(self.block_size) + b * self.block_size
                    for b in tables[place, :num_blocks]
                ]
            )
            nan = [
                mx.full((num_tokens, self.num_kv_heads, dim), np.nan, getattr(mx, self.dtype))
                for dim in self.head_dims
            ]
            case.store.write(0, *nan, mx.array(slots))
            case.store.commit()
            tables[place, :num_blocks] = tables[first, :num_blocks]
            for arrays in (keys, values):
                arrays[place] = np.concatenate(
                    [arrays[first][:num_tokens], arrays[place][num_tokens:]]
                )
        group = replace(host.groups[0], block_tables=tables)
        batch = PagedBatch(replace(host, groups=(group,)))
        return replace(case, batch=batch, keys=keys, values=values)

    def params(self) -> AttentionParams:
        heads = self.num_kv_heads * self.factor
        sinks = mx.array(np.linspace(-2.0, 3.0, heads, dtype=np.float32)) if self.sinks else None
        return AttentionParams(self.head_dims[0] ** -0.5, None, sinks, self.softcap)

    def run(self, launcher: Launcher, case: Case, cascade: str = "on") -> np.ndarray:
        backend = KernelBackend(
            launcher, self.wave, decode=self.decode, cascade=cascade, columns=self.columns
        )
        return case.attend(backend, self.params())

    def deviation(self, launcher: Launcher) -> float:
        """Largest error against float64, in units of the type's tolerance; infinite for NaN."""
        case = self.make_case(launcher)
        output, expected = self.run(launcher, case), case.expected(self.params())
        error = np.abs(output - expected) / (TOLERANCES[self.dtype] * (1 + np.abs(expected)))
        return float(np.where(np.isnan(error), np.inf, error).max())


AXES = {
    "dtype": tuple(TOLERANCES),
    "head_dims": ((64, 64), (80, 80), (128, 128), (256, 256), (192, 128)),
    "factor": (1, 3, 8, 16),
    "block_size": (4, 16, 64),
    "num_kv_heads": (1, 2),
    "order": tuple(AxisOrder),
    "softcap": (None, 20.0),
    "sinks": (False, True),
    "decode": ("lanes", "matrices"),
    "wave": (CUT, WHOLE),
    "columns": (1, 2),
}
SETTINGS = [Setting(**axes) for axes in covering(AXES)]
