/* The instruction sets that this machine supports. The kernels of each are exported under its name. */
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

/* The checksum of the sources that the library was built from. */
EXPORTED unsigned ff_sources(void) { return FF_SOURCES; }

/* Whether this processor runs the kernels of a variant: 1 or 0. */
EXPORTED int ff_supports(const char *variant) {
    if (strcmp(variant, "generic") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                   __builtin_cpu_supports("bmi2");
    const int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512cd");
    if (strcmp(variant, "v2") == 0) return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    if (strcmp(variant, "v3") == 0) return v3;
    if (strcmp(variant, "v4") == 0) return v4;
    if (strcmp(variant, "v4_bf16") == 0) return v4 && __builtin_cpu_supports("avx512bf16");
#endif
    return 0;
}
