// Attention of sequences with many rows, straight over their blocks, by 8 x 8 matrices.
//
// The FACTOR query heads that share a KV head go together: vector i of a piece is query head
// i % FACTOR of its row i / FACTOR. A threadgroup takes VECTORS = 8 * COLUMNS * SIMDGROUPS vectors of
// one KV head and walks the tokens that any of them sees, KEYS at a time.
//
// Where SPLIT, an item takes but a chunk of those tokens, and what its rows find there waits for
// merge.metal. The rows are listed: those of one sequence, or single ones of sequences whose first
// tokens lie in the same blocks and which see all of these; decode.metal finds the rest.
//
// Inputs   queries  (T, H * FACTOR, DK) of T
//          k_pool   (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR
//          v_pool   likewise with DV
//          plan     int32, at least 8 elements: [0] number of work items, [1] window (a query at p
//                   sees (p - window, p]); from [8] the items, 8 elements each:
//                   [0] first row in queries of the item's piece, rows of one sequence in a run,
//                   [1] the piece's rows, [2] one past the position of its last row,
//                   [3] where in plan the sequence's block table begins, [4] the item's first vector.
//                   Where SPLIT: [0] where in plan the numbers of the piece's rows are listed, [2]
//                   one past the item's last token, [5] its first token, a multiple of KEYS, [6] one
//                   past the last token that the piece's first row sees; each next sees one more
//          sinks    (H * FACTOR,) of any type, where HAS_SINKS
//          token    the newest token
// Outputs  out      (T, H * FACTOR, DV) of T; or, where SPLIT, for each vector of an item,
//          partials (items, H, VECTORS, DV) float32, sums of V by weight, and
//          stats    (items, H, VECTORS, 2) float32, the largest score and the sum of weights
// Grid     items * H threadgroups of SIMDGROUPS * 32 threads
// Threadgroup memory: KEYS rows of K and of V, each with K_PAD and V_PAD more vectors of W elements.
// Work of a threadgroup: VECTORS times the tokens that they see. The host bounds the
// sum over a launch.
// Numerics: products and sums in float32; softmax online, in powers of 2. Masked scores never meet
// an infinity, and slots of tokens that no row sees are not read. In CUDA factors are of KT, queries
// and weights too.
// Constants: T, KT (types); H, FACTOR, DK, DV, BS, SLOT_MAJOR, SIMDGROUPS, COLUMNS (matrices of
// query vectors that a SIMD-group has), KEYS (tokens of a tile, 8 or a multiple of 16), W (width of a
// load; DK and DV are multiples of 8 * W), K_PAD, V_PAD, SPLIT, HAS_SINKS, HAS_SOFTCAP, QUERY_SCALE
// (scale * log2(e), or scale / softcap), SOFTCAP (softcap * log2(e)).

// Products are K Q^T and V^T P^T: a SIMD-group's query vectors are the columns of its matrices.
// A row of K or V is cut in spans of 8 loads. Place c along a side of an 8 x 8 matrix stands for
// load c of a span, and the matrices of a span for the elements of its loads: a product doesn't care
// about the order of d, and so each lane reads what it needs of a span in whole loads.
constexpr int K_SPANS = DK / (8 * W);
constexpr int V_SPANS = DV / (8 * W);
constexpr int KEY_TILES = KEYS / 8;
constexpr int TILES_AT_ONCE = KEY_TILES > 1 ? 2 : 1;
constexpr int VECTORS = 8 * COLUMNS * SIMDGROUPS;
constexpr int LOADS = (DK > DV ? DK : DV) / W;
constexpr int THREADS = SIMDGROUPS * 32;
// Loads of K, and as many of V, that a thread brings to a tile.
constexpr int PARTS = (KEYS * LOADS + THREADS - 1) / THREADS;
constexpr int AT_ONCE = PARTS < COPIES_AT_ONCE ? PARTS : COPIES_AT_ONCE;

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
const int last_vector = min(first_vector + VECTORS, num_rows * FACTOR) - 1;

// A row's place in queries, and one past the last token that it sees.
#if SPLIT
#define ROW(i) long(plan[work[0] + (i)])
#define END(i) min(work[2], work[6] + (i))
#else
#define ROW(i) long(work[0] + (i))
#define END(i) (work[2] - num_rows + (i) + 1)
#endif

// What the first and the last row of the item see; the others lie between them.
const int low_end = END(first_vector / FACTOR);
const int high_end = END(last_vector / FACTOR);
#if SPLIT
const int start = work[5];
#else
const int start = max(low_end - plan[1], 0);
#endif

const int my_first = first_vector + int(simdgroup_index_in_threadgroup) * (8 * COLUMNS);
vec<T, W> q[K_SPANS][COLUMNS][2];
// What the vectors see whose scores a lane holds.
int my_end[COLUMNS][2];
UNROLL for (int c = 0; c < COLUMNS; ++c) {
  UNROLL for (int e = 0; e < 2; ++e) {
    const int vector = min(my_first + c * 8 + right_column(lane, e), last_vector);
    const long head = ROW(vector / FACTOR) * (H * FACTOR) + kv_head * FACTOR + vector % FACTOR;
    const device T* from = queries + head * DK + right_row(lane, e) * W;
    UNROLL for (int s = 0; s < K_SPANS; ++s) {
      q[s][c][e] = *reinterpret_cast<const device vec<T, W>*>(from + s * 8 * W);
    }
    my_end[c][e] = END(min(my_first + c * 8 + col8 + e, last_vector) / FACTOR);
  }
}

LOAD_TWO_ALIGNED threadgroup vec<KT, W> k_tile[KEYS][DK / W + K_PAD];
threadgroup vec<KT, W> v_tile[KEYS][DV / W + V_PAD];

simdgroup_matrix<float, 8, 8> acc[COLUMNS][V_SPANS * W];
float top[COLUMNS][2];
float weight_sum[COLUMNS][2];
UNROLL for (int c = 0; c < COLUMNS; ++c) {
  UNROLL for (int i = 0; i < V_SPANS * W; ++i) {
    acc[c][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL for (int e = 0; e < 2; ++e) {
    top[c][e] = LOWEST;
    weight_sum[c][e] = 0.0f;
  }
}

// Load j of a thread is LOAD(j) of the row of the tile's token KEY(j). A tile at either end may reach
// past the tokens that some row sees: what is loaded there is the nearest of those once more, as other
// slots may hold anything, and its score is masked. Threads that are left over load some token too, and
// don't keep it. A thread's loads are on their way at once, AHEAD while the tile before is multiplied,
// and their blocks are known before.
#define KEY(j) ((thread_id + (j) * THREADS) / LOADS)
#define LOAD(j) ((thread_id + (j) * THREADS) % LOADS)
#define POSITION(base, j) min(max((base) + KEY(j), start), high_end - 1)
int blocks[PARTS];
#define FIND_BLOCKS(base) \
  UNROLL for (int j = 0; j < PARTS; ++j) blocks[j] = table[POSITION(base, j) / BS];

constexpr bool AHEAD = LOADS_AHEAD && AT_ONCE == PARTS;
vec<KT, W> new_k[AT_ONCE];
vec<KT, W> new_v[AT_ONCE];
#define LOAD_PARTS(base, first) \
  UNROLL for (int i = 0; i < AT_ONCE; ++i) { \
    const int j = min((first) + i, PARTS - 1); \
    const long block = blocks[j]; \
    const int slot = POSITION(base, j) % BS; \
    const long place = SLOT_MAJOR ? (block * BS + slot) * H + kv_head \
                                  : (block * H + kv_head) * BS + slot; \
    const device KT* k_row = k_pool + place * DK + LOAD(j) * W; \
    const device KT* v_row = v_pool + place * DV + LOAD(j) * W; \
    if (LOAD(j) < DK / W) new_k[i] = *reinterpret_cast<const device vec<KT, W>*>(k_row); \
    if (LOAD(j) < DV / W) new_v[i] = *reinterpret_cast<const device vec<KT, W>*>(v_row); \
  }

// Tiles lie at multiples of KEYS, so that a row's result doesn't depend on the rows beside it.
int base = start / KEYS * KEYS;
FIND_BLOCKS(base)
if (AHEAD) {
  LOAD_PARTS(base, 0)
  FIND_BLOCKS(base + KEYS)
}
for (; base < high_end; base += KEYS) {
  UNROLL for (int first = 0; first < PARTS; first += AT_ONCE) {
    if (!AHEAD) {
      LOAD_PARTS(base, first)
    }
    if (first == 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < AT_ONCE; ++i) {
      const int j = first + i;
      if (j >= PARTS || KEY(j) >= KEYS) continue;
      if (LOAD(j) < DK / W) k_tile[KEY(j)][LOAD(j)] = new_k[i];
      if (LOAD(j) < DV / W) v_tile[KEY(j)][LOAD(j)] = new_v[i];
    }
  }
  if (AHEAD) {
    LOAD_PARTS(base + KEYS, 0)
  }
  FIND_BLOCKS(base + (AHEAD ? 2 : 1) * KEYS)
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_matrix<OPERAND(KT), 8, 8> left[4];
  simdgroup_matrix<OPERAND(KT), 8, 8> right[COLUMNS][2];
  simdgroup_matrix<float, 8, 8> scores[COLUMNS][KEY_TILES];
  UNROLL for (int c = 0; c < COLUMNS; ++c) {
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      scores[c][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    vec<KT, W> k[KEY_TILES][2];
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      load_two(&k_tile[n * 8 + row8][s * 8 + col8], k[n][0], k[n][1]);
    }
    UNROLL for (int w = 0; w < W; w += 2) {
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        UNROLL for (int i = 0; i < 2; ++i) set_inner(right[c][i], q[s][c][0], q[s][c][1], w + i);
      }
#if KEYS == 8
      UNROLL for (int i = 0; i < 2; ++i) {
        set_inner(left[i], k[0][0], k[0][1], w + i);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          simdgroup_multiply_accumulate(scores[c][0], left[i], right[c][i], scores[c][0]);
        }
      }
#else
      UNROLL for (int n = 0; n < KEY_TILES; n += 2) {
        UNROLL for (int i = 0; i < 4; ++i) {
          set_inner(left[i], k[n + i % 2][0], k[n + i % 2][1], w + i / 2);
        }
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          multiply_four(scores[c][n], scores[c][n + 1], left, right[c]);
        }
      }
#endif
    }
  }

  // Only the tiles at both ends hold tokens that some row doesn't see.
  const bool partial = base < high_end - plan[1] || base + KEYS > low_end;
  UNROLL for (int c = 0; c < COLUMNS; ++c) {
    float tile_top[2] = {LOWEST, LOWEST};
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      const int position = base + n * 8 + row8;
      UNROLL for (int e = 0; e < 2; ++e) {
        float score = scores[c][n].thread_elements()[e] * QUERY_SCALE;
#if HAS_SOFTCAP
        score = SOFTCAP * tanh(score);
#endif
        if (partial && (position < my_end[c][e] - plan[1] || position >= my_end[c][e])) {
          score = MASKED;
        }
        scores[c][n].thread_elements()[e] = score;
        tile_top[e] = max(tile_top[e], score);
      }
    }
    UNROLL for (int e = 0; e < 2; ++e) tile_top[e] = max_of_column(tile_top[e]);
    if (simd_any(tile_top[0] > top[c][0] || tile_top[1] > top[c][1])) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const float new_top = max(top[c][e], tile_top[e]);
        const float shrink = exp2(top[c][e] - new_top);
        top[c][e] = new_top;
        weight_sum[c][e] *= shrink;
        UNROLL for (int i = 0; i < V_SPANS * W; ++i) acc[c][i].thread_elements()[e] *= shrink;
      }
    }
  }

  UNROLL for (int n = 0; n < KEY_TILES; n += TILES_AT_ONCE) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      UNROLL for (int i = 0; i < TILES_AT_ONCE; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
          const float weight = exp2(scores[c][n + i].thread_elements()[e] - top[c][e]);
          scores[c][n + i].thread_elements()[e] = weight;
          weight_sum[c][e] += weight;
        }
        set_right(right[c][i], scores[c][n + i]);
      }
    }
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      vec<KT, W> v[TILES_AT_ONCE][2];
      UNROLL for (int i = 0; i < TILES_AT_ONCE; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
          v[i][e] = v_tile[(n + i) * 8 + col8 + e][s * 8 + row8];
        }
      }
      UNROLL for (int w = 0; w < W; w += 2) {
        UNROLL for (int i = 0; i < 2 * TILES_AT_ONCE; ++i) {
          set_pair(left[i], v[i / 2][0], v[i / 2][1], w + i % 2);
        }
        const int first = s * W + w;
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
#if KEYS == 8
          multiply_two(acc[c][first], acc[c][first + 1], left[0], left[1], right[c][0]);
#else
          multiply_four(acc[c][first], acc[c][first + 1], left, right[c]);
#endif
        }
      }
    }
  }
}

UNROLL for (int i = 0; i < 2 * COLUMNS; ++i) {
  const int c = i / 2;
  const int e = i % 2;
  float sum = sum_of_column(weight_sum[c][e]);
  const int vector = my_first + c * 8 + col8 + e;
#if SPLIT
  if (vector <= last_vector) {
    const long place = (long(item) * H + kv_head) * VECTORS + vector - first_vector;
    device float* to = partials + place * DV + row8 * W;
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      UNROLL for (int w = 0; w < W; ++w) {
        to[s * 8 * W + w] = acc[c][s * W + w].thread_elements()[e];
      }
    }
    if (row8 == 0) {
      stats[2 * place] = top[c][e];
      stats[2 * place + 1] = sum;
    }
  }
#else
  const int head = kv_head * FACTOR + vector % FACTOR;
  float factor = 1.0f;
#if HAS_SINKS
  const float sink = float(sinks[head]) * 1.4426950408889634f;
  const float with_sink = max(top[c][e], sink);
  factor = exp2(top[c][e] - with_sink);
  sum = sum * factor + exp2(sink - with_sink);
#endif
  factor = sum == 0.0f ? 0.0f : factor / sum;
  if (vector <= last_vector) {
    device T* to = out + (ROW(vector / FACTOR) * (H * FACTOR) + head) * DV + row8 * W;
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      vec<T, W> x;
      UNROLL for (int w = 0; w < W; ++w) {
        x[w] = T(acc[c][s * W + w].thread_elements()[e] * factor);
      }
      *reinterpret_cast<device vec<T, W>*>(to + s * 8 * W) = x;
    }
  }
#endif
}
#undef ROW
#undef END
#undef KEY
#undef LOAD
#undef POSITION
#undef FIND_BLOCKS
#undef LOAD_PARTS
