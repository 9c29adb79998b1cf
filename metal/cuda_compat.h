// The words of Metal that the kernels use, said in CUDA; a SIMD-group is a warp.

#define METAL_FUNC __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define device
#define thread
#define constant
#define threadgroup __shared__

#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef unsigned int uint;
typedef unsigned short ushort;
typedef __nv_bfloat16 bfloat16_t;

#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid (uint3{blockIdx.x * blockDim.x + threadIdx.x, 0, 0})
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)

METAL_FUNC uint bits(__half x) { return __half_as_ushort(x); }
METAL_FUNC uint bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
METAL_FUNC float element(uint word, int i, __half) {
  return __half2float(__ushort_as_half(ushort(i == 0 ? word : word >> 16)));
}
METAL_FUNC float element(uint word, int i, __nv_bfloat16) {
  return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
}

// An element of 16 bits within its word.
template <typename T>
struct half_word {
  uint& word;
  int i;
  METAL_FUNC operator float() const { return element(word, i, T()); }
  METAL_FUNC void operator=(T x) {
    word = i == 0 ? (word & 0xffff0000u) | bits(x) : (word & 0xffffu) | bits(x) << 16;
  }
};

// Elements of 16 bits are kept in whole words: they would take a register each.
template <typename T, int N>
struct alignas(2 * N) vec {
  uint words[N / 2];
  vec() = default;
  METAL_FUNC explicit vec(T x) {
    UNROLL for (int i = 0; i < N / 2; ++i) words[i] = bits(x) * 0x10001u;
  }
  METAL_FUNC half_word<T> operator[](int i) { return {words[i / 2], i % 2}; }
  METAL_FUNC float operator[](int i) const { return element(words[i / 2], i % 2, T()); }
};

template <int N>
struct alignas(4 * N) vec<float, N> {
  float elements[N];
  vec() = default;
  METAL_FUNC explicit vec(float x) {
    UNROLL for (int i = 0; i < N; ++i) elements[i] = x;
  }
  METAL_FUNC float& operator[](int i) { return elements[i]; }
  METAL_FUNC float operator[](int i) const { return elements[i]; }
};

template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename T>
METAL_FUNC T simd_broadcast(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

// One instruction; what is too small for a float's usual form becomes 0.
METAL_FUNC float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#define exp2 exp2_flushed

METAL_FUNC bool simd_any(bool x) { return __any_sync(0xffffffffu, x) != 0; }

METAL_FUNC float simd_max(float x) {
  UNROLL for (int step = 16; step >= 1; step /= 2) x = fmaxf(x, simd_shuffle_xor(x, step));
  return x;
}

METAL_FUNC int simd_min(int x) {
  UNROLL for (int step = 16; step >= 1; step /= 2) x = min(x, simd_shuffle_xor(x, step));
  return x;
}

METAL_FUNC float simd_sum(float x) {
  UNROLL for (int step = 16; step >= 1; step /= 2) x += simd_shuffle_xor(x, step);
  return x;
}

struct mem_flags {
  enum { mem_threadgroup, mem_device };
};

METAL_FUNC void threadgroup_barrier(int) { __syncthreads(); }
