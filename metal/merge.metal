// Merges the partial results of decode.metal by log-sum-exp, counting attention sinks once.
//
// Inputs   partials (items, H, VECTORS, DV) float32
//          stats    (items, H, VECTORS, 2) float32
//          plan     int32, as for decode.metal, with [2] where the merge list begins and [3] its
//                   rows; for each row 4 elements: [0] place of its sequence's first partial result,
//                   [1] their number, at least 1, [2] the row within its sequence
//          sinks    (H * FACTOR,) of any type, where HAS_SINKS
// Output   out      (rows, H * FACTOR, DV) of T
// Grid     rows * H * FACTOR threadgroups of SIMDGROUPS * 32 threads
// Threadgroup memory: SIMDGROUPS * DV floats.
// Work of a threadgroup: the chunks of one sequence.
// Constants: T (type); H, FACTOR, DV, VECTORS, SIMDGROUPS, HAS_SINKS.

constexpr int J = (DV + 31) / 32;
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int group = int(threadgroup_position_in_grid.x);
const int head = group % (H * FACTOR);
const int row = group / (H * FACTOR);
if (row >= plan[3]) return;
const device int* work = plan + plan[2] + 4 * row;
const int num_chunks = work[1];
const int vector = work[2] * FACTOR + head % FACTOR;
// Partial results of one query vector lie this far apart.
constexpr long STRIDE = long(H) * VECTORS;
const long first = (long(work[0]) * H + head / FACTOR) * VECTORS + vector;

float top = LOWEST;
for (int chunk = lane; chunk < num_chunks; chunk += 32) {
  top = max(top, stats[2 * (first + chunk * STRIDE)]);
}
top = simd_max(top);
#if HAS_SINKS
const float sink = float(sinks[head]) * 1.4426950408889634f;
top = max(top, sink);
#endif
float sum = 0.0f;
for (int chunk = lane; chunk < num_chunks; chunk += 32) {
  const long place = first + chunk * STRIDE;
  sum += exp2(stats[2 * place] - top) * stats[2 * place + 1];
}
sum = simd_sum(sum);
#if HAS_SINKS
sum += exp2(sink - top);
#endif

float acc[J];
UNROLL for (int j = 0; j < J; ++j) acc[j] = 0.0f;
for (int chunk = simdgroup; chunk < num_chunks; chunk += SIMDGROUPS) {
  const long place = first + chunk * STRIDE;
  const float share = exp2(stats[2 * place] - top);
  UNROLL for (int j = 0; j < J; ++j) {
    const int d = j * 32 + lane;
    if (d < DV) acc[j] += share * partials[place * DV + d];
  }
}

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
