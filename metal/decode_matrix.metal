// What decode.metal does, by 8 x 8 matrices: the query vectors of a threadgroup are the columns of
// products K Q^T and V^T P^T, so that one serves eight of them. For vectors in plenty.
//
// Inputs, outputs, plan, grid, threadgroup memory and work are those of decode.metal, with GH = 8.
// Numerics: sums in float32, softmax online, in powers of 2; products in float32 too, in CUDA of
// factors of KT, the weights included. Masked scores never meet an infinity, and V outside the
// item's tokens counts as 0, whatever the slot holds.
// Constants: those of decode.metal without U, KW and VW; KEYS (tokens of a tile, 8 or 16), W (width
// of a load). BS is at least 8; DK and DV are multiples of 8 * W.

// A row is cut in spans of 8 loads, as in prefill.metal: place c along a side of an 8 x 8 matrix
// stands for load c of a span, and the matrices of a span for the elements of its loads.
constexpr int K_SPANS = DK / (8 * W);
constexpr int V_SPANS = DV / (8 * W);
constexpr int KEY_TILES = KEYS / 8;
constexpr int STRIDE = SLOT_MAJOR ? H : 1;

const int row8 = matrix_row(lane);
const int col8 = matrix_column(lane);
// Columns that are left over repeat the last vector; nobody reads their results.
vec<T, W> q[K_SPANS][2];
UNROLL for (int e = 0; e < 2; ++e) {
  const int vector = min(part * GH + right_column(lane, e), num_vectors - 1);
  const long row = first_row + vector / FACTOR;
  const long head = row * (H * FACTOR) + kv_head * FACTOR + vector % FACTOR;
  const device T* from = queries + head * DK + right_row(lane, e) * W;
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    q[s][e] = *reinterpret_cast<const device vec<T, W>*>(from + s * 8 * W);
  }
}

// Of the two vectors whose scores a lane holds.
#if ROWS > 1
int my_end[2];
UNROLL for (int e = 0; e < 2; ++e) {
  const int vector = min(part * GH + col8 + e, num_vectors - 1);
  my_end[e] = context_len - num_rows + vector / FACTOR + 1;
}
#endif
float top[2] = {LOWEST, LOWEST};
float weight_sum[2] = {0.0f, 0.0f};

simdgroup_matrix<float, 8, 8> acc[V_SPANS * W];
UNROLL for (int i = 0; i < V_SPANS * W; ++i) {
  acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

const int first_block = start / BS;
const int last_block = (end - 1) / BS;
int base = start / KEYS * KEYS + simdgroup * KEYS;
long places[KEY_TILES];
vec<KT, W> k[KEY_TILES][K_SPANS][2];
vec<KT, W> v[KEY_TILES][V_SPANS][2];

// 8 slots lie within one block.
#define FIND(tile)                                                                    \
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {                                        \
    const uint position = uint((tile) + n * 8);                                       \
    const long id = table[min(max(int(position / BS), first_block), last_block)];     \
    places[n] = SLOT_MAJOR ? (id * BS + position % BS) * H + kv_head                  \
                           : (id * H + kv_head) * BS + position % BS;                 \
  }
#define LOAD_K                                                                        \
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {                                        \
    UNROLL for (int e = 0; e < 2; ++e) {                                              \
      const long place = places[n] + row8 * STRIDE;                                    \
      const device KT* from = k_pool + place * DK + (col8 + e) * W;                  \
      UNROLL for (int s = 0; s < K_SPANS; ++s) {                                      \
        k[n][s][e] = *reinterpret_cast<const device vec<KT, W>*>(from + s * 8 * W);   \
      }                                                                               \
    }                                                                                 \
  }

if (base < end) {
  FIND(base)
  LOAD_K
}
for (; base < end; base += SIMDGROUPS * KEYS) {
  // Loads run ahead of use, as in decode.metal.
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    UNROLL for (int e = 0; e < 2; ++e) {
      const long place = places[n] + (col8 + e) * STRIDE;
      const device KT* from = v_pool + place * DV + row8 * W;
      UNROLL for (int s = 0; s < V_SPANS; ++s) {
        v[n][s][e] = *reinterpret_cast<const device vec<KT, W>*>(from + s * 8 * W);
      }
    }
  }
  const int next = base + SIMDGROUPS * KEYS;
  FIND(next)

  simdgroup_matrix<OPERAND(KT), 8, 8> left[2];
  simdgroup_matrix<OPERAND(KT), 8, 8> right;
  simdgroup_matrix<float, 8, 8> scores[KEY_TILES];
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    scores[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    UNROLL for (int w = 0; w < W; ++w) {
      set_inner(right, q[s][0], q[s][1], w);
      UNROLL for (int n = 0; n < KEY_TILES; ++n) set_inner(left[n], k[n][s][0], k[n][s][1], w);
#if KEYS == 16
      multiply_two(scores[0], scores[1], left[0], left[1], right);
#else
      simdgroup_multiply_accumulate(scores[0], left[0], right, scores[0]);
#endif
    }
  }
  LOAD_K

  const bool partial = base < start || base + KEYS > end;
  float tile_top[2] = {LOWEST, LOWEST};
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    const int position = base + n * 8 + row8;
    UNROLL for (int e = 0; e < 2; ++e) {
      float score = scores[n].thread_elements()[e] * QUERY_SCALE;
#if HAS_SOFTCAP
      score = SOFTCAP * tanh(score);
#endif
#if ROWS > 1
      if (position < my_end[e] - plan[1] || position >= my_end[e]) score = MASKED;
#endif
      if (partial && (position < start || position >= end)) score = MASKED;
      scores[n].thread_elements()[e] = score;
      tile_top[e] = max(tile_top[e], score);
    }
  }
  if (partial) {
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const int position = base + n * 8 + col8 + e;
        if (position >= start && position < end) continue;
        UNROLL for (int s = 0; s < V_SPANS; ++s) v[n][s][e] = vec<KT, W>(KT(0));
      }
    }
  }

  UNROLL for (int e = 0; e < 2; ++e) tile_top[e] = max_of_column(tile_top[e]);
  if (simd_any(tile_top[0] > top[0] || tile_top[1] > top[1])) {
    UNROLL for (int e = 0; e < 2; ++e) {
      const float new_top = max(top[e], tile_top[e]);
      const float shrink = exp2(top[e] - new_top);
      top[e] = new_top;
      weight_sum[e] *= shrink;
      UNROLL for (int i = 0; i < V_SPANS * W; ++i) acc[i].thread_elements()[e] *= shrink;
    }
  }
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    UNROLL for (int e = 0; e < 2; ++e) {
      const float weight = exp2(scores[n].thread_elements()[e] - top[e]);
      scores[n].thread_elements()[e] = weight;
      weight_sum[e] += weight;
    }
    set_right(right, scores[n]);
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      UNROLL for (int w = 0; w < W; w += 2) {
        set_pair(left[0], v[n][s][0], v[n][s][1], w);
        set_pair(left[1], v[n][s][0], v[n][s][1], w + 1);
        multiply_two(acc[s * W + w], acc[s * W + w + 1], left[0], left[1], right);
      }
    }
  }
}
#undef FIND
#undef LOAD_K

UNROLL for (int e = 0; e < 2; ++e) {
  weight_sum[e] = sum_of_column(weight_sum[e]);
  if (row8 == 0) {
    all_tops[simdgroup][col8 + e] = top[e];
    all_sums[simdgroup][col8 + e] = weight_sum[e];
  }
  UNROLL for (int s = 0; s < V_SPANS; ++s) {
    UNROLL for (int w = 0; w < W; ++w) {
      all_acc[simdgroup][col8 + e][(s * 8 + row8) * W + w] = acc[s * W + w].thread_elements()[e];
    }
  }
}
