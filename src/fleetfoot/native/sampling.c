/* Sampling: the argmax of rows of logits, and Gumbel-max sampling with counter-based noise.
 *
 * The noise is defined in fleetfoot/kernels/sampling/gumbel.py: the same integers, and logarithms that may
 * differ from torch's in the last bit. It is computed only for tokens that can still win, which changes no result. */
#include <math.h>
#include <stdlib.h>

#include "simd.h"
#include "threads.h"
#include "variant.h"

#define SPAN 16384  /* logits of one work item of a thread */
#define BLOCK 1024  /* logits with one maximum, before its index is searched; divides SPAN, multiple of 4 * VL */
#define NOISE_MAX 16.65f /* -log(-log(u)) at the largest u, and a margin for the rounding of a sum */

typedef struct {
    float value;
    int64_t index;
} best;

/* NaN counts as the highest; among equals the lowest index wins. */
INLINE best better(best a, best b) {
    const int a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan || b_nan) return a_nan && (!b_nan || a.index < b.index) ? a : b;
    if (a.value != b.value) return a.value > b.value ? a : b;
    return a.index < b.index ? a : b;
}

/* --- argmax ---------------------------------------------------------------------------------------------------- */

/* The maximum of count logits that are not NaN; *nan is set if one of them is. */
INLINE float max_of(const char *row, int64_t begin, int64_t count, int dtype, int *nan) {
    vf top[4];
    vi not_a_number = splat_int(0);
    UNROLL
    for (int k = 0; k < 4; k++) top[k] = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * VL <= count; i += 4 * VL)
        UNROLL
        for (int k = 0; k < 4; k++) {
            vf x = load(row, begin + i + k * VL, dtype);
            not_a_number |= x != x;
            top[k] = max_float(x, top[k]);
        }
    float result = max_lanes(max_float(max_float(top[0], top[1]), max_float(top[2], top[3])));
    int found = any(not_a_number);
    for (; i < count; i++) {
        float x = load_one(row, begin + i, dtype);
        found |= x != x;
        result = x > result ? x : result;
    }
    *nan |= found;
    return result;
}

INLINE best argmax_span(const char *row, int64_t begin, int64_t end, int dtype) {
    best found = {-INFINITY, begin};
    for (int64_t block = begin; block < end; block += BLOCK) {
        const int64_t count = smallest(BLOCK, end - block);
        int nan = 0;
        const float top = max_of(row, block, count, dtype, &nan);
        if (!nan && !(top > found.value)) continue;
        for (int64_t i = block; i < block + count; i++) {
            const float x = load_one(row, i, dtype);
            if (nan ? x != x : x == top) {
                found = (best){x, i};
                break;
            }
        }
        if (nan) return found;
    }
    return found;
}

/* --- noise ----------------------------------------------------------------------------------------------------- */

/* x * factor in 64 bits, as two words. Vectors multiply every other lane at a time. */
INLINE void multiply_words(vu x, uint32_t factor, vu *high, vu *low) {
#if VL >= 8
    typedef uint64_t vl __attribute__((vector_size(4 * VL)));
    const vl half = ((vl)x & 0xffffffffu), other = (vl)x >> 32, wide = factor - (vl){0};
#if VL == 16
    const vl even = (vl)_mm512_mul_epu32((__m512i)half, (__m512i)wide);
    const vl odd = (vl)_mm512_mul_epu32((__m512i)other, (__m512i)wide);
#else
    const vl even = (vl)_mm256_mul_epu32((__m256i)half, (__m256i)wide);
    const vl odd = (vl)_mm256_mul_epu32((__m256i)other, (__m256i)wide);
#endif
    *high = (vu)((even >> 32) | (odd & 0xffffffff00000000u));
    *low = (vu)((even & 0xffffffffu) | (odd << 32));
#else
    for (int lane = 0; lane < VL; lane++) {
        const uint64_t product = (uint64_t)x[lane] * factor;
        (*high)[lane] = (uint32_t)(product >> 32);
        (*low)[lane] = (uint32_t)product;
    }
#endif
}

/* Philox4x32-10 (Salmon et al. 2011) for counters (block, position, 0, 0): four words for each lane. */
INLINE void philox(vu block, uint32_t position, uint64_t seed, vu word[4]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    word[0] = block;
    word[1] = position - (vu){0};
    word[2] = word[3] = (vu){0};
    for (int round = 0; round < 10; round++) {
        vu high0, low0, high2, low2;
        multiply_words(word[0], 0xD2511F53u, &high0, &low0);
        multiply_words(word[2], 0xCD9E8D57u, &high2, &low2);
        word[0] = high2 ^ word[1] ^ key0;
        word[1] = low2;
        word[2] = high0 ^ word[3] ^ key1;
        word[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

/* Natural logarithm of a positive normal number, to about one unit in the last place.
 * x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); log(1 + f) = 2 artanh(s) for s = f / (2 + f), by its series. */
INLINE vf log_float(vf x) {
    const vi shifted = (vi)x - splat_int(0x3f3504f3);
    const vf e = __builtin_convertvector(shifted >> 23, vf);
    const vf f = (vf)((shifted & 0x7fffff) + 0x3f3504f3) - splat(1.0f);
    const vf s = f / (f + splat(2.0f));
    const vf z = s * s;
    vf series = splat(2.0f / 11.0f);
    series = multiply_add(series, z, splat(2.0f / 9.0f));
    series = multiply_add(series, z, splat(2.0f / 7.0f));
    series = multiply_add(series, z, splat(2.0f / 5.0f));
    series = multiply_add(series, z, splat(2.0f / 3.0f));
    /* 2 s = f - s f, and f^2 / 2 taken out of it leaves a small correction to the exact f. */
    const vf half_square = splat(0.5f) * f * f;
    const vf correction = s * multiply_add(series, z, half_square);
    const vf low = multiply_add(e, splat(1.42860677e-6f), correction - half_square);
    return multiply_add(e, splat(0.693145752f), f + low); /* e * (the high bits of log 2) is exact */
}

/* Gumbel noise of the 4 * VL tokens from `token` on (a multiple of 4). */
INLINE void gumbel_noise(int64_t token, uint32_t position, uint64_t seed, float noise[4 * VL]) {
    vu word[4];
    philox((vu)(lane_index() + splat_int((int32_t)(token >> 2))), position, seed, word);
    for (int w = 0; w < 4; w++) {
        const vf u = (__builtin_convertvector((vi)(word[w] >> 9), vf) + splat(0.5f)) * splat(0x1p-23f);
        word[w] = (vu)-log_float(-log_float(u));
    }
    /* Lane by lane the four words of one call are the noise of four neighbours. */
    vu part[4];
    transpose_groups(word, part);
    for (int i = 0; i < 4; i++)
        for (int group = 0; group < VL / 4; group++)
            memcpy(noise + 4 * (4 * group + i), (const char *)&part[i] + 16 * group, 16);
}

/* --- Gumbel-max ------------------------------------------------------------------------------------------------ */

typedef struct {
    float highest, temperature;
    uint32_t position;
    uint64_t seed;
} draw;

/* The best of (logit - highest) / temperature + noise among begin .. end and the best found so far. */
INLINE best gumbel_span(const char *row, int64_t begin, int64_t end, const draw *d, best found, int dtype) {
    const vf highest = splat(d->highest), temperature = splat(d->temperature);
    for (int64_t token = begin; token < end; token += 4 * VL) {
        const int64_t count = smallest(4 * VL, end - token);
        float score[4 * VL], noise[4 * VL];
        vf top = splat(-INFINITY);
        if (count == 4 * VL) {
            UNROLL
            for (int k = 0; k < 4; k++) {
                vf x = (load(row, token + k * VL, dtype) - highest) / temperature;
                store_f32(score + k * VL, x);
                top = max_float(x, top);
            }
        } else {
            for (int64_t i = 0; i < 4 * VL; i++)
                score[i] = i < count ? (load_one(row, token + i, dtype) - d->highest) / d->temperature : -INFINITY;
            for (int k = 0; k < 4; k++) top = max_float(load_f32(score + k * VL), top);
        }
        const float bar = found.value - NOISE_MAX;
        if (!any(top >= splat(bar))) continue;
        gumbel_noise(token, d->position, d->seed, noise);
        vi wins = splat_int(0);
        UNROLL
        for (int k = 0; k < 4; k++) {
            const vf sum = load_f32(score + k * VL) + load_f32(noise + k * VL);
            wins |= sum >= splat(found.value);
            store_f32(score + k * VL, sum);
        }
        if (!any(wins)) continue;
        for (int64_t i = 0; i < count; i++) found = better(found, (best){score[i], token + i});
    }
    return found;
}

/* The noisy score of the token with the best logit: a lower bound, below which no noise is computed. */
INLINE best first_bar(const draw *d, best highest) {
    float noise[4 * VL];
    gumbel_noise(highest.index / 4 * 4, d->position, d->seed, noise);
    return (best){(d->highest - d->highest) / d->temperature + noise[highest.index % 4], highest.index};
}

/* --- rows ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t *tokens;     /* [num_rows] */
    const char *logits;  /* [num_rows, vocab_size] */
    const float *temperatures; /* [num_rows], or NULL: argmax alone */
    const int64_t *seeds, *positions;
    int64_t stride, num_rows, vocab_size, spans;
    best *found;   /* [num_rows, spans] */
    best *highest; /* [num_rows] */
    int dtype;
} batch;

INLINE const char *row_of(const batch *b, int64_t row, int dtype) {
    return b->logits + row * b->stride * element_size(dtype);
}

INLINE best merged(const batch *b, int64_t row) {
    best result = b->found[row * b->spans];
    for (int64_t span = 1; span < b->spans; span++) result = better(result, b->found[row * b->spans + span]);
    return result;
}

/* Greedy rows, and rows with a maximum logit that is not finite, are complete after the argmax. */
INLINE int is_random(const batch *b, int64_t row, best highest) {
    return b->temperatures && b->temperatures[row] > 0.0f && highest.value - highest.value == 0.0f;
}

INLINE void argmax_item(const batch *b, int64_t item, int dtype) {
    const int64_t row = item / b->spans, begin = item % b->spans * SPAN;
    b->found[item] = argmax_span(row_of(b, row, dtype), begin, smallest(begin + SPAN, b->vocab_size), dtype);
}

INLINE void gumbel_item(const batch *b, int64_t item, int dtype) {
    const int64_t row = item / b->spans, begin = item % b->spans * SPAN;
    const best highest = b->highest[row];
    if (!is_random(b, row, highest)) return;
    const draw d = {highest.value, b->temperatures[row], (uint32_t)b->positions[row], (uint64_t)b->seeds[row]};
    b->found[item] = gumbel_span(row_of(b, row, dtype), begin, smallest(begin + SPAN, b->vocab_size), &d,
                                 first_bar(&d, highest), dtype);
}

static void argmax_items(void *context, int64_t begin, int64_t end, int thread) {
    const batch *b = context;
    (void)thread;
    for (int64_t item = begin; item < end; item++) WITH_CONSTANT_DTYPE(b->dtype, argmax_item, b, item)
}

static void gumbel_items(void *context, int64_t begin, int64_t end, int thread) {
    const batch *b = context;
    (void)thread;
    for (int64_t item = begin; item < end; item++) WITH_CONSTANT_DTYPE(b->dtype, gumbel_item, b, item)
}

static int sample_rows(batch *b, int num_threads) {
    const int64_t items = b->num_rows * b->spans;
    b->highest = malloc((size_t)(items + b->num_rows) * sizeof(best));
    if (!b->highest) return FF_NO_MEMORY;
    b->found = b->highest + b->num_rows;
    const int threads = items > 2 ? num_threads : 1;
    ff_run(argmax_items, b, items, 1, threads);
    for (int64_t row = 0; row < b->num_rows; row++) b->highest[row] = merged(b, row);
    if (b->temperatures) ff_run(gumbel_items, b, items, 1, threads);
    for (int64_t row = 0; row < b->num_rows; row++)
        b->tokens[row] = is_random(b, row, b->highest[row]) ? merged(b, row).index : b->highest[row].index;
    free(b->highest);
    return FF_OK;
}

/* tokens[row] = the index of the highest logit: the first NaN if there is one, else the lowest index among equals. With
 * temperatures, rows with a temperature above 0 draw from softmax(logits / temperature) instead. Rows of logits lie
 * stride elements apart; vocab_size is at least 1. */
int EXPORT(sample)(int64_t *tokens, const char *logits, int64_t stride, int64_t num_rows, int64_t vocab_size,
                   const float *temperatures, const int64_t *seeds, const int64_t *positions, int dtype,
                   int num_threads) {
    batch b = {.tokens = tokens, .logits = logits, .temperatures = temperatures, .seeds = seeds,
               .positions = positions, .stride = stride, .num_rows = num_rows, .vocab_size = vocab_size,
               .spans = (vocab_size + SPAN - 1) / SPAN, .dtype = dtype};
    if (num_rows == 0) return FF_OK;
    return sample_rows(&b, num_threads);
}
