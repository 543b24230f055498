/* Consecutive decoder layers in one call: the kernels of the other files, in the order of a layer. */
#include <stdlib.h>

#include "simd.h"
#include "variant.h"

/* Shapes and arguments: see the definitions. */
void EXPORT(rms_norm)(char *, const char *, const char *, float, float, int64_t, int64_t, int, int);
void EXPORT(add_rms_norm)(char *, char *, const char *, const char *, const char *, float, int64_t, int64_t, int, int);
void EXPORT(silu_and_mul)(char *, const char *, int64_t, int64_t, int, int, int);
int EXPORT(linear_to)(char *, int, const uint32_t *, int64_t, const uint32_t *, const char *, int64_t, int64_t, int64_t,
                      int, int);
int EXPORT(rope_and_cache)(char *, const char *, int64_t, char *, int64_t, int64_t, int64_t, int64_t, int64_t,
                           const int64_t *, const int64_t *, const float *, int64_t, const char *, const char *, float,
                           float, int64_t, int, int, int, int, int, int);
int EXPORT(paged_attention)(void *, const void *, int64_t, int64_t, const void *, int64_t, int64_t, int64_t, int64_t,
                            int64_t, const int32_t *, const int32_t *, const int32_t *, int64_t, int64_t, int, int, int,
                            int, int, float, float, int, int, int, const void *);

#define CALL(name) FF_JOIN(FF_VARIANT, name)

/* The structs have the fields of those in kernels/native_layers.py. */
typedef struct {
    const uint32_t *weight; /* packed; or parts of blocks, of which there are num_parts */
    const char *bias;
    int64_t num_outputs, units; /* units are inputs of blocks */
    int64_t num_parts;
} linear;

typedef struct {
    const char *input_norm, *mlp_norm, *q_norm, *k_norm; /* the last two may be NULL */
    linear qkv, o, gate_up, down;
    char *kv_cache;
    const float *cos_sin;
    int64_t max_positions, window;
} decoder_layer;

/* block_linear of blocks.c, for the instruction set that suits it. */
typedef int (*block_product)(char *, int, const void *, int64_t, const void *, int, const char *, int64_t, int64_t, int64_t,
                             int, int);

typedef struct {
    block_product multiply_blocks;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, dtype;
    double eps, scale;
} decoder_shape;

typedef struct {
    char *hidden, *residual; /* [num_tokens, hidden_size] */
    const int64_t *slots, *positions;
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    int64_t num_tokens, num_requests, table_stride, table_width;
    int64_t num_blocks, block_stride, side_stride, head_stride, token_stride, block_size; /* of each KV cache */
    int64_t num_threads;
} decoder_step;

typedef struct {
    char *normed, *qkv, *query, *attended, *gate_up, *activated;
} buffers;

#define BLOCK_ROWS 512
/* Rows of a step that pass through the operations around attention together: their buffers stay in the caches. */

INLINE int apply(const linear *l, char *y, const char *x, int64_t rows, const decoder_shape *d, const decoder_step *s) {
    const int dtype = (int)d->dtype;
    if (l->num_parts)
        return d->multiply_blocks(y, dtype == FF_FLOAT32, x, l->units, l->weight, (int)l->num_parts, l->bias, rows,
                                  l->num_outputs, l->units, dtype, (int)s->num_threads);
    return CALL(linear_to)(y, dtype == FF_FLOAT32, (const uint32_t *)x, l->units, l->weight, l->bias, rows,
                             l->num_outputs, l->units, dtype, (int)s->num_threads);
}

/* Rows first .. first + n up to their query, and their K and V in the cache. Adds the hidden of the layer before to the
 * residual. */
static int before_attention(const decoder_layer *l, const decoder_shape *d, const decoder_step *s, const buffers *b,
                            int64_t first, int64_t n, int is_first_layer) {
    const int dtype = (int)d->dtype, threads = (int)s->num_threads;
    const int64_t size = d->hidden_size, at = first * size * element_size(dtype);
    const int64_t query_row = d->num_heads * d->head_dim * element_size(dtype);
    const float eps = (float)d->eps;
    char *residual = s->residual + at;
    if (is_first_layer)
        CALL(rms_norm)(b->normed, residual, l->input_norm, eps, 0.0f, n, size, dtype, threads);
    else
        CALL(add_rms_norm)(b->normed, residual, s->hidden + at, residual, l->input_norm, eps, n, size, dtype, threads);
    const int status = apply(&l->qkv, b->qkv, b->normed, n, d, s);
    if (status) return status;
    return CALL(rope_and_cache)(b->query + first * query_row, b->qkv, l->qkv.num_outputs, l->kv_cache, s->num_blocks,
                                  s->block_stride, s->side_stride, s->head_stride, s->token_stride, s->slots + first,
                                  s->positions + first, l->cos_sin, l->max_positions, l->q_norm, l->k_norm, eps, 0.0f,
                                  n, (int)d->num_heads, (int)d->num_kv_heads, (int)s->block_size, (int)d->head_dim,
                                  dtype, threads);
}

/* Rows first .. first + n from what attention has written. The hidden of the layer is not added to the residual yet. */
static int after_attention(const decoder_layer *l, const decoder_shape *d, const decoder_step *s, const buffers *b,
                           int64_t first, int64_t n) {
    const int dtype = (int)d->dtype, threads = (int)s->num_threads;
    const int64_t size = d->hidden_size, at = first * size * element_size(dtype);
    const char *attended = b->attended + first * d->num_heads * d->head_dim * element_size(dtype);
    char *hidden = s->hidden + at, *residual = s->residual + at;
    int status = apply(&l->o, hidden, attended, n, d, s);
    if (status) return status;
    CALL(add_rms_norm)(b->normed, residual, hidden, residual, l->mlp_norm, (float)d->eps, n, size, dtype, threads);
    status = apply(&l->gate_up, b->gate_up, b->normed, n, d, s);
    if (status) return status;
    CALL(silu_and_mul)(b->activated, b->gate_up, n, l->gate_up.num_outputs / 2, dtype, threads, 0);
    return apply(&l->down, hidden, b->activated, n, d, s);
}

static int run_layer(const decoder_layer *l, const decoder_shape *d, const decoder_step *s, const buffers *b,
                     int is_first) {
    const int64_t n = s->num_tokens;
    int status = FF_OK;
    for (int64_t first = 0; first < n && !status; first += BLOCK_ROWS)
        status = before_attention(l, d, s, b, first, smallest(BLOCK_ROWS, n - first), is_first);
    if (!status)
        status = CALL(paged_attention)(b->attended, b->query, d->num_heads * d->head_dim, n, l->kv_cache,
                                         s->num_blocks, s->block_stride, s->side_stride, s->head_stride,
                                         s->token_stride, s->query_start_loc, s->seq_lens, s->block_tables,
                                         s->table_stride, s->table_width, (int)s->num_requests, (int)d->num_heads,
                                         (int)d->num_kv_heads, (int)s->block_size, (int)d->head_dim, (float)d->scale,
                                         0.0f, (int)l->window, (int)d->dtype, (int)s->num_threads, NULL);
    for (int64_t first = 0; first < n && !status; first += BLOCK_ROWS)
        status = after_attention(l, d, s, b, first, smallest(BLOCK_ROWS, n - first));
    return status;
}

/* residual: the input, and then the residual stream without the last layer's hidden, which is not added yet. */
int EXPORT(decoder_layers)(const decoder_layer *layers, const decoder_shape *d, const decoder_step *s) {
    const int64_t size = element_size((int)d->dtype), n = s->num_tokens, few = smallest(BLOCK_ROWS, n);
    const int64_t queries = n * d->num_heads * d->head_dim, gate_up = few * layers->gate_up.num_outputs;
    buffers b;
    const struct {
        char **at;
        int64_t count;
    } parts[] = {{&b.normed, few * d->hidden_size}, {&b.qkv, few * layers->qkv.num_outputs}, {&b.query, queries},
                 {&b.attended, queries},            {&b.gate_up, gate_up},                   {&b.activated, gate_up / 2}};
    const int num_parts = sizeof parts / sizeof *parts;
    int64_t total = 64;
    for (int i = 0; i < num_parts; i++) total += (parts[i].count * size + 63) / 64 * 64;
    char *memory = aligned_alloc(64, (size_t)total);
    if (!memory) return FF_NO_MEMORY;
    char *next = memory;
    for (int i = 0; i < num_parts; i++) {
        *parts[i].at = next;
        next += (parts[i].count * size + 63) / 64 * 64;
    }
    int status = FF_OK;
    for (int64_t i = 0; i < d->num_layers && !status; i++) status = run_layer(layers + i, d, s, &b, i == 0);
    free(memory);
    return status;
}
