/* Recurrences over a matrix for each head, and the convolutions before them, of steps with a few tokens for each request.
 * The formulas are those of kernels/recurrent. States are read once, and written once for each token after which they are
 * kept. Sums are in float32. */
#include <stddef.h>

#include "simd.h"
#include "threads.h"
#include "variant.h"

enum { MAX_TOKENS = 32, MAX_SIZE = 256, MAX_TAPS = 8 }; /* of kernels/native_recurrent.py */

/* Where the requests of a step read and write: StateBatch. */
typedef struct {
    const int32_t *starts, *read, *write;
    int64_t num_kept, slot_stride;
    int dtype;
} steps;

/* The slot of the state after token t of `length` of a request; negative: it is not kept. */
INLINE int64_t kept_slot(const steps *s, int64_t request, int64_t length, int64_t t) {
    const int64_t column = s->num_kept - length + t;
    return column < 0 ? -1 : s->write[request * s->num_kept + column];
}

/* --- recurrences ----------------------------------------------------------------------------------------------- */

typedef struct {
    steps steps;
    char *output;
    const char *q, *k, *v, *gate, *weight; /* gate and weight of a norm of each head; NULL: there is none */
    const float *decay, *rate, *skip;      /* of each token and head; skip: of each head, or NULL */
    float *state;
    int64_t stride, gate_stride;
    int64_t num_heads, num_k_heads, k_size, v_size;
    float scale, eps;
    int is_delta;
} recurrence;

/* A head of a token's output: a norm, and then a gate through SiLU. */
INLINE void gated_norm(char *output, const char *gate, const char *weight, float eps, int64_t size, int dtype) {
    float squares = 0.0f;
    for (int64_t i = 0; i < size; i++) {
        const float value = load_one(output, i, dtype);
        squares += value * value;
    }
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)size + eps);
    int64_t i = 0;
    for (; i + VL <= size; i += VL) {
        const vf g = load(gate, i, dtype);
        store(output, i, load(output, i, dtype) * splat(factor) * load(weight, i, dtype) * (g * sigmoid(g)), dtype);
    }
    for (; i < size; i++) {
        const vf g = splat(load_one(gate, i, dtype));
        store_one(output, i, load_one(output, i, dtype) * factor * load_one(weight, i, dtype) * (g * sigmoid(g))[0],
                  dtype);
    }
}

INLINE void head_of_request(const recurrence *r, int64_t request, int64_t head, int dtype) {
    const steps *s = &r->steps;
    const int64_t first = s->starts[request], length = s->starts[request + 1] - first, k_size = r->k_size;
    const int64_t element = element_size(dtype), k_head = head * r->num_k_heads / r->num_heads;
    const int64_t num_vectors = k_size / VL;
    vf q[MAX_TOKENS][MAX_SIZE / VL], k[MAX_TOKENS][MAX_SIZE / VL], row[MAX_SIZE / VL];
    if (length <= 0) return;
    for (int64_t t = 0; t < length; t++)
        for (int64_t i = 0; i < num_vectors; i++) {
            const int64_t at = ((first + t) * r->stride + k_head * k_size) * element;
            q[t][i] = load(r->q + at, i * VL, dtype) * splat(r->scale);
            k[t][i] = load(r->k + at, i * VL, dtype);
        }
    for (int64_t j = 0; j < r->v_size; j++) {
        const int64_t place = (head * r->v_size + j) * k_size;
        const float *old = r->state + s->read[request] * s->slot_stride + place;
        for (int64_t i = 0; i < num_vectors; i++) row[i] = load_f32(old + i * VL);
        for (int64_t t = 0; t < length; t++) {
            const int64_t token = first + t, of_head = token * r->num_heads + head;
            const vf decay = splat(r->decay[of_head]);
            const float value = load_one(r->v + (token * r->stride + head * r->v_size) * element, j, dtype);
            vf sums[2] = {splat(0.0f), splat(0.0f)};
            for (int64_t i = 0; i < num_vectors; i++) {
                row[i] = row[i] * decay;
                sums[i & 1] = multiply_add(row[i], k[t][i], sums[i & 1]);
            }
            const float known = r->is_delta ? sum_lanes(sums[0] + sums[1]) : 0.0f;
            const vf update = splat((value - known) * r->rate[of_head]);
            sums[0] = sums[1] = splat(0.0f);
            for (int64_t i = 0; i < num_vectors; i++) {
                row[i] = multiply_add(update, k[t][i], row[i]);
                sums[i & 1] = multiply_add(row[i], q[t][i], sums[i & 1]);
            }
            const float sum = sum_lanes(sums[0] + sums[1]) + (r->skip ? r->skip[head] * value : 0.0f);
            store_one(r->output + (of_head * r->v_size) * element, j, sum, dtype);
            const int64_t slot = kept_slot(s, request, length, t);
            if (slot >= 0)
                for (int64_t i = 0; i < num_vectors; i++)
                    store_f32(r->state + slot * s->slot_stride + place + i * VL, row[i]);
        }
    }
    for (int64_t token = first; r->gate && token < first + length; token++)
        gated_norm(r->output + (token * r->num_heads + head) * r->v_size * element,
                   r->gate + (token * r->gate_stride + head * r->v_size) * element, r->weight, r->eps, r->v_size, dtype);
}

static void recur(void *context, int64_t begin, int64_t end, int thread) {
    const recurrence *r = context;
    (void)thread;
    for (int64_t item = begin; item < end; item++)
        WITH_CONSTANT_DTYPE(r->steps.dtype, head_of_request, r, item / r->num_heads, item % r->num_heads)
}

/* k_size is a multiple of 16, at most MAX_SIZE; a request has at most MAX_TOKENS tokens. */
void EXPORT(recurrence_steps)(char *output, const char *q, const char *k, const char *v, int64_t stride,
                              const float *decay, const float *rate, const float *skip, float *state,
                              int64_t slot_stride, const int32_t *starts, const int32_t *read, const int32_t *write,
                              int64_t num_kept, int64_t num_requests, int64_t num_heads, int64_t num_k_heads,
                              int64_t k_size, int64_t v_size, float scale, int is_delta, const char *gate,
                              int64_t gate_stride, const char *weight, float eps, int dtype, int num_threads) {
    recurrence r = {.steps = {starts, read, write, num_kept, slot_stride, dtype}, .output = output, .q = q, .k = k, .v = v,
                    .gate = gate, .weight = weight, .decay = decay, .rate = rate, .skip = skip, .state = state,
                    .stride = stride, .gate_stride = gate_stride, .num_heads = num_heads, .num_k_heads = num_k_heads,
                    .k_size = k_size, .v_size = v_size, .scale = scale, .eps = eps, .is_delta = is_delta};
    const int64_t count = num_requests * num_heads;
    ff_run(recur, &r, count, ff_grain(count, num_threads), num_threads);
}

/* --- convolutions ---------------------------------------------------------------------------------------------- */

typedef struct {
    steps steps;
    char *output, *state;
    const char *x, *weight, *bias; /* bias may be NULL */
    int64_t stride, num_taps, channels, block, num_blocks, num_normed;
    float l2_eps;
    int has_silu, is_gated;
} convolution;

/* Some channels of a request: first the inputs of its window, then each token's output, then what is kept. */
INLINE void channels_of_request(const convolution *c, int64_t request, int64_t begin, int dtype) {
    const steps *s = &c->steps;
    const int64_t first = s->starts[request], length = s->starts[request + 1] - first, before = c->num_taps - 1;
    const int64_t size = smallest(c->block, c->channels - begin), element = element_size(dtype);
    float window[MAX_TOKENS + MAX_TAPS][MAX_SIZE], sums[MAX_SIZE];
    if (length <= 0) return;
    for (int64_t tap = 0; tap < before; tap++)
        for (int64_t i = 0; i < size; i++)
            window[tap][i] = load_one(
                c->state + (s->read[request] * s->slot_stride + tap * c->channels + begin) * element, i, dtype);
    for (int64_t t = 0; t < length; t++) {
        const char *x = c->x + ((first + t) * c->stride + begin) * element;
        for (int64_t i = 0; i < size; i++) {
            float value = load_one(x, i, dtype);
            if (c->is_gated) {
                char product[4];
                store_one(product, 0, value * load_one(x, 2 * c->channels + i, dtype), dtype);
                value = load_one(product, 0, dtype);
            }
            window[before + t][i] = value;
        }
    }
    for (int64_t t = 0; t < length; t++) {
        char *output = c->output + ((first + t) * c->channels + begin) * element;
        const char *gate = c->x + ((first + t) * c->stride + c->channels + begin) * element;
        float squares = 0.0f;
        for (int64_t i = 0; i < size; i++) {
            float sum = 0.0f;
            for (int64_t tap = 0; tap < c->num_taps; tap++)
                sum += window[t + tap][i] * load_one(c->weight, tap * c->channels + begin + i, dtype);
            sums[i] = c->bias ? sum + load_one(c->bias, begin + i, dtype) : sum;
        }
        for (int64_t i = 0; c->has_silu && i < size; i += VL) {
            const vf value = load_f32(sums + i); /* MAX_SIZE is a multiple of VL */
            store_f32(sums + i, value * sigmoid(value));
        }
        for (int64_t i = 0; i < size; i++) {
            if (c->is_gated) sums[i] *= load_one(gate, i, dtype);
            squares += sums[i] * sums[i];
        }
        const float factor = begin < c->num_normed ? 1.0f / __builtin_sqrtf(squares + c->l2_eps) : 1.0f;
        for (int64_t i = 0; i < size; i++) store_one(output, i, sums[i] * factor, dtype);
    }
    for (int64_t t = 0; t < length; t++) {
        const int64_t slot = kept_slot(s, request, length, t);
        for (int64_t tap = 0; slot >= 0 && tap < before; tap++)
            for (int64_t i = 0; i < size; i++)
                store_one(c->state + (slot * s->slot_stride + tap * c->channels + begin) * element, i,
                          window[t + 1 + tap][i], dtype);
    }
}

static void convolve(void *context, int64_t begin, int64_t end, int thread) {
    const convolution *c = context;
    (void)thread;
    for (int64_t item = begin; item < end; item++)
        WITH_CONSTANT_DTYPE(c->steps.dtype, channels_of_request, c, item / c->num_blocks,
                            item % c->num_blocks * c->block)
}

/* block: channels that are computed together, a head where there are norms; at most MAX_SIZE. */
void EXPORT(convolution_steps)(char *output, const char *x, int64_t stride, const char *weight, const char *bias,
                               char *state, int64_t slot_stride, const int32_t *starts, const int32_t *read,
                               const int32_t *write, int64_t num_kept, int64_t num_requests, int64_t num_taps,
                               int64_t channels, int64_t block, int64_t num_normed, float l2_eps, int has_silu,
                               int is_gated, int dtype, int num_threads) {
    const int64_t num_blocks = (channels + block - 1) / block, count = num_requests * num_blocks;
    convolution c = {.steps = {starts, read, write, num_kept, slot_stride, dtype}, .output = output, .state = state, .x = x,
                     .weight = weight, .bias = bias, .stride = stride, .num_taps = num_taps, .channels = channels,
                     .block = block, .num_blocks = num_blocks, .num_normed = num_normed, .l2_eps = l2_eps,
                     .has_silu = has_silu, .is_gated = is_gated};
    ff_run(convolve, &c, count, ff_grain(count, num_threads), num_threads);
}
