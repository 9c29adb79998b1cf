// Rotates queries and keys by their positions (RoPE), and writes the rotated keys and the values
// into their slots of the pool, in place.
//
// Inputs   queries    (T, H * FACTOR * DK) of T, not rotated; lies in memory as its strides say
//          keys       (T, H * DK) likewise
//          values     (T, H * DV) likewise
//          positions  (T or more,) int32, padded to 8 elements
//          freqs      (DIMS / 2,) float32: wavelength of each pair over 2 pi; only where HAS_FREQS
//          k_pool     (blocks, H, BS, DK) of KT, or (blocks, BS, H, DK) where SLOT_MAJOR; written
//          v_pool     likewise with DV; written
//          slots      (T or more,) int64, padded to 8 elements; distinct; negative: K and V of the
//                     row are not stored
//          token      the newest token: everything that it depends on has happened
// Outputs  rotated    (T, H * FACTOR, DK) of T
//          written    (8,) int32, zeros: the next token
// Grid     one thread for two elements that are rotated together, of HEADS heads:
//          T * ceil(H * (1 + FACTOR) / HEADS) * max(DK, DV) / 2 threads, or 8
// Threadgroup memory: none. Work of a thread: at most 4 * HEADS loads and stores, one rotation.
// Constants: T, KT (types); H, DK, DV, BS, SLOT_MAJOR; FACTOR; HEADS; DIMS: elements at the
// beginning of a row that are rotated; TRADITIONAL: those that lie side by side together, else those
// that lie DIMS / 2 apart; HAS_FREQS, or LOG_BASE: log2 of the base; SCALE: factor on positions.

constexpr int PAIRS = (DK > DV ? DK : DV) / 2;
constexpr int GROUPS = (H * (1 + FACTOR) + HEADS - 1) / HEADS;
const uint index = thread_position_in_grid.x;
if (index < 8) written[index] = 0;

const long row = index / (GROUPS * PAIRS);
if (row >= queries_shape[0]) return;
const long slot = slots[row];
const int pair = int(index % PAIRS);
const int first_head = int(index / PAIRS) % GROUPS * HEADS;

// Elements past DIMS are not rotated; two of them that lie side by side come together.
const bool turns = pair < DIMS / 2;
const int low = turns && !TRADITIONAL ? pair : 2 * pair;
const int high = turns && !TRADITIONAL ? pair + DIMS / 2 : low + 1;

// All loads come before the first store, so that none waits for another. The heads of the keys come
// first, then those of the queries.
T x[HEADS];
T y[HEADS];
T v[HEADS][2];
UNROLL for (int i = 0; i < HEADS; ++i) {
  const int head = first_head + i;
  const bool is_key = head < H;
  if (head < H * (1 + FACTOR) && 2 * pair < DK) {
    const long step = is_key ? keys_strides[1] : queries_strides[1];
    const device T* from = is_key ? keys + row * keys_strides[0] + head * DK * step
                                  : queries + row * queries_strides[0] + (head - H) * DK * step;
    x[i] = from[low * step];
    y[i] = from[high * step];
  }
  if (is_key && 2 * pair < DV) {
    const long step = values_strides[1];
    const device T* from = values + row * values_strides[0] + head * DV * step;
    v[i][0] = from[2 * pair * step];
    v[i][1] = from[(2 * pair + 1) * step];
  }
}
float cosine = 1.0f;
float sine = 0.0f;
if (turns) {
#if HAS_FREQS
  const float frequency = 1.0f / freqs[pair];
#else
  const float frequency = exp2(-(float(pair) / float(DIMS / 2)) * LOG_BASE);
#endif
  const float angle = SCALE * float(positions[row]) * frequency;
  cosine = cos(angle);
  sine = sin(angle);
}

UNROLL for (int i = 0; i < HEADS; ++i) {
  const int head = first_head + i;
  const bool is_key = head < H;
  if (head >= H * (1 + FACTOR) || (is_key && slot < 0)) continue;
  const long place = SLOT_MAJOR ? slot * H + head
                                : ((slot / BS) * H + head) * BS + slot % BS;
  if (2 * pair < DK) {
    if (turns) {
      const float old_x = float(x[i]);
      const float old_y = float(y[i]);
      x[i] = T(old_x * cosine - old_y * sine);
      y[i] = T(old_x * sine + old_y * cosine);
    }
    if (is_key) {
      device KT* to = const_cast<device KT*>(k_pool) + place * DK;
      to[low] = KT(float(x[i]));
      to[high] = KT(float(y[i]));
    } else {
      device T* to = rotated + (row * (H * FACTOR) + head - H) * DK;
      to[low] = x[i];
      to[high] = y[i];
    }
  }
  if (is_key && 2 * pair < DV) {
    device KT* to = const_cast<device KT*>(v_pool) + place * DV + 2 * pair;
    to[0] = KT(float(v[i][0]));
    to[1] = KT(float(v[i][1]));
  }
}
