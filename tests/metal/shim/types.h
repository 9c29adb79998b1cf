// Scalar and vector types of the Metal Shading Language, and the few names that MLX puts before
// every kernel. STRICT gives address spaces their meaning; otherwise they vanish and code runs.
#pragma once

#ifdef STRICT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define MSL_SHARED static threadgroup
#else
#define device
#define constant const
#define threadgroup
#ifdef __APPLE__
#define MSL_SHARED static __attribute__((section("__DATA,tgmem")))
#else
#define MSL_SHARED static __attribute__((section("tgmem")))
#endif
#endif
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define double msl_has_no_double
#define __METAL_VERSION__ 310

typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, size_t, uint64_t, uintptr_t;
typedef long int64_t, ptrdiff_t;
typedef _Float16 half, float16_t;
typedef __bf16 bfloat, bfloat16_t;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX 65504.0f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_LOG2E_F 1.442695041f
#define M_LN2_F 0.693147181f
#define M_PI_F 3.141592654f

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename A, typename B>
static constexpr bool is_same_v = __is_same(A, B);
template <bool, typename A, typename>
struct conditional { typedef A type; };
template <typename A, typename B>
struct conditional<false, A, B> { typedef B type; };
template <bool C, typename A, typename B>
using conditional_t = typename conditional<C, A, B>::type;
template <bool, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> { typedef T type; };
template <bool C, typename T = void>
using enable_if_t = typename enable_if<C, T>::type;

template <typename T>
struct numeric_limits;
#define MSL_LIMITS(T, LOWEST, MAX)                       \
  template <>                                            \
  struct numeric_limits<T> {                             \
    static constexpr T max() { return MAX; }             \
    static constexpr T lowest() { return LOWEST; }       \
    static constexpr T infinity() { return T(INFINITY); } \
    static constexpr T quiet_NaN() { return T(NAN); }    \
  };
MSL_LIMITS(float, -FLT_MAX, FLT_MAX)
MSL_LIMITS(half, half(-65504.0f), half(65504.0f))
MSL_LIMITS(bfloat, bfloat(-3.38953139e38f), bfloat(3.38953139e38f))
#undef MSL_LIMITS
#define MSL_LIMITS(T, LOWEST, MAX)                 \
  template <>                                      \
  struct numeric_limits<T> {                       \
    static constexpr T max() { return MAX; }       \
    static constexpr T min() { return LOWEST; }    \
    static constexpr T lowest() { return LOWEST; } \
  };
MSL_LIMITS(int, INT_MIN, INT_MAX)
MSL_LIMITS(uint, 0, UINT_MAX)
MSL_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_LIMITS(ulong, 0, 18446744073709551615UL)
#undef MSL_LIMITS
}  // namespace metal
using namespace metal;

#define MSL_VECTORS(T, NAME) \
  typedef vec<T, 2> NAME##2; \
  typedef vec<T, 3> NAME##3; \
  typedef vec<T, 4> NAME##4;
MSL_VECTORS(bool, bool)
MSL_VECTORS(char, char)
MSL_VECTORS(uchar, uchar)
MSL_VECTORS(short, short)
MSL_VECTORS(ushort, ushort)
MSL_VECTORS(int, int)
MSL_VECTORS(uint, uint)
MSL_VECTORS(long, long)
MSL_VECTORS(ulong, ulong)
MSL_VECTORS(half, half)
MSL_VECTORS(bfloat, bfloat)
MSL_VECTORS(float, float)
#undef MSL_VECTORS

// float4(a, b, c, d), float4(xy, zw), float4(x) and float4(half4) are written so by translate().
template <typename T>
struct msl_parts;
template <typename T, int N>
struct msl_parts<vec<T, N>> {
  typedef T type;
  static constexpr int count = N;
};
template <typename V, typename A>
inline constexpr void msl_put(V& to, int& at, A a) {
  to[at++] = typename msl_parts<V>::type(a);
}
template <typename V, typename T, int N>
inline constexpr void msl_put(V& to, int& at, vec<T, N> a) {
  for (int i = 0; i < N; ++i) to[at++] = typename msl_parts<V>::type(a[i]);
}
template <typename V, typename A>
inline constexpr V msl_make(A a) {
  V out{};
  int at = 0;
  while (at < msl_parts<V>::count) msl_put(out, at, a);
  return out;
}
template <typename V, typename A, typename B, typename... More>
inline constexpr V msl_make(A a, B b, More... more) {
  V out{};
  int at = 0;
  msl_put(out, at, a);
  msl_put(out, at, b);
  int unused[] = {0, (msl_put(out, at, more), 0)...};
  return out;
}

template <typename To, typename From>
inline To as_type(From from) { return __builtin_bit_cast(To, from); }

// What MLX's own prefix declares at global scope; a kernel's helper of the same name would clash.
template <typename U>
struct Limits {
  static constexpr U max = numeric_limits<U>::max();
  static constexpr U finite_max = numeric_limits<U>::max();
  static constexpr U finite_min = numeric_limits<U>::lowest();
};
template <typename T, typename U>
inline T ceildiv(T n, U m) { return (n + m - 1) / m; }
