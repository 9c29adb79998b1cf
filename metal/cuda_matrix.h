// Metal's 8 x 8 matrices of a SIMD-group, said in CUDA: of 16-bit types two products with one right
// factor, or four with two, are a tensor core's 16 x 8 one (of compute capability 8.0 and above);
// float is multiplied by shuffles, for right answers only.

#define OPERAND(T) T
#define COPIES_AT_ONCE 16
#define LOADS_AHEAD 1
#define COLUMN_BIT_0 4
#define COLUMN_BIT_1 8
#define COLUMN_BIT_2 16

METAL_FUNC int matrix_row(uint lane) { return int(lane >> 2); }
METAL_FUNC int matrix_column(uint lane) { return int(lane & 3u) * 2; }
// Of a right factor a lane holds two neighbours of a column.
METAL_FUNC int right_row(uint lane, int e) { return int(lane & 3u) * 2 + e; }
METAL_FUNC int right_column(uint lane, int) { return int(lane >> 2); }

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  vec<T, 2> elements;
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
};

template <typename T, int Columns, int Rows>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> matrix;
  matrix.elements = vec<T, 2>(value);
  return matrix;
}

METAL_FUNC void put(vec<__half, 2>& pair, float x, float y) {
  const __half2 rounded = __floats2half2_rn(x, y);
  pair.words[0] = *reinterpret_cast<const uint*>(&rounded);
}
METAL_FUNC void put(vec<__nv_bfloat16, 2>& pair, float x, float y) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
  pair.words[0] = *reinterpret_cast<const uint*>(&rounded);
}
METAL_FUNC void put(vec<float, 2>& pair, float x, float y) {
  pair[0] = x;
  pair[1] = y;
}

template <typename T, int W>
METAL_FUNC void set_pair(simdgroup_matrix<T, 8, 8>& matrix, const vec<T, W>& first,
                         const vec<T, W>& second, int w) {
  const uint halves = w % 2 == 0 ? 0x5410u : 0x7632u;
  matrix.elements.words[0] = __byte_perm(first.words[w / 2], second.words[w / 2], halves);
}
template <typename T, typename U, int W>
METAL_FUNC void set_pair(simdgroup_matrix<T, 8, 8>& matrix, const vec<U, W>& first,
                         const vec<U, W>& second, int w) {
  put(matrix.elements, first[w], second[w]);
}
template <int W>
METAL_FUNC void set_pair(simdgroup_matrix<float, 8, 8>& matrix, const vec<float, W>& first,
                         const vec<float, W>& second, int w) {
  put(matrix.elements, first[w], second[w]);
}

// Neighbours of a load are a word already.
template <typename T, int W>
METAL_FUNC void set_inner(simdgroup_matrix<T, 8, 8>& matrix, const vec<T, W>& first,
                          const vec<T, W>& second, int w) {
  const vec<T, W>& load = w < W / 2 ? first : second;
  matrix.elements.words[0] = load.words[w % (W / 2)];
}
template <typename T, typename U, int W>
METAL_FUNC void set_inner(simdgroup_matrix<T, 8, 8>& matrix, const vec<U, W>& first,
                          const vec<U, W>& second, int w) {
  const vec<U, W>& load = w < W / 2 ? first : second;
  put(matrix.elements, load[w % (W / 2) * 2], load[w % (W / 2) * 2 + 1]);
}
template <int W>
METAL_FUNC void set_inner(simdgroup_matrix<float, 8, 8>& matrix, const vec<float, W>& first,
                          const vec<float, W>& second, int w) {
  const vec<float, W>& load = w < W / 2 ? first : second;
  put(matrix.elements, load[w % (W / 2) * 2], load[w % (W / 2) * 2 + 1]);
}

// Of 16 bits in one access.
#define LOAD_TWO_ALIGNED alignas(16)
template <typename T>
METAL_FUNC void load_two(const vec<T, 4>* from, vec<T, 4>& first, vec<T, 4>& second) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  first.words[0] = words.x;
  first.words[1] = words.y;
  second.words[0] = words.z;
  second.words[1] = words.w;
}
template <typename T>
METAL_FUNC void load_two(const vec<T, 2>* from, vec<T, 2>& first, vec<T, 2>& second) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  first.words[0] = words.x;
  second.words[0] = words.y;
}
METAL_FUNC void load_two(const vec<float, 4>* from, vec<float, 4>& first, vec<float, 4>& second) {
  first = from[0];
  second = from[1];
}
METAL_FUNC void load_two(const vec<float, 2>* from, vec<float, 2>& first, vec<float, 2>& second) {
  first = from[0];
  second = from[1];
}

template <typename T>
METAL_FUNC void set_right(simdgroup_matrix<T, 8, 8>& right, simdgroup_matrix<float, 8, 8>& sums) {
  vec<T, 2> pair;
  put(pair, sums.elements[0], sums.elements[1]);
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(right.elements.words[0]) : "r"(pair.words[0]));
}
METAL_FUNC void set_right(simdgroup_matrix<float, 8, 8>& right,
                          simdgroup_matrix<float, 8, 8>& sums) {
  const uint lane = threadIdx.x & 31u;
  UNROLL for (int e = 0; e < 2; ++e) {
    const uint from = uint(right_row(lane, e)) * 4 | lane >> 3;
    const float x = __shfl_sync(0xffffffffu, sums.elements[0], from);
    const float y = __shfl_sync(0xffffffffu, sums.elements[1], from);
    right.elements[e] = (lane & 4u) == 0 ? x : y;
  }
}

#define TENSOR_PRODUCT(T, NAME)                                                              \
  METAL_FUNC void tensor_product(vec<float, 2>& d0, vec<float, 2>& d1, uint a0, uint a1,     \
                                 uint b, T) {                                                \
    asm volatile(                                                                            \
        "mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 "                        \
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                \
        : "+f"(d0.elements[0]), "+f"(d0.elements[1]), "+f"(d1.elements[0]),                  \
          "+f"(d1.elements[1])                                                               \
        : "r"(a0), "r"(a1), "r"(b));                                                         \
  }                                                                                          \
  METAL_FUNC void tensor_product(vec<float, 2>& d0, vec<float, 2>& d1, uint a0, uint a1,     \
                                 uint a2, uint a3, uint b0, uint b1, T) {                    \
    asm volatile(                                                                            \
        "mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                       \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
        : "+f"(d0.elements[0]), "+f"(d0.elements[1]), "+f"(d1.elements[0]),                  \
          "+f"(d1.elements[1])                                                               \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                             \
  }
TENSOR_PRODUCT(__half, "f16")
TENSOR_PRODUCT(__nv_bfloat16, "bf16")

template <typename T>
METAL_FUNC void multiply_two(simdgroup_matrix<float, 8, 8>& d0, simdgroup_matrix<float, 8, 8>& d1,
                             simdgroup_matrix<T, 8, 8>& a0, simdgroup_matrix<T, 8, 8>& a1,
                             simdgroup_matrix<T, 8, 8>& b) {
  tensor_product(d0.elements, d1.elements, a0.elements.words[0], a1.elements.words[0],
                 b.elements.words[0], T());
}

template <typename T>
METAL_FUNC void multiply_four(simdgroup_matrix<float, 8, 8>& d0, simdgroup_matrix<float, 8, 8>& d1,
                              simdgroup_matrix<T, 8, 8>* a, simdgroup_matrix<T, 8, 8>* b) {
  tensor_product(d0.elements, d1.elements, a[0].elements.words[0], a[1].elements.words[0],
                 a[2].elements.words[0], a[3].elements.words[0], b[0].elements.words[0],
                 b[1].elements.words[0], T());
}

template <typename T>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                              simdgroup_matrix<T, 8, 8>& a,
                                              simdgroup_matrix<T, 8, 8>& b,
                                              simdgroup_matrix<float, 8, 8>& c) {
  vec<float, 2> lower(0.0f);
  d = c;
  tensor_product(d.elements, lower, a.elements.words[0], 0u, b.elements.words[0], T());
}

METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                              simdgroup_matrix<float, 8, 8>& a,
                                              simdgroup_matrix<float, 8, 8>& b,
                                              simdgroup_matrix<float, 8, 8>& c) {
  const uint lane = threadIdx.x & 31u;
  d = c;
  UNROLL for (int k = 0; k < 8; ++k) {
    const float x = __shfl_sync(0xffffffffu, a.elements[k & 1], (lane & 28u) | k >> 1);
    UNROLL for (int j = 0; j < 2; ++j) {
      const uint column = (lane & 3u) * 2 + j;
      d.elements[j] += x * __shfl_sync(0xffffffffu, b.elements[k & 1], column * 4 | k >> 1);
    }
  }
}

METAL_FUNC void multiply_two(simdgroup_matrix<float, 8, 8>& d0, simdgroup_matrix<float, 8, 8>& d1,
                             simdgroup_matrix<float, 8, 8>& a0, simdgroup_matrix<float, 8, 8>& a1,
                             simdgroup_matrix<float, 8, 8>& b) {
  simdgroup_multiply_accumulate(d0, a0, b, d0);
  simdgroup_multiply_accumulate(d1, a1, b, d1);
}

METAL_FUNC void multiply_four(simdgroup_matrix<float, 8, 8>& d0, simdgroup_matrix<float, 8, 8>& d1,
                              simdgroup_matrix<float, 8, 8>* a, simdgroup_matrix<float, 8, 8>* b) {
  multiply_two(d0, d1, a[0], a[1], b[0]);
  multiply_two(d0, d1, a[2], a[3], b[1]);
}
