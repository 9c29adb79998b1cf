"""A kernel's Metal source with the map of lanes and the product by shuffles of ``cuda_matrix.h``.

It shows that kernels rely on no map of their own, and that CUDA's words say what Metal's do.
"""

from __future__ import annotations

import re

from pagedmlx.ops.launch import Kernel
from pagedmlx.ops.sources import kernel_folder

_BEFORE = """
#define __shfl_sync(mask, value, lane) simd_shuffle(value, ushort(lane))
#define threadIdx uint3(msl::lane(), 0, 0)
"""


def with_cuda_map(kernel: Kernel, source: str) -> str:
    """The source of a kernel that multiplies matrices; any other stays as it is."""
    if "matrix.h" not in kernel.headers:
        return source
    text = (kernel_folder() / "cuda_matrix.h").read_text()
    for line in re.findall(r"^(?:#define CO|METAL_FUNC int (?:matrix|right)_).*", text, re.M):
        start = re.match(r".*?\b\w+(?=\(| \d)", line)
        assert start is not None
        source, count = re.subn(rf"^{re.escape(start[0])}.*", line, source, flags=re.M)
        assert count == 1, line
    # Of the functions those for float, which multiply by shuffles.
    functions = re.findall(
        r"(?<!>\n)^METAL_FUNC void (?:set_right|multiply_two|multiply_four|simdgroup_\w+)\(.*?^}$",
        re.sub(r"(simdgroup_matrix<float, 8, 8>)([&*])", r"thread \1\2", text),
        re.M | re.S,
    )
    for name in ("set_right", "multiply_two", "multiply_four"):
        source, count = re.subn(rf"^METAL_FUNC void {name}\(.*?^}}$", "", source, flags=re.M | re.S)
        assert count == 1, name
    marker = "METAL_FUNC float max_of_column"
    assert marker in source
    words = "\n".join([_BEFORE, *functions, marker])
    return source.replace(marker, words).replace("simdgroup_multiply", "cuda_multiply")
