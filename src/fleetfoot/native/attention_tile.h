/* One tile of attention: ROWS query rows of one KV head against TILE positions of one request.
 *
 * Each tile has its own softmax (maximum, sum, weighted values), and the tiles of a row are then merged in order of
 * position (Milakov and Gimelshein 2018). Tiles begin at multiples of TILE counted from the start of the sequence. Within
 * a tile, every score is one chain of sums over head_dim, and every output one chain of sums over positions. A row's
 * result therefore does not depend on other rows, on the chunking of its prompt, or on the number of threads: prefill and
 * decode have the same bits.
 */
#ifndef FLEETFOOT_ATTENTION_TILE_H
#define FLEETFOOT_ATTENTION_TILE_H

#include <math.h>

#include "simd.h"

#define TILE 256  /* positions of one softmax */
#define STRIP 64  /* keys that are transposed at once; they fit in the first-level cache */
#define CHUNK 16  /* positions are processed in groups of this size: a multiple of VL for every instruction set */
#define ROWS 96    /* query rows of a tile: a multiple of BLOCK_ROWS, enough to amortize the transposition */
#define BLOCK_ROWS 6 /* rows with their sums in registers at the same time */
#define MAX_HEAD_DIM 256

/* Sums are BLOCK_ROWS * BLOCK_VECTORS registers at the same time; the other registers hold operands. */
#if VL == 16 || defined(__aarch64__)
#define BLOCK_VECTORS 4
#else
#define BLOCK_VECTORS 2
#endif

/* The format of queries and keys: float32, or pairs of bfloat16 if the hardware multiplies pairs, which processors with
 * tiles do at half the rate. A unit has 32 bits in both. */
INLINE int uses_pairs(int dtype) { return HAVE_BF16_DOT && !HAVE_TILES && dtype == FF_BFLOAT16; }
INLINE int64_t units_of(int64_t head_dim, int dtype) { return uses_pairs(dtype) ? head_dim / 2 : head_dim; }

typedef struct {
    float *query;   /* [rows, units] */
    float *keys;    /* [units, STRIP], transposed */
    float *scores;  /* [rows, TILE], replaced by the weights of the softmax */
    float *tile;    /* [rows, head_dim], the result of one tile */
    float *output;  /* [rows, head_dim], merged over the tiles so far */
    float tile_max[ROWS], tile_sum[ROWS]; /* in base 2: weights are 2^(score * scale * log2(e) - max) */
    float max[ROWS], sum[ROWS];
    int low[ROWS], high[ROWS];     /* a row attends to positions low <= p < high of the tile */
    const char *key_rows[TILE];    /* the address of each position's key; its value is side_bytes after */
    char *plain;                   /* [TILE, 2, head_dim]: keys and values of a cache in FP8 */
} workspace;

/* --- scores ---------------------------------------------------------------------------------------------------- */

/* Prefetches a cache line of VL rows: the blocks of a request are scattered in memory, and with few query rows the kernel
 * is bound by memory latency. */
INLINE void prefetch_lines(const char *const *rows, int64_t offset) {
    UNROLL
    for (int i = 0; i < VL; i++) __builtin_prefetch(rows[i] + offset);
}

/* Keys of positions begin .. end of the tile (multiples of CHUNK) into ws->keys, transposed. */
INLINE void transpose_keys(workspace *ws, int strip, int begin, int end, int tile_end, int64_t head_dim,
                           int64_t side_bytes, int dtype) {
    const int64_t row_units = dtype == FF_BFLOAT16 ? head_dim / 2 : head_dim;
    for (int p = begin; p < end; p += VL) {
        const char *const *rows = ws->key_rows + p;
        float *column = ws->keys + (p - strip);
        for (int64_t unit = 0; unit < row_units; unit += 4) {
            if (unit % 16 == 0) {
                prefetch_lines(rows, side_bytes + unit * 4);
                if (p + CHUNK < tile_end) prefetch_lines(rows + CHUNK, unit * 4);
            }
            vu part[4];
            transpose_4(rows, unit * 4, part);
            UNROLL
            for (int i = 0; i < 4; i++) {
                if (dtype == FF_BFLOAT16 && !uses_pairs(dtype)) {
                    store_f32(column + (2 * (unit + i)) * STRIP, (vf)(part[i] << 16));
                    store_f32(column + (2 * (unit + i) + 1) * STRIP, (vf)(part[i] & 0xffff0000u));
                } else {
                    store_f32(column + (unit + i) * STRIP, (vf)part[i]);
                }
            }
        }
    }
}

INLINE vf dot_step(vf q, vf k, vf sum, int dtype) {
#if HAVE_BF16_DOT
    if (uses_pairs(dtype)) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)k);
#endif
    (void)dtype;
    return multiply_add(q, k, sum);
}

/* scores[r, c] = query[r] . keys[:, c] for `rows` rows and `vectors` vectors of positions. */
INLINE void score_block(const float *query, const float *keys, int64_t units, float *scores, int dtype, const int rows,
                        const int vectors) {
    vf sum[BLOCK_ROWS][BLOCK_VECTORS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vectors; c++) sum[r][c] = splat(0.0f);
    for (int64_t unit = 0; unit < units; unit++) {
        vf key[BLOCK_VECTORS];
        UNROLL
        for (int c = 0; c < vectors; c++) key[c] = load_f32(keys + unit * STRIP + c * VL);
        UNROLL
        for (int r = 0; r < rows; r++) {
            vf q = splat_bits(query[r * units + unit]);
            UNROLL
            for (int c = 0; c < vectors; c++) sum[r][c] = dot_step(q, key[c], sum[r][c], dtype);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vectors; c++) store_f32(scores + r * TILE + c * VL, sum[r][c]);
}

INLINE void score_rows(const float *query, const float *keys, int64_t units, float *scores, int columns, int dtype,
                       const int rows) {
    int c = 0;
    for (; c + BLOCK_VECTORS * VL <= columns; c += BLOCK_VECTORS * VL)
        score_block(query, keys + c, units, scores + c, dtype, rows, BLOCK_VECTORS);
    for (; c < columns; c += VL) score_block(query, keys + c, units, scores + c, dtype, rows, 1);
}

/* Calls name(..., rows) with the number of rows as a constant. */
#define WITH_CONSTANT_ROWS(rows, name, ...)       \
    switch (rows) {                               \
        case 1: name(__VA_ARGS__, 1); break;      \
        case 2: name(__VA_ARGS__, 2); break;      \
        case 3: name(__VA_ARGS__, 3); break;      \
        case 4: name(__VA_ARGS__, 4); break;      \
        case 5: name(__VA_ARGS__, 5); break;      \
        default: name(__VA_ARGS__, 6); break;     \
    }

/* --- softmax --------------------------------------------------------------------------------------------------- */

INLINE vi inside(int p, int low, int high) {
    vi position = lane_index() + splat_int(p);
    return (position >= splat_int(low)) & (position < splat_int(high));
}

/* Scores become tanh(score * factor). */
INLINE void cap_row(float *row, int from, int to, float factor) {
    for (int p = from; p < to; p += VL) store_f32(row + p, tanh_float(load_f32(row + p) * splat(factor)));
}

/* Turns the scores of one row into weights; positions from .. to outside of low .. high become 0. */
INLINE void softmax_row(float *row, int low, int high, int from, int to, float scale, float *max, float *sum) {
    const vf minus_infinity = splat(-INFINITY);
    if (low >= high) {
        for (int p = from; p < to; p += VL) store_f32(row + p, splat(0.0f));
        *max = -INFINITY;
        *sum = 0.0f;
        return;
    }
    const int begin = low / VL * VL, end = (high + VL - 1) / VL * VL;
    vf largest = minus_infinity;
    for (int p = begin; p < end; p += VL) {
        vf x = load_f32(row + p);
        if (p < low || p + VL > high) {
            x = select_float(inside(p, low, high), x, minus_infinity);
            store_f32(row + p, x);
        }
        largest = max_float(x, largest);
    }
    const float top = max_lanes(largest) * scale;
    const vf factor = splat(scale), offset = splat(-top);
    vf total = splat(0.0f);
    for (int p = begin; p < end; p += VL) {
        vf weight = exp2_float(multiply_add(load_f32(row + p), factor, offset));
        total += weight;
        store_f32(row + p, weight);
    }
    for (int p = from; p < begin; p += VL) store_f32(row + p, splat(0.0f));
    for (int p = end; p < to; p += VL) store_f32(row + p, splat(0.0f));
    *max = top;
    *sum = sum_lanes(total);
}

/* --- values ---------------------------------------------------------------------------------------------------- */

/* tile[r, d] = sum over positions from .. to of weights[r, p] * value[p, d], for some vectors of d. */
INLINE void value_block(const float *weights, const char *const *rows_of_keys, int64_t offset, int from, int to,
                        float *tile, int64_t head_dim, int dtype, const int vectors, const int rows) {
    vf sum[BLOCK_ROWS][BLOCK_VECTORS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vectors; c++) sum[r][c] = splat(0.0f);
    for (int p = from; p < to; p++) {
        const char *base = rows_of_keys[p] + offset;
        vf value[BLOCK_VECTORS];
        UNROLL
        for (int c = 0; c < vectors; c++) value[c] = load(base, c * VL, dtype);
        UNROLL
        for (int r = 0; r < rows; r++) {
            vf weight = splat(weights[r * TILE + p]);
            UNROLL
            for (int c = 0; c < vectors; c++) sum[r][c] = multiply_add(weight, value[c], sum[r][c]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vectors; c++) store_f32(tile + r * head_dim + c * VL, sum[r][c]);
}

INLINE void value_rows(const float *weights, const char *const *rows_of_keys, int64_t side_bytes, int from, int to,
                       float *tile, int64_t head_dim, int dtype, const int rows) {
    int64_t d = 0;
    for (; d + BLOCK_VECTORS * VL <= head_dim; d += BLOCK_VECTORS * VL)
        value_block(weights, rows_of_keys, side_bytes + d * element_size(dtype), from, to, tile + d, head_dim, dtype,
                    BLOCK_VECTORS, rows);
    for (; d < head_dim; d += VL)
        value_block(weights, rows_of_keys, side_bytes + d * element_size(dtype), from, to, tile + d, head_dim, dtype, 1,
                    rows);
}

/* --- the tile -------------------------------------------------------------------------------------------------- */

INLINE int round_down(int x, int step) { return x / step * step; }
INLINE int round_up(int x, int step) { return (x + step - 1) / step * step; }

/* Scores, softmax and values of `rows` rows against one tile. With a cap_factor the softmax is of tanh(score *
 * cap_factor); 0: none. ws holds the query, the rows' positions low .. high (both
 * non-decreasing over the rows) and the key rows of each CHUNK that any of them reads. */
INLINE void attend_tile(workspace *ws, int rows, int64_t head_dim, int64_t side_bytes, float scale, float cap_factor,
                        int dtype) {
    const int64_t units = units_of(head_dim, dtype);
    const int tile_low = round_down(ws->low[0], CHUNK), tile_high = round_up(ws->high[rows - 1], CHUNK);
    for (int strip = round_down(tile_low, STRIP); strip < tile_high; strip += STRIP) {
        const int begin = tile_low > strip ? tile_low : strip;
        const int end = tile_high < strip + STRIP ? tile_high : strip + STRIP;
        transpose_keys(ws, strip, begin, end, tile_high, head_dim, side_bytes, dtype);
        for (int r = 0; r < rows; r += BLOCK_ROWS) {
            const int count = rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS;
            const int low = round_down(ws->low[r], CHUNK), high = round_up(ws->high[r + count - 1], CHUNK);
            const int from = low > begin ? low : begin, to = high < end ? high : end;
            if (from < to)
                WITH_CONSTANT_ROWS(count, score_rows, ws->query + r * units, ws->keys + (from - strip), units,
                                   ws->scores + r * TILE + from, to - from, dtype)
        }
    }
    for (int r = 0; r < rows; r += BLOCK_ROWS) {
        const int count = rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS;
        const int low = ws->low[r], high = ws->high[r + count - 1];
        for (int i = r; i < r + count && cap_factor > 0.0f; i++)
            cap_row(ws->scores + i * TILE, round_down(ws->low[i], VL), ws->high[i], cap_factor);
        for (int i = r; i < r + count; i++)
            softmax_row(ws->scores + i * TILE, ws->low[i], ws->high[i], round_down(low, CHUNK), round_up(high, CHUNK),
                        scale, &ws->tile_max[i], &ws->tile_sum[i]);
        WITH_CONSTANT_ROWS(count, value_rows, ws->scores + r * TILE, ws->key_rows, side_bytes, low, high,
                           ws->tile + r * head_dim, head_dim, dtype)
    }
}

/* Merges one tile's softmax (max, sum, values) into a row. Tiles are merged in order of position. */
INLINE void merge_row(float *output, float *max, float *sum, const float *tile, float tile_max, float tile_sum,
                      int64_t head_dim) {
    if (tile_sum == 0.0f) return; /* the row attends to no position of this tile; otherwise its largest weight is 1 */
    const float new_max = tile_max > *max ? tile_max : *max;
    const vf old_factor = exp2_float(splat(*max - new_max)), tile_factor = exp2_float(splat(tile_max - new_max));
    for (int64_t d = 0; d < head_dim; d += VL) {
        vf scaled = load_f32(tile + d) * tile_factor;
        store_f32(output + d, multiply_add(load_f32(output + d), old_factor, scaled));
    }
    *sum = *sum * old_factor[0] + tile_sum * tile_factor[0];
    *max = new_max;
}

#endif
