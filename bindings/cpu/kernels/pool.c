#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum {
  SPIN = 4000,       /* looks before a worker sleeps: about 100 us, longer than the gap between two layers' products */
  SPIN_YIELD = 20000 /* looks before the caller gives its core to a worker that holds the last piece */
};

/* A thread of the pool, and the processor that it was last seen on. */
typedef struct {
  struct pool *pool;
  pthread_t thread;
  atomic_int processor;
} seat;

struct pool {
  /* The job. Written by the caller only while `open` is 0 and `inside` is 0. */
  pool_piece run;
  const void *job;
  long pieces;

  atomic_long next;   /* the next piece */
  atomic_int inside;  /* workers that may look at the job */
  atomic_int open;    /* whether there is a job to look at */
  atomic_uint serial; /* of the job: what a worker waits to see change */

  pthread_mutex_t lock;
  pthread_cond_t changed;
  atomic_int sleeping;
  int ending; /* under lock */

  int workers;
  seat seats[]; /* the workers', and behind them the caller's */
};

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* Sits down on the processor it is on; gets up and takes another one if a thread of the pool sits there already.
 *
 * The system wakes a worker where it slept, or where its waker runs, and when other processes were busy just then
 * leaves two threads on one processor for many steps: each takes twice as long. */
static void sit_apart(pool *p, seat *own) {
  int processor = sched_getcpu(), taken = 0;
  atomic_store_explicit(&own->processor, processor, memory_order_relaxed);
  for (int index = 0; index <= p->workers; index++)
    taken |= &p->seats[index] != own && atomic_load_explicit(&p->seats[index].processor, memory_order_relaxed) == processor;
  if (!taken) return;
  cpu_set_t allowed, free;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  free = allowed;
  for (int index = 0; index <= p->workers; index++) {
    int other = atomic_load_explicit(&p->seats[index].processor, memory_order_relaxed);
    if (other >= 0 && other < CPU_SETSIZE) CPU_CLR(other, &free);
  }
  if (!CPU_COUNT(&free) || sched_setaffinity(0, sizeof free, &free)) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
  atomic_store_explicit(&own->processor, sched_getcpu(), memory_order_relaxed);
}

static void take_pieces(pool *p) {
  for (;;) {
    long piece = atomic_fetch_add(&p->next, 1);
    if (piece >= p->pieces) return;
    p->run(p->job, piece);
  }
}

/* Returns the serial that differs from `seen`; 0 when the pool ends. */
static unsigned await_job(pool *p, unsigned seen) {
  for (int look = 0; look < SPIN; look++) {
    unsigned serial = atomic_load(&p->serial);
    if (serial != seen) return serial;
    relax();
  }
  pthread_mutex_lock(&p->lock);
  atomic_fetch_add(&p->sleeping, 1);
  while (atomic_load(&p->serial) == seen && !p->ending) pthread_cond_wait(&p->changed, &p->lock);
  atomic_fetch_sub(&p->sleeping, 1);
  unsigned serial = p->ending ? 0 : atomic_load(&p->serial);
  pthread_mutex_unlock(&p->lock);
  return serial;
}

static void *work(void *argument) {
  seat *own = argument;
  pool *p = own->pool;
  unsigned serial = 1;
  while ((serial = await_job(p, serial))) {
    /* Enter, then look whether the job is still there: the caller closes it, then waits for those inside. */
    atomic_fetch_add(&p->inside, 1);
    if (atomic_load(&p->open)) {
      sit_apart(p, own);
      take_pieces(p);
    }
    atomic_fetch_sub(&p->inside, 1);
  }
  return NULL;
}

pool *pool_create(int threads) {
  int workers = threads > 1 ? threads - 1 : 0;
  pool *p = calloc(1, sizeof(pool) + sizeof(seat) * (size_t)(workers + 1));
  if (!p) return NULL;
  for (int index = 0; index <= workers; index++) {
    p->seats[index].pool = p;
    atomic_store(&p->seats[index].processor, -1);
  }
  atomic_store(&p->serial, 1);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->changed, NULL);
  for (; p->workers < workers; p->workers++) {
    if (pthread_create(&p->seats[p->workers].thread, NULL, work, &p->seats[p->workers])) {
      pool_destroy(p);
      return NULL;
    }
  }
  return p;
}

static void announce(pool *p) {
  unsigned serial = atomic_load(&p->serial) + 1;
  atomic_store(&p->serial, serial ? serial : 1);
  if (!atomic_load(&p->sleeping)) return;
  pthread_mutex_lock(&p->lock);
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
}

int pool_threads(const pool *p) { return p->workers + 1; }

void pool_run(pool *p, pool_piece run, const void *job, long pieces) {
  if (!p->workers || pieces < 2) {
    for (long piece = 0; piece < pieces; piece++) run(job, piece);
    return;
  }
  p->run = run;
  p->job = job;
  p->pieces = pieces;
  atomic_store_explicit(&p->seats[p->workers].processor, sched_getcpu(), memory_order_relaxed);
  atomic_store(&p->next, 0);
  atomic_store(&p->open, 1);
  announce(p);
  take_pieces(p);
  atomic_store(&p->open, 0);
  for (int look = 0; atomic_load(&p->inside); look++) {
    if (look < SPIN_YIELD) relax();
    else sched_yield();
  }
}

void pool_destroy(pool *p) {
  pthread_mutex_lock(&p->lock);
  p->ending = 1;
  atomic_fetch_add(&p->serial, 1);
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
  for (int index = 0; index < p->workers; index++) pthread_join(p->seats[index].thread, NULL);
  pthread_cond_destroy(&p->changed);
  pthread_mutex_destroy(&p->lock);
  free(p);
}
