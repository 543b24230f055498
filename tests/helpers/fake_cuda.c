/* The calls of CUDA's driver that device_memory.c makes, over pages of the operating system. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define UNIT (2u << 20)

/* Pages in use, ranges of addresses in use, and the bytes that there are. */
int64_t fake_mapped, fake_reserved, fake_capacity = (int64_t)1 << 40;

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint, unsigned long long flags) {
    (void)alignment, (void)hint, (void)flags;
    void *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fake_reserved += size;
    *address = (uint64_t)(uintptr_t)memory;
    return 0;
}
int cuMemAddressFree(uint64_t address, size_t size) {
    fake_reserved -= size;
    return munmap((void *)(uintptr_t)address, size);
}
int cuMemCreate(uint64_t *handle, size_t size, const void *properties, unsigned long long flags) {
    (void)properties, (void)flags;
    if (size % UNIT) return 1;
    if (fake_mapped + (int64_t)size > fake_capacity) return 2;
    const int file = memfd_create("fake", 0);
    fake_mapped += size;
    *handle = file;
    return ftruncate(file, size);
}
int cuMemRelease(uint64_t handle) {
    fake_mapped -= lseek((int)handle, 0, SEEK_END);
    return close((int)handle);
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    return mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, offset) == MAP_FAILED;
}
int cuMemUnmap(uint64_t address, size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)(uintptr_t)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED;
}
int cuMemSetAccess(uint64_t address, size_t size, const int *access, size_t count) {
    if (count != 1 || access[0] != 1 || access[2] != 3) return 1;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE);
}
int cuMemGetAllocationGranularity(size_t *unit, const int *properties, int option) {
    *unit = UNIT;
    return !(properties[0] == 1 && properties[2] == 1 && option == 0);
}
int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) { return (void)memory, (void)size, flags != 1; }
int cuMemHostUnregister(void *memory) { return memory == NULL; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *stream) {
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return stream != NULL;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *stream) {
    memset((void *)(uintptr_t)to, value, size);
    return stream != NULL;
}
int cuCtxSynchronize(void) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 1, attribute != 110 || device != 0; }
int cuGetErrorString(int status, const char **text) { return *text = status == 2 ? "out of memory" : "other", 0; }
