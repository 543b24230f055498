/* Guards mapped files against being cut. A page that the file does not have any more is replaced by zeros when it is read,
 * and kernels then return an error, where the process would end with SIGBUS. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

#include "mappings.h"

#define EXPORTED __attribute__((visibility("default")))

static volatile int was_cut;

EXPORTED int ff_file_was_cut(void) { return was_cut; }

#if defined(__linux__)
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_MAPPINGS = 1024 };

static struct {
    uintptr_t begin, end;
} mappings[MAX_MAPPINGS];
static volatile int num_mappings;
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static uintptr_t page_size;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const uintptr_t address = (uintptr_t)info->si_addr, page = address & ~(page_size - 1);
    for (int i = 0; i < num_mappings; i++)
        if (address >= mappings[i].begin && address < mappings[i].end &&
            mmap((void *)page, page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
            was_cut = 1;
            return;
        }
    if (previous.sa_flags & SA_SIGINFO)
        previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
        previous.sa_handler(number);
    else
        sigaction(SIGBUS, &previous, NULL); /* the instruction fails again, and ends the process */
}

/* Guards a mapping, which stays guarded until the process ends. Returns whether it is. */
EXPORTED int ff_guard_mapping(const void *begin, int64_t size) {
    pthread_mutex_lock(&adding);
    int is_guarded = num_mappings < MAX_MAPPINGS;
    if (is_guarded && !num_mappings) {
        struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER};
        sigemptyset(&action.sa_mask);
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        is_guarded = sigaction(SIGBUS, &action, &previous) == 0;
    }
    if (is_guarded) {
        mappings[num_mappings].begin = (uintptr_t)begin;
        mappings[num_mappings].end = (uintptr_t)begin + (uintptr_t)size;
        num_mappings = num_mappings + 1;
    }
    pthread_mutex_unlock(&adding);
    return is_guarded;
}
#else
EXPORTED int ff_guard_mapping(const void *begin, int64_t size) {
    (void)begin;
    (void)size;
    return 0;
}
#endif
