/* Writes outputs of block_linear for pseudorandom blocks of each type, of many rows and of few. */
#include <stdio.h>
#include <stdlib.h>

#include "blocks.h"
#include "variant.h"

enum { INPUTS = 512, OUTPUTS = 19, ROWS = 21, FEW = 3 };

int EXPORT(block_linear)(char *y, int y_is_float32, const void *x, int64_t x_stride, const block_part *parts,
                         int num_parts, const char *bias, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                         int dtype, int num_threads);

static uint32_t state = 1;

static uint32_t next(void) { return (state = state * 1664525u + 1013904223u) >> 8; }

int main(void) {
    static const int types[] = {BLOCK_Q4_0, BLOCK_Q4_1, BLOCK_Q5_0, BLOCK_Q5_1, BLOCK_Q8_0,
                                BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_MXFP4, BLOCK_INT8};
    static float x[ROWS * INPUTS], y[ROWS * OUTPUTS], scales[OUTPUTS];
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = (float)(int32_t)(next() % 4001 - 2000) / 997.0f;
    for (int i = 0; i < OUTPUTS; i++) scales[i] = 0.01f * (float)(i + 1);
    for (unsigned t = 0; t < sizeof types / sizeof *types; t++) {
        const int64_t type = types[t], size = block_bytes(type);
        const int64_t row_bytes = INPUTS / (is_super(type) ? 256 : 32) * size;
        uint8_t *data = malloc(OUTPUTS * row_bytes + 64);
        for (int64_t i = 0; i < OUTPUTS * row_bytes; i++) data[i] = (uint8_t)next();
        for (int64_t at = 0; at < OUTPUTS * row_bytes; at += size) { /* scales are finite halves, or small powers */
            const int has_two = type == BLOCK_Q4_1 || type == BLOCK_Q5_1 || type == BLOCK_Q4_K || type == BLOCK_Q5_K;
            if (type == BLOCK_MXFP4) data[at] = (uint8_t)(120 + data[at] % 10);
            else if (type == BLOCK_Q6_K) data[at + 209] = data[at + 209] % 8 + 32;
            else if (type != BLOCK_INT8) data[at + 1] = data[at + 1] % 8 + 32;
            if (has_two) data[at + 3] = data[at + 3] % 8 + 32;
        }
        const block_part part = {data, row_bytes, 0, OUTPUTS, type, scales};
        for (int rows = ROWS; rows; rows = rows == ROWS ? FEW : 0) {
            if (FF_JOIN(FF_VARIANT, block_linear)((char *)y, 1, x, INPUTS, &part, 1, NULL, rows, OUTPUTS, INPUTS, FF_FLOAT32, 1))
                return 1;
            fwrite(y, 4, (size_t)(rows * OUTPUTS), stdout);
        }
        free(data);
    }
    return 0;
}
