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

#define TILE_ALIGNED alignas(16)
#define TWO_TILES_BYTES (48 * 1024)  // what a kernel gets without asking for more

// Elements of 16 bits are copied 8 at a time.
struct alignas(16) copied_words {
  uint words[4];
};
template <typename T, int W>
struct copy_of {
  typedef copied_words type;
};
template <int W>
struct copy_of<float, W> {
  typedef vec<float, W> type;
};
template <typename V, typename Copy>
METAL_FUNC void put_copy(V* to, const Copy& copy) {
  *reinterpret_cast<Copy*>(to) = copy;
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

// Four 8 x 8 matrices of 16 bits; lane i says where row i % 8 of matrix i / 8 lies, and gets two
// neighbours of a row of each, as factors want them; or, transposed, of a column.
#define LOAD_MATRICES(NAME, TRANSPOSED)                                                      \
  METAL_FUNC uint4 NAME(const void* row) {                                                   \
    uint4 words;                                                                             \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANSPOSED ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)                \
                 : "r"(uint(__cvta_generic_to_shared(row))));                                \
    return words;                                                                            \
  }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_transposed, ".trans")

// Two tiles of 16 bits are read by ldmatrix: there matrix w is made of the elements 8 w to 8 w + 7 of a
// span.
template <typename T, int W>
struct two_tiles {
  uint4 words[W / 2];

  METAL_FUNC void set_left(simdgroup_matrix<T, 8, 8>* left, int w) {
    left[0].elements.words[0] = words[w / 2].x;
    left[1].elements.words[0] = words[w / 2].y;
    left[2].elements.words[0] = words[w / 2].z;
    left[3].elements.words[0] = words[w / 2].w;
  }
};
template <typename T, int W>
struct two_key_tiles : two_tiles<T, W> {
  METAL_FUNC void load(const vec<T, W>* from, int row_loads, uint lane) {
    const T* row = reinterpret_cast<const T*>(from + (lane & 15u) * row_loads) + (lane >> 4) * 8;
    UNROLL for (int i = 0; i < W / 2; ++i) this->words[i] = load_matrices(row + i * 16);
  }
  template <typename Q>
  static METAL_FUNC void load_query(const Q* vector, const Q*, vec<Q, W>& first,
                                    vec<Q, W>& second, uint lane) {
    UNROLL for (int w = 0; w < W; ++w) {
      vec<Q, 2> pair = *reinterpret_cast<const vec<Q, 2>*>(vector + w * 8 + right_row(lane, 0));
      vec<Q, W>& load = w < W / 2 ? first : second;
      UNROLL for (int e = 0; e < 2; ++e) load[w % (W / 2) * 2 + e] = Q(float(pair[e]));
    }
  }
  // 16 bytes: then the rows of a matrix lie in banks of their own.
  static constexpr int padding(int) { return 8 / W; }
};
template <typename T, int W>
struct two_value_tiles : two_tiles<T, W> {
  METAL_FUNC void load(const vec<T, W>* from, int row_loads, uint lane) {
    const uint token = lane >> 4 << 3 | lane & 7u;
    const T* row = reinterpret_cast<const T*>(from + token * row_loads) + (lane & 8u);
    UNROLL for (int i = 0; i < W / 2; ++i) this->words[i] = load_transposed(row + i * 16);
  }
  static METAL_FUNC int place(int w, int row) { return w * 8 + row; }
};
template <typename T, int W, int TILES>
struct keys_span;
template <typename T, int W, int TILES>
struct values_span;
template <int W>
struct keys_span<__half, W, 2> : two_key_tiles<__half, W> {};
template <int W>
struct keys_span<__nv_bfloat16, W, 2> : two_key_tiles<__nv_bfloat16, W> {};
template <int W>
struct values_span<__half, W, 2> : two_value_tiles<__half, W> {};
template <int W>
struct values_span<__nv_bfloat16, W, 2> : two_value_tiles<__nv_bfloat16, W> {};

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
