"""A kernel's Metal source with the words of ``cuda_matrix.h`` in place of those of ``matrix.h``.

It shows that kernels rely on no map of lanes of their own, and that CUDA's words say what Metal's
do, of 16-bit types too. Only what CUDA itself gives is written here: the instructions of tensor
cores, by the fragments that PTX documents, and how types are called.
"""

from __future__ import annotations

import re

from pagedmlx.ops.launch import Kernel
from pagedmlx.ops.sources import read_source

_BEFORE = """
#define __half half
#define __nv_bfloat16 bfloat
#define __shfl_sync(mask, value, lane) simd_shuffle(value, ushort(lane))
#define threadIdx uint3(msl::lane(), 0, 0)
typedef uint __attribute__((may_alias)) cuda_word;
struct __attribute__((may_alias)) alignas(16) cuda_word4 { uint x, y, z, w; };
METAL_FUNC half2 __floats2half2_rn(float x, float y) { half2 r; r[0] = x; r[1] = y; return r; }
METAL_FUNC bfloat2 __floats2bfloat162_rn(float x, float y) {
  bfloat2 r;
  r[0] = bfloat(x);
  r[1] = bfloat(y);
  return r;
}
METAL_FUNC uint __byte_perm(uint x, uint y, uint places) {
  const ulong bytes = ulong(y) << 32 | x;
  uint result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= uint(bytes >> 8 * (places >> 4 * i & 7u) & 255u) << 8 * i;
  }
  return result;
}

// Element i of a lane's word.
template <typename T>
METAL_FUNC float cuda_element(uint word, int i, T) {
  const ushort bits = ushort(word >> 16 * i);
  T x;
  __builtin_memcpy(&x, &bits, 2);
  return float(x);
}

// The lane has two neighbours of row lane / 4 and gets those of the transposed matrix.
METAL_FUNC uint movmatrix(uint word) {
  const int row = msl::lane() / 4, column = msl::lane() % 4 * 2;
  uint result = 0;
  for (int e = 0; e < 2; ++e) {
    const uint its = simd_shuffle(word, ushort((column + e) * 4 + row / 2));
    result |= (its >> 16 * (row % 2) & 0xffffu) << 16 * e;
  }
  return result;
}

// ldmatrix: row i of matrix m is where lane 8 m + i says, at 16 bytes.
struct cuda_row { const void* from; };
METAL_FUNC cuda_word4 ldmatrix(const void* row, bool transposed) {
  const Lanes<cuda_row> lanes = meet("ldmatrix", cuda_row{row}, __builtin_LINE(), 0);
  cuda_word4 words;
  for (int m = 0; m < 4; ++m) {
    uint word = 0;
    for (int e = 0; e < 2; ++e) {
      const int mine = msl::lane() / 4, pair = msl::lane() % 4 * 2 + e;
      const auto from = (const char*)lanes[m * 8 + (transposed ? pair : mine)].from;
      if (ulong(from) % 16) __builtin_trap();
      ushort bits;
      __builtin_memcpy(&bits, from + 2 * (transposed ? mine : pair), 2);
      word |= uint(bits) << 16 * e;
    }
    (m == 0 ? words.x : m == 1 ? words.y : m == 2 ? words.z : words.w) = word;
  }
  return words;
}

// mma.m16n8k16; m16n8k8 is its first half.
struct cuda_fragments { uint a[4], b[2]; };
template <typename T>
METAL_FUNC void tensor_product(vec<float, 2>& d0, vec<float, 2>& d1, uint a0, uint a1, uint a2,
                               uint a3, uint b0, uint b1, T type) {
  const Lanes<cuda_fragments> lanes =
      meet("mma", cuda_fragments{{a0, a1, a2, a3}, {b0, b1}}, __builtin_LINE(), 0);
  const int row = msl::lane() / 4, column = msl::lane() % 4 * 2;
  for (int e = 0; e < 2; ++e) {
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2;
      const cuda_fragments left = lanes[row * 4 + pair], right = lanes[(column + e) * 4 + pair];
      const float b = cuda_element(right.b[k / 8], k % 2, type);
      d0[e] += cuda_element(left.a[k / 8 * 2], k % 2, type) * b;
      d1[e] += cuda_element(left.a[k / 8 * 2 + 1], k % 2, type) * b;
    }
  }
}
template <typename T>
METAL_FUNC void tensor_product(vec<float, 2>& d0, vec<float, 2>& d1, uint a0, uint a1, uint b,
                               T type) {
  tensor_product(d0, d1, a0, a1, 0u, 0u, b, 0u, type);
}
"""


# What the text has of CUDA's own, and what it becomes; all of it must be there.
_CHANGES = (
    # The shim's matrix and vectors serve.
    (r"^template <[^>]*>\nstruct simdgroup_matrix \{.*?^\};$", ""),
    (r"^template <[^>]*>\nMETAL_FUNC [^\n]* make_filled_simdgroup_matrix\(.*?^\}$", ""),
    (r"([\w.]+(?:\[\d\]\.elements)?)\.words\[", r"((cuda_word*)&\1)["),
    (r"reinterpret_cast<const uint\*>", "reinterpret_cast<const cuda_word*>"),
    (r"struct alignas\(16\) copied", "struct __attribute__((may_alias)) alignas(16) copied"),
    (r"\buint4\b", "cuda_word4"),
    (r"const __(?:half2|nv_bfloat162) rounded", "const auto rounded"),
    # The instructions.
    (r"^#define TENSOR_PRODUCT\(.*?^TENSOR_PRODUCT[^\n]*\n^TENSOR_PRODUCT[^\n]*$", ""),
    (r'asm volatile\("movmatrix\.sync\.aligned\.m8n8\.trans\.b16 %0, %1;"\n'
     r': "=r"\((.*?)\) : "r"\((.*?)\)\);', r"\1 = movmatrix(\2);"),
    (r'asm volatile\("ldmatrix[^;]*;"[^;]*;', "words = ldmatrix(row, sizeof(TRANSPOSED) > 1);"),
    # The shim has a product of that name.
    (r"\bsimdgroup_multiply_accumulate\(", "cuda_multiply_accumulate("),
)  # fmt: skip


def with_cuda_map(kernel: Kernel, source: str) -> str:
    """The source of a kernel that multiplies matrices; any other stays as it is."""
    if "matrix.h" not in kernel.headers:
        return source
    words = read_source("cuda_matrix.h")
    for old, new in _CHANGES:
        words, count = re.subn(old, new, words, flags=re.M | re.S)
        assert count, old
    assert "asm" not in words
    # Defining OPERAND first, it takes the place of Metal's words.
    before, marker, after = source.partition("#ifndef OPERAND")
    assert marker
    after = after.replace("simdgroup_multiply_accumulate(", "cuda_multiply_accumulate(")
    return before + _BEFORE + words + marker + after
