/* Products of random blocks, shapes and lengths, whose memory ends where a page begins that cannot be read: usage:
 * program SEED ROUNDS. Prints the bits' checksum. A row alone must have the bits that it has in its batch. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "blocks.h"
#include "variant.h"

int EXPORT(block_linear)(char *y, int y_is_float32, const void *x, int64_t x_stride, const block_part *parts,
                         int num_parts, const char *bias, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                         int dtype, int num_threads);
int EXPORT(block_rows)(char *y, const block_part *parts, int num_parts, const int64_t *index, int64_t num_rows,
                       int64_t num_inputs, int dtype);

enum { PAGE = 4096, MAX_PARTS = 3 };

static uint64_t state;

static uint32_t next(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static int64_t below(int64_t count) { return next() % count; }

typedef struct {
    char *pages, *data;
    size_t size;
} memory;

/* Memory with random bytes, before a page that faults. */
static memory fenced(int64_t bytes) {
    memory m;
    m.size = ((size_t)bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    m.pages = mmap(NULL, m.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m.pages == MAP_FAILED || mprotect(m.pages + m.size - PAGE, PAGE, PROT_NONE)) exit(3);
    m.data = m.pages + m.size - PAGE - bytes;
    for (int64_t i = 0; i < bytes; i++) m.data[i] = (char)next();
    return m;
}

static void drop(memory m) { munmap(m.pages, m.size); }

static int64_t row_bytes_of(int64_t type, int64_t num_inputs) {
    if (type == BLOCK_F32) return 4 * num_inputs;
    if (is_float(type)) return 2 * num_inputs;
    return num_inputs / (is_super(type) ? 256 : 32) * block_bytes(type);
}

static int is_nan(const char *y, int64_t i, int size) {
    uint32_t bits = 0;
    memcpy((char *)&bits + (4 - size), y + i * size, size);
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

static uint32_t one_round(void) {
    static const int types[] = {BLOCK_F32,  BLOCK_F16,  BLOCK_BF16, BLOCK_Q4_0, BLOCK_Q4_1,  BLOCK_Q5_0, BLOCK_Q5_1,
                                BLOCK_Q8_0, BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_MXFP4, BLOCK_INT8};
    const int num_parts = 1 + (int)below(MAX_PARTS), dtype = (int)below(2), y_is_float32 = (int)below(2);
    const int size = dtype == FF_FLOAT32 ? 4 : 2, y_size = y_is_float32 ? 4 : size;
    const int64_t num_inputs = 256 * (1 + below(4)), num_rows = 1 + below(20), stride = num_inputs + below(9);
    block_part parts[MAX_PARTS];
    memory blocks[MAX_PARTS], scales[MAX_PARTS];
    int64_t num_outputs = 0;
    const int is_int8 = below(10) == 0; /* its inputs are quantized in another way: no other type is with it */
    for (int i = 0; i < num_parts; i++) {
        const int64_t type = is_int8 ? BLOCK_INT8 : types[below(sizeof types / sizeof *types - 1)];
        const int64_t count = 1 + below(40), row_bytes = row_bytes_of(type, num_inputs);
        blocks[i] = fenced(count * row_bytes);
        scales[i] = fenced(4 * count);
        parts[i] = (block_part){(uint8_t *)blocks[i].data, row_bytes, num_outputs, count, type,
                                type == BLOCK_INT8 ? (float *)scales[i].data : NULL};
        num_outputs += count;
    }
    memory x = fenced((stride * (num_rows - 1) + num_inputs) * size), y = fenced(num_outputs * num_rows * y_size);
    memory bias = fenced(num_outputs * size), one = fenced(num_outputs * y_size);
    if (below(4))
        for (int64_t i = 0; i < stride * (num_rows - 1) + num_inputs; i++) /* else NaN and infinities among them */
            x.data[i * size + size - 1] = (char)(56 + below(12) + 128 * below(2));
    const char *bias_data = below(2) ? bias.data : NULL;
    if (FF_JOIN(FF_VARIANT, block_linear)(y.data, y_is_float32, x.data, stride, parts, num_parts, bias_data, num_rows,
                                          num_outputs, num_inputs, dtype, 1 + (int)below(3)))
        exit(4);
    uint32_t sum = 0;
    const int64_t row = below(num_rows);
    if (FF_JOIN(FF_VARIANT, block_linear)(one.data, y_is_float32, x.data + row * stride * size, stride, parts, num_parts,
                                          bias_data, 1, num_outputs, num_inputs, dtype, 1))
        exit(4);
    for (int64_t i = 0; i < num_outputs; i++) {
        const int nans = is_nan(y.data, row * num_outputs + i, y_size) + is_nan(one.data, i, y_size);
        if (nans ? nans != 2 : memcmp(y.data + (row * num_outputs + i) * y_size, one.data + i * y_size, y_size)) {
            fprintf(stderr, "output %d of row %d of %d depends on the batch\n", (int)i, (int)row, (int)num_rows);
            exit(5);
        }
        for (int byte = 0; !nans && byte < y_size; byte++) sum = sum * 31 + (uint8_t)one.data[i * y_size + byte];
    }
    memory index = fenced(8 * num_rows), rows = fenced(num_rows * num_inputs * size);
    int is_outside = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t at = below(50) ? below(num_outputs) : below(2) ? -1 - below(9) : num_outputs + below(9);
        memcpy(index.data + 8 * i, &at, 8);
        is_outside |= at < 0 || at >= num_outputs;
    }
    const int status = FF_JOIN(FF_VARIANT, block_rows)(rows.data, parts, num_parts, (const int64_t *)index.data, num_rows,
                                                       num_inputs, dtype);
    if (status != (is_outside ? FF_BAD_METADATA : FF_OK)) exit(6);
    for (int i = 0; i < num_parts; i++) drop(blocks[i]), drop(scales[i]);
    drop(x), drop(y), drop(bias), drop(one), drop(index), drop(rows);
    return sum;
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    state = strtoull(arguments[1], NULL, 10);
    uint32_t sum = 0;
    for (int left = atoi(arguments[2]); left; left--) sum = sum * 31 + one_round();
    printf("%u\n", sum);
    return 0;
}
