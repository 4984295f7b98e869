/* Attention with the bits of torch's scaled_dot_product_attention on AVX2, for one query.
 *
 * Positions are taken in blocks of 512 with a running maximum. Source of that order, and of the
 * exponential: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp and ATen/cpu/vec/vec256 (PyTorch 2.13). That of
 * the additions inside the two products is what its library's bfloat16 product does with one column.
 */
#include "attention.h"

#include <math.h>

#include "numbers.h"

enum { BLOCK = 512, HEAD_DIM_MAX = 256 };

/* exp with about 16 bits: the exponent and the mantissa of a float are a logarithm, and a cubic mends it.
 * Source: Malossi et al., Fast Exponential Computation on SIMD Architectures, 2015. */
INLINE floats quick_exp(floats x) {
  ints below = x < all(-0x1.5d58ap6f), above = x > all(0x1.62e43p6f);
  floats scaled = x * 0x1.715476p0f;
#if defined(__x86_64__)
  floats fraction = scaled - (floats)_mm256_floor_ps((__m256)scaled);
#else
  floats fraction;
  for (int i = 0; i < LANES; i++) fraction[i] = scaled[i] - floorf(scaled[i]);
#endif
  floats mend = fraction * -0.079204240219773236f + -0.22433836478672356f;
  mend = fraction * mend + 0.30354260500649682f;
  mend = fraction * mend + 0.00010703434948458272f;
  floats bits = (scaled - mend) * 8388608.0f + 8388608.0f * 127.0f;
  floats value = (floats)__builtin_convertvector(bits, ints);
  return choose(above, all(INFINITY), choose(below, all(0), value));
}

/* Sums at distance 4 along head_dim, then (0 + 2) + (1 + 3). */
INLINE float score(const uint16_t *query, const uint16_t *key, long head_dim) {
  float sums[4] = {0};
  for (long at = 0; at < head_dim; at += 4)
    for (int i = 0; i < 4; i++) sums[i] += widen_one(query[at + i]) * widen_one(key[at + i]);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Scores become weights, rounded to bfloat16; returns their sum before rounding. */
INLINE float exponentials(float *scores, long count, float maximum) {
  floats even = {0}, odd = {0};
  long at = 0;
  for (; at + 2 * LANES <= count; at += 2 * LANES) {
    floats first = quick_exp(load(scores + at) - maximum), second = quick_exp(load(scores + at + LANES) - maximum);
    even += first;
    odd += second;
    for (int i = 0; i < LANES; i++) scores[at + i] = rounded(first[i]), scores[at + LANES + i] = rounded(second[i]);
  }
  if (at + LANES <= count) {
    floats last = quick_exp(load(scores + at) - maximum);
    even += last;
    for (int i = 0; i < LANES; i++) scores[at + i] = rounded(last[i]);
    at += LANES;
  }
  float total = sum_lanes(even + odd);
  for (; at < count; at++) {
    float value = expf(scores[at] - maximum);
    total += value;
    scores[at] = rounded(value);
  }
  return total;
}

/* Adds weights times values: four positions at a time, (0 + 2) + (1 + 3); what is left over, last first. */
INLINE void accumulate(float *sums, const float *weights, const uint16_t *values, long count, long head_dim) {
  long whole = count - count % 4;
  for (long lane = 0; lane < head_dim; lane += LANES) {
    floats sum = load(sums + lane);
    const uint16_t *from = values + lane;
    for (long at = 0; at < whole; at += 4) {
      floats even = widen(from + at * head_dim) * weights[at];
      floats odd = widen(from + (at + 1) * head_dim) * weights[at + 1];
      even += widen(from + (at + 2) * head_dim) * weights[at + 2];
      odd += widen(from + (at + 3) * head_dim) * weights[at + 3];
      sum += even + odd;
    }
    for (long at = count - 1; at >= whole; at--) sum += widen(from + at * head_dim) * weights[at];
    store(sums + lane, sum);
  }
}

SIMD void attend(const uint16_t *query, const uint16_t *keys, const uint16_t *values, uint16_t *out, float *scores,
                 long positions, long head_dim) {
  float scale = (float)(1.0 / sqrt((double)head_dim)), maximum = -INFINITY, total = 0;
  float sums[HEAD_DIM_MAX] = {0};
  for (long first = 0; first < positions; first += BLOCK) {
    long count = positions - first < BLOCK ? positions - first : BLOCK;
    float highest = maximum;
    for (long at = 0; at < count; at++) {
      scores[at] = score(query, keys + (first + at) * head_dim, head_dim) * scale;
      highest = scores[at] > highest ? scores[at] : highest;
    }
    float added = exponentials(scores, count, highest), shrink = expf(maximum - highest);
    total = added + shrink * total;
    maximum = highest;
    if (first)
      for (long i = 0; i < head_dim; i++) sums[i] *= shrink;
    accumulate(sums, scores, values + first * head_dim, count, head_dim);
  }
  float share = 1 / total;
  for (long i = 0; i < head_dim; i++) out[i] = narrow(sums[i] * share);
}
