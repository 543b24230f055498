/* Guards mapped files against being cut. A page that the file does not have any more is replaced by zeros when it is read,
 * and kernels then return an error, where the process would end with SIGBUS. The rest of the last page that it has reads as
 * zeros without a signal, so sizes are compared, too. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

#include "mappings.h"

#define EXPORTED __attribute__((visibility("default")))

#if defined(__linux__)
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_MAPPINGS = 1024 };

static struct {
    uintptr_t begin, end; /* end 0: the place is free */
    int file;
    int64_t cut; /* bytes that the file has left; -1: all */
} mappings[MAX_MAPPINGS];
static volatile int num_mappings;
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static uintptr_t page_size;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const uintptr_t address = (uintptr_t)info->si_addr, page = address & ~(page_size - 1);
    for (int i = 0; i < num_mappings; i++)
        if (address >= mappings[i].begin && address < mappings[i].end &&
            mmap((void *)page, page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
            if (mappings[i].cut < 0) mappings[i].cut = page > mappings[i].begin ? (int64_t)(page - mappings[i].begin) : 0;
            return;
        }
    if (previous.sa_flags & SA_SIGINFO)
        previous.sa_sigaction(number, info, context);
    else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
        previous.sa_handler(number);
    else
        sigaction(SIGBUS, &previous, NULL); /* the instruction fails again, and ends the process */
}

static int install(void) {
    static int is_installed;
    if (is_installed) return 1;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    return is_installed = sigaction(SIGBUS, &action, &previous) == 0;
}

/* Guards a mapped file until ff_unguard. Returns its guard; 0: it is not guarded. */
EXPORTED int ff_guard(const void *begin, int64_t size, int file) {
    pthread_mutex_lock(&changing);
    int i = 0;
    while (i < num_mappings && mappings[i].end) i++;
    const int is_guarded = i < MAX_MAPPINGS && install() && (file = fcntl(file, F_DUPFD_CLOEXEC, 0)) >= 0;
    if (is_guarded) {
        mappings[i].file = file;
        mappings[i].cut = -1;
        mappings[i].begin = (uintptr_t)begin;
        mappings[i].end = (uintptr_t)begin + (uintptr_t)size;
        if (i == num_mappings) num_mappings = i + 1;
    }
    pthread_mutex_unlock(&changing);
    return is_guarded ? i + 1 : 0;
}

/* Call it before the memory is unmapped. */
EXPORTED void ff_unguard(int guard) {
    pthread_mutex_lock(&changing);
    mappings[guard - 1].end = 0;
    close(mappings[guard - 1].file);
    pthread_mutex_unlock(&changing);
}

/* The bytes that the file of a guard had left when it was cut; -1: it was not cut. */
EXPORTED int64_t ff_cut_at(int guard) {
    const int i = guard - 1;
    struct stat found;
    const int64_t size = (int64_t)(mappings[i].end - mappings[i].begin);
    if (fstat(mappings[i].file, &found) == 0 && found.st_size < size) mappings[i].cut = found.st_size;
    return mappings[i].cut;
}

EXPORTED int ff_file_was_cut(void) {
    for (int i = 0; i < num_mappings; i++)
        if (mappings[i].end && ff_cut_at(i + 1) >= 0) return 1;
    return 0;
}
#else
EXPORTED int ff_guard(const void *begin, int64_t size, int file) {
    (void)begin;
    (void)size;
    (void)file;
    return 0;
}

EXPORTED void ff_unguard(int guard) { (void)guard; }

EXPORTED int64_t ff_cut_at(int guard) {
    (void)guard;
    return -1;
}

EXPORTED int ff_file_was_cut(void) { return 0; }
#endif
