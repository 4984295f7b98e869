/* Attention with the bits of torch's scaled_dot_product_attention on AVX2, causal, on one thread.
 *
 * torch takes queries in blocks of 32, 64 or 256, and keys in blocks of 512, with a running maximum; hidden keys
 * of a block count where they decide in which order the others are added. Those in front of a window add exactly
 * nothing, and are not looked at: where they lay there may be something else by now. Source of that order, and of the
 * exponential: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp and ATen/cpu/vec/vec256 (PyTorch 2.13). The order of the additions
 * in the two products is what its library's bfloat16 product does, which differs for few queries or keys.
 */
#include "attention.h"

#include <math.h>

#include "numbers.h"

enum { BLOCK = 512, PART = 192, FEW_QUERIES = 4, FEW_KEYS = 12, HEAD_DIM_MAX = 256, HEADS = 4, PAIRS = HEADS / 2 };

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

/* For few queries or keys: sums at distance 4 along head_dim, then (0 + 2) + (1 + 3). */
INLINE float score_by_four(const uint16_t *query, const uint16_t *key, long head_dim) {
  float sums[4] = {0};
  for (long at = 0; at < head_dim; at += 4)
    for (int i = 0; i < 4; i++) sums[i] += widen_one(query[at + i]) * widen_one(key[at + i]);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

INLINE float score_by_eight(const uint16_t *query, const uint16_t *key, long head_dim) {
  floats sums = {0};
  for (long at = 0; at < head_dim; at += LANES) sums += widen(query + at) * widen(key + at);
  return sum_lanes(sums);
}

/* Which keys of a block a query sees: those from `from` on, before `stop`. */
typedef struct {
  long from, stop;
} sight;

/* Where keys and values are: those of positions `origin` on, counted from it. */
typedef struct {
  const paged_rows *states;
  long origin, head_dim;
} view;

/* Where the keys and values of one block lie, as far as they are seen. */
typedef struct {
  const uint16_t *keys[BLOCK], *values[BLOCK];
} block_rows;

INLINE void find_rows(view from, long first, sight see, block_rows *rows) {
  const paged_rows *states = from.states;
  for (long at = see.from; at < see.stop;) {
    long position = from.origin + first + at, offset = position % states->page_tokens;
    long stop = at + states->page_tokens - offset < see.stop ? at + states->page_tokens - offset : see.stop;
    const uint16_t *key = states->keys + states->table[position / states->page_tokens] * states->page_stride;
    for (key += offset * from.head_dim; at < stop; at++, key += from.head_dim)
      rows->keys[at] = key, rows->values[at] = key + states->values;
  }
}

/* Of one query among several: the block's last keys, past a multiple of 4, are apart. */
INLINE void scores_of_few(const uint16_t *query, const uint16_t *const *keys, sight see, long block, long head_dim,
                          float *scores) {
  long fours = block == 1 ? 1 : block - block % 4;
  for (long at = see.from; at < see.stop; at++)
    scores[at] = at < fours ? score_by_four(query, keys[at], head_dim) : score_by_eight(query, keys[at], head_dim);
}

/* For several: one sum along each part of head_dim. Eight queries `packed` [head_dim][8] with eight keys at a time. */
INLINE void scores_of_tile(const float *packed, const uint16_t *const *keys, sight see, long head_dim,
                           float *scores) {
  long part = head_dim <= PART ? head_dim : head_dim / 2;
  float wide[LANES][HEAD_DIM_MAX];
  for (long first = see.from; first < see.stop; first += LANES) {
    long last = see.stop - first < LANES ? see.stop - first - 1 : LANES - 1;
    for (long key = 0; key < LANES; key++)
      for (long at = 0; at < head_dim; at += LANES)
        store(wide[key] + at, widen(keys[first + (key < last ? key : last)] + at));
    floats sums[LANES] = {{0}};
    for (long start = 0; start < head_dim; start += part) {
      floats a = {0}, b = a, c = a, d = a, e = a, f = a, g = a, h = a;
      for (long at = start; at < start + part; at++) {
        floats values = load(packed + at * LANES);
        a += values * wide[0][at], b += values * wide[1][at], c += values * wide[2][at], d += values * wide[3][at];
        e += values * wide[4][at], f += values * wide[5][at], g += values * wide[6][at], h += values * wide[7][at];
      }
      sums[0] += a, sums[1] += b, sums[2] += c, sums[3] += d, sums[4] += e, sums[5] += f, sums[6] += g, sums[7] += h;
    }
    for (long key = 0; key <= last; key++)
      for (int query = 0; query < LANES; query++) scores[query * BLOCK + first + key] = sums[key][query];
  }
}

/* Scores become weights, rounded to bfloat16; returns their sum before rounding. Of the `count` of a block only some
 * are seen, but which of them are computed as vectors depends on all. */
INLINE float exponentials(float *scores, sight see, long count, float maximum) {
  floats even = {0}, odd = {0};
  long at = see.from - see.from % (2 * LANES), seen = see.stop;
  for (; at < seen && at + 2 * LANES <= count; at += 2 * LANES) {
    floats first = quick_exp(load(scores + at) - maximum), second = quick_exp(load(scores + at + LANES) - maximum);
    even += first;
    odd += second;
    for (int i = 0; i < LANES; i++) scores[at + i] = rounded(first[i]), scores[at + LANES + i] = rounded(second[i]);
  }
  if (at < seen && at + LANES <= count) {
    floats last = quick_exp(load(scores + at) - maximum);
    even += last;
    for (int i = 0; i < LANES; i++) scores[at + i] = rounded(last[i]);
    at += LANES;
  }
  float total = sum_lanes(even + odd);
  for (; at < seen; at++) {
    float value = expf(scores[at] - maximum);
    total += value;
    scores[at] = rounded(value);
  }
  return total;
}

/* Adds weights times values, for the only query of each of `count` heads: four positions at a time, (0 + 2) + (1 + 3);
 * what is left, last first. Products of two bfloat16 are exact, so heads can share what they read of a row. */
INLINE void weigh_fours(floats *sums, long count, float (*weights)[BLOCK], const uint16_t *const *rows, long lane,
                        sight see) {
  long whole = see.stop - see.stop % 4, at = see.from - see.from % 4;
  for (; at < whole; at += 4) {
    floats four[4]; /* what is not seen weighs nothing: any other finite value will do for it */
    for (long i = 0; i < 4; i++) four[i] = widen(rows[at + i < see.from ? see.from : at + i] + lane);
    for (long head = 0; head < count; head++) {
      const float *weight = weights[head] + at;
      floats even = four[0] * weight[0], odd = four[1] * weight[1];
      even += four[2] * weight[2];
      odd += four[3] * weight[3];
      sums[head] += even + odd;
    }
  }
  for (at = see.stop - 1; at >= whole && at >= see.from; at--) {
    floats row = widen(rows[at] + lane);
    for (long head = 0; head < count; head++) sums[head] += row * weights[head][at];
  }
}

INLINE floats weigh_run(floats sum, const float *weights, const uint16_t *const *rows, long lane, sight see) {
  for (long at = see.from; at < see.stop; at++) sum += widen(rows[at] + lane) * weights[at];
  return sum;
}

/* For four and more queries: in parts of at most 192 of the block's keys. */
INLINE floats weigh_parts(floats sum, const float *weights, const uint16_t *const *rows, long lane, sight see,
                          long keys) {
  long part = keys <= PART ? keys : keys <= 2 * PART ? keys / 2 : PART;
  for (long first = 0, index = 0; first < see.stop; index++) {
    long stop = index == 2 ? keys : first + part;
    sight own = {first > see.from ? first : see.from, stop < see.stop ? stop : see.stop};
    sum += weigh_run(all(0), weights, rows, lane, own);
    first = stop;
  }
  return sum;
}

typedef struct {
  float sums[HEAD_DIM_MAX], maximum, total;
} running;

/* Scores of one query for a block of `keys`, some of which it sees, become weights; returns by what earlier sums shrink. */
INLINE float soften(running *r, float *scores, sight see, long keys, float scale) {
  float highest = r->maximum;
  for (long at = see.from - see.from % (2 * LANES); at < see.from; at++) scores[at] = -INFINITY;
  for (long at = see.from; at < see.stop; at++) {
    scores[at] *= scale;
    highest = scores[at] > highest ? scores[at] : highest;
  }
  for (long at = see.stop; at < keys && at < see.stop + 2 * LANES; at++) scores[at] = -INFINITY;
  float added = exponentials(scores, see, keys, highest), shrink = expf(r->maximum - highest);
  r->total = added + shrink * r->total;
  r->maximum = highest;
  return shrink;
}

/* One of several queries meets one block of `keys`. */
INLINE void meet(running *r, float *scores, sight see, long keys, const uint16_t *const *values, long head_dim,
                 long queries, float scale, int first) {
  float shrink = soften(r, scores, see, keys, scale);
  for (long lane = 0; lane < head_dim; lane += LANES) {
    floats sum = load(r->sums + lane);
    if (!first) sum *= shrink;
    if (queries < FEW_QUERIES) sum = weigh_run(sum, scores, values, lane, see);
    else sum = weigh_parts(sum, scores, values, lane, see, keys);
    store(r->sums + lane, sum);
  }
}

INLINE void finish(const running *r, uint16_t *out, long head_dim) {
  float share = 1 / r->total;
  for (long i = 0; i < head_dim; i++) out[i] = narrow(r->sums[i] * share);
}

INLINE void begin(running *r) {
  memset(r->sums, 0, sizeof r->sums);
  r->maximum = -INFINITY;
  r->total = 0;
}

/* What is seen of the block of keys that begins at `first`, of positions `see`; nothing when stop is not behind from. */
INLINE sight within(sight see, long first, long block) {
  sight own = {see.from > first ? see.from - first : 0, see.stop - first < block ? see.stop - first : block};
  return own;
}

/* Queries of heads that share keys, two in a vector: four values of one, then four of the other. */
typedef struct {
  floats values[PAIRS][HEAD_DIM_MAX / 4];
} packed_heads;

INLINE void pack_heads(const uint16_t *queries, long count, long head_dim, packed_heads *packed) {
  for (long head = 0; head < HEADS; head++) {
    const uint16_t *query = queries + (head < count ? head : count - 1) * head_dim;
    for (long at = 0; at < head_dim; at++)
      packed->values[head / 2][at / 4][head % 2 * 4 + at % 4] = widen_one(query[at]);
  }
}

/* As score_by_four, for the heads of `count`, which share what they read of a key. */
INLINE void scores_of_heads(const packed_heads *packed, long count, const uint16_t *const *keys, sight see, long head_dim,
                            float (*scores)[BLOCK]) {
  long pairs = (count + 1) / 2;
  for (long at = see.from; at < see.stop; at++) {
    floats sums[PAIRS] = {{0}};
    for (long dim = 0; dim < head_dim; dim += LANES) {
      floats key = widen(keys[at] + dim);
      floats low = __builtin_shufflevector(key, key, 0, 1, 2, 3, 0, 1, 2, 3);
      floats high = __builtin_shufflevector(key, key, 4, 5, 6, 7, 4, 5, 6, 7);
      for (long pair = 0; pair < pairs; pair++) sums[pair] += packed->values[pair][dim / 4] * low;
      for (long pair = 0; pair < pairs; pair++) sums[pair] += packed->values[pair][dim / 4 + 1] * high;
    }
    for (long pair = 0; pair < pairs; pair++) {
      floats sum = sums[pair];
      sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
      sum += __builtin_shufflevector(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6);
      scores[2 * pair][at] = sum[0];
      scores[2 * pair + 1][at] = sum[4];
    }
  }
}

INLINE void attend_heads(const uint16_t *queries, long count, view from, uint16_t *out, sight see, float scale) {
  float scores[HEADS][BLOCK];
  block_rows rows;
  packed_heads packed;
  running r[HEADS];
  long head_dim = from.head_dim, start = see.from - see.from % BLOCK;
  pack_heads(queries, count, head_dim, &packed);
  for (long head = 0; head < count; head++) begin(r + head);
  for (long first = start; first < see.stop; first += BLOCK) {
    long block = see.stop - first < BLOCK ? see.stop - first : BLOCK;
    sight own = within(see, first, block);
    float shrink[HEADS];
    find_rows(from, first, own, &rows);
    scores_of_heads(&packed, count, rows.keys, own, head_dim, scores);
    for (long head = 0; head < count; head++) shrink[head] = soften(r + head, scores[head], own, block, scale);
    for (long lane = 0; lane < head_dim; lane += LANES) {
      floats sums[HEADS];
      for (long head = 0; head < count; head++) {
        sums[head] = load(r[head].sums + lane);
        if (first != start) sums[head] *= shrink[head];
      }
      weigh_fours(sums, count, scores, rows.values, lane, own);
      for (long head = 0; head < count; head++) store(r[head].sums + lane, sums[head]);
    }
  }
  for (long head = 0; head < count; head++) finish(r + head, out + head * head_dim, head_dim);
}

/* The only query of its block, of `count` heads that share keys; no key lies behind what it sees. */
static SIMD void attend_alone(const uint16_t *queries, long count, view from, uint16_t *out, sight see, float scale) {
  for (; count > 0; count -= HEADS, queries += HEADS * from.head_dim, out += HEADS * from.head_dim)
    switch (count) { /* constants, for loops without branches */
    case 1: attend_heads(queries, 1, from, out, see, scale); break;
    case 2: attend_heads(queries, 2, from, out, see, scale); break;
    case 3: attend_heads(queries, 3, from, out, see, scale); break;
    default: attend_heads(queries, HEADS, from, out, see, scale);
    }
}

typedef struct {
  const uint16_t *query;
  uint16_t *out;
  sight see;
} tile_row;

/* Up to eight of the `queries` of one block; there are `end` keys. */
static SIMD void attend_tile(const tile_row *rows, long count, view from, long end, long queries, float scale) {
  long head_dim = from.head_dim;
  block_rows found;
  float packed[HEAD_DIM_MAX * LANES], scores[LANES * BLOCK];
  running r[LANES];
  sight widest = rows->see;
  for (long i = 0; i < LANES; i++) {
    const tile_row *row = rows + (i < count ? i : count - 1);
    for (long at = 0; at < head_dim; at++) packed[at * LANES + i] = widen_one(row->query[at]);
    begin(r + i);
    if (row->see.from < widest.from) widest.from = row->see.from;
    if (row->see.stop > widest.stop) widest.stop = row->see.stop;
  }
  for (long first = widest.from - widest.from % BLOCK; first < widest.stop; first += BLOCK) {
    long block = end - first < BLOCK ? end - first : BLOCK;
    int few = queries < FEW_QUERIES || block < FEW_KEYS;
    sight any = within(widest, first, block);
    find_rows(from, first, any, &found);
    if (!few) scores_of_tile(packed, found.keys, any, head_dim, scores);
    for (long i = 0; i < count; i++) {
      sight own = within(rows[i].see, first, block);
      if (own.from >= own.stop) continue;
      if (few) scores_of_few(rows[i].query, found.keys, own, block, head_dim, scores + i * BLOCK);
      meet(r + i, scores + i * BLOCK, own, block, found.values, head_dim, queries, scale, r[i].maximum == -INFINITY);
    }
  }
  for (long i = 0; i < count; i++) finish(r + i, rows[i].out, head_dim);
}

/* A token that is not of a prompt, for all query heads of its K/V head. Once the window is full, torch is asked for
 * the heads as if they were positions, and for the keys in the window only. */
static SIMD void attend_next(long position, attention_rows rows, long group, long head_dim, const uint16_t *queries,
                             const paged_rows *states, uint16_t *out) {
  int full = rows.window && position + 1 >= rows.window;
  long origin = full ? position + 1 - rows.window : 0;
  sight all_of_it = {0, position + 1 - origin};
  view from = {states, origin, head_dim};
  tile_row tile[LANES];
  if (!full || group == 1) {
    attend_alone(queries, group, from, out, all_of_it, rows.scale);
    return;
  }
  for (long head = 0, filled = 0; head < group; head++) {
    tile[filled++] = (tile_row){queries + head * head_dim, out + head * head_dim, all_of_it};
    if (filled < LANES && head < group - 1) continue;
    attend_tile(tile, filled, from, all_of_it.stop, group, rows.scale);
    filled = 0;
  }
}

SIMD void attend(attention_rows rows, long group, long head_dim, const uint16_t *queries, long query_stride,
                 const paged_rows *states, uint16_t *out, long out_stride) {
  long span = rows.prompt >= 768 ? 256 : rows.prompt >= 192 ? 64 : 32;
  view from = {states, 0, head_dim};
  tile_row tile[LANES];
  if (rows.prompt == 1) {
    for (long at = 0; at < rows.count; at++)
      attend_next(rows.first + at, rows, group, head_dim, queries + at * query_stride, states,
                  out + at * out_stride);
    return;
  }
  for (long at = 0; at < rows.count;) {
    /* the block of queries that torch would put this position into */
    long start = (rows.first + at) / span * span, stop = start + span < rows.prompt ? start + span : rows.prompt;
    long next = stop - rows.first < rows.count ? stop - rows.first : rows.count, filled = 0;
    for (; at < next; at++) {
      const uint16_t *query = queries + at * query_stride;
      uint16_t *to = out + at * out_stride;
      sight see = {0, rows.first + at + 1};
      if (rows.window && see.stop > rows.window) see.from = see.stop - rows.window;
      if (stop - start == 1) {
        attend_alone(query, group, from, to, see, rows.scale);
        continue;
      }
      for (long head = 0; head < group; head++) {
        tile[filled++] = (tile_row){query + head * head_dim, to + head * head_dim, see};
        if (filled == LANES || (at == next - 1 && head == group - 1)) {
          attend_tile(tile, filled, from, rows.prompt, stop - start, rows.scale);
          filled = 0;
        }
      }
    }
  }
}
