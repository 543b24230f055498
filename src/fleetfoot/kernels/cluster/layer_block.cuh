// What the two kernels of a decoder layer for a few rows, one token each, have in common: `attention_block` computes
// norm, qkv, attention and o, `mlp_block` norm, gate, up and down.
//
// A cluster of CTAS thread blocks owns the query heads [cluster * GROUP_HEADS, ...) of the first kernel with their KV
// head, and a slice of the intermediate size of the second. Its blocks exchange activations through distributed shared
// memory. Only the residual stream goes through global memory: a kernel leaves a partial sum of each cluster, and the
// next one adds them to the residual in a fixed order.
//
// Each block has a producer warp, which copies weights into a ring of slots in shared memory. It does not wait for the
// kernel before, so memory keeps streaming. All products use mma with a weight as A (16 outputs) and the rows as B (8
// columns), so the bits of a row do not depend on the other rows. The order of the inputs in an mma is free: a lane
// reads 16 contiguous bytes of a weight row and the same 16 bytes of its input row.
//
// Roundings to bf16 are those of the kernels of `fleetfoot.kernels`: sums of a branch, the residual, the input of a
// product times the norm's weight, all outputs of products.
#pragma once

#include <device.cuh>

constexpr int CONSUMERS = WARPS * 32;  // threads; another warp copies weights
constexpr int GROUP_HEADS = HEADS / CLUSTERS;            // query heads of a cluster
constexpr int BLOCK_HIDDEN = HIDDEN / CTAS;              // columns of the residual of a block
constexpr int NORM_CHUNKS = (BLOCK_HIDDEN + 63) / 64;    // of 64 columns, each summed by a warp
constexpr int SQUARES = CTAS * NORM_CHUNKS;
constexpr int ATTENDED = GROUP_HEADS * HEAD_DIM;         // inputs of o in a cluster
static_assert(HIDDEN % IN_COLUMNS == 0 && IN_COLUMNS % (WARPS * 32) == 0);

// Rows in shared memory start 64 bytes apart modulo 128: reading two of them at once uses all banks.
CONSTEXPR int pitch(int columns) { return columns * 2 + (columns % 64 ? 0 : 64); }
CONSTEXPR int maximum_of(int a, int b) { return a > b ? a : b; }
CONSTEXPR int align(int bytes) { return (bytes + 127) / 128 * 128; }

struct Arguments {
  const float* partials;  // [CLUSTERS, rows, HIDDEN] of the kernel before; null: there is none
  const u16* residual;    // [rows, HIDDEN]
  u16* residual_out;      // the same plus the partial sums
  float* partials_out;
  const u16* norm;        // [HIDDEN]
  const u16* weight_in;   // [outputs, HIDDEN] of qkv; of gate and up
  const u16* weight_out;  // [HIDDEN, inputs] of o; of down
  i64 rows;
  double eps;
  // Attention only. Strides in elements.
  u16* kv_cache;          // [num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
  i64 block_stride, value_stride, head_stride, token_stride;
  const int* seq_lens;     // [rows], with the new token; 0: padding
  const int* block_tables;
  i64 table_stride;
  const i64* slots;       // [rows]; negative: K and V are not written
  const float* cos_sin;   // [positions, HEAD_DIM]
  const u16* q_norm;      // [HEAD_DIM]
  const u16* k_norm;
  double head_eps, scale_log2;
};

constexpr int BARRIERS = 128;  // bytes: up to 6 of them, then those of the ring
struct Memory {
  static constexpr int ring_barriers = 0;  // full and empty, of up to 32 slots
  static constexpr int barriers = ring_barriers + 2 * 32 * 8;
  static constexpr int factors = barriers + BARRIERS;
  static constexpr int squares = factors + 64;
  static constexpr int norm = squares + ROWS * SQUARES * 4;
  static constexpr int input = align(norm + BLOCK_HIDDEN * 2);
  // Later the splits of attention, of the warps.
  static constexpr int splits_bytes = WARPS * GROUP_HEADS * (HEAD_DIM + 2) * 4;
  static constexpr int sums = align(input + maximum_of(ROWS * pitch(HIDDEN), splits_bytes));
};

// One after the other: tiles of 16 rows of the first weight in chunks of IN_COLUMNS, then blocks of rows of the second.
template <int STAGES, int RING, int IN_TILES, int OUT_INPUTS, int OUT_TILES, int OUT_COLUMNS>
struct Ring {
  static constexpr int in_chunks = HIDDEN / IN_COLUMNS, in_stages = IN_TILES * in_chunks;
  static constexpr int out_rows = OUT_TILES * 16;
  static constexpr int out_chunks = OUT_INPUTS / OUT_COLUMNS, out_blocks = BLOCK_HIDDEN / out_rows;
  static constexpr int num_stages = in_stages + out_blocks * out_chunks;

  char* memory = shared_memory();
  u64* full = reinterpret_cast<u64*>(memory + Memory::ring_barriers);
  u64* empty = full + 32;
  int slot = 0;
  u32 phase = 0;

  __device__ char* data() const { return memory + RING + slot * SLOT_BYTES; }
  __device__ void advance() {
    if (++slot == STAGES) {
      slot = 0;
      phase ^= 1;
    }
  }
  // By one thread.
  __device__ void init() {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, WARPS);
    }
  }
  // By the producer warp. `in_row(tile, half)`: the first of 8 rows of the first weight. All addresses are the same in all
  // lanes, so that they are computed in uniform registers: a copy takes its operands from there, and with addresses of
  // lanes each takes 110 cycles.
  template <class InRow>
  __device__ void produce(const Arguments& arguments, int rank, int cluster, InRow in_row) {
    const bool is_elected = elect_lane();
#pragma unroll 1
    for (int stage = 0; stage < in_stages; stage++) {
      barrier_wait(empty + slot, phase ^ 1);
      if (is_elected) {
        constexpr int bytes = IN_COLUMNS * 2;
        barrier_expect(full + slot, 16 * bytes);
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const i64 row = in_row(stage / in_chunks, i / 8) + i % 8;
          const u16* from = arguments.weight_in + row * HIDDEN + stage % in_chunks * IN_COLUMNS;
          copy_async(data() + i * bytes + i / 8 * 64, from, bytes, full + slot);
        }
      }
      warp_sync();
      advance();
    }
    constexpr int all_inputs = CLUSTERS * OUT_INPUTS;
    const u16* first = arguments.weight_out + static_cast<i64>(rank) * BLOCK_HIDDEN * all_inputs + cluster * OUT_INPUTS;
#pragma unroll 1
    for (int stage = 0; stage < out_blocks * out_chunks; stage++) {
      barrier_wait(empty + slot, phase ^ 1);
      if (is_elected) {
        constexpr int bytes = OUT_COLUMNS * 2;
        barrier_expect(full + slot, out_rows * bytes);
        const u16* from = first + static_cast<i64>(stage / out_chunks) * out_rows * all_inputs;
#pragma unroll 16
        for (int i = 0; i < out_rows; i++) {
          char* to = data() + i * bytes + i / (out_rows / 2) * 64;
          copy_async(to, from + i * all_inputs + stage % out_chunks * OUT_COLUMNS, bytes, full + slot);
        }
      }
      warp_sync();
      advance();
    }
  }
  __device__ void await() { barrier_wait(full + slot, phase); }
  __device__ void release() {
    warp_sync();
    if (thread_index() % 32 == 0) barrier_arrive(empty + slot);
    advance();
  }
};

struct alignas(16) Vector {
  u32 x, y, z, w;
};
DEVICE Vector load_vector(const void* from) { return *static_cast<const Vector*>(from); }

struct alignas(8) Pair {
  float x, y;
};
DEVICE Pair load_pair(const void* from) { return *static_cast<const Pair*>(from); }

// Sums of 16 outputs by 8 rows, in chains that do not wait for each other.
struct Sums {
  float parts[4][4] = {};

  __device__ float of(int i) const { return (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]); }
};

// `groups` of 32 inputs: weight rows at `low` and `high` of this lane, and its input row (zeros if it has none).
template <int groups>
DEVICE void multiply(Sums& sums, const char* low, const char* high, const char* input, bool has_row) {
#pragma unroll
  for (int i = 0; i < groups; i++) {
    const Vector a = load_vector(low + i * 64), b = load_vector(high + i * 64);
    Vector x = {0, 0, 0, 0};
    if (has_row) x = load_vector(input + i * 64);
    mma(sums.parts[i % 2 * 2], a.x, b.x, a.y, b.y, x.x, x.y);
    mma(sums.parts[i % 2 * 2 + 1], a.z, b.z, a.w, b.w, x.z, x.w);
  }
}

// Before `wait_for_inputs`: the weight of the norm for this block's columns.
DEVICE void load_norm(const Arguments& arguments, int rank) {
  const u32* from = reinterpret_cast<const u32*>(arguments.norm + rank * BLOCK_HIDDEN);
  u32* norm = reinterpret_cast<u32*>(shared_memory() + Memory::norm);
  for (int i = thread_index(); i < BLOCK_HIDDEN / 2; i += CONSUMERS) norm[i] = from[i];
}

// The residual sum of this block's columns, times the norm's weight, to the inputs of all blocks.
DEVICE void add_and_norm(const Arguments& arguments, int rank, int cluster, u64* barrier) {
  char* memory = shared_memory();
  const int lane = thread_index() % 32, rows = arguments.rows;
  const u32* norm = reinterpret_cast<const u32*>(memory + Memory::norm);
  float* squares = reinterpret_cast<float*>(memory + Memory::squares);
  for (int item = thread_index() / 32; item < rows * NORM_CHUNKS; item += WARPS) {
    const int row = item / NORM_CHUNKS, chunk = item % NORM_CHUNKS;
    const int in_block = chunk * 64 + lane * 2, column = rank * BLOCK_HIDDEN + in_block;
    const bool is_column = in_block < BLOCK_HIDDEN;
    float low = 0.0f, high = 0.0f;
    if (is_column) {
      u32 total = *reinterpret_cast<const u32*>(arguments.residual + row * HIDDEN + column);
      if (arguments.partials != nullptr) {
        const float* from = arguments.partials + row * HIDDEN + column;
        Pair parts[CLUSTERS];
#pragma unroll
        for (int i = 0; i < CLUSTERS; i++) parts[i] = load_pair(from + static_cast<i64>(i) * rows * HIDDEN);
#pragma unroll
        for (int i = 0; i < CLUSTERS; i++) {
          low += parts[i].x;
          high += parts[i].y;
        }
        const u32 sum = pack_bf16(low, high);
        total = pack_bf16(low_bf16(sum) + low_bf16(total), high_bf16(sum) + high_bf16(total));
      }
      if (cluster == 0) *reinterpret_cast<u32*>(arguments.residual_out + row * HIDDEN + column) = total;
      low = low_bf16(total);
      high = high_bf16(total);
      const u32 weight = norm[in_block / 2];
      const u32 input = pack_bf16(low * low_bf16(weight), high * high_bf16(weight));
#pragma unroll
      for (int to = 0; to < CTAS; to++)
        send(to, memory + Memory::input + row * pitch(HIDDEN) + column * 2, input, barrier);
    }
    float square = low * low + high * high;
#pragma unroll
    for (int mask = 16; mask; mask /= 2) square += from_lane_xor(square, mask);
    if (lane < CTAS) send(lane, squares + row * SQUARES + rank * NORM_CHUNKS + chunk, float_bits(square), barrier);
  }
}
DEVICE u32 norm_bytes(int rows) { return rows * (HIDDEN * 2 + SQUARES * 4); }

// 1 / rms of each row, once the inputs are there; for all threads after the next `block_sync`.
DEVICE void find_factors(const Arguments& arguments) {
  const int lane = thread_index() % 32;
  const float* all_squares = reinterpret_cast<const float*>(shared_memory() + Memory::squares);
  float* factors = reinterpret_cast<float*>(shared_memory() + Memory::factors);
  for (int row = thread_index() / 32; row < arguments.rows; row += WARPS) {
    float sum = 0.0f;
    for (int i = lane; i < SQUARES; i += 32) sum += all_squares[row * SQUARES + i];
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane == 0) factors[row] = inverse_sqrt(sum / HIDDEN + static_cast<float>(arguments.eps));
  }
}

// The first product: each warp multiplies a slice of the inputs. Its sums [tiles, WARPS, ROWS, 16] are in shared memory
// after the next `block_sync`.
template <int IN_TILES, class AnyRing>
DEVICE void multiply_in(AnyRing& ring, int rows) {
  constexpr int groups = IN_COLUMNS / (WARPS * 32), chunks = HIDDEN / IN_COLUMNS;
  const int warp = thread_index() / 32, g = thread_index() % 32 / 4, t = thread_index() % 4;
  const int weight_row = g % 2 * 8 + g / 2;
  const int in_slot = weight_row * (IN_COLUMNS * 2) + g % 2 * 64 + warp * groups * 64 + t * 16;
  const char* input = ring.memory + Memory::input + g * pitch(HIDDEN) + warp * groups * 64 + t * 16;
  float* all_sums = reinterpret_cast<float*>(ring.memory + Memory::sums) + warp * ROWS * 16 + weight_row;
#pragma unroll 1
  for (int tile = 0; tile < IN_TILES; tile++) {
    Sums sums;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
      ring.await();
      const char* low = ring.data() + in_slot;
      multiply<groups>(sums, low, low + 4 * IN_COLUMNS * 2, input + chunk * (IN_COLUMNS * 2), g < rows);
      ring.release();
    }
    float* to = all_sums + tile * (WARPS * 16 * ROWS);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 2 * t + i % 2;
      if (row < ROWS) to[row * 16 + i / 2 * 4] = sums.of(i);
    }
  }
}

// Two outputs of the first product: `weight_row` of 16 of a tile, and the next one.
DEVICE Pair outputs_of(int tile, int weight_row, int row) {
  const float* sums = reinterpret_cast<const float*>(shared_memory() + Memory::sums);
  sums += (tile * WARPS * ROWS + row) * 16 + weight_row;
  Pair sum = {0.0f, 0.0f};
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    const Pair part = load_pair(sums + warp * ROWS * 16);
    sum.x += part.x;
    sum.y += part.y;
  }
  const float factor = reinterpret_cast<const float*>(shared_memory() + Memory::factors)[row];
  return {sum.x * factor, sum.y * factor};
}

// The second product, of this cluster's inputs [rows, inputs] at `input`: its partial sums, to global memory. A warp
// multiplies all inputs for 16 outputs.
template <int OUT_INPUTS, int OUT_TILES, int OUT_COLUMNS, class AnyRing>
DEVICE void multiply_out(AnyRing& ring, const Arguments& arguments, const char* input, int rank, int cluster) {
  constexpr int out_rows = OUT_TILES * 16, chunks = OUT_INPUTS / OUT_COLUMNS, warp_groups = WARPS / OUT_TILES;
  const int warp = thread_index() / 32, g = thread_index() % 32 / 4, t = thread_index() % 4, rows = arguments.rows;
  const int weight_row = g % 2 * (out_rows / 2) + warp % OUT_TILES * 8 + g / 2;
  const int in_slot = weight_row * (OUT_COLUMNS * 2) + g % 2 * 64 + t * 16;
  input += g * pitch(OUT_INPUTS) + t * 16;
  float* partials = arguments.partials_out + static_cast<i64>(cluster) * rows * HIDDEN + rank * BLOCK_HIDDEN;
#pragma unroll 1
  for (int block = 0; block < BLOCK_HIDDEN / out_rows; block++) {
    const bool is_mine = block % warp_groups == warp / OUT_TILES;
    Sums sums;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
      ring.await();
      const char* low = ring.data() + in_slot;
      const char* high = low + 4 * OUT_COLUMNS * 2;
      if (is_mine) multiply<OUT_COLUMNS / 32>(sums, low, high, input + chunk * (OUT_COLUMNS * 2), g < rows);
      ring.release();
    }
    if (!is_mine) continue;
    float* to = partials + block * out_rows + weight_row;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 2 * t + i % 2;
      if (row < rows) to[row * HIDDEN + i / 2 * 4] = sums.of(i);
    }
  }
}

// Runs `step(item, part, parts)` for `count` items, each by up to `most` threads if there are few.
template <int count, int most, class Step>
DEVICE void spread(Step step) {
  constexpr int wanted = CONSUMERS / count, parts = wanted < 1 ? 1 : wanted > most ? most : wanted;
  for (int i = thread_index(); i < count * parts; i += CONSUMERS) step(i % count, i / count, parts);
}
