/* Linear layers with weights in the blocks of GGUF files, which are read where they lie.
 *
 * Inputs are quantized to int8 in groups of 32, with a scale each. The products of a group are summed in integers, and
 * groups are added in float32 from first to last, so that the bits of a row depend neither on the batch nor on the number
 * of threads. Few rows multiply with the blocks as they are, 8 outputs at a time; for more rows, the codes of 8 outputs
 * are first laid side by side.
 *
 * A code stands for scale * (code - offset) - minimum. Layouts: "GGUF" and "ggml-common.h" of the ggml project.
 */
#include <stdlib.h>

#include "blocks.h"
#include "mappings.h"
#include "threads.h"
#include "variant.h"

#define FEW_ROWS 4 /* laying codes side by side is faster with more */

typedef struct {
    char *y;
    const block_part *parts;
    const char *bias; /* or NULL */
    const void *x;    /* rows x_stride elements apart */
    int64_t x_stride, num_rows, num_outputs, num_inputs;
    int8_t *codes;  /* [num_rows, num_inputs] */
    int16_t *wide;  /* the same; NULL: no part needs it */
    float *scales;  /* [num_rows, groups] */
    int32_t *sums;  /* [num_rows, groups, 2]: of each half of a group */
    float *totals;  /* [num_rows, groups]: scales times sums */
    float *exact;   /* [num_rows, num_inputs]; NULL: no part is of floats */
    char *scratch;  /* of each thread */
    int64_t scratch_bytes;
    int num_parts, dtype, y_is_float32;
} product;

/* --- inputs ---------------------------------------------------------------------------------------------------- */

typedef int8_t vbytes __attribute__((vector_size(VL)));
typedef int16_t vwords __attribute__((vector_size(2 * VL)));

INLINE int32_t sum_integers(vi x) {
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
}

/* Quantizes a group: the largest magnitude becomes 127. With a NaN or an infinity the scale is NaN. */
INLINE void quantize_group(const product *p, int64_t row, int64_t group, int dtype) {
    vf x[GROUP / VL], largest = splat(0.0f), probe = splat(0.0f);
    const int64_t first = group * GROUP, at = row * p->num_inputs + first;
    UNROLL
    for (int i = 0; i < GROUP / VL; i++) {
        x[i] = load(p->x, row * p->x_stride + first + i * VL, dtype);
        largest = max_float((vf)((vi)x[i] & splat_int(0x7fffffff)), largest);
        probe += x[i] * splat(0.0f);
    }
    const float most = max_lanes(largest), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const int is_finite = sum_lanes(probe) == 0.0f;
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    vi sums[2] = {{0}, {0}};
    UNROLL
    for (int i = 0; i < GROUP / VL; i++) {
        const vf scaled = is_finite ? x[i] * splat(inverse) : splat(1.0f);
        const vi codes = (vi)(scaled + magic) - splat_int(0x4b400000);
        sums[i * VL / (GROUP / 2)] += codes;
        const vbytes narrow = __builtin_convertvector(codes, vbytes);
        memcpy(p->codes + at + i * VL, &narrow, sizeof narrow);
        if (p->wide) {
            const vwords wide = __builtin_convertvector(codes, vwords);
            memcpy(p->wide + at + i * VL, &wide, sizeof wide);
        }
        if (p->exact) store_f32(p->exact + at + i * VL, x[i]);
    }
    const int64_t place = row * (p->num_inputs / GROUP) + group;
    p->scales[place] = is_finite ? most / 127.0f : __builtin_nanf("");
    p->sums[2 * place] = sum_integers(sums[0]);
    p->sums[2 * place + 1] = sum_integers(sums[1]);
    p->totals[place] = p->scales[place] * (float)(p->sums[2 * place] + p->sums[2 * place + 1]);
}

/* Quantizes a row with one scale, of which 127.5 are the largest magnitude, as compressed-tensors does. */
static void quantize_token(const product *p, int64_t row) {
    float largest = 0.0f, probe = 0.0f;
    const int64_t first = row * p->x_stride, at = row * p->num_inputs, groups = p->num_inputs / GROUP;
    for (int64_t i = 0; i < p->num_inputs; i++) {
        const float x = load_one(p->x, first + i, p->dtype), size = x < 0.0f ? -x : x;
        largest = size > largest ? size : largest;
        probe += x * 0.0f;
    }
    const float scale = probe == 0.0f ? (largest / 127.5f > 1e-12f ? largest / 127.5f : 1e-12f) : __builtin_nanf("");
    for (int64_t group = 0; group < groups; group++) {
        const int64_t place = row * groups + group;
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            const float magic = 12582912.0f, scaled = load_one(p->x, first + group * GROUP + i, p->dtype) / scale;
            const float rounded = (scaled + magic) - magic;
            const int32_t code = rounded >= 127.0f ? 127 : rounded >= -128.0f ? (int32_t)rounded : -128;
            p->codes[at + group * GROUP + i] = (int8_t)code;
            if (p->wide) p->wide[at + group * GROUP + i] = (int16_t)code;
            sums[i / (GROUP / 2)] += code;
        }
        p->scales[place] = scale;
        p->sums[2 * place] = sums[0];
        p->sums[2 * place + 1] = sums[1];
        p->totals[place] = 0.0f;
    }
}

static void quantize_rows(void *context, int64_t begin, int64_t end, int thread) {
    const product *p = context;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        if (p->parts->type == BLOCK_INT8) {
            quantize_token(p, row);
            continue;
        }
        for (int64_t group = 0; group < p->num_inputs / GROUP; group++)
            WITH_CONSTANT_DTYPE(p->dtype, quantize_group, p, row, group)
        for (int64_t i = p->num_inputs / GROUP * GROUP; p->exact && i < p->num_inputs; i++)
            p->exact[row * p->num_inputs + i] = load_one(p->x, row * p->x_stride + i, p->dtype);
    }
}

/* --- outputs --------------------------------------------------------------------------------------------------- */

/* Writes up to 8 outputs of a row, with the bias. */
INLINE void write_outputs(const product *p, const block_part *part, int64_t row, int64_t output, int count,
                          const float *sums) {
    for (int i = 0; i < count; i++) {
        const float added = p->bias ? load_one(p->bias, part->first + output + i, p->dtype) : 0.0f;
        const float sum = part->scales ? sums[i] * part->scales[output + i] : sums[i];
        store_one(p->y, row * p->num_outputs + part->first + output + i, sum + added, p->y_is_float32 ? FF_FLOAT32 : p->dtype);
    }
}

/* --- products -------------------------------------------------------------------------------------------------- */

/* One output, one row at a time: a part of floats, or of any type where there are no vectors of integers. */
static float multiply_plain(const product *p, const block_part *part, int64_t output, int64_t row) {
    const uint8_t *source = part->data + output * part->row_bytes;
    const int64_t num_groups = p->num_inputs / GROUP;
    float sum = 0.0f;
    if (is_float(part->type)) {
        for (int64_t i = 0; i < p->num_inputs; i++)
            sum += load_float(source, i, part->type) * p->exact[row * p->num_inputs + i];
        return sum;
    }
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t place = row * num_groups + group;
        const block_group b = unpack_group(source, group, part->type);
        for (int half = 0; half < 2; half++) {
            int32_t dot = 0;
            for (int i = 0; i < GROUP / 2; i++)
                dot += (b.codes[half * GROUP / 2 + i] - b.offset) *
                       p->codes[row * p->num_inputs + group * GROUP + half * GROUP / 2 + i];
            sum += (b.scales[half] * p->scales[place]) * (float)dot;
        }
        sum -= b.minimum * p->totals[place];
    }
    return sum;
}

#if defined(__AVX2__)
#include "blocks_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "blocks_neon.h"
#endif

/* Outputs of a part, 8 at a time, from group `first` on. */
static void multiply_part(const product *p, const block_part *part, int64_t first, int64_t last, int thread) {
#if defined(__AVX2__)
    if (!is_float(part->type) && part->num_rows >= 8) {
        multiply_part_avx2(p, part, first, last, thread);
        return;
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    if (!is_float(part->type)) {
        multiply_part_neon(p, part, first, last);
        return;
    }
#endif
    (void)thread;
    for (int64_t output = first * 8; output < smallest(last * 8, part->num_rows); output++)
        for (int64_t row = 0; row < p->num_rows; row++) {
            const float sum = multiply_plain(p, part, output, row);
            write_outputs(p, part, row, output, 1, &sum);
        }
}

static void multiply_parts(void *context, int64_t begin, int64_t end, int thread) {
    const product *p = context;
    int64_t first = 0;
    for (int i = 0; i < p->num_parts; i++) {
        const int64_t count = (p->parts[i].num_rows + 7) / 8;
        const int64_t from = begin > first ? begin - first : 0, to = smallest(end - first, count);
        if (from < to) multiply_part(p, p->parts + i, from, to, thread);
        first += count;
    }
}

INLINE char *take(char **next, int64_t bytes) {
    char *at = *next;
    *next += (bytes + 63) / 64 * 64;
    return at;
}

/* Divides the scratch memory; with `base` NULL the result is its size. */
static int64_t place_buffers(product *p, char *base, int has_wide, int has_exact, int num_threads) {
    char *next = base;
    const int64_t n = p->num_rows, size = p->num_inputs, groups = size / GROUP;
    p->codes = (int8_t *)take(&next, n * size);
    p->scales = (float *)take(&next, n * groups * 4);
    p->sums = (int32_t *)take(&next, n * groups * 8);
    p->totals = (float *)take(&next, n * groups * 4);
    p->wide = has_wide ? (int16_t *)take(&next, n * size * 2) : NULL;
    p->exact = has_exact ? (float *)take(&next, n * size * 4) : NULL;
    p->scratch_bytes = n > FEW_ROWS ? (groups * PANEL_BYTES + 63) / 64 * 64 : 0;
    p->scratch = take(&next, p->scratch_bytes * num_threads);
    return next - base;
}

/* y [num_rows, num_outputs], contiguous, = x W^T + bias. `parts` cover the outputs in order. num_inputs is a multiple of
 * 32 unless all parts are of floats. y is float32 if that is set, otherwise of dtype. */
int EXPORT(block_linear)(char *y, int y_is_float32, const void *x, int64_t x_stride, const block_part *parts,
                         int num_parts, const char *bias, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                         int dtype, int num_threads) {
    product p = {.y = y, .parts = parts, .bias = bias, .x = x, .x_stride = x_stride, .num_rows = num_rows,
                 .num_outputs = num_outputs, .num_inputs = num_inputs, .num_parts = num_parts, .dtype = dtype,
                 .y_is_float32 = y_is_float32};
    int64_t count = 0;
    int has_wide = 0, has_exact = 0;
    for (int i = 0; i < num_parts; i++) {
        count += (parts[i].num_rows + 7) / 8;
        has_wide |= needs_wide(parts[i].type) && num_rows > FEW_ROWS;
        has_exact |= is_float(parts[i].type);
    }
    if (!count || !num_rows) return FF_OK;
    const int threads = num_outputs * num_inputs * num_rows < 60000 ? 1 : num_threads;
    const int64_t bytes = place_buffers(&p, NULL, has_wide, has_exact, threads);
    char *memory = aligned_alloc(64, (size_t)bytes + 64);
    if (!memory) return FF_NO_MEMORY;
    place_buffers(&p, memory, has_wide, has_exact, threads);
    const int quantizing = num_rows > 8 ? threads : 1;
    ff_run(quantize_rows, &p, num_rows, ff_grain(num_rows, quantizing), quantizing);
    const int64_t grain = (count + threads * 8 - 1) / (threads * 8);
    ff_run(multiply_parts, &p, count, num_rows > FEW_ROWS ? (grain + 1) / 2 * 2 : grain, threads);
    free(memory);
    return ff_file_was_cut() ? FF_CUT_FILE : FF_OK;
}

/* Rows of a weight in floats: y [num_rows, num_inputs] of dtype, of the outputs in index. */
int EXPORT(block_rows)(char *y, const block_part *parts, int num_parts, const int64_t *index, int64_t num_rows,
                       int64_t num_inputs, int dtype) {
    for (int64_t row = 0; row < num_rows; row++) {
        const block_part *part = parts;
        const int64_t output = index[row];
        while (part < parts + num_parts && !(output >= part->first && output < part->first + part->num_rows)) part++;
        if (part == parts + num_parts) return FF_BAD_METADATA;
        const uint8_t *source = part->data + (output - part->first) * part->row_bytes;
        for (int64_t i = 0; is_float(part->type) && i < num_inputs; i++)
            store_one(y, row * num_inputs + i, load_float(source, i, part->type), dtype);
        for (int64_t group = 0; !is_float(part->type) && group < num_inputs / GROUP; group++) {
            const block_group b = unpack_group(source, group, part->type);
            for (int i = 0; i < GROUP; i++)
                store_one(y, row * num_inputs + group * GROUP + i,
                          b.scales[i / (GROUP / 2)] * (float)(b.codes[i] - b.offset) - b.minimum, dtype);
        }
    }
    return ff_file_was_cut() ? FF_CUT_FILE : FF_OK;
}
