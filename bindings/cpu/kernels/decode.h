/* New tokens of several sequences through a whole decoder. */
#pragma once

#include <stdint.h>

#include "pool.h"

/* A layer. Resident weights are bfloat16, rows of checkpoint tensors one after the other; norms that the model does
 * not have are null. */
typedef struct {
  const uint16_t *input_norm, *qkv, *q_norm, *k_norm, *o, *o_norm, *post_norm, *gate_up, *down, *down_norm;
  long window; /* see attention_rows */
  long rope;   /* which of the sequences' rotations */
} decoder_layer;

enum { ROPES_MAX = 2 };

typedef struct {
  long layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
  long norms_from_one; /* whether weights of norms are stored less one, and applied before the norm is rounded */
  float norm_eps, query_scale, embed_scale;
  const uint16_t *activation; /* [65536]: of the gate, for each bfloat16 */
  const uint16_t *embed, *norm, *head;
  const decoder_layer *layer;
} decoder;

typedef struct {
  const uint16_t *cosine, *sine; /* [count][head_dim], of the new tokens' positions */
} rotation;

/* The pages of one layer, bfloat16 [pages][2][kv_heads][page_tokens][head_dim], and whose block table leads to them. */
typedef struct {
  uint16_t *pages;
  long group;
} layer_pages;

/* New tokens of a sequence, and where its K/V lies. */
typedef struct {
  const layer_pages *layers;     /* [layers] */
  const int32_t *const *tables;  /* [groups]: the page of each page_tokens positions */
  long page_tokens, length;      /* positions of a page; positions that are taken */
  long prompt;                   /* see attention_rows */
  long count;                    /* new tokens, behind `length` */
  const int64_t *tokens;         /* [count] */
  rotation rotations[ROPES_MAX]; /* as many as layers ask for */
} decoder_sequence;

/* Bytes of working memory that decode needs for so many new tokens in all. */
long decode_workspace(const decoder *model, long rows);

/* Some layers of a step: those from `first` on, before `stop`. */
typedef struct {
  long first, stop;
  uint16_t *hidden; /* [new tokens][hidden]: states before and after them; those before layer 0 are the embeddings */
} decoder_layers;

/* Adds the new tokens' K/V behind each sequence's `length` in these layers; after the last layer writes logits
 * [count][vocab], bfloat16, of the last token of each. What a sequence gets does not depend on the others. */
void decode(pool *threads, const decoder *model, decoder_layers layers, const decoder_sequence *sequences, long count,
            uint16_t *logits, void *workspace);
