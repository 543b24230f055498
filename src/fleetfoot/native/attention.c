/* Causal attention over the paged KV cache: prefills, chunks of prefills and decodes in one call.
 *
 * The query rows of one request and one KV head are its (token, query head of the group) pairs in order of token; ROWS of
 * them share each key and value that is read. Such rows, with a range of tiles of positions, are a work item. Threads
 * process items in order of decreasing cost. A request with few rows and many tiles is split into several items, and
 * their tiles are merged afterwards in the order in which one item merges them.
 */
#include <stdlib.h>

#include "attention_tile.h"
#include "threads.h"
#include "variant.h"

typedef struct {
    char *output;            /* [num_tokens, num_heads, head_dim], contiguous */
    const char *query;       /* [num_tokens, num_heads, head_dim], tokens query_stride elements apart */
    const char *kv;          /* [num_blocks, 2, num_kv_heads, block_size, head_dim] with the strides below, in elements */
    int64_t query_stride, block_stride, side_stride, head_stride, token_stride;
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    int64_t table_stride, table_width, num_blocks, num_tokens;
    int num_requests, num_heads, num_kv_heads, block_size, head_dim, window, dtype;
    float scale;  /* times log2(e): the softmax works in base 2 */
    float cap_factor; /* scores are tanh(product * cap_factor) * scale; 0: product * scale */
    const void *values; /* of a cache in FP8: [2, 256], what each byte of K and of V stands for, in dtype; NULL: another */
    int *invalid; /* set if a block table has an id outside of the cache */
} problem;

typedef struct {
    int request, kv_head, row_begin, row_end, tile_begin, tile_end;
    int64_t partial; /* offset of the item's first tile in the partial results, in floats; -1: written to the output */
    float cost;
} item;

typedef struct {
    item *items;
    int64_t num_items, capacity;
    item *splits; /* rows split into several items: their tiles are in the partial results from `partial` on */
    int64_t num_splits, split_capacity;
    int64_t partial_size; /* floats */
    int max_rows;
} schedule;

INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE int larger(int a, int b) { return a > b ? a : b; }

/* A tile's maximum, sum and values of one row. */
INLINE int64_t partial_row(const problem *p) { return p->head_dim + 2; }

/* --- planning -------------------------------------------------------------------------------------------------- */

/* Reading a key and a value costs about as much as multiplying them with this many rows. */
#define READ_COST 8.0f
/* With less work (in multiplications and additions, about 10 microseconds) one thread is faster than two. */
#define SERIAL_WORK 3.0e5f
#define ITEMS_PER_THREAD 4

static item make_item(const problem *p, int request, int row_begin, int row_end) {
    const int group = p->num_heads / p->num_kv_heads;
    const int query_len = p->query_start_loc[request + 1] - p->query_start_loc[request];
    const int context = p->seq_lens[request] - query_len;
    const int first = context + row_begin / group, last = context + (row_end - 1) / group;
    const int lowest = larger(0, first - p->window + 1);
    item made = {.request = request, .row_begin = row_begin, .row_end = row_end, .partial = -1};
    made.tile_begin = lowest / TILE;
    made.tile_end = last / TILE + 1;
    made.cost = (float)(last + 1 - lowest) * (READ_COST + (float)(row_end - row_begin));
    return made;
}

INLINE int num_rows(const problem *p, int request) {
    return (p->query_start_loc[request + 1] - p->query_start_loc[request]) * (p->num_heads / p->num_kv_heads);
}

static int append(item **list, int64_t *count, int64_t *capacity, item added) {
    if (*count == *capacity) {
        const int64_t grown_capacity = *capacity ? 2 * *capacity : 64;
        item *grown = realloc(*list, (size_t)grown_capacity * sizeof(item));
        if (!grown) return FF_NO_MEMORY;
        *list = grown;
        *capacity = grown_capacity;
    }
    (*list)[(*count)++] = added;
    return FF_OK;
}

/* Adds one item, or several with a cost of about max_cost each. */
static int add_item(const problem *p, schedule *s, item whole, float max_cost) {
    const int tiles = whole.tile_end - whole.tile_begin;
    const int num_splits = smaller(tiles, whole.cost > max_cost ? (int)(whole.cost / max_cost) + 1 : 1);
    if (num_splits <= 1) return append(&s->items, &s->num_items, &s->capacity, whole);
    const int64_t tile_size = (whole.row_end - whole.row_begin) * partial_row(p);
    whole.partial = s->partial_size;
    s->partial_size += tiles * tile_size;
    int failed = append(&s->splits, &s->num_splits, &s->split_capacity, whole);
    for (int i = 0; i < num_splits && !failed; i++) {
        item split = whole;
        split.tile_begin = whole.tile_begin + (int)((int64_t)tiles * i / num_splits);
        split.tile_end = whole.tile_begin + (int)((int64_t)tiles * (i + 1) / num_splits);
        split.partial = whole.partial + (split.tile_begin - whole.tile_begin) * tile_size;
        split.cost = whole.cost / (float)num_splits;
        failed = append(&s->items, &s->num_items, &s->capacity, split);
    }
    return failed;
}

static int by_decreasing_cost(const void *a, const void *b) {
    const float x = ((const item *)a)->cost, y = ((const item *)b)->cost;
    return (x < y) - (x > y);
}

/* Adds the items with lightest <= cost < heaviest. */
static int add_items(const problem *p, schedule *s, float lightest, float heaviest, float max_cost) {
    for (int request = 0; request < p->num_requests; request++) {
        const int rows = num_rows(p, request);
        for (int row = 0; row < rows; row += ROWS) {
            item made = make_item(p, request, row, smaller(row + ROWS, rows));
            if (made.cost < lightest || made.cost >= heaviest) continue;
            for (made.kv_head = 0; made.kv_head < p->num_kv_heads; made.kv_head++)
                if (add_item(p, s, made, max_cost)) return FF_NO_MEMORY;
        }
    }
    return FF_OK;
}

INLINE int is_sound(const problem *p, int request) {
    const int32_t begin = p->query_start_loc[request], end = p->query_start_loc[request + 1];
    const int32_t seq_len = p->seq_lens[request];
    const int padding = seq_len == 0;
    return begin >= 0 && begin <= end && end <= p->num_tokens && (padding || seq_len >= end - begin) &&
           seq_len <= p->table_width * p->block_size;
}

/* Fills the schedule; lowers *num_threads to 1 if there is too little work for more. */
static int plan(const problem *p, schedule *s, int *num_threads) {
    float total = 0.0f;
    for (int request = 0; request < p->num_requests; request++) {
        if (!is_sound(p, request)) return FF_BAD_METADATA;
        const int rows = num_rows(p, request);
        s->max_rows = larger(s->max_rows, smaller(rows, ROWS));
        for (int row = 0; row < rows; row += ROWS)
            total += make_item(p, request, row, smaller(row + ROWS, rows)).cost * (float)p->num_kv_heads;
    }
    if (total * (float)p->head_dim < SERIAL_WORK) *num_threads = 1;
    if (*num_threads == 1) return add_items(p, s, -INFINITY, INFINITY, INFINITY);
    /* The few heavy items run first, in order of cost; the light ones balance the load of the threads. */
    const float heavy = total / (float)(*num_threads * ITEMS_PER_THREAD);
    if (add_items(p, s, heavy, INFINITY, heavy)) return FF_NO_MEMORY;
    if (s->num_items) qsort(s->items, (size_t)s->num_items, sizeof(item), by_decreasing_cost);
    return add_items(p, s, -INFINITY, heavy, INFINITY);
}

/* --- one item -------------------------------------------------------------------------------------------------- */

/* Copies the item's query rows. */
INLINE void copy_query(const problem *p, const item *it, workspace *ws, int dtype) {
    const int group = p->num_heads / p->num_kv_heads;
    const int64_t units = units_of(p->head_dim, dtype), size = element_size(dtype);
    for (int row = it->row_begin; row < it->row_end; row++) {
        const int64_t token = p->query_start_loc[it->request] + row / group;
        const int64_t head = (int64_t)it->kv_head * group + row % group;
        const char *source = p->query + (token * p->query_stride + head * p->head_dim) * size;
        float *target = ws->query + (row - it->row_begin) * units;
        if (dtype == FF_FLOAT32 || uses_pairs(dtype))
            memcpy(target, source, (size_t)(p->head_dim * size));
        else
            for (int64_t d = 0; d < p->head_dim; d += VL) store_f32(target + d, load(source, d, dtype));
    }
}

INLINE void widen(char *target, const char *source, const char *values, int64_t count, int dtype) {
    const uint8_t *codes = (const uint8_t *)source;
    if (dtype == FF_BFLOAT16)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)target)[i] = ((const uint16_t *)values)[codes[i]];
    else
        for (int64_t i = 0; i < count; i++) ((uint32_t *)target)[i] = ((const uint32_t *)values)[codes[i]];
}

/* The range of a tile's positions that each row attends to, and the addresses of their keys. */
INLINE void place_tile(const problem *p, const item *it, int first, workspace *ws, int dtype) {
    const int group = p->num_heads / p->num_kv_heads, rows = it->row_end - it->row_begin;
    const int query_len = p->query_start_loc[it->request + 1] - p->query_start_loc[it->request];
    const int context = p->seq_lens[it->request] - query_len;
    for (int r = 0; r < rows; r++) {
        const int position = context + (it->row_begin + r) / group - first;
        ws->low[r] = smaller(TILE, larger(0, position - p->window + 1));
        ws->high[r] = smaller(TILE, larger(0, position + 1));
    }
    const int low = ws->low[0], high = ws->high[rows - 1];
    const int32_t *table = p->block_tables + it->request * p->table_stride;
    const int64_t size = p->values ? 1 : element_size(dtype), row_bytes = p->head_dim * element_size(dtype);
    int block = (first + low) / p->block_size, offset = (first + low) % p->block_size;
    for (int position = low; position < high; block++, offset = 0) {
        int64_t id = table[block];
        if (id < 0 || id >= p->num_blocks) {
            __atomic_store_n(p->invalid, 1, __ATOMIC_RELAXED);
            id = 0;
        }
        const char *key = p->kv + (id * p->block_stride + it->kv_head * p->head_stride) * size;
        for (; offset < p->block_size && position < high; offset++, position++)
            ws->key_rows[position] = key + offset * p->token_stride * size;
    }
    for (int position = low; p->values && position < high; position++) {
        const char *key = ws->key_rows[position], *values = p->values;
        char *plain = ws->plain + position * 2 * row_bytes;
        widen(plain, key, values, p->head_dim, dtype);
        widen(plain + row_bytes, key + p->side_stride, values + 256 * element_size(dtype), p->head_dim, dtype);
        ws->key_rows[position] = plain;
    }
    /* The chunks at both ends are read whole; their positions outside of the range are masked. */
    for (int position = round_down(low, CHUNK); position < low; position++) ws->key_rows[position] = ws->key_rows[low];
    for (int position = high; position < round_up(high, CHUNK); position++)
        ws->key_rows[position] = ws->key_rows[high - 1];
}

INLINE void write_row(const problem *p, const item *it, int row, const float *output, float sum, int dtype) {
    const int group = p->num_heads / p->num_kv_heads;
    const int64_t token = p->query_start_loc[it->request] + row / group;
    const int64_t head = (int64_t)it->kv_head * group + row % group;
    const vf factor = splat(sum == 0.0f ? 0.0f : 1.0f / sum); /* 0: a padding request has no positions */
    for (int64_t d = 0; d < p->head_dim; d += VL)
        store(p->output, (token * p->num_heads + head) * p->head_dim + d, load_f32(output + d) * factor, dtype);
}

INLINE void run_item(const problem *p, const item *it, workspace *ws, float *partials, int dtype) {
    const int rows = it->row_end - it->row_begin;
    const int64_t head_dim = p->head_dim;
    copy_query(p, it, ws, dtype);
    memset(ws->output, 0, (size_t)(rows * head_dim) * sizeof(float));
    for (int r = 0; r < rows; r++) ws->max[r] = -INFINITY, ws->sum[r] = 0.0f;
    float *partial = it->partial < 0 ? NULL : partials + it->partial;
    for (int tile = it->tile_begin; tile < it->tile_end; tile++) {
        place_tile(p, it, tile * TILE, ws, dtype);
        const int64_t side = p->values ? head_dim : p->side_stride;
        attend_tile(ws, rows, head_dim, side * element_size(dtype), p->scale, p->cap_factor, dtype);
        for (int r = 0; r < rows; r++) {
            const float *values = ws->tile + r * head_dim;
            if (it->partial < 0) {
                merge_row(ws->output + r * head_dim, &ws->max[r], &ws->sum[r], values, ws->tile_max[r],
                          ws->tile_sum[r], head_dim);
                continue;
            }
            partial[0] = ws->tile_max[r];
            partial[1] = ws->tile_sum[r];
            memcpy(partial + 2, values, (size_t)head_dim * sizeof(float));
            partial += partial_row(p);
        }
    }
    if (it->partial < 0)
        for (int r = 0; r < rows; r++)
            write_row(p, it, it->row_begin + r, ws->output + r * head_dim, ws->sum[r], dtype);
}

/* Merges the tiles of rows that were split. */
static void merge_split(const problem *p, const item *whole, workspace *ws, const float *partials) {
    const int rows = whole->row_end - whole->row_begin, tiles = whole->tile_end - whole->tile_begin;
    for (int r = 0; r < rows; r++) {
        float max = -INFINITY, sum = 0.0f;
        memset(ws->output, 0, (size_t)p->head_dim * sizeof(float));
        for (int tile = 0; tile < tiles; tile++) {
            const float *partial = partials + whole->partial + ((int64_t)tile * rows + r) * partial_row(p);
            merge_row(ws->output, &max, &sum, partial + 2, partial[0], partial[1], p->head_dim);
        }
        WITH_CONSTANT_DTYPE(p->dtype, write_row, p, whole, whole->row_begin + r, ws->output, sum)
    }
}

/* --- all of them ----------------------------------------------------------------------------------------------- */

/* One thread's workspace in one allocation; NULL if there is no memory. */
static workspace *make_workspace(const problem *p, int rows) {
    const int64_t units = units_of(p->head_dim, p->dtype), head_dim = p->head_dim;
    const int64_t header = ((int64_t)sizeof(workspace) + 63) / 64 * 16; /* floats */
    const int64_t query = ((int64_t)rows * units + 15) / 16 * 16;
    const int64_t plain = p->values ? TILE * 2 * head_dim : 0;
    const int64_t size = header + query + units * STRIP + (int64_t)rows * (TILE + 2 * head_dim) + plain;
    float *memory = aligned_alloc(64, (size_t)(size + 15) / 16 * 64);
    if (!memory) return NULL;
    workspace *ws = (workspace *)memory;
    ws->keys = memory + header;
    ws->scores = ws->keys + units * STRIP;
    ws->tile = ws->scores + (int64_t)rows * TILE;
    ws->output = ws->tile + (int64_t)rows * head_dim;
    ws->query = ws->output + (int64_t)rows * head_dim;
    ws->plain = (char *)(ws->query + query);
    return ws;
}

typedef struct {
    const problem *p;
    const schedule *s;
    float *partials;
    workspace **workspaces; /* of each thread; NULL until its first item, or without memory */
    int failed;
} running;

static workspace *workspace_of(running *r, int thread) {
    if (!r->workspaces[thread] && !(r->workspaces[thread] = make_workspace(r->p, r->s->max_rows)))
        __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
    return r->workspaces[thread];
}

static void run_items(void *context, int64_t begin, int64_t end, int thread) {
    running *r = context;
    workspace *ws = workspace_of(r, thread);
    for (int64_t i = begin; ws && i < end; i++)
        WITH_CONSTANT_DTYPE(r->p->dtype, run_item, r->p, r->s->items + i, ws, r->partials)
}

static void merge_splits(void *context, int64_t begin, int64_t end, int thread) {
    running *r = context;
    workspace *ws = workspace_of(r, thread);
    for (int64_t i = begin; ws && i < end; i++) merge_split(r->p, r->s->splits + i, ws, r->partials);
}

static int run(const problem *p, const schedule *s, float *partials, int num_threads) {
    workspace **workspaces = calloc((size_t)num_threads, sizeof *workspaces);
    if (!workspaces) return FF_NO_MEMORY;
    running r = {p, s, partials, workspaces, 0};
    ff_run(run_items, &r, s->num_items, 1, num_threads);
    ff_run(merge_splits, &r, s->num_splits, 1, num_threads);
    for (int thread = 0; thread < num_threads; thread++) free(workspaces[thread]);
    free(workspaces);
    return r.failed ? FF_NO_MEMORY : FF_OK;
}

int EXPORT(paged_attention)(void *output, const void *query, int64_t query_stride, int64_t num_tokens, const void *kv,
                            int64_t num_blocks, int64_t block_stride, int64_t side_stride, int64_t head_stride,
                            int64_t token_stride, const int32_t *query_start_loc, const int32_t *seq_lens,
                            const int32_t *block_tables, int64_t table_stride, int64_t table_width, int num_requests,
                            int num_heads, int num_kv_heads, int block_size, int head_dim, float scale,
                            float soft_cap, int window, int dtype, int num_threads, const void *fp8_values) {
    int invalid = 0;
    const problem p = {
        .output = output, .query = query, .kv = kv, .query_stride = query_stride, .block_stride = block_stride,
        .side_stride = side_stride, .head_stride = head_stride, .token_stride = token_stride,
        .query_start_loc = query_start_loc, .seq_lens = seq_lens, .block_tables = block_tables,
        .table_stride = table_stride, .table_width = table_width, .num_blocks = num_blocks, .num_tokens = num_tokens,
        .num_requests = num_requests, .num_heads = num_heads, .num_kv_heads = num_kv_heads, .block_size = block_size,
        .head_dim = head_dim, .window = window, .dtype = dtype, .values = fp8_values,
        .invalid = &invalid,
        .scale = (soft_cap > 0.0f ? soft_cap : scale) * LOG2_E,
        .cap_factor = soft_cap > 0.0f ? scale / soft_cap : 0.0f,
    };
    schedule s = {0};
    int status = plan(&p, &s, &num_threads);
    float *partials = NULL;
    if (!status && s.partial_size) {
        partials = malloc((size_t)s.partial_size * sizeof(float));
        if (!partials) status = FF_NO_MEMORY;
    }
    if (!status && s.num_items) status = run(&p, &s, partials, num_threads);
    if (!status && invalid) status = FF_BAD_METADATA;
    const int64_t end = query_start_loc[num_requests];
    if (!status && end < num_tokens) { /* tokens that belong to no request */
        const int64_t token = (int64_t)num_heads * head_dim * element_size(dtype);
        memset(p.output + end * token, 0, (size_t)((num_tokens - end) * token));
    }
    free(partials);
    free(s.items);
    free(s.splits);
    return status;
}
