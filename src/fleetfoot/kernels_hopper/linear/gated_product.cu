// silu(x @ gate.T) * (x @ up.T), or with GELU, for large weights, in tiles as large as registers allow, so that one tile
// for each multiprocessor is enough where smaller tiles need a second, half-empty round. x may be a deferred norm of one
// tile of rows: see `DeferredRMSNorm`.
//
// A tile is ROWS rows by OUTPUTS rows of the weight, gates and ups, half and half. Warp groups multiply 64 or 128 rows
// of it each. There is no producer warp, since sums take all registers: the first warp refills a stage as soon as all
// groups have multiplied it, while the tensor cores have the next one. The PEERS blocks of a cluster have the same
// rows: each copies a part of them for all. With more tiles than blocks, a block has several, one after the other.
#include <activation.cuh>
#if PARTS
#include <deferred_norm.cuh>
#endif

constexpr int THREADS = GROUPS * 128, CHUNK = 64;  // inputs, 128 bytes: the width of the swizzle
constexpr int CHUNKS = INPUTS / CHUNK;
constexpr int BLOCKS = ROWS / (64 * GROUPS);  // of 64 rows, of a warp group
constexpr int ROW_BYTES = ROWS * CHUNK * 2, STAGE = ROW_BYTES + OUTPUTS * CHUNK * 2;
constexpr int WIDTH = OUTPUTS / 2;  // of the result
// Results of a warp on their way to memory: 16 rows of 16 bytes modulo 32, so that eight are in different banks.
constexpr int PITCH = WIDTH * 2 + (WIDTH % 16 ? 0 : 16), SCRATCH = GROUPS * 4 * 16 * PITCH;
static_assert(BLOCKS * 64 * GROUPS == ROWS && OUTPUTS % 16 == 0 && INPUTS % CHUNK == 0 && STAGES <= CHUNKS);
static_assert(ROWS / PEERS <= 256 && ROWS % (8 * PEERS) == 0);
static_assert(SHARED_BYTES >= 1024 + STAGES * STAGE + SCRATCH + 16 * STAGES);

struct Arguments {
  TensorMap x, weight;
  const float* squares;  // [num_parts, rows] of the deferred norm of x, in one tile of rows; PARTS 0: none
  u16* out;              // [rows, num_outputs]
  int rows, num_outputs;
  int num_parts;
  int padded_rows;  // of `out`, with PARTS: those after `rows` are zeros (`row_padding.py` has the reason)
  float eps;
  int row_tiles, num_tiles;  // of a cluster: PEERS tiles of the same rows
};

struct Tile {
  int row, output;
};
// The last tile of rows begins so that it ends with the last row: copies out of bounds are slow. Rows that two tiles
// have get the same bits twice.
DEVICE Tile tile_of(const Arguments& arguments, int index, int peer) {
  const int row = index % arguments.row_tiles * ROWS, last = arguments.rows - ROWS;
  return {row > last && last > 0 ? last : row, (index / arguments.row_tiles * PEERS + peer) * WIDTH};
}

struct Ring {
  u32 stages, full, empty;

  __device__ u32 rows(int stage) const { return stages + stage * STAGE; }
  __device__ u32 weight(int stage) const { return rows(stage) + ROW_BYTES; }
};

DEVICE void copy_weight(const Arguments& arguments, const Ring& ring, int stage, const Tile& tile, int chunk) {
  const u32 barrier = ring.full + stage * 8;
  barrier_expect(barrier, STAGE);
  copy_gated_box(ring.weight(stage), arguments.weight, barrier, chunk * CHUNK, tile.output / 8);
}
DEVICE void copy_rows(const Arguments& arguments, const Ring& ring, int stage, const Tile& tile, int chunk, int peer) {
  constexpr int part = ROWS / PEERS;
  const u32 to = ring.rows(stage) + peer * (part * CHUNK * 2), barrier = ring.full + stage * 8;
  if (PEERS > 1)
    copy_box_to(to, arguments.x, barrier, chunk * CHUNK, tile.row + peer * part, (1 << PEERS) - 1);
  else
    copy_box(to, arguments.x, barrier, chunk * CHUNK, tile.row);
}

#if PARTS
// Sums of a warp's 16 rows. Those of padding become zeros.
DEVICE void scale(const Arguments& arguments, const Factor& factor_of, int first_row, float (&sums)[WIDTH]) {
  const int row = first_row + threadIdx.x % 16;
  float factor = factor_of.get(arguments.eps);
  if (row >= arguments.rows) factor = -1.0f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float scale = from_lane(factor, threadIdx.x % 32 / 4 + half * 8);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
      float& sum = sums[i / 2 * 4 + half * 2 + i % 2];
      sum = scale < 0.0f ? 0.0f : sum * scale;
    }
  }
}
#endif

// `results`: shared memory of this warp.
DEVICE void store(const Arguments& arguments, const Tile& tile, const float (&sums)[BLOCKS][WIDTH], char* results) {
  constexpr int vectors = WIDTH / 8;  // of 16 bytes, in a row
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    __syncwarp();
    const int place = (warp / 4 * BLOCKS + block) * 64 + warp % 4 * 16, first = tile.row + place;
    char* to = results + lane / 4 * PITCH + lane % 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < WIDTH / 8; i++) {
        const float* gates = sums[block] + i * 8 + half * 2;
        *reinterpret_cast<u32*>(to + half * (8 * PITCH) + i * 16) = activate_and_mul(gates, gates + 4);
      }
    __syncwarp();
#pragma unroll 4
    for (int item = lane; item < 16 * vectors; item += 32) {
      const int row = first + item / vectors, output = tile.output + item % vectors * 8;
      if (row < (PARTS ? arguments.padded_rows : arguments.rows) && output < arguments.num_outputs)
        *reinterpret_cast<uint4*>(arguments.out + static_cast<i64>(row) * arguments.num_outputs + output) =
            *reinterpret_cast<const uint4*>(results + item / vectors * PITCH + item % vectors * 16);
    }
  }
}

DEVICE void release(u32 empty) {  // of a warp group
  const u32 thread = threadIdx.x % 128;
  if (PEERS > 1) {
    if (thread < PEERS) barrier_arrive_in(thread, empty);
  } else if (thread == 0) {
    barrier_arrive(empty);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gated_product(const __grid_constant__ Arguments arguments) {
  launch_dependents();
  char* memory = shared_memory();
  const u32 stages = (shared_address(memory) + 1023) / 1024 * 1024, scratch = stages + STAGES * STAGE;
  const Ring ring{stages, scratch + SCRATCH, scratch + SCRATCH + STAGES * 8};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
  const int peer = blockIdx.x % PEERS, cluster = blockIdx.x / PEERS, step = gridDim.x / PEERS;
  Tile tile = tile_of(arguments, cluster, peer);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(ring.full + i * 8, 1);
      barrier_init(ring.empty + i * 8, GROUPS * PEERS);
    }
    barriers_ready();
    // Weights do not depend on the kernel before.
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) copy_weight(arguments, ring, i, tile, i);
  }
  __syncthreads();
  if (PEERS > 1) {  // they have barriers
    cluster_arrive();
    cluster_wait();
  }
  wait_for_inputs();
  if (threadIdx.x == 0)
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) copy_rows(arguments, ring, i, tile, i, peer);
  __syncwarp();
#if PARTS
  const auto first_row = [&](int block) { return (group * BLOCKS + block) * 64 + warp % 4 * 16; };
  Factor factors[BLOCKS];
#pragma unroll
  for (int block = 0; block < BLOCKS; block++)
    factors[block].load(arguments.squares, arguments.num_parts, arguments.rows, first_row(block));
#endif

  int stage = 0;
  u32 phase = 0;
  // A stage that has been multiplied gets the chunk that comes STAGES chunks later, of this tile or the next one.
  const auto refill = [&](int multiplied, u32 parity, int chunk, int index) {
    if (chunk >= CHUNKS) {
      index += step;
      chunk -= CHUNKS;
    }
    if (index >= arguments.num_tiles) return;
    barrier_wait(ring.empty + multiplied * 8, parity);
    if (elect_lane()) {
      const Tile of = tile_of(arguments, index, peer);
      copy_weight(arguments, ring, multiplied, of, chunk);
      copy_rows(arguments, ring, multiplied, of, chunk, peer);
    }
    __syncwarp();
  };
#pragma unroll 1
  for (int index = cluster; index < arguments.num_tiles; index += step) {
    float sums[BLOCKS][WIDTH];
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      barrier_wait(ring.full + stage * 8, phase);
      const u64 rows = matrix_of(ring.rows(stage) + group * (BLOCKS * 64 * CHUNK * 2));
      const u64 weight = matrix_of(ring.weight(stage));
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
          multiply(sums[block], rows + block * (64 * CHUNK * 2 / 16) + k * 2, weight + k * 2, chunk + k);
      products_commit();
      products_wait<1>();
      if (chunk > 0) {
        const int previous = (stage ? stage : STAGES) - 1;
        release(ring.empty + previous * 8);
        if (warp == 0) refill(previous, stage ? phase : phase ^ 1, chunk - 1 + STAGES, index);
      }
      if (chunk + 1 < CHUNKS && ++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    products_wait<0>();
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < WIDTH; i++) keep_order(sums[block][i]);
    release(ring.empty + stage * 8);
    if (warp == 0) refill(stage, phase, CHUNKS - 1 + STAGES, index);
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
    tile = tile_of(arguments, index, peer);
#if PARTS
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) scale(arguments, factors[block], first_row(block), sums[block]);
#endif
    store(arguments, tile, sums, memory + (scratch - shared_address(memory)) + warp * (16 * PITCH));
  }
  if (PEERS > 1) {  // other blocks arrive at barriers of this one
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}
