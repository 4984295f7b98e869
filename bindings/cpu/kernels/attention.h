/* Attention of new positions of one sequence, for one head of keys and values. */
#pragma once

#include <stdint.h>

/* New positions, and how they were asked for.
 *
 * The bits of a result depend on how many positions are computed in one call of torch's, since it adds
 * in another order for each. Here they depend on the whole prompt only: however it is cut in pieces, each
 * position gets what it would get if the prompt were computed at once.
 */
typedef struct {
  long first, count; /* positions in the sequence */
  long prompt;       /* length of the prompt that they belong to; 1 for tokens that are not of the prompt */
  long window;       /* how many positions each looks at, its own included; 0 for all */
  float scale;       /* of the products of queries and keys */
} attention_rows;

/* Keys and values of one head, in pages. Position p has its key, [head_dim] values, at
 * keys + table[p / page_tokens] * page_stride + p % page_tokens * head_dim, and its value `values` behind that.
 */
typedef struct {
  const uint16_t *keys;
  const int32_t *table;
  long values, page_tokens, page_stride;
} paged_rows;

/* queries [count][group][head_dim], `query_stride` values from one position to the next; keys and values of all
 * positions, those of the new rows included -> out, laid out like the queries with `out_stride`.
 * All bfloat16. head_dim is a multiple of 8, at most 256; a group has at most 32. Keys and values in
 * front of every window are not read. */
void attend(attention_rows rows, long group, long head_dim, const uint16_t *queries, long query_stride,
            const paged_rows *states, uint16_t *out, long out_stride);
