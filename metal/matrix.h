// Where the elements of an 8 x 8 matrix lie in a SIMD-group: each lane holds two neighbours of a
// row. CUDA's map is in cuda_matrix.h, so kernels say these words only and load no matrix whole.

#ifndef OPERAND
// What a factor is made of: Metal multiplies float as fast as 16 bits.
#define OPERAND(T) float
// Bits in which the lanes of a row differ.
#define ROW_BIT_0 1
#define ROW_BIT_1 8

METAL_FUNC int matrix_row(uint lane) { return int(((lane & 16u) >> 2) | ((lane >> 1) & 3u)); }
METAL_FUNC int matrix_column(uint lane) { return int(((lane & 8u) >> 1) | ((lane & 1u) << 1)); }
// Row and column of element e of a right factor.
METAL_FUNC int right_row(uint lane, int) { return matrix_row(lane); }
METAL_FUNC int right_column(uint lane, int e) { return matrix_column(lane) + e; }

// A lane's two elements are element w of two loads.
template <typename T, int W>
METAL_FUNC void set_pair(thread simdgroup_matrix<float, 8, 8>& matrix, thread vec<T, W>& first,
                         thread vec<T, W>& second, int w) {
  matrix.thread_elements()[0] = first[w];
  matrix.thread_elements()[1] = second[w];
}
#endif

METAL_FUNC float max_of_row(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(ROW_BIT_0)));
  return max(x, simd_shuffle_xor(x, ushort(ROW_BIT_1)));
}

METAL_FUNC float sum_of_row(float x) {
  x += simd_shuffle_xor(x, ushort(ROW_BIT_0));
  return x + simd_shuffle_xor(x, ushort(ROW_BIT_1));
}
