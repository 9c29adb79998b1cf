"""A kernel's Metal source with the map of lanes and the product by shuffles of ``cuda_matrix.h``.

It shows that kernels rely on no map of their own, and that CUDA's words say what Metal's do.
"""

from __future__ import annotations

import re

from pagedmlx.ops.launch import Kernel
from pagedmlx.ops.sources import read_source

_BEFORE = """
#define __shfl_sync(mask, value, lane) simd_shuffle(value, ushort(lane))
#define threadIdx uint3(msl::lane(), 0, 0)
"""


def with_cuda_map(kernel: Kernel, source: str) -> str:
    """The source of a kernel that multiplies matrices; any other stays as it is."""
    if "matrix.h" not in kernel.headers:
        return source
    text = read_source("cuda_matrix.h")
    for line in re.findall(r"^(?:#define ROW_BIT|METAL_FUNC int (?:matrix|right)_).*", text, re.M):
        start = re.match(r".*?\b\w+(?=\(| \d)", line)
        assert start is not None
        source, count = re.subn(rf"^{re.escape(start[0])}.*", line, source, flags=re.M)
        assert count == 1, line
    _, template, product = text.rpartition("template <typename A>")
    product = re.sub(r"(simdgroup_matrix<\w+, 8, 8>)&", r"thread \1&", template + product)
    # The header ends with the sums over a row, which need no product.
    marker = "METAL_FUNC float max_of_row"
    assert marker in source
    source = source.replace(marker, f"{_BEFORE}{product}{marker}")
    return source.replace("simdgroup_multiply", "cuda_multiply")
