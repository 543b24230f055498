/* Norms, the SwiGLU gate, and the rotary embedding with the KV cache write. Sums and products are in float32, and results are
 * rounded once. Rows are independent and divided among the threads, so the bits of a row do not depend on their number. */
#include <stddef.h>

#include "simd.h"
#include "threads.h"
#include "variant.h"

/* With fewer elements one thread is faster than two. */
#define SERIAL_ELEMENTS 16384

INLINE int threads_for(int64_t elements, int num_threads) { return elements < SERIAL_ELEMENTS ? 1 : num_threads; }

/* --- RMS norm -------------------------------------------------------------------------------------------------- */

/* One vector of a row; with a residual, that is added and the sum is written to total. */
INLINE vf load_total(const char *x, const char *residual, char *total, int64_t i, int dtype) {
    if (!residual) return load(x, i, dtype);
    const vf sum = rounded(load(x, i, dtype) + load(residual, i, dtype), dtype);
    store(total, i, sum, dtype);
    return sum;
}

/* The sum of the squares of a row (of its sum with residual, which is written to total; both may be NULL). */
INLINE float sum_of_squares(const char *x, const char *residual, char *total, int64_t size, int dtype) {
    vf squares[4];
    float rest = 0.0f;
    int64_t i = 0;
    UNROLL
    for (int k = 0; k < 4; k++) squares[k] = splat(0.0f);
    for (; i + 4 * VL <= size; i += 4 * VL)
        UNROLL
        for (int k = 0; k < 4; k++) {
            const vf value = load_total(x, residual, total, i + k * VL, dtype);
            squares[k] = multiply_add(value, value, squares[k]);
        }
    for (; i + VL <= size; i += VL) {
        const vf value = load_total(x, residual, total, i, dtype);
        squares[0] = multiply_add(value, value, squares[0]);
    }
    for (; i < size; i++) {
        float value = load_one(x, i, dtype);
        if (residual) {
            store_one(total, i, value + load_one(residual, i, dtype), dtype);
            value = load_one(total, i, dtype);
        }
        rest += value * value;
    }
    return sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
}

INLINE void scale_row(char *output, const char *x, const char *weight, float factor, float offset, int64_t size,
                      int dtype) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL)
        store(output, i, load(x, i, dtype) * splat(factor) * (load(weight, i, dtype) + splat(offset)), dtype);
    for (; i < size; i++)
        store_one(output, i, load_one(x, i, dtype) * factor * (load_one(weight, i, dtype) + offset), dtype);
}

INLINE void norm_row(char *output, char *total, const char *x, const char *residual, const char *weight, float eps,
                     float offset, int64_t size, int dtype) {
    const float squares = sum_of_squares(x, residual, total, size, dtype);
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)size + eps);
    scale_row(output, residual ? total : x, weight, factor, offset, size, dtype);
}

typedef struct {
    char *output, *total;
    const char *x, *residual, *weight; /* residual and total may be NULL */
    float eps, offset;
    int64_t size;
    int dtype;
} norm;

static void norm_rows(void *context, int64_t begin, int64_t end, int thread) {
    const norm *n = context;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        const int64_t at = row * n->size * element_size(n->dtype);
        WITH_CONSTANT_DTYPE(n->dtype, norm_row, n->output + at, n->residual ? n->total + at : NULL, n->x + at,
                            n->residual ? n->residual + at : NULL, n->weight, n->eps, n->offset, n->size)
    }
}

static void run_rows(ff_task task, void *context, int64_t num_rows, int64_t row_size, int num_threads) {
    const int threads = threads_for(num_rows * row_size, num_threads);
    ff_run(task, context, num_rows, ff_grain(num_rows, threads), threads);
}

/* output = rms_norm(x) * (weight + offset) over rows [num_rows, size]; all contiguous. */
void EXPORT(rms_norm)(char *output, const char *x, const char *weight, float eps, float offset, int64_t num_rows,
                      int64_t size, int dtype, int num_threads) {
    norm n = {output, NULL, x, NULL, weight, eps, offset, size, dtype};
    run_rows(norm_rows, &n, num_rows, size, num_threads);
}

/* total = x + residual, rounded; output = rms_norm(total) * weight. */
void EXPORT(add_rms_norm)(char *output, char *total, const char *x, const char *residual, const char *weight, float eps,
                          int64_t num_rows, int64_t size, int dtype, int num_threads) {
    norm n = {output, total, x, residual, weight, eps, 0.0f, size, dtype};
    run_rows(norm_rows, &n, num_rows, size, num_threads);
}

/* --- SwiGLU and GeGLU ------------------------------------------------------------------------------------------ */

/* SiLU, or GELU with tanh: 0.5 * x * (1 + tanh(y)) is x * sigmoid(2 * y). */
INLINE vf activation(vf x, const int is_gelu) {
    if (!is_gelu) return x * sigmoid(x);
    const vf cubic = multiply_add(x * x * splat(0.044715f), x, x);
    return x * sigmoid(cubic * splat(1.59576912160573f)); /* 2 * sqrt(2 / pi) */
}

INLINE void activate_row(char *output, const char *gate, const char *up, int64_t size, const int is_gelu, int dtype) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL)
        store(output, i, activation(load(gate, i, dtype), is_gelu) * load(up, i, dtype), dtype);
    for (; i < size; i++) {
        vf x = splat(load_one(gate, i, dtype));
        store_one(output, i, activation(x, is_gelu)[0] * load_one(up, i, dtype), dtype);
    }
}

INLINE void silu_row(char *output, const char *gate, const char *up, int64_t size, int dtype) {
    activate_row(output, gate, up, size, 0, dtype);
}

INLINE void gelu_row(char *output, const char *gate, const char *up, int64_t size, int dtype) {
    activate_row(output, gate, up, size, 1, dtype);
}

typedef struct {
    char *output;
    const char *gate_up;
    int64_t size;
    int dtype, is_gelu;
} gated;

static void activate_rows(void *context, int64_t begin, int64_t end, int thread) {
    const gated *g = context;
    const int64_t bytes = g->size * element_size(g->dtype);
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        char *target = g->output + row * bytes;
        const char *gate = g->gate_up + 2 * row * bytes, *up = gate + bytes;
        if (g->is_gelu)
            WITH_CONSTANT_DTYPE(g->dtype, gelu_row, target, gate, up, g->size)
        else
            WITH_CONSTANT_DTYPE(g->dtype, silu_row, target, gate, up, g->size)
    }
}

/* output [num_rows, size] = silu(gate) * up of gate_up [num_rows, 2 * size], or gelu(gate) * up. */
void EXPORT(silu_and_mul)(char *output, const char *gate_up, int64_t num_rows, int64_t size, int dtype,
                          int num_threads, int is_gelu) {
    gated g = {output, gate_up, size, dtype, is_gelu};
    run_rows(activate_rows, &g, num_rows, size, num_threads);
}

/* --- rotary embedding and KV cache ----------------------------------------------------------------------------- */

typedef struct {
    char *query;        /* [num_tokens, num_heads, head_dim] */
    const char *qkv;    /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows qkv_stride elements apart */
    char *kv_cache;     /* [num_blocks, 2, num_kv_heads, block_size, head_dim], strides in elements */
    const float *cos_sin; /* [max_positions, head_dim] */
    const char *q_norm, *k_norm; /* [head_dim] or NULL */
    int64_t qkv_stride, block_stride, side_stride, head_stride, token_stride;
    int num_heads, num_kv_heads, block_size, head_dim;
    const int64_t *slots, *positions; /* [num_tokens] */
    float eps, norm_offset;
    int dtype;
} rope;

/* Rotates the pairs (x[i], x[i + head_dim / 2]); head_dim / 2 is a multiple of VL or taken element by element. */
INLINE void rotate_head(const rope *r, char *output, const char *x, const char *weight, const float *cos_sin, int dtype) {
    const int head_dim = r->head_dim;
    const float offset = r->norm_offset;
    const int half = head_dim / 2;
    float factor = 1.0f;
    if (weight) {
        const float squares = sum_of_squares(x, NULL, NULL, head_dim, dtype);
        factor = 1.0f / __builtin_sqrtf(squares / (float)head_dim + r->eps);
    }
    int i = 0;
    for (; i + VL <= half; i += VL) {
        vf low = load(x, i, dtype), high = load(x, half + i, dtype);
        if (weight) {
            low = low * splat(factor) * (load(weight, i, dtype) + splat(offset));
            high = high * splat(factor) * (load(weight, half + i, dtype) + splat(offset));
        }
        const vf cos = load_f32(cos_sin + i), sin = load_f32(cos_sin + half + i);
        store(output, i, low * cos - high * sin, dtype);
        store(output, half + i, high * cos + low * sin, dtype);
    }
    for (; i < half; i++) {
        float low = load_one(x, i, dtype), high = load_one(x, half + i, dtype);
        if (weight) {
            low = low * factor * (load_one(weight, i, dtype) + offset);
            high = high * factor * (load_one(weight, half + i, dtype) + offset);
        }
        store_one(output, i, low * cos_sin[i] - high * cos_sin[half + i], dtype);
        store_one(output, half + i, high * cos_sin[i] + low * cos_sin[half + i], dtype);
    }
}

INLINE void rope_token(const rope *r, int64_t token, int64_t slot, int64_t position, int dtype) {
    const int64_t size = element_size(dtype), head_bytes = r->head_dim * size;
    const char *head = r->qkv + token * r->qkv_stride * size;
    const float *cos_sin = r->cos_sin + position * r->head_dim;
    char *query = r->query + token * r->num_heads * head_bytes;
    for (int h = 0; h < r->num_heads; h++)
        rotate_head(r, query + h * head_bytes, head + h * head_bytes, r->q_norm, cos_sin, dtype);
    if (slot < 0) return;
    head += r->num_heads * head_bytes;
    char *key = r->kv_cache +
                ((slot / r->block_size) * r->block_stride + (slot % r->block_size) * r->token_stride) * size;
    for (int h = 0; h < r->num_kv_heads; h++) {
        char *target = key + h * r->head_stride * size;
        rotate_head(r, target, head + h * head_bytes, r->k_norm, cos_sin, dtype);
        memcpy(target + r->side_stride * size, head + (r->num_kv_heads + h) * head_bytes, (size_t)head_bytes);
    }
}

static void rope_tokens(void *context, int64_t begin, int64_t end, int thread) {
    const rope *r = context;
    (void)thread;
    for (int64_t token = begin; token < end; token++)
        WITH_CONSTANT_DTYPE(r->dtype, rope_token, r, token, r->slots[token], r->positions[token])
}

int EXPORT(rope_and_cache)(char *query, const char *qkv, int64_t qkv_stride, char *kv_cache, int64_t num_blocks,
                           int64_t block_stride, int64_t side_stride, int64_t head_stride, int64_t token_stride,
                           const int64_t *slots, const int64_t *positions, const float *cos_sin, int64_t max_positions,
                           const char *q_norm, const char *k_norm, float eps, float norm_offset, int64_t num_tokens,
                           int num_heads, int num_kv_heads, int block_size, int head_dim, int dtype, int num_threads) {
    rope r = {.query = query, .qkv = qkv, .kv_cache = kv_cache, .cos_sin = cos_sin, .q_norm = q_norm,
                    .k_norm = k_norm, .slots = slots, .positions = positions, .dtype = dtype, .qkv_stride = qkv_stride, .block_stride = block_stride,
                    .side_stride = side_stride, .head_stride = head_stride, .token_stride = token_stride,
                    .num_heads = num_heads, .num_kv_heads = num_kv_heads, .block_size = block_size,
                    .head_dim = head_dim, .eps = eps, .norm_offset = norm_offset};
    for (int64_t token = 0; token < num_tokens; token++)
        if (slots[token] >= num_blocks * block_size || positions[token] < 0 || positions[token] >= max_positions)
            return FF_BAD_METADATA;
    run_rows(rope_tokens, &r, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, num_threads);
    return FF_OK;
}
