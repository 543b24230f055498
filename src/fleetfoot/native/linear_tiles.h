/* Linear layers of bfloat16 on tiles (AMX). Included by linear.c; its packed weight is read as it is: 16 units of a
 * vector of outputs are a tile with rows PANEL units apart.
 *
 * A group of 16 units is one product of tiles, and groups are added from first to last. Few rows, and the units after
 * the last whole group, are computed by vectors in the same order, so the bits of a row do not depend on the batch.
 */
#include "tiles.h"

#define GROUP 16    /* units of a tile */
#define TILE_ROWS 16
#define FEW_ROWS 2  /* tiles are faster with more */
#define BAND_BYTES (1 << 20)  /* of x, and of the panels that it passes over: both fit in a second-level cache */
#define CHUNK_BYTES (1 << 19)
#define FAR_AHEAD (8192 / 4)  /* of prefetches of the weight into the second-level cache, in units */
#define NEAR_AHEAD (4096 / 4) /* and into the first */

/* Tiles 0 .. 3 are sums [row tile, vector], or vectors of two panels for one row tile. */
#define X0 4 /* tiles of x; macros, because they become parts of the names of registers */
#define X1 5
#define W0 6
#define W1 7

/* Adds a group of at most 16 units. x: [units, 2, rows], widened. */
INLINE void add_group(const layer *l, const float *x, const uint32_t *weight, int units, vf sum[MAX_ROWS][WIDE * VECTORS],
                      const int panels, const int rows) {
    vf halves[2][FEW_ROWS][WIDE * VECTORS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) halves[0][r][v] = halves[1][r][v] = splat(0.0f);
    for (int unit = 0; unit < units; unit++) {
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) {
            const uint32_t *at = weight + (v / VECTORS * l->units + unit) * PANEL + v % VECTORS * VL;
            const vu pair = (vu)load_f32((const float *)at);
            __builtin_prefetch(at + WIDE_AHEAD * PANEL);
            UNROLL
            for (int r = 0; r < rows; r++) {
                halves[0][r][v] = multiply_add(splat(x[2 * unit * rows + r]), (vf)(pair << 16), halves[0][r][v]);
                halves[1][r][v] = multiply_add(splat(x[(2 * unit + 1) * rows + r]), (vf)(pair & 0xffff0000u),
                                               halves[1][r][v]);
                IN_ORDER(halves[1][r][v]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) sum[r][v] += halves[0][r][v] + halves[1][r][v];
}

INLINE void multiply_few(const layer *l, const block *b, int64_t panel, const int panels, const int rows) {
    vf sum[MAX_ROWS][WIDE * VECTORS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) sum[r][v] = splat(0.0f);
    const float *x = (const float *)b->x;
    const uint32_t *weight = l->packed + panel * l->units * PANEL;
    for (int64_t unit = 0; unit < l->units; unit += GROUP)
        add_group(l, x + 2 * unit * rows, weight + unit * PANEL, (int)smallest(GROUP, l->units - unit), sum, panels, rows);
    write_sums(l, b, panel * PANEL, sum, FF_BFLOAT16, panels, rows);
}

/* At most FEW_ROWS rows against panels begin .. end: several panels at a time, as far as there are registers. */
static void multiply_few_rows(const layer *l, const block *b, int64_t begin, int64_t end) {
    int64_t panel = begin;
    if (b->rows == 1) {
        for (; panel + WIDE <= end; panel += WIDE) multiply_few(l, b, panel, WIDE, 1);
        for (; panel < end; panel++) multiply_few(l, b, panel, 1, 1);
    }
    for (; panel + 2 <= end; panel += 2) multiply_few(l, b, panel, 2, 2);
    for (; panel < end; panel++) multiply_few(l, b, panel, 1, 2);
}

/* Shapes for blocks of `rows` rows. */
static void configure(int rows) {
    tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        const int second = rows > TILE_ROWS && (t == 2 || t == 3 || t == X1);
        shapes.rows[t] = (uint8_t)(t >= W0 ? GROUP : second ? rows - TILE_ROWS : smallest(rows, TILE_ROWS));
        shapes.row_bytes[t] = t == X0 || t == X1 ? 4 * GROUP : 4 * VL;
    }
    CONFIGURE_TILES(&shapes);
}

/* Prefetches a group of a panel. */
INLINE void prefetch_group(const uint32_t *weight) {
    for (int line = 0; line < GROUP * VECTORS; line++) {
        __builtin_prefetch(weight + FAR_AHEAD + line * VL, 0, 2);
        __builtin_prefetch(weight + NEAR_AHEAD + line * VL, 0, 3);
    }
}

/* `rows` rows from `row` on against one panel (two row tiles) or two panels (one row tile), configured for them.
 * reads_first: the panel is not in a cache yet. */
INLINE void multiply_tile_block(const layer *l, int64_t row, int rows, int64_t panel, int reads_first,
                                const int row_tiles, const int panels) {
    _Alignas(64) float sums[2 * TILE_ROWS * PANEL];
    const int64_t whole = l->units / GROUP * GROUP, stride = l->x_stride * 4, width = panels * PANEL;
    const uint32_t *x = l->x + row * l->x_stride, *weight = l->packed + panel * l->units * PANEL;
    ZERO_TILE(0);
    ZERO_TILE(1);
    ZERO_TILE(2);
    ZERO_TILE(3);
    for (int64_t unit = 0; unit < whole; unit += GROUP, x += GROUP, weight += GROUP * PANEL) {
        const uint32_t *second = weight + l->units * PANEL; /* the panel after */
        LOAD_TILE(X0, x, stride);
        LOAD_TILE(W0, weight, 4 * PANEL);
        MULTIPLY_TILES(0, X0, W0);
        LOAD_TILE(W1, weight + VL, 4 * PANEL);
        MULTIPLY_TILES(1, X0, W1);
        if (row_tiles == 2) {
            LOAD_TILE(X1, x + TILE_ROWS * l->x_stride, stride);
            MULTIPLY_TILES(2, X1, W0);
            MULTIPLY_TILES(3, X1, W1);
        }
        if (panels == 2) {
            LOAD_TILE(W0, second, 4 * PANEL);
            MULTIPLY_TILES(2, X0, W0);
            LOAD_TILE(W1, second + VL, 4 * PANEL);
            MULTIPLY_TILES(3, X0, W1);
        }
        if (reads_first) prefetch_group(weight);
        if (reads_first && panels == 2) prefetch_group(second);
    }
    STORE_TILE(0, sums, 4 * width);
    STORE_TILE(1, sums + VL, 4 * width);
    if (row_tiles == 2 || panels == 2) {
        STORE_TILE(2, sums + (row_tiles == 2 ? TILE_ROWS * width : 2 * VL), 4 * width);
        STORE_TILE(3, sums + (row_tiles == 2 ? TILE_ROWS * width : 2 * VL) + VL, 4 * width);
    }
    for (int r = 0; r < rows; r++, x += l->x_stride) {
        vf sum[MAX_ROWS][WIDE * VECTORS];
        UNROLL
        for (int v = 0; v < panels * VECTORS; v++) sum[0][v] = load_f32(sums + r * width + v * VL);
        if (whole < l->units) {
            float widened[2 * GROUP];
            for (int i = 0; i < 2 * (l->units - whole); i++) widened[i] = load_one(x, i, FF_BFLOAT16);
            add_group(l, widened, weight, (int)(l->units - whole), sum, panels, 1);
        }
        write_sums(l, &(block){.row = row + r}, panel * PANEL, sum, FF_BFLOAT16, panels, 1);
    }
}

/* Rows first .. last against panels begin .. end: blocks of two row tiles, and then the rest, with other shapes. */
static void multiply_tile_rows(const layer *l, int64_t first, int64_t last, int64_t begin, int64_t end) {
    const int64_t whole = first + (last - first) / (2 * TILE_ROWS) * (2 * TILE_ROWS);
    if (whole > first) configure(2 * TILE_ROWS);
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t row = first; row < whole; row += 2 * TILE_ROWS)
            multiply_tile_block(l, row, 2 * TILE_ROWS, panel, row == first, 2, 1);
    const int rest = (int)(last - whole), is_all = whole == first;
    int64_t panel = begin;
    if (rest) configure(rest);
    if (rest && rest <= TILE_ROWS) {
        for (; panel + 2 <= end; panel += 2) multiply_tile_block(l, whole, rest, panel, is_all, 1, 2);
        if (panel < end) multiply_tile_block(l, whole, rest, panel, is_all, 1, 1);
    } else if (rest)
        for (; panel < end; panel++) multiply_tile_block(l, whole, rest, panel, is_all, 2, 1);
    RELEASE_TILES();
}

/* Bands of rows against chunks of panels: first all chunks of the first band. */
typedef struct {
    const layer *l;
    const block *few; /* NULL: too many rows for vectors */
    int64_t chunk, band, chunks_of_band;
} tile_product;

static void multiply_tile_chunks(void *context, int64_t begin, int64_t end, int thread) {
    const tile_product *p = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i / p->chunks_of_band * p->band, panel = i % p->chunks_of_band * p->chunk;
        const int64_t last_panel = smallest(panel + p->chunk, p->l->num_panels);
        if (p->few)
            multiply_few_rows(p->l, p->few, panel, last_panel);
        else
            multiply_tile_rows(p->l, first, smallest(first + p->band, p->l->num_rows), panel, last_panel);
    }
}

static int multiply_on_tiles(const layer *l, int num_threads) {
    const int threads = l->num_outputs * l->units * l->num_rows < SERIAL_WORK ? 1 : num_threads;
    const int is_few = l->num_rows <= FEW_ROWS;
    const int64_t fitting = is_few ? l->num_panels : CHUNK_BYTES / (4 * PANEL * l->units) + 1;
    const int64_t chunk = smallest(fitting, chunk_size(l, threads));
    const int64_t band = (BAND_BYTES / (4 * l->units) / (2 * TILE_ROWS) + 1) * (2 * TILE_ROWS);
    block few = {.rows = (int)l->num_rows};
    if (is_few) {
        uint32_t *arranged = malloc((size_t)(2 * l->units * l->num_rows) * sizeof(uint32_t));
        if (!arranged) return FF_NO_MEMORY;
        arrange(arranged, l->x, l->x_stride, few.rows, l->units, 1);
        few.x = arranged;
    }
    tile_product p = {l, is_few ? &few : NULL, chunk, band, (l->num_panels + chunk - 1) / chunk};
    ff_run(multiply_tile_chunks, &p, (l->num_rows + band - 1) / band * p.chunks_of_band, 1, threads);
    if (is_few) free((void *)few.x);
    return FF_OK;
}
