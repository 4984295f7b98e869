/* y[m][n] = sum over k of x[m][k] * w[n][k], in bfloat16 with sums in float32.
 *
 * The weights are read where they lie, row by row: no packed copy that a row write would miss.
 *
 * The order of the additions is fixed, and is the one of torch's own AVX2 product, so that both
 * give the same bits (tests/unit/test_linear.py), whatever m is and however many threads there are:
 *
 *     64 running sums, sum i over k = i, i + 64, ...; then pairs at distance 32, 16, 8, 4, 2, 1;
 *     then a tail of 16s into 16 sums (8 lanes, low halves before high), and single products.
 *
 * Source of that order: aten/src/ATen/native/cpu/ReducedPrecisionFloatGemvFastPathKernel.cpp (PyTorch 2.13).
 */
#include "linear.h"

#include "numbers.h"

enum {
  GROUPS = 8, /* vectors of running sums */
  STEP = LANES * GROUPS,
  TILE_M = 4, /* rows of x and of w whose sums fit into the registers together */
  TILE_N = 3,
  LINE = 32, /* values of w in a cache line */
};

typedef struct {
  const float *x;    /* [m][k], widened */
  const uint16_t *w; /* [n][k] */
  uint16_t *y;       /* [m][n] */
  long m, n, k;
  long rows; /* of w in one piece */
} product;

/* What follows the main loop: the running sums, by lane group, become one, and the tail of k is added. */
INLINE float finish(const floats sums[GROUPS], const float *x, const uint16_t *w, long k) {
  floats four[4], two[2];
  for (int i = 0; i < 4; i++) four[i] = sums[i] + sums[i + 4];
  for (int i = 0; i < 2; i++) two[i] = four[i] + four[i + 2];
  float total = sum_lanes(two[0] + two[1]);
  long at = k - k % STEP;
  if (at == k) return total;
  floats tail = {0};
  for (; at + 2 * LANES <= k; at += 2 * LANES) {
    tail += widen(w + at) * load(x + at);
    tail += widen(w + at + LANES) * load(x + at + LANES);
  }
  total += sum_lanes(tail);
  for (; at < k; at++) total += x[at] * widen_one(w[at]);
  return total;
}

/* One row of x: each row of w is read once, in order. The eight sums are named so that they stay in registers. */
INLINE void one_row(const product *p, long first, long stop) {
  long whole = p->k - p->k % STEP;
  const float *x = p->x;
  for (long n = first; n < stop; n++) {
    const uint16_t *w = p->w + n * p->k;
    floats a = {0}, b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    for (long at = 0; at < whole; at += STEP) {
      a += widen(w + at) * load(x + at);
      b += widen(w + at + 8) * load(x + at + 8);
      c += widen(w + at + 16) * load(x + at + 16);
      d += widen(w + at + 24) * load(x + at + 24);
      e += widen(w + at + 32) * load(x + at + 32);
      f += widen(w + at + 40) * load(x + at + 40);
      g += widen(w + at + 48) * load(x + at + 48);
      h += widen(w + at + 56) * load(x + at + 56);
    }
    floats sums[GROUPS] = {a, b, c, d, e, f, g, h};
    p->y[n] = narrow(finish(sums, x, w, p->k));
  }
}

/* Four rows of x times three rows of w, one group of lanes at a time: 12 sums and 3 weights fill the registers.
 * The next three rows of w are fetched meanwhile, a line for every 64 values.
 * Rows that are not there repeat the last one; what they give is not stored. */
INLINE void tile(const product *p, long m, long n, long stop) {
  long k = p->k, whole = k - k % STEP, m_last = p->m - 1, n_last = stop - 1;
  const float *x[TILE_M];
  const uint16_t *w[TILE_N];
  for (int i = 0; i < TILE_M; i++) x[i] = p->x + (m + i < m_last ? m + i : m_last) * k;
  for (int j = 0; j < TILE_N; j++) w[j] = p->w + (n + j < n_last ? n + j : n_last) * k;
  floats sums[TILE_M][TILE_N][GROUPS];
  for (int g = 0; g < GROUPS; g++) {
    floats a0 = {0}, a1 = a0, a2 = a0, b0 = a0, b1 = a0, b2 = a0, c0 = a0, c1 = a0, c2 = a0, d0 = a0, d1 = a0, d2 = a0;
    const uint16_t *ahead = w[0] + (TILE_N + g / 2) * k + g % 2 * LINE - g * LANES;
    for (long at = g * LANES; at < whole; at += STEP) {
      if (g < 2 * TILE_N) __builtin_prefetch(ahead + at);
      floats w0 = widen(w[0] + at), w1 = widen(w[1] + at), w2 = widen(w[2] + at), row;
      row = load(x[0] + at), a0 += w0 * row, a1 += w1 * row, a2 += w2 * row;
      row = load(x[1] + at), b0 += w0 * row, b1 += w1 * row, b2 += w2 * row;
      row = load(x[2] + at), c0 += w0 * row, c1 += w1 * row, c2 += w2 * row;
      row = load(x[3] + at), d0 += w0 * row, d1 += w1 * row, d2 += w2 * row;
    }
    sums[0][0][g] = a0, sums[0][1][g] = a1, sums[0][2][g] = a2;
    sums[1][0][g] = b0, sums[1][1][g] = b1, sums[1][2][g] = b2;
    sums[2][0][g] = c0, sums[2][1][g] = c1, sums[2][2][g] = c2;
    sums[3][0][g] = d0, sums[3][1][g] = d1, sums[3][2][g] = d2;
  }
  for (int i = 0; i < TILE_M && m + i <= m_last; i++)
    for (int j = 0; j < TILE_N && n + j <= n_last; j++)
      p->y[(m + i) * p->n + n + j] = narrow(finish(sums[i][j], x[i], w[j], k));
}

SIMD static void piece(const void *job, long index) {
  const product *p = job;
  long first = index * p->rows, stop = first + p->rows < p->n ? first + p->rows : p->n;
  if (p->m == 1) {
    one_row(p, first, stop);
    return;
  }
  for (long m = 0; m < p->m; m += TILE_M)
    for (long n = first; n < stop; n += TILE_N) tile(p, m, n, stop);
}

int linear_supported(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 0; /* they compile, and were never run elsewhere */
#endif
}

SIMD void linear(pool *threads, const uint16_t *x, const uint16_t *w, uint16_t *y, float *wide, long m,
                 long n, long k) {
  for (long i = 0; i < m * k; i++) wide[i] = widen_one(x[i]);
  long rows = n / (8 * pool_threads(threads)) / TILE_N * TILE_N;
  if (rows < 4 * TILE_N) rows = 4 * TILE_N;
  if (rows > 32 * TILE_N) rows = 32 * TILE_N;
  product job = {wide, w, y, m, n, k, rows};
  pool_run(threads, piece, &job, (n + rows - 1) / rows);
}
