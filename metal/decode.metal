// Attention of the 1 to ROWS newest tokens of each sequence, straight over its blocks.
//
// Inputs   queries  (T, H * FACTOR, DK) of T
//          k_pool   (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR
//          v_pool   likewise with DV
//          plan     int32, at least 8 elements: [0] number of work items, [1] window (a query at p
//                   sees (p - window, p]); from [8] the items, 8 elements each:
//                   [0] the sequence's first row in queries, [1] its rows, 1 to ROWS,
//                   [2] first and [3] end of the item's tokens, a half-open range, empty for a row
//                   of padding, whose output is zeros,
//                   [4] the sequence's tokens: its rows are the last of these,
//                   [5] where in plan its block table begins, [6] place of the partial result
//          sinks    (H * FACTOR,) of any type, where HAS_SINKS and not SPLIT
//          token    the newest token
//          keys     (T, H, DK) of T, where WRITES: the new rows' K, which is not in the pool yet;
//                   it is stored where the block table says, and then attended to like the rest
//          values   (T, H, DV) of T, likewise
// Outputs  not SPLIT, where each sequence is one item:
//          out      (T, H * FACTOR, DV) of T
//          SPLIT, where merge.metal follows:
//          partials (items, H, PARTS * GH, DV) float32, weighted sums of V, not normalised
//          stats    (items, H, PARTS * GH, 2) float32: maximum of the scores times log2(e), and
//                   the sum of the weights relative to it
//          written  (8,) int32, where WRITES: zeros, the next token
// Grid     items * H * PARTS threadgroups of SIMDGROUPS * 32 threads; a threadgroup takes up to GH
//          of the ROWS * FACTOR query vectors that share a KV head, in registers
// Threadgroup memory: SIMDGROUPS * GH * (DV + 2) floats.
// Work of a threadgroup: the tokens of one item; the host bounds them.
// Numerics: products and sums in float32; softmax online, in powers of 2. Masked scores never meet
// an infinity, and V outside the item's tokens counts as 0, whatever the slot holds.
// Constants: T, KT (types); H, FACTOR, DK, DV, BS, SLOT_MAJOR, ROWS, GH, PARTS, U (tokens of a tile;
// at least 2; U * GH is at most 32 and a power of 2), SIMDGROUPS, KW, VW (width of a load), SPLIT, WRITES,
// HAS_SINKS, HAS_SOFTCAP, QUERY_SCALE (scale * log2(e), or scale / softcap), SOFTCAP (softcap * log2(e)).

constexpr int KJ = (DK + 32 * KW - 1) / (32 * KW);
constexpr int VJ = (DV + 32 * VW - 1) / (32 * VW);
constexpr int N = U * GH;
// Lanes that share a score after sum_scores, and lanes from one token to the next.
constexpr int SPREAD = 32 / N;
constexpr int ACROSS = SPREAD * GH;
// A tile spans RUNS runs of RUN slots, each within one block.
constexpr int RUN = BS < U ? BS : U;
constexpr int RUNS = U / RUN;
constexpr int STRIDE = SLOT_MAJOR ? H : 1;

float q[GH][KJ * KW];
UNROLL for (int g = 0; g < GH; ++g) {
  const int vector = part * GH + g;
  const bool live = vector < num_vectors;
  const long row = live ? first_row + vector / FACTOR : first_row;
  const device T* from = queries + (row * (H * FACTOR) + kv_head * FACTOR + vector % FACTOR) * DK;
  UNROLL for (int j = 0; j < KJ; ++j) {
    UNROLL for (int w = 0; w < KW; ++w) {
      const int d = (j * 32 + int(lane)) * KW + w;
      q[g][j * KW + w] = live && d < DK ? float(from[d]) * QUERY_SCALE : 0.0f;
    }
  }
}

// After sum_scores a lane holds one score: of this token of the tile and this query vector.
const int my_token = int(lane) / ACROSS;
const int my_vector = part * GH + (int(lane) / SPREAD) % GH;
#if ROWS > 1
const int my_row = my_vector < num_vectors ? my_vector / FACTOR : num_rows - 1;
const int my_end = context_len - num_rows + my_row + 1;
const int my_start = my_end - plan[1];
#endif

float top = LOWEST;
float weight_sum = 0.0f;
float acc[GH][VJ * VW];
UNROLL for (int g = 0; g < GH; ++g) {
  UNROLL for (int e = 0; e < VJ * VW; ++e) acc[g][e] = 0.0f;
}

const int first_block = start / BS;
const int last_block = (end - 1) / BS;
int base = start / U * U + simdgroup * U;
long places[RUNS];
vec<KT, KW> k[U][KJ];
vec<KT, VW> v[U][VJ];

#define FIND(tile)                                                                     \
  UNROLL for (int r = 0; r < RUNS; ++r) {                                              \
    const uint position = uint((tile) + r * RUN);                                      \
    const long id = table[min(max(int(position / BS), first_block), last_block)];      \
    places[r] = SLOT_MAJOR ? (id * BS + position % BS) * H + kv_head                   \
                           : (id * H + kv_head) * BS + position % BS;                  \
  }
#define LOAD_K                                                                         \
  UNROLL for (int u = 0; u < U; ++u) {                                                 \
    const long place = places[u / RUN] + (u % RUN) * STRIDE;                           \
    load_row<KT, KW, KJ, DK>(k[u], k_pool + place * DK, lane);                         \
  }

if (base < end) {
  FIND(base)
  LOAD_K
}
for (; base < end; base += SIMDGROUPS * U) {
  // Loads run ahead of use: V of this tile before its scores, K of the next one after them.
  UNROLL for (int u = 0; u < U; ++u) {
    const long place = places[u / RUN] + (u % RUN) * STRIDE;
    load_row<KT, VW, VJ, DV>(v[u], v_pool + place * DV, lane);
  }
  const int next = base + SIMDGROUPS * U;
  FIND(next)

  float scores[N / 2];
  UNROLL for (int i = 0; i < N / 2; ++i) {
    const int u = i / GH;
    const int g = i % GH;
    float low = 0.0f;
    float high = 0.0f;
    UNROLL for (int e = 0; e < KJ * KW; ++e) {
      low += q[g][e] * float(k[u][e / KW][e % KW]);
      high += q[g][e] * float(k[U / 2 + u][e / KW][e % KW]);
    }
    scores[i] = halve(low, high, lane, 16);
  }
  // Also after the last tile, where the slots are some of the last block's: a condition would
  // keep the compiler from reusing the registers.
  LOAD_K

  float score = sum_scores<N>(scores, lane);
#if HAS_SOFTCAP
  score = SOFTCAP * tanh(score);
#endif
  const int position = base + my_token;
#if ROWS > 1
  if (position < my_start || position >= my_end) score = MASKED;
#endif
  if (base < start || base + U > end) {
    if (position < start || position >= end) score = MASKED;
    UNROLL for (int u = 0; u < U; ++u) {
      if (base + u < start || base + u >= end) clear_row<KT, VW, VJ>(v[u]);
    }
  }

  const float tile_top = max_above<ACROSS>(score);
  if (simd_any(tile_top > top)) {
    const float new_top = max(top, tile_top);
    const float shrink = exp2(top - new_top);
    top = new_top;
    weight_sum *= shrink;
    UNROLL for (int g = 0; g < GH; ++g) {
      const float factor = simd_broadcast(shrink, ushort(g * SPREAD));
      UNROLL for (int e = 0; e < VJ * VW; ++e) acc[g][e] *= factor;
    }
  }
  const float weight = exp2(score - top);
  weight_sum += weight;
  UNROLL for (int u = 0; u < U; ++u) {
    UNROLL for (int g = 0; g < GH; ++g) {
      const float p = simd_broadcast(weight, ushort((u * GH + g) * SPREAD));
      UNROLL for (int e = 0; e < VJ * VW; ++e) acc[g][e] += p * float(v[u][e / VW][e % VW]);
    }
  }
}
#undef FIND
#undef LOAD_K

weight_sum = sum_above<ACROSS>(weight_sum);

if (int(lane) < ACROSS && int(lane) % SPREAD == 0) {
  all_tops[simdgroup][int(lane) / SPREAD] = top;
  all_sums[simdgroup][int(lane) / SPREAD] = weight_sum;
}
UNROLL for (int g = 0; g < GH; ++g) {
  UNROLL for (int e = 0; e < VJ * VW; ++e) {
    const int d = (e / VW * 32 + int(lane)) * VW + e % VW;
    if (d < DV) all_acc[simdgroup][g][d] = acc[g][e];
  }
}
