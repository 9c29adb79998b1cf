// Merges the partial results of decode.metal by log-sum-exp, counting attention sinks once; where
// SHARED, also those that prefill.metal found in the tokens that sequences share.
//
// Inputs   partials (items, H, VECTORS, DV) float32
//          stats    (items, H, VECTORS, 2) float32
//          plan     int32, as for decode.metal, with [2] where the merge list begins and [3] its
//                   rows; for each row 8 elements: [0] place of its sequence's first partial result,
//                   [1] their number, at least 1, [2] the row within its sequence, [3] the first
//                   item of prefill.metal for the row's piece, [4] chunks of each of the piece's
//                   tiles, whose items follow each other, 0 for a row that shares nothing, [5] the
//                   row within its piece
//          sinks    (H * FACTOR,) of any type, where HAS_SINKS
//          shared_partials, shared_stats: those of prefill.metal, where SHARED
// Output   out      (rows, H * FACTOR, DV) of T
// Grid     rows * H * FACTOR threadgroups of SIMDGROUPS * 32 threads
// Threadgroup memory: SIMDGROUPS * DV floats.
// Work of a threadgroup: the chunks of one sequence.
// Constants: T (type); H, FACTOR, DV, VECTORS, SIMDGROUPS, HAS_SINKS, SHARED (vectors of an item of
// prefill.metal, or 0).

constexpr int J = (DV + 31) / 32;
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int group = int(threadgroup_position_in_grid.x);
const int head = group % (H * FACTOR);
const int row = group / (H * FACTOR);
if (row >= plan[3]) return;
const device int* work = plan + plan[2] + 8 * row;
const int num_own = work[1];
const int vector = work[2] * FACTOR + head % FACTOR;
// Partial results of one query vector lie this far apart.
constexpr long STRIDE = long(H) * VECTORS;
const long first = (long(work[0]) * H + head / FACTOR) * VECTORS + vector;

// Partial results and stats of chunk i: first the sequence's own chunks, then the shared ones.
#if SHARED
const int num_chunks = num_own + work[4];
const int shared_vector = work[5] * FACTOR + head % FACTOR;
const long first_item = long(work[3]) + shared_vector / SHARED * work[4];
const long first_shared = (first_item * H + head / FACTOR) * SHARED + shared_vector % SHARED;
constexpr long SHARED_STRIDE = long(H) * SHARED;
#define STAT(i, e) ((i) < num_own ? stats[2 * (first + (i) * STRIDE) + (e)] \
                    : shared_stats[2 * (first_shared + ((i) - num_own) * SHARED_STRIDE) + (e)])
#define PARTIAL(i, d) \
  ((i) < num_own ? partials[(first + (i) * STRIDE) * DV + (d)] \
                 : shared_partials[(first_shared + ((i) - num_own) * SHARED_STRIDE) * DV + (d)])
#else
const int num_chunks = num_own;
#define STAT(i, e) stats[2 * (first + (i) * STRIDE) + (e)]
#define PARTIAL(i, d) partials[(first + (i) * STRIDE) * DV + (d)]
#endif

float top = LOWEST;
for (int chunk = lane; chunk < num_chunks; chunk += 32) {
  top = max(top, STAT(chunk, 0));
}
top = simd_max(top);
#if HAS_SINKS
const float sink = float(sinks[head]) * 1.4426950408889634f;
top = max(top, sink);
#endif

// Each lane has the share of one chunk in 32, and all need it for the chunk's values.
float sum = 0.0f;
float acc[J];
UNROLL for (int j = 0; j < J; ++j) acc[j] = 0.0f;
for (int chunk = 0; chunk < num_chunks; chunk += 32) {
  const int mine = chunk + lane;
  const float share = mine < num_chunks ? exp2(STAT(mine, 0) - top) : 0.0f;
  if (mine < num_chunks) sum += share * STAT(mine, 1);
  const int count = min(num_chunks - chunk, 32);
  for (int i = simdgroup; i < count; i += SIMDGROUPS) {
    const float its = simd_broadcast(share, ushort(i));
    UNROLL for (int j = 0; j < J; ++j) {
      const int d = j * 32 + lane;
      if (d < DV) acc[j] += its * PARTIAL(chunk + i, d);
    }
  }
}
sum = simd_sum(sum);
#if HAS_SINKS
sum += exp2(sink - top);
#endif
#undef STAT
#undef PARTIAL

threadgroup float all_acc[SIMDGROUPS][DV];
UNROLL for (int j = 0; j < J; ++j) {
  const int d = j * 32 + lane;
  if (d < DV) all_acc[simdgroup][d] = acc[j];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
for (int d = int(thread_index_in_threadgroup); d < DV; d += SIMDGROUPS * 32) {
  float total = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) total += all_acc[s][d];
  out[(long(row) * (H * FACTOR) + head) * DV + d] = T(total * scale);
}
