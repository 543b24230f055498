/* Work shared by threads of the library's own pool. */
#ifndef FLEETFOOT_THREADS_H
#define FLEETFOOT_THREADS_H

#include <stdint.h>

/* Items begin .. end of a job; thread is below the job's num_threads, and no other thread has the number meanwhile. */
typedef void (*ff_task)(void *context, int64_t begin, int64_t end, int thread);

/* Calls the task for all items below count, `grain` at a time, on at most num_threads threads, the caller's included, and
 * returns when all are done. A task must compute the same in whatever order and on whatever thread its items come. */
__attribute__((visibility("default"))) void ff_run(ff_task task, void *context, int64_t count, int64_t grain,
                                                   int num_threads);

/* Items for each of a few chunks per thread. */
static inline int64_t ff_grain(int64_t count, int num_threads) {
    const int64_t chunks = 4 * (int64_t)num_threads;
    return (count + chunks - 1) / chunks;
}

#endif
