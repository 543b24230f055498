/* Looking for a change of a word in memory that processes share, in pauses that leave the core to its other thread. */
#include <stdint.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))

enum { LOOKS = 32 }; /* between two looks at the clock */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Returns 1 once the word is not value, and 0 if it still is after so many nanoseconds. */
EXPORTED int ff_watch(const volatile int32_t *word, int32_t value, int64_t nanoseconds) {
    const int64_t end = now() + nanoseconds;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return 1;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (now() < end);
    return 0;
}
