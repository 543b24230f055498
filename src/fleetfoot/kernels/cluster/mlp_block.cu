// The second half of a decoder layer for a few rows: norm, gate, up and down.
#include <layer_block.cuh>

constexpr int BLOCK_PAIRS = INTERMEDIATE / (CLUSTERS * CTAS);  // gate and up of so many outputs
constexpr int ACTIVATED = INTERMEDIATE / CLUSTERS;       // inputs of down in a cluster
constexpr int GATE_UP_TILES = BLOCK_PAIRS / 8;
static_assert(BLOCK_PAIRS % 8 == 0 && ACTIVATED % DOWN_COLUMNS == 0 && BLOCK_HIDDEN % (DOWN_TILES * 16) == 0);

struct MlpMemory : Memory {
  static constexpr int output = align(sums + GATE_UP_TILES * WARPS * 16 * ROWS * 4);
  static constexpr int ring = align(output + ROWS * pitch(ACTIVATED));
};
static_assert(MlpMemory::ring <= MLP_FIXED_BYTES && MLP_STAGES <= 32);

DEVICE float silu(float x) { return x / (1.0f + exp2_fast(x * -1.4426950408889634f)); }

KERNEL(MLP_REGISTERS) mlp_block(const Arguments arguments) {
  launch_dependents();
  char* memory = shared_memory();
  u64* barriers = reinterpret_cast<u64*>(memory + Memory::barriers);
  const int rank = cluster_rank(), cluster = block_index() / CTAS, rows = arguments.rows;
  Ring<MLP_STAGES, MlpMemory::ring, GATE_UP_TILES, ACTIVATED, DOWN_TILES, DOWN_COLUMNS> ring;
  if (thread_index() >= CONSUMERS) {
    // 8 rows of gate, and the same of up.
    const auto weight_row = [&](int tile, int half) {
      return half * INTERMEDIATE + (cluster * CTAS + rank) * BLOCK_PAIRS + tile * 8;
    };
    if (thread_index() == CONSUMERS) {
      ring.init();
      for (int i = 0; i < 2; i++) barrier_init(barriers + i, 1);
      barriers_ready();
      barrier_expect(barriers, norm_bytes(rows));
      barrier_expect(barriers + 1, rows * ACTIVATED * 2);
    }
    warp_sync();
    cluster_arrive();
    ring.produce(arguments, rank, cluster, weight_row);
    cluster_wait();
    return;
  }
  load_norm(arguments, rank);
  block_sync(CONSUMERS);
  cluster_arrive();
  cluster_wait();
  wait_for_inputs();
  add_and_norm(arguments, rank, cluster, barriers);
  barrier_wait(barriers, 0);
  find_factors(arguments);
  multiply_in<GATE_UP_TILES>(ring, rows);
  block_sync(CONSUMERS);
  spread<GATE_UP_TILES * 4 * ROWS, CTAS>([&](int item, int first, int step) {
    const int pair = item % (GATE_UP_TILES * 4), row = item / (GATE_UP_TILES * 4), tile = pair / 4;
    if (row >= rows) return;
    const Pair gates = outputs_of(tile, pair % 4 * 2, row), ups = outputs_of(tile, pair % 4 * 2 + 8, row);
    const u32 gate = pack_bf16(gates.x, gates.y), up = pack_bf16(ups.x, ups.y);
    const u32 value = pack_bf16(silu(low_bf16(gate)) * low_bf16(up), silu(high_bf16(gate)) * high_bf16(up));
    const int column = rank * BLOCK_PAIRS + tile * 8 + pair % 4 * 2;
    char* to = memory + MlpMemory::output + row * pitch(ACTIVATED) + column * 2;
    for (int block = first; block < CTAS; block += step)
      send(block, to, value, barriers + 1);
  });
  barrier_wait(barriers + 1, 0);
  multiply_out<ACTIVATED, DOWN_TILES, DOWN_COLUMNS>(ring, arguments, memory + MlpMemory::output, rank, cluster);
}
