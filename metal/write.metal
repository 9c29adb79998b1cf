// Writes K and V rows into their slots of the pool, in place.
//
// Inputs   keys     (T, H, DK) of T; the rows' new keys
//          values   (T, H, DV) of T
//          k_pool   (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR; written
//          v_pool   likewise with DV; written
//          slots    (T or more,) int64, padded to 8 elements; distinct; negative: skip the row
//          token    the newest token: everything that it depends on has happened
// Output   written  (8,) int32, zeros: the next token
// Grid     one thread for 4 elements of a K row and of a V row: T * H * max(DK, DV) / 4 threads
// Threadgroup memory: none. Work of a thread: two loads and two stores of 4 elements.
// Constants: T, KT (types); H, DK, DV, BS, SLOT_MAJOR.

constexpr int VECTORS = (DK > DV ? DK : DV) / 4;
const uint index = thread_position_in_grid.x;
if (index < 8) written[index] = 0;

const uint row = index / (H * VECTORS);
if (row >= uint(keys_shape[0])) return;
const long slot = slots[row];
if (slot < 0) return;
const int head = int(index / VECTORS) % H;
const int d = int(index % VECTORS) * 4;
const long place = SLOT_MAJOR ? slot * H + head
                              : ((slot / BS) * H + head) * BS + slot % BS;
const long source = long(row) * H + head;

if (d < DK) {
  const vec<T, 4> x = *reinterpret_cast<const device vec<T, 4>*>(keys + source * DK + d);
  device KT* out = const_cast<device KT*>(k_pool) + place * DK + d;
  UNROLL for (int i = 0; i < 4; ++i) out[i] = KT(float(x[i]));
}
if (d < DV) {
  const vec<T, 4> x = *reinterpret_cast<const device vec<T, 4>*>(values + source * DV + d);
  device KT* out = const_cast<device KT*>(v_pool) + place * DV + d;
  UNROLL for (int i = 0; i < 4; ++i) out[i] = KT(float(x[i]));
}
