/* Products with resident weights. */
#pragma once

#include <stdint.h>

#include "pool.h"

/* Whether this machine can run these kernels. */
int linear_supported(void);

/* x [m][k] and w [n][k], bfloat16 -> y [m][n], bfloat16. `wide`: m * k floats to work in. */
void linear(pool *threads, const uint16_t *x, const uint16_t *w, uint16_t *y, float *wide, long m, long n,
            long k);
