/* The blocks of GGUF files, in plain C. Included by blocks.c. Numbers of types are those of the files. */
#ifndef FLEETFOOT_BLOCKS_H
#define FLEETFOOT_BLOCKS_H

#include "simd.h"

enum {
    BLOCK_F32 = 0, BLOCK_F16 = 1, BLOCK_Q4_0 = 2, BLOCK_Q4_1 = 3, BLOCK_Q5_0 = 6, BLOCK_Q5_1 = 7, BLOCK_Q8_0 = 8,
    BLOCK_Q4_K = 12, BLOCK_Q5_K = 13, BLOCK_Q6_K = 14, BLOCK_BF16 = 30, BLOCK_MXFP4 = 39,
    BLOCK_INT8 = 1000 /* int8 without blocks, of no GGUF file */
};

#define GROUP 32 /* inputs that are multiplied in integers */
#define GROUPS_OF_SUPER 8 /* of a block of 256 inputs */

/* Consecutive outputs of one type. The struct has the fields of that in kernels/native_blocks.py. */
typedef struct {
    const uint8_t *data;
    int64_t row_bytes, first, num_rows, type;
    const float *scales; /* of each output; of int8 alone */
} block_part;

/* 32 inputs of one output. */
typedef struct {
    int16_t codes[GROUP];
    float scales[2]; /* of each half */
    float minimum;
    int offset;
} block_group;

INLINE int is_float(int64_t type) { return type == BLOCK_F32 || type == BLOCK_F16 || type == BLOCK_BF16; }

INLINE int is_super(int64_t type) { return type == BLOCK_Q4_K || type == BLOCK_Q5_K || type == BLOCK_Q6_K; }

/* Bytes of a block: 32 inputs, or 256. */
INLINE int64_t block_bytes(int64_t type) {
    switch (type) {
        case BLOCK_Q4_0: return 18;
        case BLOCK_Q4_1: return 20;
        case BLOCK_Q5_0: return 22;
        case BLOCK_Q5_1: return 24;
        case BLOCK_Q8_0: return 34;
        case BLOCK_MXFP4: return 17;
        case BLOCK_INT8: return 32;
        case BLOCK_Q4_K: return 144;
        case BLOCK_Q5_K: return 176;
        default: return 210; /* Q6_K */
    }
}

INLINE int code_offset(int64_t type) {
    switch (type) {
        case BLOCK_Q4_0: return 8;
        case BLOCK_Q5_0: return 16;
        case BLOCK_Q6_K: return 32;
        case BLOCK_MXFP4: return 12;
        default: return 0;
    }
}

INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float half_to_float(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | rest << 13);
    if (rest < 0x400) return bits_to_float(sign | 0x33800000u) * (float)rest; /* times 2^-24 */
    return bits_to_float(sign | (rest << 13) + 0x38000000u);
#endif
}

/* Half of 2^(e - 127), as the values of codes are doubled. */
INLINE float half_of_exponent(uint8_t e) { return bits_to_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

INLINE float load_float(const uint8_t *source, int64_t i, int64_t type) {
    if (type == BLOCK_F16) return half_to_float(source + 2 * i);
    return load_one(source, i, type == BLOCK_F32 ? FF_FLOAT32 : FF_BFLOAT16);
}

/* The 6-bit scales (0 .. 7) and minima (8 .. 15) of a block of Q4_K or Q5_K, from its 12 bytes. */
INLINE void unpack_super_scales(const uint8_t *source, uint8_t *scales) {
    uint32_t w[3], s[4];
    memcpy(w, source, sizeof w);
    s[0] = w[0] & 0x3f3f3f3fu;
    s[1] = (w[2] & 0x0f0f0f0fu) | (w[0] >> 2 & 0x30303030u);
    s[2] = w[1] & 0x3f3f3f3fu;
    s[3] = (w[2] >> 4 & 0x0f0f0f0fu) | (w[1] >> 2 & 0x30303030u);
    memcpy(scales, s, sizeof s);
}

static const int8_t MXFP4_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Group `group` of a row. */
static block_group unpack_group(const uint8_t *row, int64_t group, int64_t type) {
    block_group b = {.offset = code_offset(type)};
    if (is_super(type)) {
        const uint8_t *at = row + group / GROUPS_OF_SUPER * block_bytes(type);
        const int j = (int)(group % GROUPS_OF_SUPER);
        if (type == BLOCK_Q6_K) {
            const uint8_t *low = at + j / 4 * 64 + j % 2 * 32, *high = at + 128 + j / 4 * 32;
            const int8_t *scales = (const int8_t *)at + 192;
            const float d = half_to_float(at + 208);
            for (int i = 0; i < GROUP; i++)
                b.codes[i] = (int16_t)((low[i] >> (j % 4 / 2 * 4) & 15) | (high[i] >> (j % 4 * 2) & 3) << 4);
            for (int half = 0; half < 2; half++) b.scales[half] = d * (float)scales[2 * j + half];
            return b;
        }
        uint8_t scales[16];
        unpack_super_scales(at + 4, scales);
        const uint8_t *high = at + 16, *low = at + (type == BLOCK_Q5_K ? 48 : 16) + j / 2 * 32;
        for (int i = 0; i < GROUP; i++)
            b.codes[i] = (int16_t)((low[i] >> (j % 2 * 4) & 15) | (type == BLOCK_Q5_K ? (high[i] >> j & 1) << 4 : 0));
        b.scales[0] = b.scales[1] = half_to_float(at) * (float)scales[j];
        b.minimum = half_to_float(at + 2) * (float)scales[8 + j];
        return b;
    }
    const uint8_t *at = row + group * block_bytes(type);
    if (type == BLOCK_MXFP4) {
        b.scales[0] = b.scales[1] = half_of_exponent(at[0]);
        for (int i = 0; i < GROUP; i++) b.codes[i] = MXFP4_CODES[at[1 + i % 16] >> (i / 16 * 4) & 15];
        return b;
    }
    if (type == BLOCK_INT8) {
        b.scales[0] = b.scales[1] = 1.0f;
        for (int i = 0; i < GROUP; i++) b.codes[i] = (int8_t)at[i];
        return b;
    }
    b.scales[0] = b.scales[1] = half_to_float(at);
    at += 2;
    if (type == BLOCK_Q8_0) {
        for (int i = 0; i < GROUP; i++) b.codes[i] = (int8_t)at[i];
        return b;
    }
    if (type == BLOCK_Q4_1 || type == BLOCK_Q5_1) {
        b.minimum = -half_to_float(at);
        at += 2;
    }
    uint32_t high = 0;
    if (type == BLOCK_Q5_0 || type == BLOCK_Q5_1) {
        memcpy(&high, at, sizeof high);
        at += 4;
    }
    for (int i = 0; i < GROUP; i++)
        b.codes[i] = (int16_t)((at[i % 16] >> (i / 16 * 4) & 15) | (high >> i & 1) << 4);
    return b;
}

/* Bytes of 32 inputs of 8 outputs, side by side: codes as int16 at most, two scales and a minimum. */
#define PANEL_BYTES (8 * (2 * GROUP + 3 * 4) * 2) /* two panels */

/* Whether codes laid side by side are int16: their products with int8 do not fit in 16 bits in pairs. */
INLINE int needs_wide(int64_t type) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    return type == BLOCK_Q8_0 || type == BLOCK_INT8;
#else
    (void)type;
    return 0;
#endif
}

#endif
