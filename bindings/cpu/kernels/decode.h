/* New tokens of several sequences through a whole decoder. */
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

/* New tokens of a sequence, and its K/V: bfloat16 [layers][2][kv_heads][capacity][head_dim]. */
typedef struct {
  uint16_t *states;
  long capacity, length;         /* positions that there is room for, and that are taken */
  long prompt;                   /* see attention_rows */
  long count;                    /* new tokens, behind `length` */
  const int64_t *tokens;         /* [count] */
  const uint16_t *cosine, *sine; /* [count][head_dim], of their positions */
} decoder_sequence;

/* Bytes of working memory that decode needs for so many new tokens in all. */
long decode_workspace(const decoder *model, long rows);

/* Adds the new tokens' K/V behind each sequence's `length`, and writes logits [count][vocab], bfloat16, of
 * the last token of each. What a sequence gets does not depend on the others. */
void decode(pool *threads, const decoder *model, const decoder_sequence *sequences, long count,
            uint16_t *logits, void *workspace);
