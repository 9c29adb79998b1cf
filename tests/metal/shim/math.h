// Metal's maths functions: overloads and not templates, so that max(float, int) is as ambiguous as
// it is there. half is computed in float and rounded; bfloat follows the overloads MLX adds.
#pragma once
#include "types.h"

extern "C" {
float expf(float); float exp2f(float); float logf(float); float log2f(float); float log10f(float);
float tanhf(float); float sinf(float); float cosf(float); float tanf(float); float erff(float);
float powf(float, float); float fmodf(float, float); float atan2f(float, float);
}

namespace metal {
#define MSL_UNARY(NAME, CALL)                                            \
  inline float NAME(float x) { return CALL(x); }                         \
  inline half NAME(half x) { return half(CALL(float(x))); }              \
  inline bfloat NAME(bfloat x) { return bfloat(CALL(float(x))); }        \
  template <typename T, int N>                                           \
  inline vec<T, N> NAME(vec<T, N> x) {                                   \
    vec<T, N> out;                                                       \
    for (int i = 0; i < N; ++i) out[i] = NAME(x[i]);                     \
    return out;                                                          \
  }
#define MSL_RSQRT(x) (1.0f / __builtin_sqrtf(x))
#define MSL_FLOAT_FUNCTIONS                                                              \
  MSL_UNARY(exp, expf) MSL_UNARY(exp2, exp2f) MSL_UNARY(log, logf) MSL_UNARY(log2, log2f) \
  MSL_UNARY(log10, log10f) MSL_UNARY(tanh, tanhf) MSL_UNARY(sin, sinf) MSL_UNARY(cos, cosf) \
  MSL_UNARY(tan, tanf) MSL_UNARY(sqrt, __builtin_sqrtf) MSL_UNARY(rsqrt, MSL_RSQRT)
MSL_FLOAT_FUNCTIONS
MSL_UNARY(fabs, __builtin_fabsf)
MSL_UNARY(floor, __builtin_floorf)
MSL_UNARY(ceil, __builtin_ceilf)
MSL_UNARY(trunc, __builtin_truncf)
MSL_UNARY(rint, __builtin_rintf)
MSL_UNARY(round, __builtin_roundf)
namespace precise { MSL_FLOAT_FUNCTIONS }
namespace fast { MSL_FLOAT_FUNCTIONS }

inline float pow(float x, float y) { return powf(x, y); }
inline float fmod(float x, float y) { return fmodf(x, y); }
inline float atan2(float y, float x) { return atan2f(y, x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(float(a) * float(b) + float(c)); }
inline float divide(float x, float y) { return x / y; }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

#define MSL_ORDER(T)                                                       \
  inline T min(T a, T b) { return b < a ? b : a; }                         \
  inline T max(T a, T b) { return a < b ? b : a; }                         \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }    \
  inline T select(T a, T b, bool take_b) { return take_b ? b : a; }
MSL_ORDER(char) MSL_ORDER(uchar) MSL_ORDER(short) MSL_ORDER(ushort) MSL_ORDER(int)
MSL_ORDER(uint) MSL_ORDER(long) MSL_ORDER(ulong)
// A NaN loses against a number, as in IEEE's minNum.
#define MSL_FLOAT_ORDER(T)                                                       \
  inline T fmin(T a, T b) { return (b < a || a != a) ? b : a; }                  \
  inline T fmax(T a, T b) { return (a < b || a != a) ? b : a; }                  \
  inline T min(T a, T b) { return fmin(a, b); }                                  \
  inline T max(T a, T b) { return fmax(a, b); }                                  \
  inline T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }        \
  inline T select(T a, T b, bool take_b) { return take_b ? b : a; }              \
  inline T abs(T x) { return x < T(0) ? -x : (x == T(0) ? T(0) : x); }           \
  inline T sign(T x) { return x > T(0) ? T(1) : (x < T(0) ? T(-1) : T(0)); }     \
  inline T mix(T a, T b, T t) { return a + (b - a) * t; }
MSL_FLOAT_ORDER(float) MSL_FLOAT_ORDER(half) MSL_FLOAT_ORDER(bfloat)
inline int abs(int x) { return x < 0 ? -x : x; }
inline short abs(short x) { return short(x < 0 ? -x : x); }

#define MSL_BINARY(NAME)                                       \
  template <typename T, int N>                                 \
  inline vec<T, N> NAME(vec<T, N> a, vec<T, N> b) {            \
    vec<T, N> out;                                             \
    for (int i = 0; i < N; ++i) out[i] = NAME(a[i], b[i]);     \
    return out;                                                \
  }
MSL_BINARY(min) MSL_BINARY(max) MSL_BINARY(fmin) MSL_BINARY(fmax)
template <typename T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> out;
  for (int i = 0; i < N; ++i) out[i] = fma(a[i], b[i], c[i]);
  return out;
}
template <typename T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(0);
  for (int i = 0; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
#undef MSL_UNARY
#undef MSL_RSQRT
#undef MSL_FLOAT_FUNCTIONS
#undef MSL_ORDER
#undef MSL_FLOAT_ORDER
#undef MSL_BINARY
}  // namespace metal
