// Metal's 8 x 8 matrices of a SIMD-group, said in CUDA by shuffles: for right answers, not for
// speed. A lane holds two neighbours of a row, as on Apple's GPUs.

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  vec<T, 2> elements;
  __device__ __forceinline__ vec<T, 2>& thread_elements() { return elements; }
};

template <typename T, int Columns, int Rows>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> matrix;
  matrix.elements = vec<T, 2>(value);
  return matrix;
}

METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                              simdgroup_matrix<float, 8, 8>& a,
                                              simdgroup_matrix<float, 8, 8>& b,
                                              simdgroup_matrix<float, 8, 8>& c) {
  const uint lane = threadIdx.x & 31u;
  float sums[2] = {c.elements[0], c.elements[1]};
  UNROLL for (int k = 0; k < 8; ++k) {
    // Of a lane's number, bits 4, 2 and 1 say its row, bits 3 and 0 which pair of columns it holds.
    const uint column = (k & 4) << 1 | (k & 2) >> 1;
    const float x = __shfl_sync(0xffffffffu, a.elements[k & 1], (lane & 22u) | column);
    const uint row = (k & 4) << 2 | (k & 3) << 1;
    UNROLL for (int j = 0; j < 2; ++j) {
      sums[j] += x * __shfl_sync(0xffffffffu, b.elements[j], (lane & 9u) | row);
    }
  }
  d.elements[0] = sums[0];
  d.elements[1] = sums[1];
}
