// Copies runs of tokens out of the pool into contiguous K and V; what is past a run becomes zero.
//
// Inputs   k_pool   (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR
//          v_pool   likewise with DV
//          plan     int32, at least 8 elements: [0] S, [1] N, [2] length of a table row, [3] where
//                   the tables begin; from [8] for each run its first token and its number of tokens
//          token    the newest token
// Outputs  keys     (S, H, N, DK) of KT
//          values   (S, H, N, DV) of KT
// Grid     one thread for 4 elements of a K row and of a V row: S * H * N * max(DK, DV) / 4 threads
// Threadgroup memory: none. Work of a thread: two loads and two stores of 4 elements.
// Constants: KT (type); H, DK, DV, BS, SLOT_MAJOR.

constexpr int VECTORS = (DK > DV ? DK : DV) / 4;
const uint index = thread_position_in_grid.x;
const int num_tokens = plan[1];
const int d = int(index % VECTORS) * 4;
const uint row = index / VECTORS;
const int offset = int(row % uint(num_tokens));
const int head = int(row / uint(num_tokens)) % H;
const int run = int(row / uint(num_tokens)) / H;
if (run >= plan[0]) return;

const bool live = offset < plan[8 + 2 * run + 1];
const int position = plan[8 + 2 * run] + offset;
const long block = live ? plan[plan[3] + run * plan[2] + position / BS] : 0;
const long place = SLOT_MAJOR ? (block * BS + position % BS) * H + head
                              : (block * H + head) * BS + position % BS;
if (d < DK) {
  vec<KT, 4> x = vec<KT, 4>(KT(0));
  if (live) x = *reinterpret_cast<const device vec<KT, 4>*>(k_pool + place * DK + d);
  *reinterpret_cast<device vec<KT, 4>*>(keys + long(row) * DK + d) = x;
}
if (d < DV) {
  vec<KT, 4> x = vec<KT, 4>(KT(0));
  if (live) x = *reinterpret_cast<const device vec<KT, 4>*>(v_pool + place * DV + d);
  *reinterpret_cast<device vec<KT, 4>*>(values + long(row) * DV + d) = x;
}
