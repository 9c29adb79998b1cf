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
    lanes = re.findall(r"^(?:#define ROW_BIT|METAL_FUNC int (?:matrix|right)_).*", text, re.M)
    _, _, product = text.rpartition("template <typename A>")
    product = re.sub(r"(simdgroup_matrix<\w+, 8, 8>)&", r"thread \1&", product)
    product = product.replace("simdgroup_multiply", "cuda_multiply")
    words = "\n".join(["#define OPERAND(T) float", *lanes, _BEFORE, "template <typename A>"])
    marker = "#ifndef OPERAND"
    assert marker in source
    source = source.replace("simdgroup_multiply", "cuda_multiply")
    return source.replace(marker, words + product + marker)
