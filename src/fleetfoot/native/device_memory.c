/* GPU memory at fixed addresses, with pages that can be given back to the driver: an allocator for torch's memory pools.
 *
 * Each allocation reserves a range of addresses and maps pages to it. `ff_device_unmap` releases the pages of all
 * allocations with a tag, and `ff_device_map` maps new ones to the same addresses, so that captured graphs stay valid.
 * The driver's library is opened at run time, and CUDA's headers are not needed: the types below are those of its
 * stable binary interface. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "threads.h"

#define EXPORTED __attribute__((visibility("default")))

enum { PINNED_MEMORY = 1, ON_DEVICE = 1, READ_AND_WRITE = 3, MINIMUM = 0, RDMA_ATTRIBUTE = 110, PORTABLE = 1 };
enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} Properties;
typedef struct { Location location; int flags; } Access;

static struct {
    int (*address_reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*address_free)(uint64_t, size_t);
    int (*create)(uint64_t *, size_t, const Properties *, unsigned long long);
    int (*release)(uint64_t);
    int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    int (*unmap)(uint64_t, size_t);
    int (*set_access)(uint64_t, size_t, const Access *, size_t);
    int (*granularity)(size_t *, const Properties *, int);
    int (*host_register)(void *, size_t, unsigned);
    int (*host_unregister)(void *);
    int (*copy)(uint64_t, uint64_t, size_t, void *);
    int (*set)(uint64_t, unsigned char, size_t, void *);
    int (*synchronize)(void);
    int (*attribute)(int *, int, int);
    int (*error_text)(int, const char **);
} driver;

static const struct { const char *name; void *function; } SYMBOLS[] = {
    {"cuMemAddressReserve", &driver.address_reserve},
    {"cuMemAddressFree", &driver.address_free},
    {"cuMemCreate", &driver.create},
    {"cuMemRelease", &driver.release},
    {"cuMemMap", &driver.map},
    {"cuMemUnmap", &driver.unmap},
    {"cuMemSetAccess", &driver.set_access},
    {"cuMemGetAllocationGranularity", &driver.granularity},
    {"cuMemHostRegister_v2", &driver.host_register},
    {"cuMemHostUnregister", &driver.host_unregister},
    {"cuMemcpyAsync", &driver.copy},
    {"cuMemsetD8Async", &driver.set},
    {"cuCtxSynchronize", &driver.synchronize},
    {"cuDeviceGetAttribute", &driver.attribute},
    {"cuGetErrorString", &driver.error_text},
};

typedef struct Range {
    uint64_t address, handle;
    size_t size;
    int device, tag, is_mapped, is_new;
    struct Range *next;
} Range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static int is_open, num_tags;
static __thread int current_tag;
static char message[256];

static int fail(const char *call, int status) {
    const char *text = NULL;
    if (driver.error_text(status, &text) || text == NULL) text = "unknown error";
    snprintf(message, sizeof message, "%s: %s", call, text);
    return status;
}

/* The error of the last function that failed. */
EXPORTED const char *ff_device_error(void) { return message; }

/* Open the driver's library. 0: it has all calls. */
EXPORTED int ff_device_open(const char *library) {
    pthread_mutex_lock(&mutex);
    void *opened = is_open ? NULL : dlopen(library, RTLD_NOW);
    if (!is_open && opened == NULL) {
        snprintf(message, sizeof message, "%s", dlerror());
    } else if (!is_open) {
        is_open = 1;
        for (size_t i = 0; is_open && i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
            void *symbol = dlsym(opened, SYMBOLS[i].name);
            memcpy(SYMBOLS[i].function, &symbol, sizeof symbol);
            if (symbol == NULL) snprintf(message, sizeof message, "%s has no %s", library, SYMBOLS[i].name);
            is_open = symbol != NULL;
        }
    }
    pthread_mutex_unlock(&mutex);
    return !is_open;
}

/* A new tag. */
EXPORTED int ff_device_new_tag(void) { return __sync_add_and_fetch(&num_tags, 1); }

/* Set the tag of what this thread allocates from now on. */
EXPORTED void ff_device_set_tag(int tag) { current_tag = tag; }

static Properties properties_of(int device) {
    Properties properties = {.type = PINNED_MEMORY, .location = {ON_DEVICE, device}};
    int has_rdma = 0;
    if (driver.attribute(&has_rdma, RDMA_ATTRIBUTE, device) == 0 && has_rdma) properties.rdma = 1;
    return properties;
}

/* Map new pages to a range. */
static int map_pages(Range *range) {
    const Properties properties = properties_of(range->device);
    const Access access = {{ON_DEVICE, range->device}, READ_AND_WRITE};
    int status = driver.create(&range->handle, range->size, &properties, 0);
    if (status) return fail("cuMemCreate", status);
    if ((status = driver.map(range->address, range->size, 0, range->handle, 0))) {
        driver.release(range->handle);
        return fail("cuMemMap", status);
    }
    range->is_mapped = 1;
    if ((status = driver.set_access(range->address, range->size, &access, 1))) return fail("cuMemSetAccess", status);
    return 0;
}

/* Give the pages of a range back. */
static int unmap_pages(Range *range) {
    if (!range->is_mapped) return 0;
    int status = driver.unmap(range->address, range->size);
    if (status) return fail("cuMemUnmap", status);
    range->is_mapped = 0;
    if ((status = driver.release(range->handle))) return fail("cuMemRelease", status);
    return 0;
}

/* For torch's CUDAPluggableAllocator; NULL: no memory. */
EXPORTED void *ff_device_alloc(ssize_t size, int device, void *stream) {
    (void)stream;
    const Properties properties = properties_of(device);
    size_t unit = 0;
    Range *range = calloc(1, sizeof *range);
    if (range == NULL || size <= 0 || driver.granularity(&unit, &properties, MINIMUM) || unit == 0) goto failed;
    range->size = ((size_t)size + unit - 1) / unit * unit;
    range->device = device;
    range->tag = current_tag;
    if (driver.address_reserve(&range->address, range->size, 0, 0, 0)) goto failed;
    if (map_pages(range)) {
        unmap_pages(range);
        driver.address_free(range->address, range->size);
        goto failed;
    }
    pthread_mutex_lock(&mutex);
    range->next = ranges;
    ranges = range;
    pthread_mutex_unlock(&mutex);
    return (void *)(uintptr_t)range->address;
failed:
    free(range);
    return NULL;
}

/* For torch's CUDAPluggableAllocator; the pages may have been given back before. */
EXPORTED void ff_device_free(void *pointer, size_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&mutex);
    Range **link = &ranges;
    while (*link && (*link)->address != (uint64_t)(uintptr_t)pointer) link = &(*link)->next;
    Range *range = *link;
    if (range) *link = range->next;
    pthread_mutex_unlock(&mutex);
    if (range == NULL) return;
    driver.synchronize();
    unmap_pages(range);
    driver.address_free(range->address, range->size);
    free(range);
}

/* Give the pages of all allocations of a tag back. Their content is lost. 0: done. */
EXPORTED int ff_device_unmap(int tag) {
    pthread_mutex_lock(&mutex);
    int status = driver.synchronize();
    if (status) fail("cuCtxSynchronize", status);
    for (Range *range = ranges; range && !status; range = range->next)
        if (range->tag == tag) status = unmap_pages(range);
    pthread_mutex_unlock(&mutex);
    return status;
}

/* Map new pages, of zeros, to all allocations of a tag, or to none if the device has no memory for all. 0: done. */
EXPORTED int ff_device_map(int tag) {
    pthread_mutex_lock(&mutex);
    int status = 0;
    for (Range *range = ranges; range && !status; range = range->next) {
        range->is_new = range->tag == tag && !range->is_mapped;
        if (range->is_new) status = map_pages(range);
        if (range->is_new && !status) driver.set(range->address, 0, range->size, NULL);
    }
    if (status) driver.synchronize(); /* pages must not go while they are set to 0 */
    for (Range *range = ranges; range; range = range->next) {
        if (range->is_new && status) unmap_pages(range);
        range->is_new = 0;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

/* The number of allocations of a tag; address and size of the first `capacity` go to `spans`. */
EXPORTED int64_t ff_device_list(int tag, uint64_t *spans, int64_t capacity) {
    int64_t count = 0;
    pthread_mutex_lock(&mutex);
    for (Range *range = ranges; range; range = range->next) {
        if (range->tag != tag) continue;
        if (count < capacity) spans[2 * count] = range->address, spans[2 * count + 1] = range->size;
        count++;
    }
    pthread_mutex_unlock(&mutex);
    return count;
}

static void write_pages(void *memory, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t page = begin; page < end; page++) ((char *)memory)[page * PAGE] = 0;
}

/* Memory of the host that the GPU reads and writes directly; NULL: none. Its pages are written first, in parallel,
 * because the driver would take them one by one. */
EXPORTED void *ff_device_host_alloc(int64_t size) {
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        snprintf(message, sizeof message, "no %lld bytes of host memory", (long long)size);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE);
#endif
    const int num_threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    ff_run(write_pages, memory, (size + PAGE - 1) / PAGE, HUGE_PAGE / PAGE, num_threads);
    int status = driver.host_register(memory, size, PORTABLE);
    if (status == 0) return memory;
    fail("cuMemHostRegister", status);
    munmap(memory, size);
    return NULL;
}

EXPORTED void ff_device_host_free(void *memory, int64_t size) {
    driver.host_unregister(memory);
    munmap(memory, size);
}

/* Copy `count` spans, each a source, a destination and a number of bytes, and wait for all. 0: done. */
EXPORTED int ff_device_copy(const uint64_t *spans, int64_t count) {
    int status = 0;
    for (int64_t i = 0; i < count && !status; i++, spans += 3)
        if ((status = driver.copy(spans[1], spans[0], spans[2], NULL))) fail("cuMemcpyAsync", status);
    int ended = driver.synchronize();
    if (ended && !status) status = fail("cuCtxSynchronize", ended);
    return status;
}
