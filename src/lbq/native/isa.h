/* The instruction set that a file's templates are compiled for.
 *
 * A file defines one of LBQ_FOR_AVX2, LBQ_FOR_AVX512, LBQ_FOR_NEON or LBQ_FOR_PORTABLE and includes this after all
 * system headers. LANES is then the number of floats in a register and NAME(f) the name f carries in this set. */
#include "native.h"

#define LBQ_JOIN_(a, b) a##_##b
#define LBQ_JOIN(a, b) LBQ_JOIN_(a, b)
#define NAME(f) LBQ_JOIN(f, LBQ_SUFFIX)

#if defined(LBQ_FOR_AVX512)
#define LANES 16
#define LBQ_SUFFIX avx512
#define LBQ_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,popcnt,bmi,bmi2,lzcnt"
#elif defined(LBQ_FOR_AVX2)
#define LANES 8
#define LBQ_SUFFIX avx2
#define LBQ_TARGET "avx2,popcnt,bmi,bmi2,lzcnt"
#elif defined(LBQ_FOR_NEON)
#define LANES 4
#define LBQ_SUFFIX neon
#else
#define LANES 4
#define LBQ_SUFFIX portable
#endif

#ifdef LBQ_TARGET
#define LBQ_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LBQ_USE(set) LBQ_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#else
#define LBQ_USE(set) LBQ_PRAGMA(GCC target(set))
#endif
LBQ_USE(LBQ_TARGET)
#endif
#if defined(LBQ_TARGET) && defined(__clang__)
#define LBQ_END _Pragma("clang attribute pop") /* a template's last line */
#else
#define LBQ_END
#endif
#define INLINE static inline __attribute__((always_inline))
