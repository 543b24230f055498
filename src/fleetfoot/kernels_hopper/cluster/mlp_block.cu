// The second half of a decoder layer for a few rows: norm, gate, up and down.
#include <layer_block.cuh>

// The intermediate size in groups of 32, 4 tiles of 8 gates and 8 ups each. Clusters have one group more or less than
// others, and blocks one tile, so that their number need not divide the size.
constexpr int GROUPS = INTERMEDIATE / GROUP;
constexpr int MOST_GROUPS = (GROUPS + MLP_CLUSTERS - 1) / MLP_CLUSTERS;
constexpr int MOST_TILES = (MOST_GROUPS * 4 + CTAS - 1) / CTAS;
using DownGroups = OutGroups<DOWN_TILES, DOWN_CHUNKS, MOST_GROUPS>;
constexpr int ACTIVATED = DownGroups::padded * GROUP;    // inputs of down in a cluster, and zeros
static_assert(GROUPS * GROUP == INTERMEDIATE && BLOCK_HIDDEN % (DOWN_TILES * 16) == 0);
static_assert(GROUPS / MLP_CLUSTERS > (DOWN_CHUNKS - 1) * DownGroups::per_chunk);

struct MlpMemory : Memory {
  static constexpr int output = align(sums + MOST_TILES * WARPS * 16 * ROWS * 4);
  static constexpr int ring = align(output + ROWS * pitch(ACTIVATED));
};
static_assert(MlpMemory::ring <= MLP_FIXED_BYTES && MLP_STAGES <= 32);

DEVICE float silu(float x) { return x * inverse(1.0f + exp2_fast(x * -1.4426950408889634f)); }

KERNEL(MLP_REGISTERS) mlp_block(const Arguments arguments) {
  char* memory = shared_memory();
  u64* barriers = reinterpret_cast<u64*>(memory + Memory::barriers);
  const int rank = block_index() % CTAS, cluster = block_index() / CTAS, rows = arguments.rows;
  const int first_group = cluster * GROUPS / MLP_CLUSTERS;
  const DownGroups groups = {first_group, (cluster + 1) * GROUPS / MLP_CLUSTERS - first_group};
  const int first_tile = rank * groups.count * 4 / CTAS;  // of the cluster's
  const int tiles = (rank + 1) * groups.count * 4 / CTAS - first_tile;
  Ring<MLP_STAGES, MlpMemory::ring, MLP_SLOT_BYTES> ring;
  const u32 expected[] = {norm_bytes(rows), rows * groups.count * GROUP * 2u};
  // 8 rows of gate, and the same of up.
  const auto weight_row = [&](int tile, int half) {
    return half * INTERMEDIATE + first_group * GROUP + (first_tile + tile) * 8;
  };
  if (begin(ring, arguments, barriers, expected, rank, tiles, weight_row, groups, INTERMEDIATE)) return;
  load_norm(arguments, rank);
  constexpr int words = ROWS * pitch(ACTIVATED) / 4;
  for (int i = thread_index(); i < words; i += CONSUMERS) reinterpret_cast<u32*>(memory + MlpMemory::output)[i] = 0;
  block_sync(CONSUMERS);
  cluster_arrive();
  cluster_wait();
  wait_for_inputs();
  add_and_norm<CLUSTERS>(arguments, rank, cluster, barriers);
  barrier_wait(barriers, 0);
  find_factors(arguments);
  multiply_in<2>(ring, tiles, rows);
  block_sync(CONSUMERS);
  spread<MOST_TILES * 4 * ROWS, CTAS>([&](int item, int first, int step) {
    const int pair = item % (MOST_TILES * 4), row = item / (MOST_TILES * 4), tile = pair / 4;
    if (row >= rows || tile >= tiles) return;
    const Pair gates = outputs_of(tile, pair % 4 * 2, row), ups = outputs_of(tile, pair % 4 * 2 + 8, row);
    const u32 gate = pack_bf16(gates.x, gates.y), up = pack_bf16(ups.x, ups.y);
    const u32 value = pack_bf16(silu(low_bf16(gate)) * low_bf16(up), silu(high_bf16(gate)) * high_bf16(up));
    const int column = (first_tile + tile) * 8 + pair % 4 * 2;
    char* to = memory + MlpMemory::output + row * pitch(ACTIVATED) + input_place(column);
    for (int block = first; block < CTAS; block += step)
      send(block, to, value, barriers + 1);
  });
  barrier_wait(barriers + 1, 0);
  multiply_out<2>(ring, arguments, memory + MlpMemory::output, rank, cluster, groups);
}
