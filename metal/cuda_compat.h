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

typedef unsigned int uint;
typedef unsigned short ushort;
typedef __nv_bfloat16 bfloat16_t;

#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid (uint3{blockIdx.x * blockDim.x + threadIdx.x, 0, 0})
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)

template <typename T, int N>
struct alignas(sizeof(T) * N) vec {
  T elements[N];
  vec() = default;
  __device__ __forceinline__ explicit vec(T value) {
    UNROLL for (int i = 0; i < N; ++i) elements[i] = value;
  }
  __device__ __forceinline__ T& operator[](int i) { return elements[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return elements[i]; }
};

template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename T>
METAL_FUNC T simd_broadcast(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

METAL_FUNC bool simd_any(bool x) { return __any_sync(0xffffffffu, x) != 0; }

METAL_FUNC float simd_max(float x) {
  UNROLL for (int step = 16; step >= 1; step /= 2) x = fmaxf(x, simd_shuffle_xor(x, step));
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
