// What several kernels share.

#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

// A masked score is below LOWEST by so much that its weight is 0, also while no score was seen.
#define MASKED (-FLT_MAX)
#define LOWEST (-0.5f * FLT_MAX)
