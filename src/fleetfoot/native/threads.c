/* The pool of threads that computes the kernels.
 *
 * A job is divided into chunks, which threads take from a counter. So a thread that has no core takes nothing, and the
 * caller, which takes chunks too, does not wait for it: it waits for chunks that others have begun, and for no barrier.
 * A worker without work looks for the next job for a few microseconds, then yields its core between its looks, then
 * sleeps. The caller sleeps sooner than it would wait for a time slice of another process: its own core is free then for
 * the thread that it waits for.
 *
 * Beside a busy process a thread may lose its core within a chunk. Such a wait is many times the work's own time; it makes
 * the pool smaller by one thread for a while (see `policy`). It is rare, since workers offer their core between chunks, many
 * times within the time slice of another process, which takes it then: so a core that is shared is noticed at no cost.
 */
#include <stddef.h>
#include <stdint.h>

#include "threads.h"

#define EXPORTED __attribute__((visibility("default")))

/* --- how many threads ------------------------------------------------------------------------------------------- */

/* A wait for other threads is a delay if it takes so long, and half as long as the work before it. */
#define DELAY_NS 250000
/* How long the pool stays smaller after a delay: the first time, and at most. It is twice as long each time that the next
 * delay comes soon after the pool has grown again. */
#define FIRST_PAUSE_NS 10000000
#define LAST_PAUSE_NS 1000000000

typedef struct {
    int64_t allowed;   /* threads; 0: no limit; -1: none whatever happens, for tests */
    int64_t pause;     /* the last one */
    int64_t next_try;  /* when one more thread is allowed */
    int64_t lost_core; /* when a worker got the core back that it had offered, if that took as long as a delay; else 0 */
} policy;

/* Makes the pool smaller than so many threads after a delay. */
static void shrink(policy *p, int64_t num_threads, int64_t now) {
    if (p->allowed < 0) return;
    const int is_soon = p->allowed && now < p->next_try + 4 * p->pause;
    p->pause = !is_soon ? FIRST_PAUSE_NS : 2 * p->pause < LAST_PAUSE_NS ? 2 * p->pause : LAST_PAUSE_NS;
    p->allowed = num_threads > 2 ? num_threads - 1 : 1;
    p->next_try = now + p->pause;
}

/* How many of the wanted threads a job has that starts now. */
EXPORTED int64_t ff_threads_for(policy *p, int64_t wanted, int64_t now) {
    const int64_t lost_core = __atomic_exchange_n(&p->lost_core, 0, __ATOMIC_RELAXED);
    if (lost_core) shrink(p, p->allowed > 0 && p->allowed < wanted ? p->allowed : wanted, lost_core);
    if (p->allowed <= 0 || p->allowed >= wanted) return wanted;
    if (now >= p->next_try) {
        p->allowed++;
        p->next_try = now + p->pause;
    }
    return p->allowed;
}

/* Takes in that a job of some threads, which began and ended at these times, waited for one of them since `idle`. */
EXPORTED void ff_threads_waited(policy *p, int64_t num_threads, int64_t began, int64_t idle, int64_t ended) {
    if (ended - idle >= DELAY_NS && ended - idle >= (idle - began) / 2) shrink(p, num_threads, ended);
}

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* --- the pool --------------------------------------------------------------------------------------------------- */

enum { MAX_THREADS = 512 };
/* Looks of a worker and of the caller, a pause of some tens of cycles apart, before they read the clock. */
enum { LOOKS = 200, CALLERS_LOOKS = 1000 };
#define YIELDING_NS 50000    /* of a worker before it sleeps */
#define UNYIELDING_NS 100000 /* of a worker that has chunks: much less than the slice after which it would lose its core */

typedef struct {
    _Alignas(64) uint32_t is_asleep;
} worker;

static struct {
    _Alignas(64) uint64_t chunks; /* of the job: the number of its threads in the upper half, chunks left in the lower one */
    _Alignas(64) uint32_t unfinished; /* chunks */
    uint32_t caller_sleeps;
    int64_t idle_since; /* a worker that found no chunk while others were unfinished */
    _Alignas(64) ff_task task; /* written while there are no unfinished chunks, read by threads that have taken one */
    void *context;
    int64_t count, grain;
    uint32_t num_chunks;
    int num_threads; /* that were started, with the caller */
    policy size;
    uint32_t is_in_use;
    void (*before_chunk)(int thread); /* for tests */
    worker workers[MAX_THREADS];
} pool;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_while(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static int has_chunk(uint64_t chunks, int thread) { return (uint32_t)chunks && thread < (int)(chunks >> 32); }

/* Takes and computes chunks until there are none. Whatever job a chunk is taken from is the current one, which does not
 * end before it is finished. */
static void work(int thread) {
    uint32_t done = 0;
    uint64_t chunks = __atomic_load_n(&pool.chunks, __ATOMIC_ACQUIRE);
    while (has_chunk(chunks, thread)) {
        if (!__atomic_compare_exchange_n(&pool.chunks, &chunks, chunks - 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        if (pool.before_chunk) pool.before_chunk(thread);
        const int64_t begin = (int64_t)(pool.num_chunks - (uint32_t)chunks) * pool.grain, rest = pool.count - begin;
        pool.task(pool.context, begin, begin + (rest < pool.grain ? rest : pool.grain), thread);
        done++;
        chunks = __atomic_load_n(&pool.chunks, __ATOMIC_ACQUIRE);
    }
    if (done && __atomic_sub_fetch(&pool.unfinished, done, __ATOMIC_SEQ_CST) == 0 && thread &&
        __atomic_load_n(&pool.caller_sleeps, __ATOMIC_SEQ_CST))
        wake(&pool.unfinished);
}

/* Offers the core to others and returns the time. Another process that wants the core takes it here, for as long as the
 * system lets it, while no chunk waits for this thread. */
static int64_t yield_core(int64_t began) {
    sched_yield();
    const int64_t ended = now();
    if (ended - began > DELAY_NS) __atomic_store_n(&pool.size.lost_core, ended, __ATOMIC_RELAXED);
    return ended;
}

static int found_chunk(int thread) { return has_chunk(__atomic_load_n(&pool.chunks, __ATOMIC_SEQ_CST), thread); }

static void wait_for_chunk(int thread, int64_t *yielded) {
    uint32_t *is_asleep = &pool.workers[thread].is_asleep;
    int64_t time = now();
    if (time - *yielded > UNYIELDING_NS) *yielded = yield_core(time);
    for (int look = 0; look < LOOKS; look++) {
        if (found_chunk(thread)) return;
        pause_core();
    }
    const int64_t began = now();
    if (__atomic_load_n(&pool.unfinished, __ATOMIC_RELAXED) && !__atomic_load_n(&pool.idle_since, __ATOMIC_RELAXED))
        __atomic_store_n(&pool.idle_since, began, __ATOMIC_RELAXED);
    for (time = began; time - began < YIELDING_NS;) {
        *yielded = time = yield_core(time);
        if (found_chunk(thread)) return;
    }
    __atomic_store_n(is_asleep, 1, __ATOMIC_SEQ_CST);
    if (found_chunk(thread)) __atomic_store_n(is_asleep, 0, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(is_asleep, __ATOMIC_ACQUIRE)) sleep_while(is_asleep, 1);
}

static void *run_worker(void *number) {
    for (int64_t yielded = 0;;) {
        work((int)(intptr_t)number);
        wait_for_chunk((int)(intptr_t)number, &yielded);
    }
    return NULL;
}

/* The threads of the parent are not in the child. */
static void forget_threads(void) {
    pool.chunks = pool.unfinished = pool.caller_sleeps = pool.is_in_use = 0;
    pool.num_threads = 1;
}

/* Starts threads until there are so many, as far as the system has them. */
static void start_threads(int num_threads) {
    sigset_t all, before;
    if (!pool.num_threads) {
        if (pthread_atfork(NULL, NULL, forget_threads)) return;
        pool.num_threads = 1;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    for (pthread_t id; pool.num_threads < num_threads; pool.num_threads++) {
        pool.workers[pool.num_threads].is_asleep = 0;
        if (pthread_create(&id, NULL, run_worker, (void *)(intptr_t)pool.num_threads)) break;
        pthread_detach(id);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Waits for the chunks of other threads, in a job that began at that time. */
static void wait_for_others(int num_threads, int64_t began) {
    for (int look = 0; look < CALLERS_LOOKS; look++) {
        if (!__atomic_load_n(&pool.unfinished, __ATOMIC_ACQUIRE)) return;
        pause_core();
    }
    const int64_t idle = now();
    __atomic_store_n(&pool.caller_sleeps, 1, __ATOMIC_SEQ_CST);
    for (uint32_t left; (left = __atomic_load_n(&pool.unfinished, __ATOMIC_SEQ_CST));) sleep_while(&pool.unfinished, left);
    __atomic_store_n(&pool.caller_sleeps, 0, __ATOMIC_RELAXED);
    ff_threads_waited(&pool.size, num_threads, began, idle, now());
}

void ff_run(ff_task task, void *context, int64_t count, int64_t grain, int num_threads) {
    const int64_t num_chunks = count > 0 ? (count + grain - 1) / grain : 0;
    /* One job at a time: another caller's thread computes alone meanwhile. */
    if (num_threads < 2 || num_chunks < 2 || num_chunks > UINT32_MAX ||
        __atomic_exchange_n(&pool.is_in_use, 1, __ATOMIC_ACQUIRE)) {
        if (count > 0) task(context, 0, count, 0);
        return;
    }
    const int64_t began = now();
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    num_threads = (int)ff_threads_for(&pool.size, num_threads, began);
    if (num_threads > num_chunks) num_threads = (int)num_chunks;
    if (num_threads > pool.num_threads) start_threads(num_threads);
    if (num_threads > pool.num_threads) num_threads = pool.num_threads;
    if (num_threads < 2) {
        __atomic_store_n(&pool.is_in_use, 0, __ATOMIC_RELEASE);
        task(context, 0, count, 0);
        return;
    }
    pool.task = task;
    pool.context = context;
    pool.count = count;
    pool.grain = grain;
    pool.num_chunks = (uint32_t)num_chunks;
    pool.idle_since = 0;
    __atomic_store_n(&pool.unfinished, (uint32_t)num_chunks, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.chunks, (uint64_t)num_threads << 32 | (uint32_t)num_chunks, __ATOMIC_SEQ_CST);
    for (int thread = 1; thread < num_threads; thread++) {
        uint32_t *is_asleep = &pool.workers[thread].is_asleep;
        if (__atomic_load_n(is_asleep, __ATOMIC_SEQ_CST)) {
            __atomic_store_n(is_asleep, 0, __ATOMIC_SEQ_CST);
            wake(is_asleep);
        }
    }
    work(0);
    const int64_t idle = __atomic_load_n(&pool.idle_since, __ATOMIC_RELAXED);
    if (__atomic_load_n(&pool.unfinished, __ATOMIC_ACQUIRE))
        wait_for_others(num_threads, began);
    else if (idle > began) /* the caller itself had no core */
        ff_threads_waited(&pool.size, num_threads, began, idle, now());
    __atomic_store_n(&pool.is_in_use, 0, __ATOMIC_RELEASE);
}

/* How many of the wanted threads a step has that starts now, for operations that are not the pool's. */
EXPORTED int ff_threads_of_step(int wanted) {
    return pool.size.allowed || pool.size.lost_core ? (int)ff_threads_for(&pool.size, wanted, now()) : wanted;
}

/* For tests: called by each thread of a job before each of its chunks; NULL: nothing is. */
EXPORTED void ff_threads_watch(void (*before_chunk)(int thread)) { pool.before_chunk = before_chunk; }

/* The size of the pool, for tests. */
EXPORTED policy *ff_threads_policy(void) { return &pool.size; }

#else

void ff_run(ff_task task, void *context, int64_t count, int64_t grain, int num_threads) {
    (void)grain;
    (void)num_threads;
    if (count > 0) task(context, 0, count, 0);
}

EXPORTED int ff_threads_of_step(int wanted) { return wanted; }

#endif
