// Copies a run of a sequence's tokens out of the pool into contiguous K and V, in scratch memory that
// all layers of a step share, and passes the queries on: who attends those that are passed on reads
// K and V after they are there, and the next layer's, which come of that attention, write after that.
//
// Inputs   k_scratch at least k_at + H * N * DK elements of T; written from k_at: (H, N, DK)
//          v_scratch likewise, from v_at: (H, N, DV)
//          queries  (L, heads, DK) of T
//          k_pool   (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR
//          v_pool   likewise with DV
//          plan     int32, at least 8 elements: [0] the first token, [1] N, [2] k_at and [3] v_at, in
//                   units of 8 elements; from [8] the sequence's block table
//          token    the newest token
// Output   passed   the queries
// Grid     H * N * max(DK, DV) / 4 threads, or what the queries have in fours if that is more: each
//          copies 4 elements of a K row, of a V row and of the queries
// Threadgroup memory: none. Work of a thread: three loads and three stores of 4 elements.
// Constants: T, KT (types); H, DK, DV, BS, SLOT_MAJOR.

constexpr int VECTORS = (DK > DV ? DK : DV) / 4;
const uint index = thread_position_in_grid.x;
const long num_passed = long(queries_shape[0]) * queries_shape[1] * queries_shape[2] / 4;
if (index < num_passed) {
  reinterpret_cast<device vec<T, 4>*>(passed)[index] =
      reinterpret_cast<const device vec<T, 4>*>(queries)[index];
}

const int num_tokens = plan[1];
const int d = int(index % VECTORS) * 4;
const uint row = index / VECTORS;
const int head = int(row / uint(num_tokens));
if (head >= H) return;
const int position = plan[0] + int(row % uint(num_tokens));
const long block = plan[8 + position / BS];
const long place = SLOT_MAJOR ? (block * BS + position % BS) * H + head
                              : (block * H + head) * BS + position % BS;
if (d < DK) {
  const vec<KT, 4> x = *reinterpret_cast<const device vec<KT, 4>*>(k_pool + place * DK + d);
  device T* out = const_cast<device T*>(k_scratch) + long(plan[2]) * 8 + long(row) * DK + d;
  UNROLL for (int i = 0; i < 4; ++i) out[i] = T(float(x[i]));
}
if (d < DV) {
  const vec<KT, 4> x = *reinterpret_cast<const device vec<KT, 4>*>(v_pool + place * DV + d);
  device T* out = const_cast<device T*>(v_scratch) + long(plan[3]) * 8 + long(row) * DV + d;
  UNROLL for (int i = 0; i < 4; ++i) out[i] = T(float(x[i]));
}
