// How decode.metal and decode_matrix.metal begin: the item's tokens and query vectors, and the new
// rows stored. Names and constants are those of their contracts.

const uint lane = thread_index_in_simdgroup;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int group = int(threadgroup_position_in_grid.x);
#if WRITES
if (group == 0 && thread_index_in_threadgroup < 8) written[thread_index_in_threadgroup] = 0;
#endif
const int part = group % PARTS;
const int kv_head = (group / PARTS) % H;
const int item = group / (PARTS * H);
if (item >= plan[0]) return;
const device int* work = plan + 8 + item * 8;
const int first_row = work[0];
const int num_rows = work[1];
const int start = work[2];
const int end = work[3];
const int context_len = work[4];
const device int* table = plan + work[5];
const int num_vectors = num_rows * FACTOR;
if (part * GH >= num_vectors) return;

#if WRITES
// Each threadgroup that reads a new row stores it first; those that share it store the same.
constexpr int VECTORS = (DK > DV ? DK : DV) / 4;
for (int i = int(thread_index_in_threadgroup); i < num_rows * VECTORS; i += SIMDGROUPS * 32) {
  const int row = i / VECTORS;
  const int d = i % VECTORS * 4;
  const int position = context_len - num_rows + row;
  if (position < start || position >= end) continue;
  const long id = table[position / BS];
  const long place = SLOT_MAJOR ? (id * BS + position % BS) * H + kv_head
                                : (id * H + kv_head) * BS + position % BS;
  const long source = long(first_row + row) * H + kv_head;
  if (d < DK) {
    const vec<T, 4> x = *reinterpret_cast<const device vec<T, 4>*>(keys + source * DK + d);
    device KT* to = const_cast<device KT*>(k_pool) + place * DK + d;
    UNROLL for (int j = 0; j < 4; ++j) to[j] = KT(float(x[j]));
  }
  if (d < DV) {
    const vec<T, 4> x = *reinterpret_cast<const device vec<T, 4>*>(values + source * DV + d);
    device KT* to = const_cast<device KT*>(v_pool) + place * DV + d;
    UNROLL for (int j = 0; j < 4; ++j) to[j] = KT(float(x[j]));
  }
}
threadgroup_barrier(mem_flags::mem_device);
#endif

// What each SIMD-group has found, by query vector.
threadgroup float all_acc[SIMDGROUPS][GH][DV];
threadgroup float all_tops[SIMDGROUPS][GH];
threadgroup float all_sums[SIMDGROUPS][GH];
