// Attention of sequences with many rows, straight over their blocks, by 8 x 8 matrices.
//
// The FACTOR query heads that share a KV head go together: vector i of a piece is query head
// i % FACTOR of its row i / FACTOR. A threadgroup takes 8 * SIMDGROUPS vectors of one KV head and
// walks the tokens that any of them sees, KEYS at a time.
//
// Where SHARED, a piece is made of single rows of sequences whose first tokens lie in the same
// blocks, and an item takes a chunk of those tokens, which all of its rows see. What a row finds
// there waits for merge.metal, which adds what decode.metal finds in the rest.
//
// Inputs   queries  (T, H * FACTOR, DK) of T
//          k_pool   (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR
//          v_pool   likewise with DV
//          plan     int32, at least 8 elements: [0] number of work items, [1] window (a query at p
//                   sees (p - window, p]); from [8] the items, 8 elements each:
//                   [0] first row in queries of the item's piece, rows of one sequence in a run,
//                   [1] the piece's rows, [2] one past the position of its last row,
//                   [3] where in plan the sequence's block table begins, [4] the item's first vector.
//                   Where SHARED: [0] where in plan the numbers of the piece's rows are listed, [2]
//                   one past the item's last token, [5] its first token, a multiple of KEYS
//          sinks    (H * FACTOR,) of any type, where HAS_SINKS
//          token    the newest token
// Outputs  out      (T, H * FACTOR, DV) of T; or, where SHARED, for each vector of an item,
//          partials (items, H, 8 * SIMDGROUPS, DV) float32, sums of V by weight, and
//          stats    (items, H, 8 * SIMDGROUPS, 2) float32, the largest score and the sum of weights
// Grid     items * H threadgroups of SIMDGROUPS * 32 threads
// Threadgroup memory: KEYS rows of K and of V, each with PAD more vectors of W elements.
// Work of a threadgroup: 8 * SIMDGROUPS vectors times the tokens that they see. The host bounds the
// sum over a launch.
// Numerics: products and sums in float32; softmax online, in powers of 2. Masked scores never meet
// an infinity, and K and V of tokens that no row sees count as 0, whatever their slots hold. In CUDA
// factors are of KT, queries and weights too.
// Constants: T, KT (types); H, FACTOR, DK, DV, BS, SLOT_MAJOR, SIMDGROUPS, KEYS, W (width of a load;
// DK and DV are multiples of 8 * W), PAD, SHARED, HAS_SINKS, HAS_SOFTCAP, QUERY_SCALE (scale *
// log2(e), or scale / softcap), SOFTCAP (softcap * log2(e)).

// Products are K Q^T and V^T P^T: a SIMD-group's query vectors are the columns of its matrices.
// A row of K or V is cut in spans of 8 loads. Place c along a side of an 8 x 8 matrix stands for
// load c of a span, and the matrices of a span for the elements of its loads: a product doesn't care
// about the order of d, and so each lane reads what it needs of a span in whole loads.
constexpr int K_SPANS = DK / (8 * W);
constexpr int V_SPANS = DV / (8 * W);
constexpr int KEY_TILES = KEYS / 8;
constexpr int LOADS = (DK > DV ? DK : DV) / W;

const int thread_id = int(thread_index_in_threadgroup);
const uint lane = thread_index_in_simdgroup;
const int row8 = matrix_row(lane);
const int col8 = matrix_column(lane);

const int group = int(threadgroup_position_in_grid.x);
const int kv_head = group % H;
const int item = group / H;
if (item >= plan[0]) return;
const device int* work = plan + 8 + item * 8;
const int num_rows = work[1];
const device int* table = plan + work[3];
const int first_vector = work[4];
const int last_vector = min(first_vector + 8 * SIMDGROUPS, num_rows * FACTOR) - 1;

// A row's place in queries, and one past the last token that it sees.
#if SHARED
#define ROW(i) long(plan[work[0] + (i)])
#define END(i) work[2]
#else
#define ROW(i) long(work[0] + (i))
#define END(i) (work[2] - num_rows + (i) + 1)
#endif

// What the first and the last row of the item see; the others lie between them.
const int low_end = END(first_vector / FACTOR);
const int high_end = END(last_vector / FACTOR);
#if SHARED
const int start = work[5];
#else
const int start = max(low_end - plan[1], 0);
#endif

const int my_first = first_vector + int(simdgroup_index_in_threadgroup) * 8;
vec<T, W> q[K_SPANS][2];
UNROLL for (int e = 0; e < 2; ++e) {
  const int vector = min(my_first + right_column(lane, e), last_vector);
  const long head = ROW(vector / FACTOR) * (H * FACTOR) + kv_head * FACTOR + vector % FACTOR;
  const device T* from = queries + head * DK + right_row(lane, e) * W;
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    q[s][e] = *reinterpret_cast<const device vec<T, W>*>(from + s * 8 * W);
  }
}
// What the two vectors see whose scores a lane holds.
int my_end[2];
UNROLL for (int e = 0; e < 2; ++e) {
  my_end[e] = END(min(my_first + col8 + e, last_vector) / FACTOR);
}

threadgroup vec<KT, W> k_tile[KEYS][DK / W + PAD];
threadgroup vec<KT, W> v_tile[KEYS][DV / W + PAD];

simdgroup_matrix<float, 8, 8> acc[V_SPANS * W];
UNROLL for (int i = 0; i < V_SPANS * W; ++i) {
  acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float top[2] = {LOWEST, LOWEST};
float weight_sum[2] = {0.0f, 0.0f};

// Tiles lie at multiples of KEYS, so that a row's result doesn't depend on the rows beside it.
for (int base = start / KEYS * KEYS; base < high_end; base += KEYS) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < KEYS * LOADS; i += SIMDGROUPS * 32) {
    const int key = i / LOADS;
    const int load = i % LOADS;
    const int position = base + key;
    const bool live = position >= start && position < high_end;
    const long block = live ? table[position / BS] : 0;
    const long place = SLOT_MAJOR ? (block * BS + position % BS) * H + kv_head
                                  : (block * H + kv_head) * BS + position % BS;
    if (load < DK / W) {
      vec<KT, W> x = vec<KT, W>(KT(0));
      if (live) x = *reinterpret_cast<const device vec<KT, W>*>(k_pool + place * DK + load * W);
      k_tile[key][load] = x;
    }
    if (load < DV / W) {
      vec<KT, W> x = vec<KT, W>(KT(0));
      if (live) x = *reinterpret_cast<const device vec<KT, W>*>(v_pool + place * DV + load * W);
      v_tile[key][load] = x;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_matrix<OPERAND(KT), 8, 8> left[2];
  simdgroup_matrix<OPERAND(KT), 8, 8> right;
  simdgroup_matrix<float, 8, 8> scores[KEY_TILES];
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    scores[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    vec<KT, W> k[KEY_TILES][2];
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      UNROLL for (int e = 0; e < 2; ++e) k[n][e] = k_tile[n * 8 + row8][s * 8 + col8 + e];
    }
    // Products that follow each other go to different sums, so that none waits for the last.
    UNROLL for (int w = 0; w < W; ++w) {
      set_pair(right, q[s][0], q[s][1], w);
#if KEYS == 8
      set_pair(left[0], k[0][0], k[0][1], w);
      simdgroup_multiply_accumulate(scores[0], left[0], right, scores[0]);
#else
      UNROLL for (int n = 0; n < KEY_TILES; n += 2) {
        set_pair(left[0], k[n][0], k[n][1], w);
        set_pair(left[1], k[n + 1][0], k[n + 1][1], w);
        multiply_two(scores[n], scores[n + 1], left[0], left[1], right);
      }
#endif
    }
  }

  // Only the tiles at both ends hold tokens that some row doesn't see.
  const bool partial = base < high_end - plan[1] || base + KEYS > low_end;
  float tile_top[2] = {LOWEST, LOWEST};
  UNROLL for (int n = 0; n < KEY_TILES; ++n) {
    const int position = base + n * 8 + row8;
    UNROLL for (int e = 0; e < 2; ++e) {
      float score = scores[n].thread_elements()[e] * QUERY_SCALE;
#if HAS_SOFTCAP
      score = SOFTCAP * tanh(score);
#endif
      if (partial && (position < my_end[e] - plan[1] || position >= my_end[e])) score = MASKED;
      scores[n].thread_elements()[e] = score;
      tile_top[e] = max(tile_top[e], score);
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
      vec<KT, W> v[2];
      UNROLL for (int e = 0; e < 2; ++e) v[e] = v_tile[n * 8 + col8 + e][s * 8 + row8];
      UNROLL for (int w = 0; w < W; w += 2) {
        set_pair(left[0], v[0], v[1], w);
        set_pair(left[1], v[0], v[1], w + 1);
        multiply_two(acc[s * W + w], acc[s * W + w + 1], left[0], left[1], right);
      }
    }
  }
}

UNROLL for (int e = 0; e < 2; ++e) {
  float sum = sum_of_column(weight_sum[e]);
  const int vector = my_first + col8 + e;
#if SHARED
  if (vector <= last_vector) {
    const long place = (long(item) * H + kv_head) * (8 * SIMDGROUPS) + vector - first_vector;
    device float* to = partials + place * DV + row8 * W;
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      UNROLL for (int w = 0; w < W; ++w) to[s * 8 * W + w] = acc[s * W + w].thread_elements()[e];
    }
    if (row8 == 0) {
      stats[2 * place] = top[e];
      stats[2 * place + 1] = sum;
    }
  }
#else
  const int head = kv_head * FACTOR + vector % FACTOR;
  float factor = 1.0f;
#if HAS_SINKS
  const float sink = float(sinks[head]) * 1.4426950408889634f;
  const float with_sink = max(top[e], sink);
  factor = exp2(top[e] - with_sink);
  sum = sum * factor + exp2(sink - with_sink);
#endif
  factor = sum == 0.0f ? 0.0f : factor / sum;
  if (vector <= last_vector) {
    device T* to = out + (ROW(vector / FACTOR) * (H * FACTOR) + head) * DV + row8 * W;
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      vec<T, W> x;
      UNROLL for (int w = 0; w < W; ++w) x[w] = T(acc[s * W + w].thread_elements()[e] * factor);
      *reinterpret_cast<device vec<T, W>*>(to + s * 8 * W) = x;
    }
  }
#endif
}
#undef ROW
#undef END
