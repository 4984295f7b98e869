/* The decoder of bindings/model/decoder.py: the same operations, in the same order, with the same roundings to
 * bfloat16 between them, and so the same bits (tests/unit/test_decode.py). */
#include "decode.h"

#include <math.h>

#include "attention.h"
#include "linear.h"
#include "numbers.h"

typedef struct {
  float *wide;
  uint16_t *hidden, *normed, *qkv, *attended, *product, *gate_up, *mlp;
} workspace;

enum { ALIGN = 64 };

static void *take(char **at, long bytes) {
  void *taken = *at;
  if (*at) *at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
  return taken;
}

static long qkv_rows(const decoder *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

static long widest(const decoder *m) {
  long q = m->heads * m->head_dim, wide = m->hidden > m->intermediate ? m->hidden : m->intermediate;
  return wide > q ? wide : q;
}

static workspace carve(const decoder *m, long count, char **at) {
  workspace w;
  w.wide = take(at, count * widest(m) * (long)sizeof(float));
  w.normed = take(at, count * m->hidden * 2);
  w.qkv = take(at, count * qkv_rows(m) * 2);
  w.attended = take(at, count * m->heads * m->head_dim * 2);
  w.product = take(at, count * m->hidden * 2);
  w.gate_up = take(at, count * 2 * m->intermediate * 2);
  w.mlp = take(at, count * m->intermediate * 2);
  return w;
}

long decode_workspace(const decoder *model, long rows) {
  static char none[1];
  char *at = none; /* any address that is not null: only the distance counts */
  carve(model, rows, &at);
  return at - none + ALIGN;
}

/* Sum of squares in the order of torch's sum over the last dimension: four vectors of running sums,
 * set aside every 16 rounds. Source: aten/src/ATen/native/cpu/SumKernel.cpp (PyTorch 2.13), for under 2^16 values. */
INLINE float sum_of_squares(const uint16_t *x, long count) {
  enum { WAYS = 4, ROUNDS = 16 };
  floats own[WAYS] = {{0}}, higher[WAYS] = {{0}};
  long vectors = count / LANES, rounds = vectors / WAYS;
  for (long round = 0; round < rounds; round++) {
    for (int way = 0; way < WAYS; way++) {
      floats v = widen(x + (round * WAYS + way) * LANES);
      own[way] += v * v;
    }
    if (round % ROUNDS == ROUNDS - 1)
      for (int way = 0; way < WAYS; way++) higher[way] += own[way], own[way] = all(0);
  }
  for (int way = 0; way < WAYS; way++) own[way] += higher[way];
  for (long at = rounds * WAYS; at < vectors; at++) {
    floats v = widen(x + at * LANES);
    own[0] += v * v;
  }
  own[0] += own[1];
  own[0] += own[2];
  own[0] += own[3];
  float total = 0;
  for (long at = vectors * LANES; at < count; at++) total += widen_one(x[at]) * widen_one(x[at]);
  for (int lane = 0; lane < LANES; lane++) total += own[0][lane];
  return total;
}

/* x and y may be the same. */
SIMD static void rms_norm(const decoder *m, const uint16_t *x, const uint16_t *weight, uint16_t *y, long rows,
                          long count) {
  for (long row = 0; row < rows; row++, x += count, y += count) {
    float scale = 1 / sqrtf(sum_of_squares(x, count) / (float)count + m->norm_eps);
    if (m->norms_from_one)
      for (long i = 0; i < count; i++) y[i] = narrow(widen_one(x[i]) * scale * (1 + widen_one(weight[i])));
    else
      for (long i = 0; i < count; i++) y[i] = narrow(widen_one(weight[i]) * rounded(widen_one(x[i]) * scale));
  }
}

/* The rotary embedding of one head, in place, at position `at` of the rotation; behind a norm where there is one. */
SIMD static void turn(const decoder *m, uint16_t *x, const uint16_t *norm, const rotation *r, long at) {
  long head_dim = m->head_dim, half = head_dim / 2;
  const uint16_t *cosine = r->cosine + at * head_dim, *sine = r->sine + at * head_dim;
  if (norm) rms_norm(m, x, norm, x, 1, head_dim);
  for (long i = 0; i < half; i++) {
    float left = widen_one(x[i]), right = widen_one(x[i + half]);
    x[i] = narrow(rounded(left * widen_one(cosine[i])) + rounded(-right * widen_one(sine[i])));
    x[i + half] = narrow(rounded(right * widen_one(cosine[i + half])) + rounded(left * widen_one(sine[i + half])));
  }
}

SIMD static void add(uint16_t *x, const uint16_t *y, long count) {
  for (long i = 0; i < count; i++) x[i] = narrow(widen_one(x[i]) + widen_one(y[i]));
}

SIMD static void embed(const decoder *m, int64_t token, uint16_t *to) {
  const uint16_t *from = m->embed + token * m->hidden;
  for (long i = 0; i < m->hidden; i++) to[i] = narrow(widen_one(from[i]) * m->embed_scale);
}

/* The activated gate times up, of one row. */
SIMD static void gate(const uint16_t *activation, const uint16_t *gate_up, uint16_t *y, long count) {
  const uint16_t *up = gate_up + count;
  for (long i = 0; i < count; i++) y[i] = narrow(widen_one(activation[gate_up[i]]) * widen_one(up[i]));
}

typedef struct {
  const decoder *model;
  const decoder_sequence *sequences;
  const workspace *work;
  long layer;
} attention;

/* Where the K/V of one head lies. */
static paged_rows head_rows(const decoder *m, const decoder_sequence *s, long layer, long head) {
  const layer_pages *pages = s->layers + layer;
  long rows = s->page_tokens * m->head_dim, half = m->kv_heads * rows;
  return (paged_rows){pages->pages + head * rows, s->tables[pages->group], half, s->page_tokens, 2 * half};
}

static uint16_t *key_row(const paged_rows *states, long position, long head_dim) {
  return (uint16_t *)states->keys + states->table[position / states->page_tokens] * states->page_stride +
         position % states->page_tokens * head_dim;
}

/* One K/V head of one sequence: its new positions join, then their query heads look. */
static void attend_head(const void *job, long index) {
  const attention *a = job;
  const decoder *m = a->model;
  const decoder_layer *layer = m->layer + a->layer;
  const decoder_sequence *s = a->sequences + index / m->kv_heads;
  const rotation *r = s->rotations + layer->rope;
  long head = index % m->kv_heads, group = m->heads / m->kv_heads, size = m->head_dim, stride = qkv_rows(m), row = 0;
  for (const decoder_sequence *earlier = a->sequences; earlier < s; earlier++) row += earlier->count;
  uint16_t *queries = a->work->qkv + row * stride + head * group * size;
  paged_rows states = head_rows(m, s, a->layer, head);
  for (long at = 0; at < s->count; at++) {
    uint16_t *key = a->work->qkv + (row + at) * stride + (m->heads + head) * size, *value = key + m->kv_heads * size;
    turn(m, key, layer->k_norm, r, at);
    uint16_t *kept = key_row(&states, s->length + at, size);
    memcpy(kept, key, (size_t)size * 2);
    memcpy(kept + states.values, value, (size_t)size * 2);
    for (long q = 0; q < group; q++) turn(m, queries + at * stride + q * size, layer->q_norm, r, at);
  }
  attention_rows rows = {s->length, s->count, s->prompt, layer->window, m->query_scale};
  attend(rows, group, size, queries, stride, &states, a->work->attended + (row * m->heads + head * group) * size,
         m->heads * size);
}

/* The last row of each sequence, one after the other. */
static void gather_last(const decoder_sequence *sequences, long count, const uint16_t *rows, uint16_t *to, long size) {
  long row = 0;
  for (long i = 0; i < count; i++) {
    row += sequences[i].count;
    memcpy(to + i * size, rows + (row - 1) * size, (size_t)size * 2);
  }
}

void decode(pool *threads, const decoder *m, decoder_layers layers, const decoder_sequence *sequences, long count,
            uint16_t *logits, void *memory) {
  char *at = (char *)(((uintptr_t)memory + ALIGN - 1) / ALIGN * ALIGN);
  long rows = 0, hidden = m->hidden, inner = m->intermediate, q_rows = m->heads * m->head_dim;
  for (long i = 0; i < count; i++) rows += sequences[i].count;
  workspace w = carve(m, rows, &at);
  w.hidden = layers.hidden;
  for (long i = 0, row = 0; i < count && !layers.first; i++)
    for (long j = 0; j < sequences[i].count; j++, row++) embed(m, sequences[i].tokens[j], w.hidden + row * hidden);
  for (long layer = layers.first; layer < layers.stop; layer++) {
    const decoder_layer *l = m->layer + layer;
    rms_norm(m, w.hidden, l->input_norm, w.normed, rows, hidden);
    linear(threads, w.normed, l->qkv, w.qkv, w.wide, rows, qkv_rows(m), hidden);
    attention job = {m, sequences, &w, layer};
    pool_run(threads, attend_head, &job, count * m->kv_heads);
    linear(threads, w.attended, l->o, w.product, w.wide, rows, hidden, q_rows);
    if (l->o_norm) rms_norm(m, w.product, l->o_norm, w.product, rows, hidden);
    add(w.hidden, w.product, rows * hidden);
    rms_norm(m, w.hidden, l->post_norm, w.normed, rows, hidden);
    linear(threads, w.normed, l->gate_up, w.gate_up, w.wide, rows, 2 * inner, hidden);
    for (long row = 0; row < rows; row++) gate(m->activation, w.gate_up + row * 2 * inner, w.mlp + row * inner, inner);
    linear(threads, w.mlp, l->down, w.product, w.wide, rows, hidden, inner);
    if (l->down_norm) rms_norm(m, w.product, l->down_norm, w.product, rows, hidden);
    add(w.hidden, w.product, rows * hidden);
  }
  if (layers.stop < m->layers) return;
  gather_last(sequences, count, w.hidden, w.product, hidden);
  rms_norm(m, w.product, m->norm, w.normed, count, hidden);
  linear(threads, w.normed, m->head, logits, w.wide, count, m->vocab, hidden);
}
