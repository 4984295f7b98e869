/* One new token of each of several sequences through a whole decoder. */
#pragma once

#include <stdint.h>

#include "pool.h"

/* Resident weights of a layer, bfloat16, rows of checkpoint tensors one after the other. */
typedef struct {
  const uint16_t *input_norm, *qkv, *o, *post_norm, *gate_up, *down;
} decoder_layer;

typedef struct {
  long layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
  float norm_eps;
  const uint16_t *embed, *norm, *head;
  const decoder_layer *layer;
} decoder;

/* A sequence's K/V: bfloat16 [layers][2][kv_heads][capacity][head_dim], of which `length` positions are taken. */
typedef struct {
  uint16_t *states;
  long capacity, length;
  int64_t token;                /* the new one */
  const uint16_t *cosine, *sine; /* [head_dim], of its position */
} decoder_sequence;

/* Bytes of working memory that decode needs. */
long decode_workspace(const decoder *model, long count, long longest);

/* Adds each token's K/V behind its sequence's `length`, and writes logits [count][vocab], bfloat16.
 *
 * `longest`: the largest `length` + 1. What a sequence gets does not depend on the others. */
void decode(pool *threads, int width, const decoder *model, const decoder_sequence *sequences, long count, long longest,
            uint16_t *logits, void *workspace);
