/* Threads that share out the pieces of one job, and never make its caller wait for a thread that sleeps.
 *
 * Pieces are taken one by one from a counter, the caller takes part, and a worker that the kernel has
 * set aside between two pieces holds up nobody: that is what a barrier of equal shares cannot offer to a process
 * that decodes and stages on the same cores.
 */
#pragma once

typedef struct pool pool;

/* One piece of a job. */
typedef void (*pool_piece)(const void *job, long piece);

/* A pool of `threads` in all, the caller counted. NULL when threads cannot be made. */
pool *pool_create(int threads);

/* How many threads there are, the caller counted. */
int pool_threads(const pool *p);

/* Run pieces 0 .. pieces-1; returns when all are done. One caller at a time. */
void pool_run(pool *p, pool_piece run, const void *job, long pieces);

/* End the threads. Nothing may run. */
void pool_destroy(pool *p);
