// Metal's 8 x 8 matrices of a SIMD-group, said in CUDA: a product of 16-bit operands is the upper
// half of a tensor core's 16 x 8 one, any other is made of shuffles, for right answers only.

#define OPERAND(T) T
#define ROW_BIT_0 1
#define ROW_BIT_1 2

METAL_FUNC int matrix_row(uint lane) { return int(lane >> 2); }
METAL_FUNC int matrix_column(uint lane) { return int(lane & 3u) * 2; }
// Of a right operand a lane holds two neighbours of a column.
METAL_FUNC int right_row(uint lane, int e) { return int(lane & 3u) * 2 + e; }
METAL_FUNC int right_column(uint lane, int) { return int(lane >> 2); }

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  vec<T, 2> elements;
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
};

// Sums have room for the lower half, which stays 0.
template <int Columns, int Rows>
struct simdgroup_matrix<float, Columns, Rows> {
  vec<float, 2> elements;
  float lower[2];
  METAL_FUNC vec<float, 2>& thread_elements() { return elements; }
};

template <typename T, int Columns, int Rows>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> matrix = {};
  matrix.elements = vec<T, 2>(value);
  return matrix;
}

template <typename T, int W>
METAL_FUNC void set_pair(simdgroup_matrix<T, 8, 8>& matrix, const vec<T, W>& first,
                         const vec<T, W>& second, int w) {
  const uint halves = w % 2 == 0 ? 0x5410u : 0x7632u;
  matrix.elements.words[0] = __byte_perm(first.words[w / 2], second.words[w / 2], halves);
}
template <int W>
METAL_FUNC void set_pair(simdgroup_matrix<float, 8, 8>& matrix, const vec<float, W>& first,
                         const vec<float, W>& second, int w) {
  matrix.elements[0] = first[w];
  matrix.elements[1] = second[w];
}

METAL_FUNC uint pack(float x, float y, __half) {
  const __half2 pair = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint*>(&pair);
}
METAL_FUNC uint pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint*>(&pair);
}
// A left operand in the type of the right one.
template <typename T>
METAL_FUNC uint left_pair(const vec<T, 2>& x, T) { return x.words[0]; }
template <typename A, typename B>
METAL_FUNC uint left_pair(const vec<A, 2>& x, B type) { return pack(x[0], x[1], type); }

#define TENSOR_PRODUCT(T, NAME)                                                            \
  METAL_FUNC void tensor_product(simdgroup_matrix<float, 8, 8>& d, uint a, uint b, T) {    \
    asm volatile(                                                                          \
        "mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 "                      \
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                              \
        : "+f"(d.elements.elements[0]), "+f"(d.elements.elements[1]), "+f"(d.lower[0]),    \
          "+f"(d.lower[1])                                                                 \
        : "r"(a), "r"(0u), "r"(b));                                                        \
  }
TENSOR_PRODUCT(__half, "f16")
TENSOR_PRODUCT(__nv_bfloat16, "bf16")

template <typename A, typename B>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8>& a,
                                              simdgroup_matrix<B, 8, 8>& b,
                                              simdgroup_matrix<float, 8, 8>& c) {
  d = c;
  tensor_product(d, left_pair(a.elements, B()), b.elements.words[0], B());
}

template <typename A>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8>& a,
                                              simdgroup_matrix<float, 8, 8>& b,
                                              simdgroup_matrix<float, 8, 8>& c) {
  const uint lane = threadIdx.x & 31u;
  const float left[2] = {float(a.elements[0]), float(a.elements[1])};
  d = c;
  UNROLL for (int k = 0; k < 8; ++k) {
    const float x = __shfl_sync(0xffffffffu, left[k & 1], (lane & 28u) | k >> 1);
    UNROLL for (int j = 0; j < 2; ++j) {
      const uint column = (lane & 3u) * 2 + j;
      d.elements[j] += x * __shfl_sync(0xffffffffu, b.elements[k & 1], column * 4 | k >> 1);
    }
  }
}
