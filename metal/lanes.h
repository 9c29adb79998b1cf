// Rows of K and V in a SIMD-group's registers, and the sums of a tile's scores over its lanes.

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

// One step of a sum over the lanes of many scores: a lane keeps one of two and gives the other to
// its partner, so that 31 shuffles do for 32 sums.
METAL_FUNC float halve(float low, float high, uint lane, ushort offset) {
  const bool upper = (lane & uint(offset)) != 0;
  return (upper ? high : low) + simd_shuffle_xor(upper ? low : high, offset);
}

// The other steps for N scores, of which the first half was halved with the second at offset 16.
// Lane i is left with the sum of score i / (32 / N).
template <int N>
METAL_FUNC float sum_scores(thread float (&scores)[N / 2], uint lane) {
  // Loops that count up by one are unrolled everywhere, so that the scores stay in registers.
  UNROLL for (int round = 1; round < 5; ++round) {
    const int left = N >> (round + 1);
    UNROLL for (int i = 0; i < N / 4; ++i) {
      if (i < left) scores[i] = halve(scores[i], scores[left + i], lane, ushort(16 >> round));
    }
  }
  float sum = scores[0];
  UNROLL for (int round = 1; round < 5; ++round) {
    const int step = 16 >> round;
    if (step < 32 / N) sum += simd_shuffle_xor(sum, ushort(step));
  }
  return sum;
}

// Maximum and sum over the lanes that differ in bits of STEP and above.
template <int STEP>
METAL_FUNC float max_above(float x) {
  UNROLL for (int round = 0; round < 5; ++round) {
    if ((1 << round) >= STEP) x = max(x, simd_shuffle_xor(x, ushort(1 << round)));
  }
  return x;
}

template <int STEP>
METAL_FUNC float sum_above(float x) {
  UNROLL for (int round = 0; round < 5; ++round) {
    if ((1 << round) >= STEP) x += simd_shuffle_xor(x, ushort(1 << round));
  }
  return x;
}
