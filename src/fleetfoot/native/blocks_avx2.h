/* Products of blocks with vectors of bytes (AVX2, and VNNI where the compiler has it). Included by blocks.c.
 *
 * An unsigned code times an int8 fits in 16 bits, and so does a sum of two, but for the int8 of Q8_0, of which the sign is
 * moved to the other factor, or which are widened.
 */

typedef __m256i bytes;

/* Eight rows of a part. */
typedef struct {
    const uint8_t *first;
    int64_t stride;
} eight_rows;

INLINE const uint8_t *row_at(eight_rows rows, int i) { return rows.first + i * rows.stride; }

/* Not through memory: a load of several short stores waits for them. */
INLINE __m256 load_halves(eight_rows rows, int64_t at) {
    int16_t h[8];
    UNROLL
    for (int i = 0; i < 8; i++) memcpy(h + i, row_at(rows, i) + at, 2);
    return _mm256_cvtph_ps(_mm_setr_epi16(h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]));
}

/* As unpack_super_scales, from the 16 bytes that begin with the 12. */
INLINE __m128i unpack_scales(const uint8_t *source) {
    const __m128i w = _mm_loadu_si128((const __m128i *)source), six = _mm_set1_epi32(0x3f3f3f3f);
    const __m128i two = _mm_and_si128(_mm_srli_epi32(w, 2), _mm_set1_epi32(0x30303030));
    const __m128i last = _mm_srlv_epi32(_mm_shuffle_epi32(w, 0xaa), _mm_setr_epi32(0, 4, 0, 0));
    const __m128i four = _mm_and_si128(last, _mm_set1_epi32(0x0f0f0f0f));
    return _mm_unpacklo_epi32(_mm_and_si128(w, six), _mm_or_si128(four, two));
}

/* 16 bytes of 8 rows, transposed: out[i] has byte i of each. */
INLINE void transpose_bytes(const __m128i r[8], uint8_t out[16][8]) {
    __m128i low[4], high[4];
    for (int i = 0; i < 4; i++) {
        low[i] = _mm_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
        high[i] = _mm_unpackhi_epi8(r[2 * i], r[2 * i + 1]);
    }
    for (int half = 0; half < 2; half++) {
        const __m128i *source = half ? high : low;
        const __m128i a0 = _mm_unpacklo_epi16(source[0], source[1]), a1 = _mm_unpackhi_epi16(source[0], source[1]);
        const __m128i b0 = _mm_unpacklo_epi16(source[2], source[3]), b1 = _mm_unpackhi_epi16(source[2], source[3]);
        __m128i *target = (__m128i *)out[8 * half];
        _mm_storeu_si128(target, _mm_unpacklo_epi32(a0, b0));
        _mm_storeu_si128(target + 1, _mm_unpackhi_epi32(a0, b0));
        _mm_storeu_si128(target + 2, _mm_unpacklo_epi32(a1, b1));
        _mm_storeu_si128(target + 3, _mm_unpackhi_epi32(a1, b1));
    }
}

/* Scales of the next block of 8 outputs. */
typedef struct {
    __m256 d, dmin;
    uint8_t scales[16][8];
} block_scales;

INLINE void load_scales(block_scales *s, eight_rows rows, const int type) {
    if (is_super(type)) {
        __m128i r[8];
        s->d = load_halves(rows, type == BLOCK_Q6_K ? 208 : 0);
        if (type != BLOCK_Q6_K) s->dmin = load_halves(rows, 2);
        for (int i = 0; i < 8; i++) {
            const uint8_t *at = row_at(rows, i);
            r[i] = type == BLOCK_Q6_K ? _mm_loadu_si128((const __m128i *)(at + 192)) : unpack_scales(at + 4);
        }
        transpose_bytes(r, s->scales);
    } else if (type == BLOCK_INT8) {
        s->d = _mm256_set1_ps(1.0f);
    } else if (type == BLOCK_MXFP4) {
        float d[8];
        for (int i = 0; i < 8; i++) d[i] = half_of_exponent(row_at(rows, i)[0]);
        s->d = _mm256_setr_ps(d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
    } else {
        s->d = load_halves(rows, 0);
        if (type == BLOCK_Q4_1 || type == BLOCK_Q5_1) s->dmin = load_halves(rows, 2);
    }
}

INLINE __m256 byte_scales(const uint8_t *source, const int is_signed) {
    const __m128i b = _mm_loadl_epi64((const __m128i *)source);
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
}

/* Scale of a half of group j of the block; both are the same but for Q6_K. */
INLINE __m256 scale_of(const block_scales *s, int j, int half, const int type) {
    if (!is_super(type)) return s->d;
    return _mm256_mul_ps(s->d, byte_scales(s->scales[type == BLOCK_Q6_K ? 2 * j + half : j], type == BLOCK_Q6_K));
}

INLINE int has_minimum(const int type) {
    return type == BLOCK_Q4_K || type == BLOCK_Q5_K || type == BLOCK_Q4_1 || type == BLOCK_Q5_1;
}

INLINE __m256 minimum_of(const block_scales *s, int j, const int type) {
    if (is_super(type)) return _mm256_mul_ps(s->dmin, byte_scales(s->scales[8 + j], 0));
    return _mm256_sub_ps(_mm256_setzero_ps(), s->dmin);
}

INLINE bytes load32(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* 16 bytes of nibbles: the low ones first. */
INLINE bytes load_nibbles(const uint8_t *p) {
    const __m128i b = _mm_loadu_si128((const __m128i *)p);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(b), _mm_srli_epi16(b, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

/* Bit i of p as 16 in byte i. */
INLINE bytes load_fifth_bits(const uint8_t *p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    const __m256i each = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), _mm256_setr_epi64x(
        0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i mask = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(each, mask), mask);
    return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}

/* The codes of group j of a block, 0 .. 63, or int8 of Q8_0. */
INLINE bytes load_codes(const uint8_t *at, int j, const int type) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    switch (type) {
        case BLOCK_INT8: return load32(at);
        case BLOCK_Q8_0: return load32(at + 2);
        case BLOCK_Q4_0: return load_nibbles(at + 2);
        case BLOCK_Q4_1: return load_nibbles(at + 4);
        case BLOCK_Q5_0: return _mm256_or_si256(load_nibbles(at + 6), load_fifth_bits(at + 2));
        case BLOCK_Q5_1: return _mm256_or_si256(load_nibbles(at + 8), load_fifth_bits(at + 4));
        case BLOCK_MXFP4: {
            const __m128i table = _mm_loadu_si128((const __m128i *)MXFP4_CODES);
            return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), load_nibbles(at + 1));
        }
        case BLOCK_Q4_K: {
            const __m256i two = load32(at + 16 + j / 2 * 32);
            return _mm256_and_si256(j % 2 ? _mm256_srli_epi16(two, 4) : two, low_bits);
        }
        case BLOCK_Q5_K: {
            const __m256i two = load32(at + 48 + j / 2 * 32), high = load32(at + 16);
            const __m256i low = _mm256_and_si256(j % 2 ? _mm256_srli_epi16(two, 4) : two, low_bits);
            const __m256i fifth = j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
            return _mm256_or_si256(low, _mm256_and_si256(fifth, _mm256_set1_epi8(16)));
        }
        default: {
            const __m256i two = load32(at + j / 4 * 64 + j % 2 * 32), high = load32(at + 128 + j / 4 * 32);
            const __m256i low = _mm256_and_si256(j % 4 / 2 ? _mm256_srli_epi16(two, 4) : two, low_bits);
            const int place = j % 4 * 2; /* bits place, place + 1 go to 4, 5 */
            const __m256i upper = place < 4 ? _mm256_slli_epi16(high, 4 - place) : _mm256_srli_epi16(high, place - 4);
            return _mm256_or_si256(low, _mm256_and_si256(upper, _mm256_set1_epi8(48)));
        }
    }
}

/* Sums of four products each: codes (see load_codes) times int8. */
INLINE __m256i multiply_codes(bytes codes, bytes x, const int type) {
    if (type == BLOCK_INT8) { /* -128 occurs on both sides */
        const __m256i low = _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(codes)),
                                              _mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)));
        return _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(codes, 1)),
                                                       _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1))));
    }
    if (type == BLOCK_Q8_0) {
        x = _mm256_sign_epi8(x, codes);
        codes = _mm256_abs_epi8(codes);
    }
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, x);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1));
#endif
}

/* Sums of the lower and of the upper halves of 8 vectors: the two halves of a group. */
INLINE void sum_rows(const __m256i v[8], __m256i *low, __m256i *high) {
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    *low = _mm256_permute2x128_si256(a, b, 0x20);
    *high = _mm256_permute2x128_si256(a, b, 0x31);
}

/* Adds a group, whose two halves have these sums of codes times x. The same operations for few rows and for many. */
INLINE __m256 add_group(__m256 sum, __m256i low, __m256i high, __m256 scale_low, __m256 scale_high, __m256 minimum,
                        const product *p, int64_t place, const int offset, const int type) {
    const __m256 x_scale = _mm256_set1_ps(p->scales[place]);
    if (type == BLOCK_Q6_K) {
        low = _mm256_sub_epi32(low, _mm256_set1_epi32(offset * p->sums[2 * place]));
        high = _mm256_sub_epi32(high, _mm256_set1_epi32(offset * p->sums[2 * place + 1]));
        sum = _mm256_fmadd_ps(_mm256_mul_ps(scale_low, x_scale), _mm256_cvtepi32_ps(low), sum);
        return _mm256_fmadd_ps(_mm256_mul_ps(scale_high, x_scale), _mm256_cvtepi32_ps(high), sum);
    }
    __m256i both = low;
    if (offset) {
        const int32_t total = p->sums[2 * place] + p->sums[2 * place + 1];
        both = _mm256_sub_epi32(both, _mm256_set1_epi32(offset * total));
    }
    sum = _mm256_fmadd_ps(_mm256_mul_ps(scale_low, x_scale), _mm256_cvtepi32_ps(both), sum);
    return has_minimum(type) ? _mm256_fnmadd_ps(minimum, _mm256_set1_ps(p->totals[place]), sum) : sum;
}

/* Eight rows from `output` on, or the last eight: some are computed twice then. */
INLINE int64_t first_of_eight(const block_part *part, int64_t output) { return smallest(output, part->num_rows - 8); }

INLINE eight_rows rows_from(const block_part *part, int64_t output) {
    return (eight_rows){part->data + output * part->row_bytes, part->row_bytes};
}

/* --- few rows: the blocks as they are ------------------------------------------------------------------------------ */

INLINE void multiply_few(const product *p, const block_part *part, int64_t output, const int type, const int num_rows) {
    const int per_block = is_super(type) ? GROUPS_OF_SUPER : 1;
    const int64_t groups = p->num_inputs / GROUP, size = block_bytes(type);
    output = first_of_eight(part, output);
    eight_rows rows = rows_from(part, output);
    const uint8_t *ahead = rows.first + 8 * part->row_bytes;
    __m256 sum[FEW_ROWS];
    for (int r = 0; r < num_rows; r++) sum[r] = _mm256_setzero_ps();
    block_scales scales;
    for (int64_t block = 0; block < groups / per_block; block++) {
        load_scales(&scales, rows, type);
        UNROLL
        for (int j = 0; j < per_block; j++) {
            const int64_t group = block * per_block + j;
            __m256i v[FEW_ROWS][8];
            UNROLL
            for (int i = 0; i < 8; i++) {
                const bytes codes = load_codes(row_at(rows, i), j, type);
                for (int r = 0; r < num_rows; r++)
                    v[r][i] = multiply_codes(codes, load32((const uint8_t *)p->codes + r * p->num_inputs + group * GROUP), type);
            }
            const __m256 low_scale = scale_of(&scales, j, 0, type), high_scale = scale_of(&scales, j, 1, type);
            const __m256 minimum = has_minimum(type) ? minimum_of(&scales, j, type) : low_scale;
            for (int r = 0; r < num_rows; r++) {
                __m256i low, high;
                sum_rows(v[r], &low, &high);
                if (type != BLOCK_Q6_K) low = _mm256_add_epi32(low, high);
                sum[r] = add_group(sum[r], low, high, low_scale, high_scale, minimum, p, r * groups + group,
                                   code_offset(type), type);
            }
        }
        if (is_super(type) || block % 2 == 0) /* of the next eight rows, in their order in memory */
            for (int64_t line = 0; line < (is_super(type) ? 8 : 16) * size; line += 64)
                __builtin_prefetch(ahead + block * 8 * size + line);
        rows.first += size;
    }
    for (int r = 0; r < num_rows; r++) {
        float sums[8];
        _mm256_storeu_ps(sums, sum[r]);
        write_outputs(p, part, r, output, 8, sums);
    }
}

/* --- many rows: codes side by side --------------------------------------------------------------------------------- */

#define NUM_PANELS 2 /* that pass over x together */

/* For each group: [GROUP / step, 8, step] codes of 8 outputs, where step is 4 bytes or 2 int16; scales; minima. */
typedef struct {
    char *codes;
    float *scales; /* [groups, 2 for Q6_K, 8] */
    float *minima; /* [groups, 8] */
} panel;

#if defined(__AVX512VNNI__)
#define PANEL_OFFSET(type) (type == BLOCK_Q8_0 || type == BLOCK_INT8 ? 128 : code_offset(type))
#else
#define PANEL_OFFSET(type) code_offset(type)
#endif

/* 8 x 8 units of 32 bits, transposed. */
INLINE void transpose_units(const __m256i r[8], __m256i out[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            b[i + 2 * k] = _mm256_unpacklo_epi64(a[i + k], a[i + k + 2]);
            b[i + 2 * k + 1] = _mm256_unpackhi_epi64(a[i + k], a[i + k + 2]);
        }
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

INLINE void lay_panel(const product *p, const block_part *part, int64_t output, panel *target, const int type) {
    const int per_block = is_super(type) ? GROUPS_OF_SUPER : 1, num_scales = type == BLOCK_Q6_K ? 2 : 1;
    const int64_t groups = p->num_inputs / GROUP, size = block_bytes(type);
    eight_rows rows = rows_from(part, output);
    block_scales scales;
    for (int64_t block = 0; block < groups / per_block; block++) {
        load_scales(&scales, rows, type);
        for (int j = 0; j < per_block; j++) {
            const int64_t group = block * per_block + j;
            __m256i codes[8], units[8];
            for (int i = 0; i < 8; i++) codes[i] = load_codes(row_at(rows, i), j, type);
            if (needs_wide(type))
                for (int half = 0; half < 2; half++) {
                    __m256i wide[8];
                    for (int i = 0; i < 8; i++)
                        wide[i] = _mm256_cvtepi8_epi16(half ? _mm256_extracti128_si256(codes[i], 1)
                                                            : _mm256_castsi256_si128(codes[i]));
                    transpose_units(wide, units);
                    for (int i = 0; i < 8; i++)
                        _mm256_store_si256((__m256i *)(target->codes + (group * 16 + half * 8 + i) * 32), units[i]);
                }
            else {
                if (PANEL_OFFSET(type) == 128)
                    for (int i = 0; i < 8; i++) codes[i] = _mm256_xor_si256(codes[i], _mm256_set1_epi8((char)128));
                transpose_units(codes, units);
                for (int i = 0; i < 8; i++)
                    _mm256_store_si256((__m256i *)(target->codes + (group * 8 + i) * 32), units[i]);
            }
            for (int half = 0; half < num_scales; half++)
                _mm256_store_ps(target->scales + (group * num_scales + half) * 8, scale_of(&scales, j, half, type));
            if (has_minimum(type)) _mm256_store_ps(target->minima + group * 8, minimum_of(&scales, j, type));
        }
        rows.first += size;
    }
}

/* Units 8 half .. of codes times x, for some panels and rows: sums in 32 bits. */
INLINE __m256i multiply_units(__m256i sum, const __m256i w, const __m256i x) {
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(sum, w, x);
#else
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
#endif
}

INLINE __m256i spread(const void *p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
}

/* Sums of units begin .. end of a group, for panels x rows, added to sum. Codes up to `largest` times int8 fit in 16 bits
 * `run` at a time. */
INLINE void multiply_run(__m256i sum[NUM_PANELS][3], const panel *panels, const product *p, int64_t row, int64_t group, int begin,
                         int end, const int type, const int num_rows) {
    if (needs_wide(type)) {
        UNROLL
        for (int unit = 2 * begin; unit < 2 * end; unit++) {
            __m256i w[NUM_PANELS];
            UNROLL
            for (int i = 0; i < NUM_PANELS; i++)
                w[i] = _mm256_load_si256((const __m256i *)(panels[i].codes + (group * 16 + unit) * 32));
            UNROLL
            for (int r = 0; r < num_rows; r++) {
                const __m256i x = spread(p->wide + (row + r) * p->num_inputs + group * GROUP + 2 * unit);
                UNROLL
                for (int i = 0; i < NUM_PANELS; i++)
                    sum[i][r] = _mm256_add_epi32(sum[i][r], _mm256_madd_epi16(w[i], x));
            }
        }
        return;
    }
#if defined(__AVX512VNNI__)
    const int run = end - begin;
#else
    /* 127 times 15 (4 bits), 31 or 63, twice, as often as fits in 32767 */
    const int run = type == BLOCK_Q6_K ? 2 : type == BLOCK_Q4_K || type == BLOCK_Q4_0 || type == BLOCK_Q4_1 ? 8 : 4;
#endif
    UNROLL
    for (int first = begin; first < end; first += run) {
        __m256i part[NUM_PANELS][3];
        UNROLL
        for (int unit = first; unit < first + run; unit++) {
            __m256i w[NUM_PANELS];
            UNROLL
            for (int i = 0; i < NUM_PANELS; i++)
                w[i] = _mm256_load_si256((const __m256i *)(panels[i].codes + (group * 8 + unit) * 32));
            UNROLL
            for (int r = 0; r < num_rows; r++) {
                const __m256i x = spread(p->codes + (row + r) * p->num_inputs + group * GROUP + 4 * unit);
                UNROLL
                for (int i = 0; i < NUM_PANELS; i++)
                    part[i][r] = multiply_units(unit == first ? _mm256_setzero_si256() : part[i][r], w[i], x);
            }
        }
        UNROLL
        for (int i = 0; i < NUM_PANELS; i++)
            UNROLL
            for (int r = 0; r < num_rows; r++) {
#if !defined(__AVX512VNNI__)
                part[i][r] = _mm256_madd_epi16(part[i][r], _mm256_set1_epi16(1));
#endif
                sum[i][r] = first == begin ? part[i][r] : _mm256_add_epi32(sum[i][r], part[i][r]);
            }
    }
}

INLINE void multiply_panels(const product *p, const block_part *part, const panel *panels, int64_t output, int64_t row,
                            const int type, const int num_rows) {
    const int64_t groups = p->num_inputs / GROUP;
    __m256 sum[NUM_PANELS][3];
    for (int i = 0; i < NUM_PANELS; i++)
        for (int r = 0; r < num_rows; r++) sum[i][r] = _mm256_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m256i low[NUM_PANELS][3] = {{{0}}}, high[NUM_PANELS][3] = {{{0}}};
        multiply_run(low, panels, p, row, group, 0, type == BLOCK_Q6_K ? 4 : 8, type, num_rows);
        if (type == BLOCK_Q6_K) multiply_run(high, panels, p, row, group, 4, 8, type, num_rows);
        UNROLL
        for (int i = 0; i < NUM_PANELS; i++) {
            const int num_scales = type == BLOCK_Q6_K ? 2 : 1;
            const __m256 low_scale = _mm256_load_ps(panels[i].scales + group * num_scales * 8);
            const __m256 high_scale = num_scales == 2 ? _mm256_load_ps(panels[i].scales + (group * 2 + 1) * 8) : low_scale;
            const __m256 minimum = has_minimum(type) ? _mm256_load_ps(panels[i].minima + group * 8) : low_scale;
            UNROLL
            for (int r = 0; r < num_rows; r++)
                sum[i][r] = add_group(sum[i][r], low[i][r], high[i][r], low_scale, high_scale, minimum, p,
                                      (row + r) * groups + group, PANEL_OFFSET(type), type);
        }
    }
    for (int i = 0; i < NUM_PANELS; i++)
        for (int r = 0; r < num_rows; r++) {
            float sums[8];
            const int64_t first = first_of_eight(part, output + 8 * i);
            _mm256_storeu_ps(sums, sum[i][r]);
            write_outputs(p, part, row + r, first, 8, sums);
        }
}

INLINE void multiply_many(const product *p, const block_part *part, int64_t output, char *scratch, const int type) {
    const int64_t groups = p->num_inputs / GROUP;
    panel panels[NUM_PANELS];
    for (int i = 0; i < NUM_PANELS; i++) {
        panels[i].codes = scratch + i * (groups * PANEL_BYTES / 2);
        panels[i].scales = (float *)(panels[i].codes + groups * 8 * 2 * GROUP);
        panels[i].minima = panels[i].scales + groups * 16;
        lay_panel(p, part, first_of_eight(part, output + 8 * i), panels + i, type);
    }
    int64_t row = 0;
    for (; row + 3 <= p->num_rows; row += 3) multiply_panels(p, part, panels, output, row, type, 3);
    for (; row < p->num_rows; row++) multiply_panels(p, part, panels, output, row, type, 1);
}

#define FOR_EACH_TYPE(DO) \
    DO(BLOCK_Q4_0) DO(BLOCK_Q4_1) DO(BLOCK_Q5_0) DO(BLOCK_Q5_1) DO(BLOCK_Q8_0) DO(BLOCK_Q4_K) DO(BLOCK_Q5_K) \
    DO(BLOCK_Q6_K) DO(BLOCK_MXFP4) DO(BLOCK_INT8)

#define DEFINE(type)                                                                                                  \
    static __attribute__((noinline)) void few_##type(const product *p, const block_part *part, int64_t output) {      \
        if (p->num_rows == 1)                                                                                         \
            multiply_few(p, part, output, type, 1);                                                                   \
        else                                                                                                          \
            multiply_few(p, part, output, type, (int)p->num_rows);                                                    \
    }                                                                                                                 \
    static __attribute__((noinline)) void many_##type(const product *p, const block_part *part, int64_t output,       \
                                                      char *scratch) {                                                \
        multiply_many(p, part, output, scratch, type);                                                                \
    }
FOR_EACH_TYPE(DEFINE)

/* Groups of 8 outputs, first .. last. */
static void multiply_part_avx2(const product *p, const block_part *part, int64_t first, int64_t last, int thread) {
    char *scratch = p->scratch + thread * p->scratch_bytes;
    for (int64_t group = first; group < last;) {
        switch (part->type) {
#define CASE_OF(type)                                                     \
    case type:                                                            \
        if (p->num_rows <= FEW_ROWS)                                      \
            few_##type(p, part, group * 8);                               \
        else                                                              \
            many_##type(p, part, group * 8, scratch);                     \
        break;
            FOR_EACH_TYPE(CASE_OF)
        }
        group += p->num_rows > FEW_ROWS ? NUM_PANELS : 1;
    }
}
