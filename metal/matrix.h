// Where the elements of an 8 x 8 matrix lie in a SIMD-group: each lane holds two neighbours of a
// row. CUDA's map is in cuda_matrix.h, so kernels say these words only and load no matrix whole.

#ifndef OPERAND
// What a factor is made of: Metal multiplies float as fast as 16 bits.
#define OPERAND(T) float
// What a thread copies to a tile at a time, where loads from there have W elements.
template <typename T, int W>
struct copy_of {
  typedef vec<T, W> type;
};
template <typename V>
METAL_FUNC void put_copy(threadgroup V* to, V copy) {
  *to = copy;
}
// Copies of K and as many of V that a thread has on their way at a time: what registers have room for.
#define COPIES_AT_ONCE 4
// Whether those of the next tile are on their way while this one is multiplied.
#define LOADS_AHEAD 0
// Bits in which the lanes of a column differ.
#define COLUMN_BIT_0 2
#define COLUMN_BIT_1 4
#define COLUMN_BIT_2 16

METAL_FUNC int matrix_row(uint lane) { return int(((lane & 16u) >> 2) | ((lane >> 1) & 3u)); }
METAL_FUNC int matrix_column(uint lane) { return int(((lane & 8u) >> 1) | ((lane & 1u) << 1)); }
// Row and column of element e of a right factor.
METAL_FUNC int right_row(uint lane, int) { return matrix_row(lane); }
METAL_FUNC int right_column(uint lane, int e) { return matrix_column(lane) + e; }

// A lane's two elements are element w of two loads.
template <typename V>
METAL_FUNC void set_pair(thread simdgroup_matrix<float, 8, 8>& matrix, thread V& first,
                         thread V& second, int w) {
  matrix.thread_elements()[0] = first[w];
  matrix.thread_elements()[1] = second[w];
}

// The same for both factors of a product that sums along the loads. There any order of elements does
// that both factors share, so CUDA takes neighbours within a load.
template <typename V>
METAL_FUNC void set_inner(thread simdgroup_matrix<float, 8, 8>& matrix, thread V& first,
                          thread V& second, int w) {
  set_pair(matrix, first, second, w);
}

// How tiles are declared; and in how much memory there may be two, one to fill while the other is read.
#define TILE_ALIGNED
#define TWO_TILES_BYTES 0

// Sums become a right factor.
METAL_FUNC void set_right(thread simdgroup_matrix<float, 8, 8>& right,
                          thread simdgroup_matrix<float, 8, 8>& sums) {
  right.thread_elements()[0] = sums.thread_elements()[0];
  right.thread_elements()[1] = sums.thread_elements()[1];
}

// d0 += a0 b and d1 += a1 b, which is one instruction in CUDA.
METAL_FUNC void multiply_two(thread simdgroup_matrix<float, 8, 8>& d0,
                             thread simdgroup_matrix<float, 8, 8>& d1,
                             thread simdgroup_matrix<float, 8, 8>& a0,
                             thread simdgroup_matrix<float, 8, 8>& a1,
                             thread simdgroup_matrix<float, 8, 8>& b) {
  simdgroup_multiply_accumulate(d0, a0, b, d0);
  simdgroup_multiply_accumulate(d1, a1, b, d1);
}

// d0 += a[0] b[0] + a[2] b[1] and d1 += a[1] b[0] + a[3] b[1], likewise.
METAL_FUNC void multiply_four(thread simdgroup_matrix<float, 8, 8>& d0,
                              thread simdgroup_matrix<float, 8, 8>& d1,
                              thread simdgroup_matrix<float, 8, 8>* a,
                              thread simdgroup_matrix<float, 8, 8>* b) {
  multiply_two(d0, d1, a[0], a[1], b[0]);
  multiply_two(d0, d1, a[2], a[3], b[1]);
}
#endif

// A span of K, 8 loads of W elements, of the tokens of TILES matrices: left factors of products that
// sum along the span, with queries on their right.
template <typename T, int W, int TILES>
struct keys_span {
  vec<T, W> loads[TILES][2];

  // From where the first token's first load lies in a tile; each token has so many.
  template <typename Loads>
  METAL_FUNC void load(Loads from, int row_loads, uint lane) thread {
    UNROLL for (int i = 0; i < TILES; ++i) {
      Loads mine = from + (i * 8 + matrix_row(lane)) * row_loads;
      UNROLL for (int e = 0; e < 2; ++e) loads[i][e] = mine[matrix_column(lane) + e];
    }
  }

  // Matrix w of all tokens, then matrix w + 1.
  METAL_FUNC void set_left(thread simdgroup_matrix<OPERAND(T), 8, 8>* left, int w) thread {
    UNROLL for (int i = 0; i < 2 * TILES; ++i) {
      set_inner(left[i], loads[i % TILES][0], loads[i % TILES][1], w + i / TILES);
    }
  }

  // The span of a lane's query vectors, whose elements set_inner takes in the same order.
  template <typename Q>
  static METAL_FUNC void load_query(const device Q* first_vector, const device Q* second_vector,
                                    thread vec<Q, W>& first, thread vec<Q, W>& second, uint lane) {
    first = *reinterpret_cast<const device vec<Q, W>*>(first_vector + right_row(lane, 0) * W);
    second = *reinterpret_cast<const device vec<Q, W>*>(second_vector + right_row(lane, 1) * W);
  }

  // Loads between tokens, of which the host suggests so many.
  static constexpr int padding(int suggested) { return suggested; }
};

// A span of V, 8 loads of W elements, of the tokens of TILES matrices: left factors of products that
// sum over tokens.
template <typename T, int W, int TILES>
struct values_span {
  vec<T, W> loads[TILES][2];

  template <typename Loads>
  METAL_FUNC void load(Loads from, int row_loads, uint lane) thread {
    UNROLL for (int i = 0; i < TILES; ++i) {
      UNROLL for (int e = 0; e < 2; ++e) {
        loads[i][e] = from[(i * 8 + matrix_column(lane) + e) * row_loads + matrix_row(lane)];
      }
    }
  }

  // Matrices w and w + 1, of all tokens.
  METAL_FUNC void set_left(thread simdgroup_matrix<OPERAND(T), 8, 8>* left, int w) thread {
    UNROLL for (int i = 0; i < 2 * TILES; ++i) {
      set_pair(left[i], loads[i / 2][0], loads[i / 2][1], w + i % 2);
    }
  }

  // The element of the span that a row of matrix w stands for.
  static METAL_FUNC int place(int w, int row) { return row * W + w; }
};

METAL_FUNC float max_of_column(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(COLUMN_BIT_0)));
  x = max(x, simd_shuffle_xor(x, ushort(COLUMN_BIT_1)));
  return max(x, simd_shuffle_xor(x, ushort(COLUMN_BIT_2)));
}

METAL_FUNC float sum_of_column(float x) {
  x += simd_shuffle_xor(x, ushort(COLUMN_BIT_0));
  x += simd_shuffle_xor(x, ushort(COLUMN_BIT_1));
  return x + simd_shuffle_xor(x, ushort(COLUMN_BIT_2));
}
