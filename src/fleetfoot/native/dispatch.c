/* The instruction sets that this machine supports. The kernels of each are exported under its name. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM, and the state's number */

/* Whether there are tiles of bfloat16, and Linux lets this process use them: permission is requested for all
 * threads. Source: Intel SDM, CPUID leaf 7; Linux, Documentation/arch/x86/xstate.rst. */
static int has_tiles(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return 0;
    if (!(edx >> 22 & 1) || !(edx >> 24 & 1)) return 0; /* AMX-BF16, AMX-TILE */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static int has_tiles(void) { return 0; }
#endif

/* Whether half floats are converted by the processor: CPUID leaf 1. Any with AVX2 does. */
static int has_f16c(void) {
#if defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
#else
    return 0;
#endif
}

#define EXPORTED __attribute__((visibility("default")))

/* The checksum of the sources that the library was built from. */
EXPORTED unsigned ff_sources(void) { return FF_SOURCES; }

/* Whether this processor runs the kernels of a variant: 1 or 0; 2: it does, but another one is faster. Intel's
 * processors multiply pairs of bfloat16 at half the rate, which saves nothing over widening them. */
EXPORTED int ff_supports(const char *variant) {
    if (strcmp(variant, "generic") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                   __builtin_cpu_supports("bmi2") && has_f16c();
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512cd");
    if (strcmp(variant, "sse4") == 0) return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    if (strcmp(variant, "avx2") == 0) return avx2;
    if (strcmp(variant, "avx512") == 0) return avx512;
    if (strcmp(variant, "avx512_vnni") == 0) return avx512 && __builtin_cpu_supports("avx512vnni");
    const int bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (strcmp(variant, "avx512_bf16") == 0) return bf16 && __builtin_cpu_is("intel") ? 2 : bf16;
    if (strcmp(variant, "amx") == 0) return bf16 && has_tiles();
#elif defined(__aarch64__) && defined(__linux__)
    if (strcmp(variant, "dotprod") == 0) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    return 0;
}
