/* bfloat16 and eight floats at a time. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define SIMD __attribute__((target("avx2,fma")))
#else
#define SIMD
#endif
#define INLINE static inline __attribute__((always_inline)) SIMD

enum { LANES = 8 };

typedef float floats __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));

INLINE floats widen(const uint16_t *from) {
#if defined(__x86_64__) /* GCC makes five instructions of what follows */
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
  halves narrow;
  memcpy(&narrow, from, sizeof narrow);
  return (floats)(__builtin_convertvector(narrow, words) << 16);
#endif
}

INLINE floats load(const float *from) {
  floats values;
  memcpy(&values, from, sizeof values);
  return values;
}

INLINE void store(float *to, floats values) { memcpy(to, &values, sizeof values); }

INLINE floats all(float value) { return (floats){0} + value; }

/* a where the mask is set, else b. */
INLINE floats choose(ints mask, floats a, floats b) { return (floats)((mask & (ints)a) | (~mask & (ints)b)); }

INLINE float widen_one(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* Round to nearest, ties to even; any NaN becomes the quiet one. */
INLINE uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* What a bfloat16 keeps of a float. */
INLINE float rounded(float value) { return widen_one(narrow(value)); }

/* Pairs at distance 4, 2, 1. */
INLINE float sum_lanes(floats v) {
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
  return v[0];
}
