// What decode.metal does, by 8 x 8 matrices: the query vectors of a threadgroup are their rows, so
// that a product of K serves eight of them. For vectors in plenty and 16-bit types.
//
// Inputs, outputs, plan, grid, threadgroup memory and work are those of decode.metal, with GH = 8.
// Numerics: sums in float32, softmax online, in powers of 2; products in float32 too, in CUDA of
// factors of KT, the weights included. Masked scores never meet an infinity, and V outside the
// item's tokens counts as 0, whatever the slot holds.
// Constants: those of decode.metal without U, KW and VW; KEYS (tokens of a tile, a multiple of 8),
// W (width of a load). BS is at least 8; DK and DV are multiples of 8 * W.

// A row is cut in spans of 8 loads, as in prefill.metal: column c of an 8 x 8 matrix stands for load
// c of a span, and the matrices of a span for the elements of its loads.
constexpr int K_SPANS = DK / (8 * W);
constexpr int V_SPANS = DV / (8 * W);
constexpr int KEY_TILES = KEYS / 8;
constexpr int STRIDE = SLOT_MAJOR ? H : 1;

const int row8 = matrix_row(lane);
const int col8 = matrix_column(lane);
// Rows that are left over repeat the last vector; nobody reads their results.
const int my_vector = min(part * GH + row8, num_vectors - 1);
#if ROWS > 1
const int my_end = context_len - num_rows + my_vector / FACTOR + 1;
const int my_start = my_end - plan[1];
#endif

vec<T, W> q[K_SPANS][2];
UNROLL for (int s = 0; s < K_SPANS; ++s) {
  UNROLL for (int e = 0; e < 2; ++e) {
    const long row = first_row + my_vector / FACTOR;
    const long head = row * (H * FACTOR) + kv_head * FACTOR + my_vector % FACTOR;
    const device T* from = queries + head * DK + (s * 8 + col8 + e) * W;
    q[s][e] = *reinterpret_cast<const device vec<T, W>*>(from);
  }
}

simdgroup_matrix<float, 8, 8> acc[V_SPANS * W];
UNROLL for (int i = 0; i < V_SPANS * W; ++i) {
  acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float top = LOWEST;
float weight_sum = 0.0f;

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
      const long place = places[n] + right_column(lane, e) * STRIDE;                  \
      const device KT* from = k_pool + place * DK + right_row(lane, e) * W;           \
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
      const long place = places[n] + right_row(lane, e) * STRIDE;
      const device KT* from = v_pool + place * DV + right_column(lane, e) * W;
      UNROLL for (int s = 0; s < V_SPANS; ++s) {
        v[n][s][e] = *reinterpret_cast<const device vec<KT, W>*>(from + s * 8 * W);
      }
    }
  }
  const int next = base + SIMDGROUPS * KEYS;
  FIND(next)

  simdgroup_matrix<OPERAND(T), 8, 8> left;
  simdgroup_matrix<OPERAND(KT), 8, 8> right;
  simdgroup_matrix<float, 8, 8> scores[KEY_TILES];
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    scores[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    UNROLL for (int w = 0; w < W; ++w) {
      set_pair(left, q[s][0], q[s][1], w);
      UNROLL for (int n = 0; n < KEY_TILES; ++n) {
        set_pair(right, k[n][s][0], k[n][s][1], w);
        simdgroup_multiply_accumulate(scores[n], left, right, scores[n]);
      }
    }
  }
  LOAD_K

  const bool partial = base < start || base + KEYS > end;
  float tile_top = LOWEST;
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    UNROLL for (int e = 0; e < 2; ++e) {
      float score = scores[n].thread_elements()[e] * QUERY_SCALE;
#if HAS_SOFTCAP
      score = SOFTCAP * tanh(score);
#endif
      const int position = base + n * 8 + col8 + e;
#if ROWS > 1
      if (position < my_start || position >= my_end) score = MASKED;
#endif
      if (partial && (position < start || position >= end)) score = MASKED;
      scores[n].thread_elements()[e] = score;
      tile_top = max(tile_top, score);
    }
  }
  if (partial) {
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const int position = base + n * 8 + right_row(lane, e);
        if (position >= start && position < end) continue;
        UNROLL for (int s = 0; s < V_SPANS; ++s) v[n][s][e] = vec<KT, W>(KT(0));
      }
    }
  }

  tile_top = max_of_row(tile_top);
  if (simd_any(tile_top > top)) {
    const float new_top = max(top, tile_top);
    const float shrink = exp2(top - new_top);
    top = new_top;
    weight_sum *= shrink;
    UNROLL for (int i = 0; i < V_SPANS * W; ++i) {
      acc[i].thread_elements()[0] *= shrink;
      acc[i].thread_elements()[1] *= shrink;
    }
  }
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    UNROLL for (int e = 0; e < 2; ++e) {
      const float weight = exp2(scores[n].thread_elements()[e] - top);
      scores[n].thread_elements()[e] = weight;
      weight_sum += weight;
    }
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      UNROLL for (int w = 0; w < W; ++w) {
        set_pair(right, v[n][s][0], v[n][s][1], w);
        simdgroup_multiply_accumulate(acc[s * W + w], scores[n], right, acc[s * W + w]);
      }
    }
  }
}
#undef FIND
#undef LOAD_K

weight_sum = sum_of_row(weight_sum);

if (col8 == 0) {
  all_tops[simdgroup][row8] = top;
  all_sums[simdgroup][row8] = weight_sum;
}
UNROLL for (int s = 0; s < V_SPANS; ++s) {
  UNROLL for (int e = 0; e < 2; ++e) {
    UNROLL for (int w = 0; w < W; ++w) {
      const int d = (s * 8 + col8 + e) * W + w;
      all_acc[simdgroup][row8][d] = acc[s * W + w].thread_elements()[e];
    }
  }
}
