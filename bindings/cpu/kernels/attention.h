/* Attention of one new position of a sequence over all of its positions. */
#pragma once

#include <stdint.h>

/* One head of one sequence.
 *
 * query [head_dim], keys and values [positions][head_dim] -> out [head_dim], all bfloat16.
 * `scores`: `positions` floats to work in. head_dim is a multiple of 8, at most 256.
 */
void attend(const uint16_t *query, const uint16_t *keys, const uint16_t *values, uint16_t *out, float *scores,
            long positions, long head_dim);
