/* The inputs of a decode step of Model Runner V2, and the update of its rows: a few integers per request, for which a call
 * of numpy or torch costs more than the work. One thread. Names and shapes are those of fleetfoot.kernels.prepare.tables. */
#include <stdint.h>
#include <string.h>

#include "variant.h"

/* positions, seq_lens, batch_index, slots, input_ids and block_tables of num_reqs requests with query_len tokens each. */
void EXPORT(prepare_decode)
(const int32_t *idx_mapping, int64_t num_reqs, int64_t query_len, const int32_t *num_computed,
 const int32_t *prefill_lens, const int32_t *last_sampled, const int32_t *draft_tokens, int64_t num_drafts,
 const int32_t *limits, const int32_t *table, int64_t table_stride, int64_t block_size, int32_t *pages, int64_t *positions, int32_t *seq_lens,
 int32_t *batch_index, int64_t *slots, int64_t *input_ids, int32_t *block_tables, int64_t out_stride,
 int64_t out_width) {
    for (int64_t request = 0; request < num_reqs; request++) {
        const int64_t row = idx_mapping[request], first = request * query_len;
        if (row < 0) { /* padding */
            seq_lens[request] = 0;
            for (int64_t token = first; token < first + query_len; token++) {
                positions[token] = input_ids[token] = 0;
                batch_index[token] = -1;
                slots[token] = -1;
            }
            continue;
        }
        const int32_t *blocks = table + row * table_stride;
        const int64_t computed = num_computed[row], length = computed + query_len;
        const int64_t last_block = (limits[row] - 1) / block_size;
        seq_lens[request] = (int32_t)length;
        for (int64_t j = 0; j < query_len; j++) {
            const int64_t position = computed + j, token = first + j;
            const int64_t slot = blocks[position / block_size] * block_size + position % block_size;
            const int is_dead = position / block_size > last_block;
            int32_t id = 0;
            if (position < prefill_lens[row])
                id = pages[slot];
            else {
                id = j == 0 ? last_sampled[row] : draft_tokens[row * num_drafts + j - 1];
                if (id < 0) id = 0; /* no draft */
                if (!is_dead) pages[slot] = id;
            }
            positions[token] = position;
            batch_index[token] = (int32_t)request;
            slots[token] = is_dead ? -1 : slot;
            input_ids[token] = id;
        }
        int64_t count = (length + block_size - 1) / block_size;
        if (count > out_width) count = out_width;
        int32_t *copy = block_tables + request * out_stride;
        memcpy(copy, blocks, (size_t)count * sizeof(int32_t));
        for (int64_t block = last_block + 1; block < count; block++) copy[block] = blocks[last_block];
    }
}

/* num_computed and last_sampled after a step in which the first num_sampling of num_reqs requests have sampled. */
void EXPORT(post_update)
(const int32_t *idx_mapping, int64_t num_reqs, const int32_t *query_start_loc, const int64_t *sampled,
 int64_t sampled_stride, const int32_t *num_sampled, const int32_t *num_rejected, int64_t num_sampling,
 int32_t *num_computed, int32_t *last_sampled) {
    for (int64_t request = 0; request < num_reqs; request++) {
        const int64_t row = idx_mapping[request];
        if (row < 0) continue;
        num_computed[row] += query_start_loc[request + 1] - query_start_loc[request];
        if (request < num_sampling) {
            num_computed[row] -= num_rejected[request];
            if (num_sampled[request] > 0)
                last_sampled[row] = (int32_t)sampled[request * sampled_stride + num_sampled[request] - 1];
        }
    }
}
