// Barriers, SIMD-group operations, SIMD-group matrices and atomics. Under STRICT these are only
// declarations to type-check against; otherwise every one is a rendezvous of the fiber runtime.
#pragma once
#include "math.h"
#include "runtime.h"

#define MSL_SITE int line = __builtin_LINE(), int column = __builtin_COLUMN()

#pragma clang attribute push(__attribute__((no_sanitize("thread", "undefined"))), apply_to = function)
namespace metal {
enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_device_and_threadgroup = 3
};
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::barrier(true, uint(flags), line, column);
}
inline void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::barrier(false, uint(flags), line, column);
}

template <typename T>
struct Lanes {  // the values that the lanes brought
  const msl::Exchange& all;
  T operator[](uint lane) const {
    T value;
    __builtin_memcpy(&value, all.slots[lane], sizeof(T));
    return value;
  }
  bool has(uint lane) const { return lane < msl::kLanes && ((all.present >> lane) & 1u); }
};
template <typename T>
inline Lanes<T> meet(const char* what, T value, int line, int column) {
  static_assert(sizeof(T) <= msl::kSlotBytes, "too large for a SIMD-group operation");
  static_assert(!is_same_v<T, long> && !is_same_v<T, ulong>, "no 64-bit SIMD-group operations");
  return Lanes<T>{msl::exchange(what, line, column, &value, sizeof(T))};
}

// Sums run up a binary tree, as the lanes would; every lane gets the same bits.
#define MSL_REDUCE(NAME, EXPRESSION)                                             \
  template <typename T>                                                          \
  inline T NAME(T value, MSL_SITE) {                                             \
    Lanes<T> lanes = meet(#NAME, value, line, column);                           \
    T tree[msl::kLanes];                                                         \
    uint count = 0;                                                              \
    for (uint i = 0; i < msl::kLanes; ++i)                                       \
      if (lanes.has(i)) tree[count++] = lanes[i];                                \
    for (; count > 1; count = (count + 1) / 2)                                   \
      for (uint i = 0; i < (count + 1) / 2; ++i) {                               \
        if (2 * i + 1 == count) { tree[i] = tree[2 * i]; continue; }             \
        T a = tree[2 * i], b = tree[2 * i + 1];                                  \
        tree[i] = EXPRESSION;                                                    \
      }                                                                          \
    return tree[0];                                                              \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a * b)
MSL_REDUCE(simd_min, min(a, b))
MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_and, a & b)
MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)
#undef MSL_REDUCE

#define MSL_PREFIX(NAME, START, OP, INCLUSIVE)                                   \
  template <typename T>                                                          \
  inline T NAME(T value, MSL_SITE) {                                             \
    Lanes<T> lanes = meet(#NAME, value, line, column);                           \
    T sum = T(START);                                                            \
    for (uint i = 0; i < msl::lane() + INCLUSIVE; ++i)                           \
      if (lanes.has(i)) sum = sum OP lanes[i];                                   \
    return sum;                                                                  \
  }
MSL_PREFIX(simd_prefix_exclusive_sum, 0, +, 0)
MSL_PREFIX(simd_prefix_inclusive_sum, 0, +, 1)
MSL_PREFIX(simd_prefix_exclusive_product, 1, *, 0)
MSL_PREFIX(simd_prefix_inclusive_product, 1, *, 1)
#undef MSL_PREFIX

// A lane that does not exist has no value to give: that is undefined, so it is reported.
template <typename T>
inline T from_lane(const char* what, T value, uint source, int line, int column) {
  Lanes<T> lanes = meet(what, value, line, column);
  if (!lanes.has(source))
    msl::fail("out_of_bounds", line, "%s reads lane %u, which does not exist", what, source);
  return lanes[source];
}
template <typename T>
inline T simd_shuffle(T value, ushort source, MSL_SITE) {
  return from_lane("simd_shuffle", value, source, line, column);
}
template <typename T>
inline T simd_broadcast(T value, ushort source, MSL_SITE) {
  return from_lane("simd_broadcast", value, source, line, column);
}
template <typename T>
inline T simd_broadcast_first(T value, MSL_SITE) {
  return from_lane("simd_broadcast_first", value, 0, line, column);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, MSL_SITE) {
  return from_lane("simd_shuffle_xor", value, msl::lane() ^ mask, line, column);
}
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, MSL_SITE) {
  uint source = msl::lane() + delta;
  return from_lane("simd_shuffle_down", value, source < 32 ? source : msl::lane(), line, column);
}
template <typename T>
inline T simd_shuffle_up(T value, ushort delta, MSL_SITE) {
  uint at = msl::lane();
  return from_lane("simd_shuffle_up", value, at >= delta ? at - delta : at, line, column);
}
template <typename T>
inline T simd_shuffle_rotate_down(T value, ushort delta, MSL_SITE) {
  return from_lane("simd_shuffle_rotate_down", value, (msl::lane() + delta) % 32, line, column);
}
template <typename T>
inline T simd_shuffle_rotate_up(T value, ushort delta, MSL_SITE) {
  return from_lane("simd_shuffle_rotate_up", value, (msl::lane() + 32 - delta) % 32, line, column);
}
template <typename T>
inline T quad_shuffle_xor(T value, ushort mask, MSL_SITE) {
  return from_lane("quad_shuffle_xor", value, msl::lane() ^ (mask & 3), line, column);
}
template <typename T>
inline T quad_sum(T value, MSL_SITE) {
  T pair = value + from_lane("quad_sum", value, msl::lane() ^ 1, line, column);
  return pair + from_lane("quad_sum", pair, msl::lane() ^ 2, line, column);
}

struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool any() const { return bits != 0; }
};
inline simd_vote simd_ballot(bool value, MSL_SITE) {
  Lanes<bool> lanes = meet("simd_ballot", value, line, column);
  ulong bits = 0;
  for (uint i = 0; i < msl::kLanes; ++i)
    if (lanes.has(i) && lanes[i]) bits |= 1ul << i;
  return simd_vote{bits};
}
inline bool simd_any(bool value, MSL_SITE) { return simd_ballot(value, line, column).bits != 0; }
inline bool simd_all(bool value, MSL_SITE) { return simd_ballot(!value, line, column).bits == 0; }
inline bool simd_is_first() { return msl::lane() == 0; }

// An 8 x 8 matrix spread over 32 lanes: a lane holds two neighbours of one row.
template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "only 8 x 8 matrices exist");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>,
                "a SIMD-group matrix holds float, half or bfloat");
  vec<T, 2> elements;
  simdgroup_matrix() {}
  // One number makes a diagonal matrix, as in Metal.
  explicit simdgroup_matrix(T diagonal) : elements(T(0)) {
    if (row() == column()) elements[0] = diagonal;
    if (row() == column() + 1) elements[1] = diagonal;
  }
  thread vec<T, 2>& thread_elements() { return elements; }
  const thread vec<T, 2>& thread_elements() const { return elements; }
  static uint row() { return ((msl::lane() & 16) >> 2) | ((msl::lane() >> 1) & 3); }
  static uint column() { return ((msl::lane() & 8) >> 1) | ((msl::lane() & 1) << 1); }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> matrix;
  matrix.elements = value;
  return matrix;
}

template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                          thread simdgroup_matrix<A, 8, 8>& a,
                                          thread simdgroup_matrix<B, 8, 8>& b,
                                          thread simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
  float4 mine = {float(a.elements[0]), float(a.elements[1]),
                 float(b.elements[0]), float(b.elements[1])};
  Lanes<float4> lanes = meet("simdgroup_multiply_accumulate", mine, line, column);
  float left[8][8], right[8][8];
  for (uint i = 0; i < 32; ++i) {
    if (!lanes.has(i))
      msl::fail("divergence", line, "a SIMD-group matrix needs 32 lanes; lane %u is missing", i);
    uint r = ((i & 16) >> 2) | ((i >> 1) & 3), k = ((i & 8) >> 1) | ((i & 1) << 1);
    float4 its = lanes[i];
    left[r][k] = its[0], left[r][k + 1] = its[1], right[r][k] = its[2], right[r][k + 1] = its[3];
  }
  uint r = d.row(), k = d.column();
  float sums[2] = {float(c.elements[0]), float(c.elements[1])};
  for (uint j = 0; j < 2; ++j)
    for (uint i = 0; i < 8; ++i) sums[j] += left[r][i] * right[i][k + j];
  d.elements[0] = D(sums[0]), d.elements[1] = D(sums[1]);
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                               thread simdgroup_matrix<A, 8, 8>& a,
                               thread simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
  simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero, line, column);
}

template <typename T>
struct memory_of { static constexpr bool shared = false; };
#ifdef STRICT
template <typename T> struct memory_of<device T*> { static constexpr bool shared = true; typedef T type; };
template <typename T> struct memory_of<threadgroup T*> { static constexpr bool shared = true; typedef T type; };
#else
template <typename T> struct memory_of<T*> { static constexpr bool shared = true; typedef T type; };
#endif
}  // namespace metal
#pragma clang attribute pop

// Loads and stores touch the kernel's memory, so their accesses stay checked.
namespace metal {
template <typename T, typename P>
inline void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix, P source,
                           ulong elements_per_row = 8, ulong2 origin = 0, bool transpose = false,
                           MSL_SITE) {
  static_assert(memory_of<P>::shared, "simdgroup_load reads device or threadgroup memory");
  static_assert(is_same_v<typename memory_of<P>::type, T> ||
                is_same_v<typename memory_of<P>::type, const T>, "element types differ");
  meet("simdgroup_load", 0, line, column);
  for (uint j = 0; j < 2; ++j) {
    ulong r = matrix.row(), k = matrix.column() + j;
    ulong at_row = transpose ? k : r, at_column = transpose ? r : k;
    matrix.elements[j] = source[(origin.y + at_row) * elements_per_row + origin.x + at_column];
  }
}
template <typename T, typename P>
inline void simdgroup_store(thread simdgroup_matrix<T, 8, 8>& matrix, P target,
                            ulong elements_per_row = 8, ulong2 origin = 0, bool transpose = false,
                            MSL_SITE) {
  static_assert(memory_of<P>::shared, "simdgroup_store writes device or threadgroup memory");
  static_assert(is_same_v<typename memory_of<P>::type, T>, "element types differ");
  meet("simdgroup_store", 0, line, column);
  for (uint j = 0; j < 2; ++j) {
    ulong r = matrix.row(), k = matrix.column() + j;
    ulong at_row = transpose ? k : r, at_column = transpose ? r : k;
    target[(origin.y + at_row) * elements_per_row + origin.x + at_column] = matrix.elements[j];
  }
}
}  // namespace metal
#undef MSL_SITE
