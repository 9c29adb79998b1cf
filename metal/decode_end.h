// How decode.metal and decode_matrix.metal end: the results of the SIMD-groups become one.

threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = int(thread_index_in_threadgroup); i < GH * DV; i += SIMDGROUPS * 32) {
  const int g = i / DV;
  const int d = i % DV;
  const int vector = part * GH + g;
  if (vector >= num_vectors) continue;
  float group_top = all_tops[0][g];
  UNROLL for (int s = 1; s < SIMDGROUPS; ++s) group_top = max(group_top, all_tops[s][g]);
  float sum = 0.0f;
  float total = 0.0f;
  UNROLL for (int s = 0; s < SIMDGROUPS; ++s) {
    const float share = exp2(all_tops[s][g] - group_top);
    sum += share * all_sums[s][g];
    total += share * all_acc[s][g][d];
  }
#if SPLIT
  const long place = (long(work[6]) * H + kv_head) * (PARTS * GH) + vector;
  partials[place * DV + d] = total;
  if (d == 0) {
    stats[2 * place] = group_top;
    stats[2 * place + 1] = sum;
  }
#else
  const int head = kv_head * FACTOR + vector % FACTOR;
#if HAS_SINKS
  const float sink = float(sinks[head]) * 1.4426950408889634f;
  const float with_sink = max(group_top, sink);
  total *= exp2(group_top - with_sink);
  sum = sum * exp2(group_top - with_sink) + exp2(sink - with_sink);
#endif
  const long row = first_row + vector / FACTOR;
  out[(row * (H * FACTOR) + head) * DV + d] = T(sum == 0.0f ? 0.0f : total / sum);
#endif
}
