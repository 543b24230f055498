/* Products of blocks with NEON's dot products of bytes (FEAT_DotProd). Included by blocks.c.
 *
 * Codes minus their offset fit in int8, so four products are summed by one instruction, exactly. Sums in float32 are those
 * of multiply_plain, in its order: the bits are the same.
 */

#define NEON_ROWS 16 /* rows that a group of codes is multiplied with once it is unpacked */

/* 32 inputs of one output: two halves. */
typedef struct {
    int8x16_t codes[2];
    float scales[2];
    float minimum;
} neon_group;

/* 16 bytes of nibbles: the low ones first. */
INLINE void load_nibbles(const uint8_t *p, uint8x16_t out[2]) {
    const uint8x16_t b = vld1q_u8(p);
    out[0] = vandq_u8(b, vdupq_n_u8(15));
    out[1] = vshrq_n_u8(b, 4);
}

/* Adds bit i of `bits` as 16 to byte i. */
INLINE void add_fifth_bits(const uint8_t *p, uint8x16_t out[2]) {
    static const uint8_t place[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    static const uint8_t bit[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    for (int half = 0; half < 2; half++) {
        uint16_t two;
        memcpy(&two, p + 2 * half, sizeof two);
        const uint8x16_t each = vqtbl1q_u8(vreinterpretq_u8_u16(vdupq_n_u16(two)), vld1q_u8(place));
        out[half] = vorrq_u8(out[half], vandq_u8(vtstq_u8(each, vld1q_u8(bit)), vdupq_n_u8(16)));
    }
}

/* Bits `from` and up of 32 bytes, as many as the mask has, to the place `to`. */
INLINE void add_bits(const uint8_t *p, int from, int to, uint8_t mask, uint8x16_t out[2]) {
    const int8x16_t by = vdupq_n_s8((int8_t)(to - from));
    for (int half = 0; half < 2; half++)
        out[half] = vorrq_u8(out[half], vandq_u8(vshlq_u8(vld1q_u8(p + 16 * half), by), vdupq_n_u8(mask)));
}

/* Group `group` of a row; see unpack_group. */
INLINE neon_group unpack_neon(const uint8_t *row, int64_t group, const int type) {
    neon_group g = {.minimum = 0.0f};
    uint8x16_t codes[2] = {vdupq_n_u8(0), vdupq_n_u8(0)};
    if (is_super(type)) {
        const uint8_t *at = row + group / GROUPS_OF_SUPER * block_bytes(type);
        const int j = (int)(group % GROUPS_OF_SUPER);
        if (type == BLOCK_Q6_K) {
            const float d = half_to_float(at + 208);
            add_bits(at + j / 4 * 64 + j % 2 * 32, j % 4 / 2 * 4, 0, 15, codes);
            add_bits(at + 128 + j / 4 * 32, j % 4 * 2, 4, 48, codes);
            for (int half = 0; half < 2; half++) g.scales[half] = d * (float)(int8_t)at[192 + 2 * j + half];
        } else {
            uint8_t scales[16];
            unpack_super_scales(at + 4, scales);
            add_bits(at + (type == BLOCK_Q5_K ? 48 : 16) + j / 2 * 32, j % 2 * 4, 0, 15, codes);
            if (type == BLOCK_Q5_K) add_bits(at + 16, j, 4, 16, codes);
            g.scales[0] = g.scales[1] = half_to_float(at) * (float)scales[j];
            g.minimum = half_to_float(at + 2) * (float)scales[8 + j];
        }
    } else {
        const uint8_t *at = row + group * block_bytes(type);
        if (type == BLOCK_MXFP4) {
            load_nibbles(at + 1, codes);
            const uint8x16_t table = vld1q_u8((const uint8_t *)MXFP4_CODES);
            for (int half = 0; half < 2; half++) codes[half] = vqtbl1q_u8(table, codes[half]);
            g.scales[0] = g.scales[1] = half_of_exponent(at[0]);
        } else if (type == BLOCK_INT8) {
            add_bits(at, 0, 0, 255, codes);
            g.scales[0] = g.scales[1] = 1.0f;
        } else {
            g.scales[0] = g.scales[1] = half_to_float(at);
            at += 2;
            if (type == BLOCK_Q4_1 || type == BLOCK_Q5_1) {
                g.minimum = -half_to_float(at);
                at += 2;
            }
            if (type == BLOCK_Q8_0) add_bits(at, 0, 0, 255, codes);
            else load_nibbles(at + (type == BLOCK_Q5_0 || type == BLOCK_Q5_1 ? 4 : 0), codes);
            if (type == BLOCK_Q5_0 || type == BLOCK_Q5_1) add_fifth_bits(at, codes);
        }
    }
    for (int half = 0; half < 2; half++)
        g.codes[half] = vsubq_s8(vreinterpretq_s8_u8(codes[half]), vdupq_n_s8((int8_t)code_offset(type)));
    return g;
}

/* One output for rows `first` to `last`, at most NEON_ROWS. */
INLINE void multiply_output(const product *p, const block_part *part, int64_t output, int64_t first, int64_t last,
                            const int type) {
    const uint8_t *source = part->data + output * part->row_bytes;
    const int64_t num_groups = p->num_inputs / GROUP;
    float sums[NEON_ROWS] = {0.0f};
    for (int64_t group = 0; group < num_groups; group++) {
        const neon_group g = unpack_neon(source, group, type);
        for (int64_t row = first; row < last; row++) {
            const int64_t place = row * num_groups + group;
            const int8_t *x = p->codes + row * p->num_inputs + group * GROUP;
            float sum = sums[row - first];
            for (int half = 0; half < 2; half++) {
                const int32_t dot = vaddvq_s32(vdotq_s32(vdupq_n_s32(0), g.codes[half], vld1q_s8(x + 16 * half)));
                sum += (g.scales[half] * p->scales[place]) * (float)dot;
            }
            sums[row - first] = sum - g.minimum * p->totals[place];
        }
    }
    for (int64_t row = first; row < last; row++) write_outputs(p, part, row, output, 1, sums + (row - first));
}

/* Outputs of a part of codes, 8 at a time, from group `first` on. */
static void multiply_part_neon(const product *p, const block_part *part, int64_t first, int64_t last) {
#define CASE(type)                                                                                     \
    case type:                                                                                         \
        multiply_output(p, part, output, row, smallest(row + NEON_ROWS, p->num_rows), type);           \
        break;
    for (int64_t output = first * 8; output < smallest(last * 8, part->num_rows); output++)
        for (int64_t row = 0; row < p->num_rows; row += NEON_ROWS) switch (part->type) {
                CASE(BLOCK_Q4_0)
                CASE(BLOCK_Q4_1)
                CASE(BLOCK_Q5_0)
                CASE(BLOCK_Q5_1)
                CASE(BLOCK_Q8_0)
                CASE(BLOCK_Q4_K)
                CASE(BLOCK_Q5_K)
                CASE(BLOCK_Q6_K)
                CASE(BLOCK_MXFP4)
                CASE(BLOCK_INT8)
            }
#undef CASE
}
