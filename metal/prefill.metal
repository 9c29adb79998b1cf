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
// Threadgroup memory: KEYS rows of K and of V, each with K_PAD and V_PAD more vectors of W elements;
// in CUDA K may have a padding of its own, and where there is room all is there twice.
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
// A row of K or V is cut in spans of 8 loads, and a span is W matrices wide. A product doesn't care
// about the order of d, so matrix.h says which element of a span each row or column stands for.
constexpr int K_SPANS = DK / (8 * W);
constexpr int V_SPANS = DV / (8 * W);
constexpr int KEY_TILES = KEYS / 8;
constexpr int TILES = KEY_TILES > 1 ? 2 : 1;
constexpr int VECTORS = 8 * COLUMNS * SIMDGROUPS;
constexpr int THREADS = SIMDGROUPS * 32;
// A tile's rows are brought to threadgroup memory in copies of CW elements, PARTS of K and of V by
// every thread.
typedef copy_of<KT, W>::type Copy;
constexpr int CW = sizeof(Copy) / sizeof(KT);
constexpr int COPIES = (DK > DV ? DK : DV) / CW;
constexpr int PARTS = (KEYS * COPIES + THREADS - 1) / THREADS;
constexpr int AT_ONCE = PARTS < COPIES_AT_ONCE ? PARTS : COPIES_AT_ONCE;
// Whether a thread's are of rows so far apart, in blocks that follow from the text alone.
constexpr int APART = THREADS / COPIES;
constexpr bool REGULAR = THREADS % COPIES == 0 && BS % APART == 0 && APART <= KEYS;
constexpr int NUM_BLOCKS = !REGULAR ? PARTS : KEYS > BS ? KEYS / BS : 1;

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
const int window = plan[1];

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
const int start = max(low_end - window, 0);
#endif

const int my_first = first_vector + int(simdgroup_index_in_threadgroup) * (8 * COLUMNS);
typedef keys_span<KT, W, TILES> KSpan;
typedef values_span<KT, W, TILES> VSpan;
vec<T, W> q[K_SPANS][COLUMNS][2];
// What the vectors see whose scores a lane holds.
int my_end[COLUMNS][2];
UNROLL for (int c = 0; c < COLUMNS; ++c) {
  const device T* from[2];
  UNROLL for (int e = 0; e < 2; ++e) {
    const int vector = min(my_first + c * 8 + right_column(lane, e), last_vector);
    const long head = ROW(vector / FACTOR) * (H * FACTOR) + kv_head * FACTOR + vector % FACTOR;
    from[e] = queries + head * DK;
    my_end[c][e] = END(min(my_first + c * 8 + col8 + e, last_vector) / FACTOR);
  }
  UNROLL for (int s = 0; s < K_SPANS; ++s) {
    const int d = s * 8 * W;
    KSpan::load_query(from[0] + d, from[1] + d, q[s][c][0], q[s][c][1], lane);
  }
}

constexpr int K_ROW = DK / W + KSpan::padding(K_PAD);
constexpr int V_ROW = DV / W + V_PAD;
constexpr int TILE_BYTES = KEYS * (K_ROW + V_ROW) * W * int(sizeof(KT));
constexpr int BUFFERS = 2 * TILE_BYTES <= TWO_TILES_BYTES ? 2 : 1;
TILE_ALIGNED threadgroup vec<KT, W> k_tiles[BUFFERS][KEYS][K_ROW];
TILE_ALIGNED threadgroup vec<KT, W> v_tiles[BUFFERS][KEYS][V_ROW];

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

// Copy j of a thread is number COPY(j) of the row of the tile's token KEY(j). Tokens of a tile that no
// row sees are not read, as their slots may hold anything: what a thread has read before stays in their
// place, and their scores are masked. A thread's copies are on their way at once, AHEAD while the tile
// before is multiplied, and their blocks are known before.
const int my_key = REGULAR ? thread_id / COPIES : 0;
#define KEY(j) (REGULAR ? my_key + (j) * APART : (thread_id + (j) * THREADS) / COPIES)
#define COPY(j) (REGULAR ? thread_id % COPIES : (thread_id + (j) * THREADS) % COPIES)
// Rows of a head from that of slot my_key to that of KEY(j), in its block.
#define SLOTS(base, j) \
  int(REGULAR ? (j) * APART % BS + (BS > KEYS ? uint(base) % BS : 0u) \
                      : uint((base) + KEY(j)) % BS)
const int first_block = start / BS;
const int last_block = (high_end - 1) / BS;
int blocks[NUM_BLOCKS];
#define FIND_BLOCKS(base) \
  UNROLL for (int i = 0; i < NUM_BLOCKS; ++i) { \
    const int block = int(uint((base) + (REGULAR ? i * BS : KEY(i))) / BS); \
    blocks[i] = table[min(max(block, first_block), last_block)]; \
  }

constexpr bool AHEAD = LOADS_AHEAD && AT_ONCE == PARTS;
constexpr int SLOT_ROWS = SLOT_MAJOR ? H : 1;
const long my_row = SLOT_MAJOR ? my_key * H + kv_head : kv_head * BS + my_key;
Copy new_k[AT_ONCE] = {};
Copy new_v[AT_ONCE] = {};
#define LOAD_PARTS(base, first) \
  UNROLL for (int i = 0; i < AT_ONCE; ++i) { \
    const int j = min((first) + i, PARTS - 1); \
    if (uint((base) + KEY(j) - start) >= uint(high_end - start)) continue; \
    const long block = blocks[REGULAR ? j * APART / BS : j]; \
    const long row = block * (BS * H) + my_row + SLOTS(base, j) * SLOT_ROWS; \
    const device KT* k_row = k_pool + row * DK + COPY(j) * CW; \
    const device KT* v_row = v_pool + row * DV + COPY(j) * CW; \
    if (COPY(j) < DK / CW) new_k[i] = *reinterpret_cast<const device Copy*>(k_row); \
    if (COPY(j) < DV / CW) new_v[i] = *reinterpret_cast<const device Copy*>(v_row); \
  }
// Tiles lie at multiples of KEYS, so that a row's result doesn't depend on the rows beside it.
int base = start / KEYS * KEYS;
FIND_BLOCKS(base)
if (AHEAD && base < high_end) {
  LOAD_PARTS(base, 0)
  FIND_BLOCKS(base + KEYS)
}
for (; base < high_end; base += KEYS) {
  // With two buffers one barrier a tile does: whoever fills one knows that all are done with it.
  const int buffer = base / KEYS % BUFFERS;
#define K_TILE(key, load) &k_tiles[buffer][key][load]
#define V_TILE(key, load) &v_tiles[buffer][key][load]
  UNROLL for (int first = 0; first < PARTS; first += AT_ONCE) {
    if (!AHEAD) {
      LOAD_PARTS(base, first)
    }
    if (BUFFERS == 1 && first == 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 0; i < AT_ONCE; ++i) {
      const int j = first + i;
      if (j >= PARTS || KEY(j) >= KEYS) continue;
      const int load = COPY(j) * (CW / W);
      if (COPY(j) < DK / CW) put_copy(K_TILE(KEY(j), load), new_k[i]);
      if (COPY(j) < DV / CW) put_copy(V_TILE(KEY(j), load), new_v[i]);
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
    KSpan keys[KEY_TILES / TILES];
    UNROLL for (int n = 0; n < KEY_TILES; n += TILES) {
      keys[n / TILES].load(K_TILE(n * 8, s * 8), K_ROW, lane);
    }
    UNROLL for (int w = 0; w < W; w += 2) {
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        UNROLL for (int i = 0; i < 2; ++i) set_inner(right[c][i], q[s][c][0], q[s][c][1], w + i);
      }
      UNROLL for (int n = 0; n < KEY_TILES; n += TILES) {
        keys[n / TILES].set_left(left, w);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
#if KEYS == 8
          simdgroup_multiply_accumulate(scores[c][0], left[0], right[c][0], scores[c][0]);
          simdgroup_multiply_accumulate(scores[c][0], left[1], right[c][1], scores[c][0]);
#else
          multiply_four(scores[c][n], scores[c][n + 1], left, right[c]);
#endif
        }
      }
    }
  }

  // Only the tiles at both ends hold tokens that some row doesn't see.
  const bool partial = base < high_end - window || base + KEYS > low_end;
  UNROLL for (int c = 0; c < COLUMNS; ++c) {
    float tile_top[2] = {LOWEST, LOWEST};
    UNROLL for (int n = 0; n < KEY_TILES; ++n) {
      const int position = base + n * 8 + row8;
      UNROLL for (int e = 0; e < 2; ++e) {
        float score = scores[c][n].thread_elements()[e] * QUERY_SCALE;
#if HAS_SOFTCAP
        score = SOFTCAP * tanh(score);
#endif
        if (partial && (position < my_end[c][e] - window || position >= my_end[c][e])) {
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

  UNROLL for (int n = 0; n < KEY_TILES; n += TILES) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      UNROLL for (int i = 0; i < TILES; ++i) {
        UNROLL for (int e = 0; e < 2; ++e) {
          const float weight = exp2(scores[c][n + i].thread_elements()[e] - top[c][e]);
          scores[c][n + i].thread_elements()[e] = weight;
          weight_sum[c][e] += weight;
        }
        set_right(right[c][i], scores[c][n + i]);
      }
    }
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      VSpan values;
      values.load(V_TILE(n * 8, s * 8), V_ROW, lane);
      UNROLL for (int w = 0; w < W; w += 2) {
        values.set_left(left, w);
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
    device float* to = partials + place * DV;
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      UNROLL for (int w = 0; w < W; ++w) {
        to[s * 8 * W + VSpan::place(w, row8)] = acc[c][s * W + w].thread_elements()[e];
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
    device T* to = out + (ROW(vector / FACTOR) * (H * FACTOR) + head) * DV;
    UNROLL for (int s = 0; s < V_SPANS; ++s) {
      UNROLL for (int w = 0; w < W; ++w) {
        const float x = acc[c][s * W + w].thread_elements()[e] * factor;
        to[s * 8 * W + VSpan::place(w, row8)] = T(x);
      }
    }
  }
#endif
}
#undef ROW
#undef END
#undef KEY
#undef COPY
#undef SLOTS
#undef FIND_BLOCKS
#undef LOAD_PARTS
#undef K_TILE
#undef V_TILE
