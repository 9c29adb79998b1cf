// What several kernels share: rows of K and V in a lane's registers, and the sums of a tile's
// scores over a SIMD-group.

#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

// A masked score is below LOWEST by so much that its weight is 0, also while no score was seen.
#define MASKED (-FLT_MAX)
#define LOWEST (-0.5f * FLT_MAX)

// A row of D elements over 32 lanes: lane i holds the vectors i, i + 32, .. of W elements.
template <typename T, int W, int J, int D>
METAL_FUNC void load_row(thread vec<T, W> (&out)[J], const device T* row, uint lane) {
  UNROLL for (int j = 0; j < J; ++j) {
    const int d = (j * 32 + int(lane)) * W;
    if ((j + 1) * 32 * W <= D || d < D) {
      out[j] = *reinterpret_cast<const device vec<T, W>*>(row + d);
    } else {
      out[j] = vec<T, W>(T(0));
    }
  }
}

template <typename T, int W, int J>
METAL_FUNC void clear_row(thread vec<T, W> (&out)[J]) {
  UNROLL for (int j = 0; j < J; ++j) out[j] = vec<T, W>(T(0));
}

// Sums N scores over the lanes at once: each step adds half of them to the partner's other half,
// so 31 shuffles do for 32 sums. Lane i is left with the sum of score i / (32 / N).
template <int N>
METAL_FUNC float sum_scores(thread float (&scores)[N], uint lane) {
  int offset = 16;
  UNROLL for (int left = N / 2; left >= 1; left /= 2) {
    const bool upper = (lane & uint(offset)) != 0;
    UNROLL for (int i = 0; i < left; ++i) {
      const float kept = upper ? scores[left + i] : scores[i];
      const float sent = upper ? scores[i] : scores[left + i];
      scores[i] = kept + simd_shuffle_xor(sent, ushort(offset));
    }
    offset /= 2;
  }
  float sum = scores[0];
  UNROLL for (int step = 16 / N; step >= 1; step /= 2) {
    sum += simd_shuffle_xor(sum, ushort(step));
  }
  return sum;
}

// Maximum and sum over the lanes that differ in bits of STEP and above.
template <int STEP>
METAL_FUNC float max_above(float x) {
  UNROLL for (int step = STEP; step < 32; step *= 2) {
    x = max(x, simd_shuffle_xor(x, ushort(step)));
  }
  return x;
}

template <int STEP>
METAL_FUNC float sum_above(float x) {
  UNROLL for (int step = STEP; step < 32; step *= 2) {
    x += simd_shuffle_xor(x, ushort(step));
  }
  return x;
}
