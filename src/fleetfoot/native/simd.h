/* Vectors of VL floats, with the width of the instruction set that this file is compiled for.
 *
 * The code uses the vector extensions of GCC and Clang, and intrinsics only for what those cannot express. It is compiled
 * with -ffp-contract=off, which does not contract a * b + c: only multiply_add() is fused, so a function has the same
 * arithmetic wherever it is inlined.
 */
#ifndef FLEETFOOT_SIMD_H
#define FLEETFOOT_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

/* Products of bfloat16 pairs, accumulated in float32 by the hardware. */
#if VL == 16 && defined(__AVX512BF16__)
#define HAVE_BF16_DOT 1
#else
#define HAVE_BF16_DOT 0
#endif

/* Products of bfloat16 tiles (AMX), or what stands for them in a test. */
#if (VL == 16 && defined(__AMX_BF16__)) || defined(FF_EMULATE_TILES)
#define HAVE_TILES 1
#else
#define HAVE_TILES 0
#endif

#define INLINE static inline __attribute__((always_inline, unused))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));

enum { FF_FLOAT32 = 0, FF_BFLOAT16 = 1 };

/* Calls name(..., dtype) with the dtype as a constant. The body of a parallel region is a separate function, in which
 * a dtype from outside is not a constant. */
#define WITH_CONSTANT_DTYPE(dtype, name, ...)  \
    {                                          \
        if (dtype == FF_FLOAT32)               \
            name(__VA_ARGS__, FF_FLOAT32);     \
        else                                   \
            name(__VA_ARGS__, FF_BFLOAT16);    \
    }

INLINE int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }

/* Like splat, for 32 bits of any type; no arithmetic is applied to them. */
INLINE vf splat_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (vf)splat_int(bits);
}

/* 0, 1, ... VL - 1 */
INLINE vi lane_index(void) {
    vi index;
    for (int i = 0; i < VL; i++) index[i] = i;
    return index;
}

/* yes where the mask is set, no elsewhere; a mask is the result of a comparison of vectors. */
INLINE vf select_float(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vi select_int(vi mask, vi yes, vi no) { return (mask & yes) | (~mask & no); }

/* Whether any lane of a mask is set. */
INLINE int any(vi mask) {
    uint64_t words[VL / 2], set = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < VL / 2; i++) set |= words[i];
    return set != 0;
}

INLINE vf multiply_add(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* The larger; b if a is NaN. */
INLINE vf max_float(vf a, vf b) {
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_float(a > b, a, b);
#endif
}

INLINE vf load_f32(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vf widen_bf16(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }

INLINE vf load_bf16(const uint16_t *p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return widen_bf16(x);
}

/* To the nearest, ties to even; NaN stays NaN. (The hardware's rounding flushes numbers below 2^-126 to 0.) */
INLINE vh round_bf16(vf x) {
#if HAVE_BF16_DOT
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    const vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vi is_nan = x != x;
    return __builtin_convertvector(((vu)is_nan & 0x7fc0) | (~(vu)is_nan & rounded), vh);
#endif
}

INLINE void store_bf16(uint16_t *p, vf x) {
    const vh narrow = round_bf16(x);
    memcpy(p, &narrow, sizeof narrow);
}

/* dtype is a constant at every call, so the branch is removed. */
INLINE vf load(const void *base, int64_t index, int dtype) {
    if (dtype == FF_BFLOAT16) return load_bf16((const uint16_t *)base + index);
    return load_f32((const float *)base + index);
}

INLINE void store(void *base, int64_t index, vf x, int dtype) {
    if (dtype == FF_BFLOAT16)
        store_bf16((uint16_t *)base + index, x);
    else
        store_f32((float *)base + index, x);
}

/* x as it is read back after a store. */
INLINE vf rounded(vf x, int dtype) { return dtype == FF_BFLOAT16 ? widen_bf16(round_bf16(x)) : x; }

INLINE float load_one(const void *base, int64_t index, int dtype) {
    if (dtype == FF_FLOAT32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE void store_one(void *base, int64_t index, float x, int dtype) {
    if (dtype == FF_FLOAT32)
        ((float *)base)[index] = x;
    else
        ((uint16_t *)base)[index] = round_bf16(splat(x))[0];
}

INLINE int64_t element_size(int dtype) { return dtype == FF_BFLOAT16 ? 2 : 4; }

typedef float quad_float __attribute__((vector_size(16)));

/* Four lanes out of VL: the upper half is added to the lower, or the larger of both taken, until four are left. */
INLINE quad_float fold_to_four(vf x, const int adds) {
#if VL == 16
    const __m256 low = _mm512_castps512_ps256((__m512)x), high = _mm512_extractf32x8_ps((__m512)x, 1);
    const __m256 eight = adds ? _mm256_add_ps(low, high) : _mm256_max_ps(low, high);
#elif VL == 8
    const __m256 eight = (__m256)x;
#endif
#if VL >= 8
    const __m128 first = _mm256_castps256_ps128(eight), second = _mm256_extractf128_ps(eight, 1);
    return (quad_float)(adds ? _mm_add_ps(first, second) : _mm_max_ps(first, second));
#else
    (void)adds;
    return (quad_float)x;
#endif
}

/* Sum of the lanes, pairwise and always in the same order. */
INLINE float sum_lanes(vf x) {
    const quad_float four = fold_to_four(x, 1);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE float max_lanes(vf x) {
    const quad_float four = fold_to_four(x, 0);
    const float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
    return even > odd ? even : odd;
}

/* 2^x for x <= 127, to about 1e-7 relative; 0 below 2^-126; NaN stays NaN.
 * x = n + f with n whole and |f| <= 1/2: n is added to the exponent bits, 2^f is a polynomial of degree 6 that
 * interpolates it in Chebyshev's points (error 5e-9) and is 1 at 0. */
INLINE vf exp2_float(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    const vf lowest = splat(-126.0f);
    vi underflow = x < lowest;
    x = select_float(underflow, lowest, x);
    vf shifted = x + magic;
    vf f = x - (shifted - magic);
    vf p = splat(1.546144746e-4f);
    p = multiply_add(p, f, splat(1.339086735e-3f));
    p = multiply_add(p, f, splat(9.618056670e-3f));
    p = multiply_add(p, f, splat(5.550357104e-2f));
    p = multiply_add(p, f, splat(2.402265092e-1f));
    p = multiply_add(p, f, splat(6.931471880e-1f));
    p = multiply_add(p, f, splat(1.0f));
    vf scaled = (vf)((vi)p + ((vi)shifted << 23));
    return (vf)(~underflow & (vi)scaled);
}

#define LOG2_E 1.44269504088896341f

/* 1 / (1 + e^-x); 0 where e^-x is beyond the largest float. */
INLINE vf sigmoid(vf x) {
    vf exponent = x * splat(-LOG2_E);
    vi overflow = exponent > splat(127.0f);
    exponent = select_float(overflow, splat(127.0f), exponent);
    vf result = splat(1.0f) / (splat(1.0f) + exp2_float(exponent));
    return (vf)(~overflow & (vi)result);
}

/* tanh, to about 2e-7 relative: 1 - 2 / (e^2x + 1), and near 0, where that loses digits, x + x^3 * polynomial in x^2. */
INLINE vf tanh_float(vf x) {
    const vf one = splat(1.0f), two = splat(2.0f), square = x * x;
    const vf far = one - two * sigmoid(x * splat(-2.0f));
    vf p = splat(-5.70498872745e-3f); /* coefficients: Cephes, tanhf (Moshier 1989) */
    p = multiply_add(p, square, splat(2.06390887954e-2f));
    p = multiply_add(p, square, splat(-5.37397155531e-2f));
    p = multiply_add(p, square, splat(1.33314422036e-1f));
    p = multiply_add(p, square, splat(-3.33332819422e-1f));
    const vf near = multiply_add(p * square, x, x);
    return select_float(square < splat(0.390625f), near, far); /* |x| < 0.625 */
}

/* Two vectors shuffled into one, within each group of four lanes; the indices are those of one group. */
#if defined(__clang__)
#define SHUFFLE16(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE16(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#if VL == 16
#define SHUFFLE_GROUPS(a, b, i, j, k, l) \
    SHUFFLE16(a, b, i, j, k, l, (i) + 4, (j) + 4, (k) + 4, (l) + 4, (i) + 8, (j) + 8, (k) + 8, (l) + 8, (i) + 12, \
              (j) + 12, (k) + 12, (l) + 12)
#elif VL == 8
#define SHUFFLE_GROUPS(a, b, i, j, k, l) SHUFFLE16(a, b, i, j, k, l, (i) + 4, (j) + 4, (k) + 4, (l) + 4)
#else
#define SHUFFLE_GROUPS(a, b, i, j, k, l) SHUFFLE16(a, b, i, j, k, l)
#endif

/* Four vectors as VL / 4 matrices of four by four, transposed each. */
INLINE void transpose_groups(const vu part[4], vu out[4]) {
    vu low01 = SHUFFLE_GROUPS(part[0], part[1], 0, VL, 1, VL + 1);
    vu high01 = SHUFFLE_GROUPS(part[0], part[1], 2, VL + 2, 3, VL + 3);
    vu low23 = SHUFFLE_GROUPS(part[2], part[3], 0, VL, 1, VL + 1);
    vu high23 = SHUFFLE_GROUPS(part[2], part[3], 2, VL + 2, 3, VL + 3);
    out[0] = SHUFFLE_GROUPS(low01, low23, 0, 1, VL, VL + 1);
    out[1] = SHUFFLE_GROUPS(low01, low23, 2, 3, VL + 2, VL + 3);
    out[2] = SHUFFLE_GROUPS(high01, high23, 0, 1, VL, VL + 1);
    out[3] = SHUFFLE_GROUPS(high01, high23, 2, 3, VL + 2, VL + 3);
}

/* Four 32-bit values from each of VL rows, transposed: out[j] holds value j of rows 0 .. VL - 1. */
INLINE void transpose_4(const char *const *rows, int64_t offset, vu out[4]) {
    vu part[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        /* Group g of part[i] is row 4 * g + i. */
#if VL == 16
        __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[i] + offset)));
        x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(rows[i + 4] + offset)), 1);
        x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(rows[i + 8] + offset)), 2);
        x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(rows[i + 12] + offset)), 3);
        part[i] = (vu)x;
#elif VL == 8
        __m256i x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(rows[i] + offset)));
        x = _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i *)(rows[i + 4] + offset)), 1);
        part[i] = (vu)x;
#else
        memcpy(&part[i], rows[i] + offset, sizeof part[i]);
#endif
    }
    transpose_groups(part, out);
}

typedef uint32_t quad __attribute__((vector_size(16)));

/* Four 32-bit values from each of four rows, stride values apart, transposed. */
INLINE void transpose_quads(const uint32_t *rows, int64_t stride, quad out[4]) {
    quad row[4];
    for (int i = 0; i < 4; i++) memcpy(&row[i], rows + i * stride, sizeof row[i]);
#if defined(__clang__)
#define SHUFFLE_QUADS(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE_QUADS(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif
    const quad low01 = SHUFFLE_QUADS(row[0], row[1], 0, 4, 1, 5), high01 = SHUFFLE_QUADS(row[0], row[1], 2, 6, 3, 7);
    const quad low23 = SHUFFLE_QUADS(row[2], row[3], 0, 4, 1, 5), high23 = SHUFFLE_QUADS(row[2], row[3], 2, 6, 3, 7);
    out[0] = SHUFFLE_QUADS(low01, low23, 0, 1, 4, 5);
    out[1] = SHUFFLE_QUADS(low01, low23, 2, 3, 6, 7);
    out[2] = SHUFFLE_QUADS(high01, high23, 0, 1, 4, 5);
    out[3] = SHUFFLE_QUADS(high01, high23, 2, 3, 6, 7);
#undef SHUFFLE_QUADS
}

#endif
