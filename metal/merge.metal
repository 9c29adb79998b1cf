// Merges the partial results of decode.metal, or of prefill.metal where that is SPLIT, by
// log-sum-exp, counting attention sinks once; where SHARED, those of both.
//
// Inputs   partials (items, H, VECTORS, DV) float32
//          stats    (items, H, VECTORS, 2) float32
//          plan     int32, as for decode.metal, with [2] where the merge list begins and [3] its
//                   rows; for each row 8 elements: [0] the item of its sequence's first partial
//                   result, [1] how many each tile of VECTORS has, whose items follow each other, 0
//                   for a row of padding, [2] the row within its sequence, and where SHARED [3] to [5]
//                   the same of what prefill.metal has found, 0 for a row that shares nothing
//          sinks    (H * FACTOR,) of any type, where HAS_SINKS
//          shared_partials, shared_stats: those of prefill.metal, where SHARED
// Output   out      (rows, H * FACTOR, DV) of T
// Grid     rows * H * FACTOR threadgroups of SIMDGROUPS * 32 threads
// Threadgroup memory: SIMDGROUPS * DV floats, where there are several.
// Work of a threadgroup: the chunks of one sequence.
// Constants: T (type); H, FACTOR, DV (a multiple of 4), VECTORS, SIMDGROUPS, HAS_SINKS, SHARED
// (vectors of an item of prefill.metal, or 0).

// A row of DV elements over 32 lanes, in loads of W.
constexpr int W = DV % 128 == 0 ? 4 : 2;
constexpr int LOADS = DV / W;
constexpr int J = (LOADS + 31) / 32;
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int group = int(threadgroup_position_in_grid.x);
const int head = group % (H * FACTOR);
const int row = group / (H * FACTOR);
if (row >= plan[3]) return;
const device int* work = plan + plan[2] + 8 * row;
const int num_own = work[1];

// Where the results of chunk i lie: first those of the sequence, then the shared ones.
#define FIRST(at, vectors) \
  ((long((at)[0] + ((at)[2] * FACTOR + head % FACTOR) / (vectors) * (at)[1]) * H + head / FACTOR) * \
       (vectors) + ((at)[2] * FACTOR + head % FACTOR) % (vectors))
const long first = FIRST(work, VECTORS);
#define PLACE(i) (first + (i) * (long(H) * VECTORS))
#if SHARED
const int num_chunks = num_own + work[4];
const long first_shared = FIRST(work + 3, SHARED);
#define SHARED_PLACE(i) (first_shared + ((i) - num_own) * (long(H) * SHARED))
#define STAT(i, e) \
  ((i) < num_own ? stats[2 * PLACE(i) + (e)] : shared_stats[2 * SHARED_PLACE(i) + (e)])
#define PARTIAL(i) \
  ((i) < num_own ? partials + PLACE(i) * DV : shared_partials + SHARED_PLACE(i) * DV)
#else
const int num_chunks = num_own;
#define STAT(i, e) stats[2 * PLACE(i) + (e)]
#define PARTIAL(i) (partials + PLACE(i) * DV)
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
vec<float, W> acc[J];
UNROLL for (int j = 0; j < J; ++j) acc[j] = vec<float, W>(0.0f);
for (int chunk = 0; chunk < num_chunks; chunk += 32) {
  const int mine = chunk + lane;
  const float share = mine < num_chunks ? exp2(STAT(mine, 0) - top) : 0.0f;
  if (mine < num_chunks) sum += share * STAT(mine, 1);
  const int count = min(num_chunks - chunk, 32);
  for (int i = simdgroup; i < count; i += SIMDGROUPS) {
    const float its = simd_broadcast(share, ushort(i));
    const device float* from = PARTIAL(chunk + i);
    UNROLL for (int j = 0; j < J; ++j) {
      const int load = j * 32 + lane;
      if (load >= LOADS) continue;
      const vec<float, W> x = *reinterpret_cast<const device vec<float, W>*>(from + load * W);
      UNROLL for (int w = 0; w < W; ++w) acc[j][w] += its * x[w];
    }
  }
}
sum = simd_sum(sum);
#if HAS_SINKS
sum += exp2(sink - top);
#endif
#undef FIRST
#undef PLACE
#undef SHARED_PLACE
#undef STAT
#undef PARTIAL

const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
device T* to = out + long(group) * DV;
#if SIMDGROUPS > 1
threadgroup float all_acc[SIMDGROUPS][DV];
UNROLL for (int j = 0; j < J; ++j) {
  const int load = j * 32 + lane;
  if (load >= LOADS) continue;
  UNROLL for (int w = 0; w < W; ++w) all_acc[simdgroup][load * W + w] = acc[j][w];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int d = int(thread_index_in_threadgroup); d < DV; d += SIMDGROUPS * 32) {
  float total = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) total += all_acc[s][d];
  to[d] = T(total * scale);
}
#else
UNROLL for (int j = 0; j < J; ++j) {
  const int load = j * 32 + lane;
  if (load >= LOADS) continue;
  vec<T, W> x;
  UNROLL for (int w = 0; w < W; ++w) x[w] = T(acc[j][w] * scale);
  *reinterpret_cast<device vec<T, W>*>(to + load * W) = x;
}
#endif
