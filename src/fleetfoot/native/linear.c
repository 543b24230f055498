/* Linear layers: y = x W^T + b, with the weight packed once in the order in which it is read.
 *
 * Every output is one chain of multiplications and additions over the inputs, from first to last, in a register. A row of
 * y therefore has the same bits in every batch and with every number of threads, which libraries that choose an order by
 * the batch size do not guarantee.
 *
 * A unit is 32 bits: one float32, or two neighbouring bfloat16 inputs. The packed weight is [panels][units][PANEL], with
 * the PANEL outputs of a panel side by side, padded with zeros.
 */
#include <stdlib.h>

#include "simd.h"
#include "threads.h"
#include "variant.h"

#define VECTORS 2 /* of one panel */
#define PANEL (VECTORS * VL)
#define WIDE 4 /* panels computed at the same time for few rows: enough chains to hide the latency of one step */

/* Sums that are in registers at the same time; some are left for operands. */
#if VL == 16 || defined(__aarch64__)
#define MAX_SUMS 28
#else
#define MAX_SUMS 12
#endif
#define MAX_ROWS (MAX_SUMS / VECTORS)
#define MAX_WIDE_ROWS (MAX_SUMS / (VECTORS * WIDE))
#define BAND 12  /* blocks of rows that pass over all panels together: their x fits in the second-level cache */
#define SPAN 72  /* blocks of rows of x that are rearranged at once: it bounds the memory */

/* Units of a panel that fit in the first-level cache while all rows of a band pass over it: more for many rows, because
 * sums are stored in between; fewer when memory bound. */
#define UNIT_BYTES (4 * PANEL)
#define DEPTH_OF_MANY_BLOCKS (16384 / UNIT_BYTES)
#define DEPTH_OF_FEW_BLOCKS (8192 / UNIT_BYTES)

/* Distance of the prefetch of the weight, in units. */
#define AHEAD (16384 / UNIT_BYTES)
#define WIDE_AHEAD (2048 / UNIT_BYTES)
#define CACHE_LINE 64

/* Keeps the compiler from loading all factors of a step first, for which there are too few registers. */
#if defined(__x86_64__)
#define IN_ORDER(x) __asm__ volatile("" : "+v"(x))
#elif defined(__aarch64__)
#define IN_ORDER(x) __asm__ volatile("" : "+w"(x))
#else
#define IN_ORDER(x) (void)(x)
#endif

typedef struct {
    char *y;
    const uint32_t *x; /* rows of units, x_stride units apart */
    const uint32_t *packed;
    const char *bias; /* or NULL */
    int64_t x_stride, num_rows, num_outputs, units, num_panels;
    int y_is_float32;
} layer;

/* A block of rows of x, rearranged: [units, rows], with two values for each unit if bfloat16 is widened. */
typedef struct {
    const uint32_t *x;
    int64_t row; /* of y */
    int rows;
} block;

/* --- arithmetic ------------------------------------------------------------------------------------------------ */

/* Without products of pairs in hardware, x is float32, with two units for each unit of the weight. */
INLINE int x_is_widened(int dtype) { return dtype == FF_BFLOAT16 && !HAVE_BF16_DOT; }

/* A vector of the weight, or one half of its pairs as float32. */
INLINE vf load_weight(const uint32_t *source, int half, int dtype) {
    const vu weight = (vu)load_f32((const float *)source);
    if (!x_is_widened(dtype)) return (vf)weight;
    return (vf)(half == 0 ? weight << 16 : weight & 0xffff0000u);
}

INLINE vf multiply_unit(uint32_t x, vf weight, vf sum, int dtype) {
    const vf factor = (vf)splat_int((int32_t)x);
#if HAVE_BF16_DOT
    if (dtype == FF_BFLOAT16) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)factor, (__m512bh)weight);
#endif
    (void)dtype;
    return multiply_add(factor, weight, sum);
}

INLINE int y_dtype(const layer *l, int dtype) { return l->y_is_float32 ? FF_FLOAT32 : dtype; }

/* One value at a time, for the panel that holds the last outputs. */
static __attribute__((noinline)) void write_rest(const layer *l, int64_t row, int64_t output, const float *sums,
                                                 int dtype) {
    for (int lane = 0; lane < VL && output + lane < l->num_outputs; lane++) {
        const float added = l->bias ? load_one(l->bias, output + lane, dtype) : 0.0f;
        store_one(l->y, row * l->num_outputs + output + lane, sums[lane] + added, y_dtype(l, dtype));
    }
}

/* Writes rows x panels sums to y, with the bias. */
INLINE void write_sums(const layer *l, const block *b, int64_t output, vf sum[MAX_ROWS][WIDE * VECTORS], int dtype,
                       const int panels, const int rows) {
    const int is_whole = output + panels * PANEL <= l->num_outputs;
    UNROLL
    for (int v = 0; v < panels * VECTORS; v++) {
        const vf added = l->bias && is_whole ? load(l->bias, output + v * VL, dtype) : splat(0.0f);
        UNROLL
        for (int r = 0; r < rows; r++) {
            if (is_whole) {
                const int64_t at = (b->row + r) * l->num_outputs + output + v * VL;
                const vf total = l->bias ? sum[r][v] + added : sum[r][v];
                if (l->y_is_float32)
                    store_f32((float *)l->y + at, total);
                else
                    store(l->y, at, total, dtype);
            } else {
                float sums[VL];
                store_f32(sums, sum[r][v]);
                write_rest(l, b->row + r, output + v * VL, sums, dtype);
            }
        }
    }
}

/* Adds one unit of the weight, or one half of its pairs, times its factors x [rows]. */
INLINE void multiply_step(const layer *l, const uint32_t *x, const uint32_t *weight, vf sum[MAX_ROWS][WIDE * VECTORS],
                          int half, int dtype, const int panels, const int rows) {
    vf w[WIDE * VECTORS];
    UNROLL
    for (int v = 0; v < panels * VECTORS; v++)
        w[v] = load_weight(weight + v / VECTORS * l->units * PANEL + v % VECTORS * VL, half, dtype);
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) {
            sum[r][v] = multiply_unit(x[r], w[v], sum[r][v], dtype);
            IN_ORDER(sum[r][v]);
        }
}

/* One block of rows against units first .. last of `panels` panels from `panel` on. Between two parts of a panel the sums
 * are stored in sums [rows, PANEL]; whole panels need none. `widened`: these units as float32, or NULL. */
INLINE void multiply_block(const layer *l, const block *b, float *sums, int64_t panel, int64_t first, int64_t last,
                           const float *widened, int dtype, const int panels, const int rows) {
    vf sum[MAX_ROWS][WIDE * VECTORS];
    const uint32_t *weight = l->packed + panel * l->units * PANEL;
    const int width = x_is_widened(dtype) ? 2 : 1;
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) sum[r][v] = first ? load_f32(sums + r * PANEL + v * VL) : splat(0.0f);
    for (int64_t i = 0; widened && i < 2 * (last - first); i++)
        multiply_step(l, b->x + (2 * first + i) * rows, (const uint32_t *)widened + i * PANEL, sum, 0, FF_FLOAT32, panels,
                      rows);
    for (int64_t unit = widened ? last : first; unit < last; unit++) {
        UNROLL
        for (int v = 0; v < panels * VECTORS; v += 4 * VL < CACHE_LINE ? VECTORS : 1) {
            const int64_t later = unit + (panels == 1 ? AHEAD : WIDE_AHEAD);
            __builtin_prefetch(weight + (v / VECTORS * l->units + later) * PANEL + v % VECTORS * VL);
        }
        const uint32_t *x = b->x + unit * width * rows;
        multiply_step(l, x, weight + unit * PANEL, sum, 0, dtype, panels, rows);
        if (width == 2) multiply_step(l, x + rows, weight + unit * PANEL, sum, 1, dtype, panels, rows);
    }
    if (last == l->units) {
        write_sums(l, b, panel * PANEL, sum, dtype, panels, rows);
        return;
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) store_f32(sums + r * PANEL + v * VL, sum[r][v]);
}

/* The number of rows as a constant. */
#define CASE(n, most, ...) \
    case n:                \
        if (n <= most) multiply_block(__VA_ARGS__, n <= most ? n : 1); \
        break;

INLINE void multiply_panel(const layer *l, const block *b, float *sums, int64_t panel, int64_t first, int64_t last,
                           const float *widened, int dtype) {
#define ROWS(n) CASE(n, MAX_ROWS, l, b, sums, panel, first, last, widened, dtype, 1)
    switch (b->rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7)
        ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
    }
#undef ROWS
}

INLINE void multiply_wide(const layer *l, const block *b, float *sums, int64_t panel, int dtype) {
#define ROWS(n) CASE(n, MAX_WIDE_ROWS, l, b, sums, panel, 0, l->units, NULL, dtype, WIDE)
    switch (b->rows) { ROWS(1) ROWS(2) ROWS(3) }
#undef ROWS
}

/* --- sharing the work ------------------------------------------------------------------------------------------ */

/* `rows` rows of x, stride units apart, into target [units, rows]; widened: [units, 2, rows], the first of a pair first. */
INLINE void arrange(uint32_t *target, const uint32_t *x, int64_t stride, int rows, int64_t units, const int widened) {
    const quad high = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
    const int width = widened ? 2 : 1, quads = rows / 4 * 4;
    for (int64_t unit = 0; unit < units; unit++) {
        uint32_t *at = target + unit * width * rows;
        if (unit % 4 == 0 && unit + 4 <= units)
            for (int r = 0; r < quads; r += 4) {
                quad part[4];
                transpose_quads(x + r * stride + unit, stride, part);
                for (int i = 0; i < 4; i++) {
                    const quad first = widened ? part[i] << 16 : part[i], second = part[i] & high;
                    memcpy(at + i * width * rows + r, &first, sizeof first);
                    if (widened) memcpy(at + (i * width + 1) * rows + r, &second, sizeof second);
                }
            }
        for (int r = unit < units / 4 * 4 ? quads : 0; r < rows; r++) {
            const uint32_t value = x[r * stride + unit];
            at[r] = widened ? value << 16 : value;
            if (widened) at[rows + r] = value & 0xffff0000u;
        }
    }
}

/* Units of a panel as float32 [units, 2, PANEL]. */
INLINE void widen_weight(float *target, const uint32_t *weight, int64_t units) {
    for (int64_t i = 0; i < units * VECTORS; i++)
        for (int half = 0; half < 2; half++)
            store_f32(target + (i / VECTORS * 2 + half) * PANEL + i % VECTORS * VL,
                      load_weight(weight + i * VL, half, FF_BFLOAT16));
}

/* Whether bfloat16 is widened once for some blocks, and not for each: where a block has so few rows that the instructions
 * take a seventh of the time. */
INLINE int widens_once(int num_blocks, int dtype) { return x_is_widened(dtype) && MAX_ROWS < 8 && num_blocks >= 4; }

/* Some blocks against panels begin .. end, of which parts are widened for all blocks. Not inlined: beside the other loops
 * the compiler has too few registers for the sums. */
static __attribute__((noinline)) void multiply_widened(const layer *l, const block *blocks, int num_blocks, int64_t begin,
                                                       int64_t end) {
    float sums[BAND * MAX_ROWS * PANEL];
    float widened[DEPTH_OF_FEW_BLOCKS * 2 * PANEL] __attribute__((aligned(CACHE_LINE)));
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t unit = 0; unit < l->units; unit += DEPTH_OF_FEW_BLOCKS) {
            const int64_t last = smallest(unit + DEPTH_OF_FEW_BLOCKS, l->units);
            widen_weight(widened, l->packed + (panel * l->units + unit) * PANEL, last - unit);
            for (int i = 0; i < num_blocks; i++)
                multiply_panel(l, &blocks[i], sums + i * MAX_ROWS * PANEL, panel, unit, last, widened, FF_BFLOAT16);
        }
}

/* Some blocks against panels begin .. end. */
INLINE void multiply_blocks(const layer *l, const block *blocks, int num_blocks, int64_t begin, int64_t end, int dtype) {
    if (widens_once(num_blocks, dtype)) {
        multiply_widened(l, blocks, num_blocks, begin, end);
        return;
    }
    float sums[BAND * MAX_ROWS * PANEL];
    int64_t panel = begin;
    if (num_blocks == 1 && blocks[0].rows <= MAX_WIDE_ROWS)
        for (; panel + WIDE <= end; panel += WIDE) multiply_wide(l, &blocks[0], sums, panel, dtype);
    const int64_t depth = num_blocks == 1   ? l->units
                          : num_blocks <= 4 ? DEPTH_OF_FEW_BLOCKS
                                            : DEPTH_OF_MANY_BLOCKS;
    for (; panel < end; panel++)
        for (int64_t unit = 0; unit < l->units; unit += depth)
            for (int i = 0; i < num_blocks; i++)
                multiply_panel(l, &blocks[i], sums + i * MAX_ROWS * PANEL, panel, unit,
                               smallest(unit + depth, l->units), NULL, dtype);
}

#define CHUNKS_PER_THREAD 8
#define SERIAL_WORK 20000 /* with fewer products one thread is faster than two */

INLINE int64_t arranged_units(const layer *l, int dtype) { return x_is_widened(dtype) ? 2 * l->units : l->units; }

/* Panels that a thread takes at once. */
INLINE int64_t chunk_size(const layer *l, int num_threads) {
    const int64_t share = (l->num_panels + (int64_t)num_threads * CHUNKS_PER_THREAD - 1) /
                          (num_threads * CHUNKS_PER_THREAD);
    return (share + WIDE - 1) / WIDE * WIDE;
}

/* Some blocks of rows against all panels, in chunks of panels: first all chunks of the first band. */
typedef struct {
    const layer *l;
    block *blocks;
    int64_t num_blocks, chunk, chunks_of_band;
    int dtype;
} product;

static void arrange_blocks(void *context, int64_t begin, int64_t end, int thread) {
    const product *p = context;
    const layer *l = p->l;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        arrange((uint32_t *)p->blocks[i].x, l->x + p->blocks[i].row * l->x_stride, l->x_stride, p->blocks[i].rows,
                l->units, x_is_widened(p->dtype));
}

static void multiply_chunks(void *context, int64_t begin, int64_t end, int thread) {
    const product *p = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i / p->chunks_of_band * BAND, panel = i % p->chunks_of_band * p->chunk;
        WITH_CONSTANT_DTYPE(p->dtype, multiply_blocks, p->l, p->blocks + first, (int)smallest(BAND, p->num_blocks - first),
                            panel, smallest(panel + p->chunk, p->l->num_panels))
    }
}

/* Rows first .. last of x, at most SPAN blocks. */
static void multiply_span(const layer *l, int64_t first, int64_t last, uint32_t *arranged, int num_threads, int dtype) {
    const int64_t rows = last - first, num_blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    block blocks[SPAN];
    for (int64_t i = 0; i < num_blocks; i++) {
        /* Blocks of even size, so that none has so few rows that reading a panel costs more than computing with it. */
        const int64_t begin = rows * i / num_blocks, end = rows * (i + 1) / num_blocks;
        const uint32_t *x = arranged ? arranged + begin * arranged_units(l, dtype) : l->x + first * l->x_stride;
        blocks[i] = (block){.x = x, .row = first + begin, .rows = (int)(end - begin)};
    }
    product p = {l, blocks, num_blocks, chunk_size(l, num_threads), 0, dtype};
    p.chunks_of_band = (l->num_panels + p.chunk - 1) / p.chunk;
    if (arranged) ff_run(arrange_blocks, &p, num_blocks, 1, num_threads);
    ff_run(multiply_chunks, &p, (num_blocks + BAND - 1) / BAND * p.chunks_of_band, 1, num_threads);
}

#if HAVE_TILES
#include "linear_tiles.h"
#endif

static int multiply(const layer *l, int num_threads, int dtype) {
#if HAVE_TILES
    if (dtype == FF_BFLOAT16) return multiply_on_tiles(l, num_threads);
#endif
    const int64_t span = smallest(l->num_rows, SPAN * MAX_ROWS);
    const int threads = l->num_outputs * l->units * l->num_rows < SERIAL_WORK ? 1 : num_threads;
    uint32_t *arranged = NULL;
    if (l->num_rows > 1 || x_is_widened(dtype)) { /* one row needs no rearranging */
        arranged = malloc((size_t)(span * arranged_units(l, dtype)) * sizeof(uint32_t));
        if (!arranged) return FF_NO_MEMORY;
    }
    for (int64_t first = 0; first < l->num_rows; first += span)
        multiply_span(l, first, smallest(first + span, l->num_rows), arranged, threads, dtype);
    free(arranged);
    return FF_OK;
}

/* y [num_rows, num_outputs], contiguous, = x W^T + bias; rows of x lie x_stride units apart. y is float32 if that is set,
 * otherwise of dtype. */
int EXPORT(linear_to)(char *y, int y_is_float32, const uint32_t *x, int64_t x_stride, const uint32_t *packed,
                      const char *bias, int64_t num_rows, int64_t num_outputs, int64_t units, int dtype,
                      int num_threads) {
    const layer l = {.y = y, .x = x, .packed = packed, .bias = bias, .x_stride = x_stride, .num_rows = num_rows,
                     .num_outputs = num_outputs, .units = units, .num_panels = (num_outputs + PANEL - 1) / PANEL,
                     .y_is_float32 = y_is_float32};
    return l.num_panels ? multiply(&l, num_threads, dtype) : FF_OK;
}

/* Between a packed weight and one with rows of units, stride units apart. */
typedef struct {
    uint32_t *packed, *rows;
    const int64_t *index; /* the outputs of the rows; NULL: all, in order */
    int64_t stride, num_outputs, units;
} packing;

static void unpack_rows(void *context, int64_t begin, int64_t end, int thread) {
    const packing *p = context;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        const int64_t output = p->index ? p->index[row] : row;
        const uint32_t *source = p->packed + output / PANEL * p->units * PANEL + output % PANEL;
        for (int64_t unit = 0; unit < p->units; unit++) p->rows[row * p->stride + unit] = source[unit * PANEL];
    }
}

/* Rows of the weight, unpacked: target [num_rows, units], of the outputs in index. A lookup of embeddings. */
int EXPORT(linear_rows)(uint32_t *target, const uint32_t *packed, const int64_t *index, int64_t num_rows,
                        int64_t num_outputs, int64_t units, int num_threads) {
    for (int64_t row = 0; row < num_rows; row++)
        if (index[row] < 0 || index[row] >= num_outputs) return FF_BAD_METADATA;
    const int threads = num_rows > 32 ? num_threads : 1;
    packing p = {(uint32_t *)packed, target, index, units, num_outputs, units};
    ff_run(unpack_rows, &p, num_rows, ff_grain(num_rows, threads), threads);
    return FF_OK;
}

/* --- packing --------------------------------------------------------------------------------------------------- */

/* Outputs of a panel. */
int EXPORT(panel_width)(void) { return PANEL; }

static void pack_groups(void *context, int64_t begin, int64_t end, int thread) {
    const packing *p = context;
    const uint32_t *weight = p->rows;
    const int64_t stride = p->stride, num_outputs = p->num_outputs, units = p->units;
    (void)thread;
    for (int64_t group = begin; group < end; group++) { /* of VL outputs */
        const int64_t first = group * VL;
        uint32_t *target = p->packed + group / VECTORS * units * PANEL + group % VECTORS * VL;
        int64_t unit = 0;
        if (first + VL <= num_outputs) {
            const char *rows[VL];
            for (int lane = 0; lane < VL; lane++) rows[lane] = (const char *)(weight + (first + lane) * stride);
            for (; unit + 4 <= units; unit += 4) {
                vu part[4];
                transpose_4(rows, unit * 4, part);
                for (int i = 0; i < 4; i++) memcpy(target + (unit + i) * PANEL, &part[i], sizeof part[i]);
            }
        }
        for (; unit < units; unit++)
            for (int lane = 0; lane < VL; lane++)
                target[unit * PANEL + lane] = first + lane < num_outputs ? weight[(first + lane) * stride + unit] : 0;
    }
}

/* weight [num_outputs, units], rows stride units apart, into packed [panels, units, PANEL]. */
void EXPORT(pack_linear)(uint32_t *packed, const uint32_t *weight, int64_t stride, int64_t num_outputs, int64_t units,
                         int num_threads) {
    const int64_t num_groups = (num_outputs + PANEL - 1) / PANEL * VECTORS;
    packing p = {packed, (uint32_t *)weight, NULL, stride, num_outputs, units};
    ff_run(pack_groups, &p, num_groups, ff_grain(num_groups, num_threads), num_threads);
}

/* The inverse of pack_linear: packed to weight [num_outputs, units], contiguous. */
void EXPORT(unpack_linear)(uint32_t *weight, const uint32_t *packed, int64_t num_outputs, int64_t units,
                           int num_threads) {
    packing p = {(uint32_t *)packed, weight, NULL, units, num_outputs, units};
    ff_run(unpack_rows, &p, num_outputs, ff_grain(num_outputs, num_threads), num_threads);
}
