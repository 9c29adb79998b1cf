// The most likely token of each row of logits: the first of the largest.
//
// Input    logits  (R, V) of T, at least 8 elements; a row may begin anywhere
// Output   tokens  (R,) int32: the smallest index of a row's largest element; INVALID for a row with
//                  a NaN, or whose largest element isn't finite
// Grid     R threadgroups of SIMDGROUPS * 32 threads
// Threadgroup memory: 8 * SIMDGROUPS bytes. Work of a threadgroup: one row, 4 elements at a time.
// Constants: T (type); SIMDGROUPS; INVALID.

constexpr int THREADS = SIMDGROUPS * 32;
// Vectors that a thread loads before it looks at one.
constexpr int LOADS = 16 / int(sizeof(T));
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const uint row = threadgroup_position_in_grid.x;
if (row >= uint(logits_shape[0])) return;
const int num_logits = logits_shape[1];
const device T* from = logits + long(row) * num_logits;

// Vectors lie where memory is aligned for them, so the first begins up to 3 elements before the row.
const int before = int(reinterpret_cast<size_t>(from) / sizeof(T) % 4);
const int num_vectors = (before + num_logits + 3) / 4;
float top = -INFINITY;
int place = 0;
for (int first = int(thread_index_in_threadgroup); first < num_vectors; first += LOADS * THREADS) {
  vec<T, 4> x[LOADS];
  UNROLL for (int i = 0; i < LOADS; ++i) {
    const int start = 4 * (first + i * THREADS) - before;
    if (start >= 0 && start + 4 <= num_logits) {
      x[i] = *reinterpret_cast<const device vec<T, 4>*>(from + start);
    } else {
      UNROLL for (int e = 0; e < 4; ++e) {
        const int index = start + e;
        x[i][e] = index >= 0 && index < num_logits ? from[index] : T(-INFINITY);
      }
    }
  }
  UNROLL for (int i = 0; i < LOADS; ++i) {
    UNROLL for (int e = 0; e < 4; ++e) {
      // A thread's elements come in the order of their indexes. A NaN stays, as nothing is above it.
      const float logit = float(x[i][e]);
      if (logit > top || logit != logit) {
        top = logit;
        place = 4 * (first + i * THREADS) - before + e;
      }
    }
  }
}

// Where a row has a NaN there is no token, just as where its largest element is infinite.
if (top != top) top = INFINITY;
threadgroup float tops[SIMDGROUPS];
threadgroup int places[SIMDGROUPS];
float highest = simd_max(top);
int token = simd_min(top == highest ? place : num_logits);
if (lane == 0) {
  tops[simdgroup] = highest;
  places[simdgroup] = token;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup > 0) return;
top = lane < SIMDGROUPS ? tops[lane] : -INFINITY;
highest = simd_max(top);
token = simd_min(lane < SIMDGROUPS && top == highest ? places[lane] : num_logits);
if (lane == 0) tokens[row] = fabs(highest) < INFINITY ? token : INVALID;
