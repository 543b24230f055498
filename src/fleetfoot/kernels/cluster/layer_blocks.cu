// A decoder layer for a few rows, one token each, in two kernels: norm, qkv, attention and o; norm, gate, up and down.
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
#include <device.cuh>

constexpr int CONSUMERS = WARPS * 32;  // threads; another warp copies weights
constexpr int GROUP_HEADS = HEADS / CLUSTERS;            // query heads of a cluster
constexpr int HEADS_PER_KV = HEADS / KV_HEADS;
constexpr int QKV_SIZE = (GROUP_HEADS + 2) * HEAD_DIM;   // outputs of a cluster: its query heads, K, V
constexpr int BLOCK_HIDDEN = HIDDEN / CTAS;              // columns of the residual of a block
constexpr int NORM_CHUNKS = (BLOCK_HIDDEN + 63) / 64;    // of 64 columns, each summed by a warp
constexpr int SQUARES = CTAS * NORM_CHUNKS;
constexpr int BLOCK_PAIRS = INTERMEDIATE / (CLUSTERS * CTAS);  // gate and up of so many outputs
constexpr int ATTENDED = GROUP_HEADS * HEAD_DIM;         // inputs of o in a cluster
constexpr int ACTIVATED = INTERMEDIATE / CLUSTERS;       // inputs of down in a cluster
constexpr int QKV_TILES = QKV_SIZE / CTAS / 16, GATE_UP_TILES = BLOCK_PAIRS / 8;

// Attention: blocks of a row, or rows of a block.
constexpr int ROW_BLOCKS = CTAS > ROWS ? CTAS / ROWS : 1, BLOCK_ROWS = ROWS > CTAS ? ROWS / CTAS : 1;
constexpr int ROW_WARPS = WARPS / BLOCK_ROWS;            // warps of a row in a block
constexpr int SPLITS = ROW_BLOCKS * ROW_WARPS;
constexpr int LANES = HEAD_DIM / 8;                      // lanes with a position: 16 bytes each
constexpr int POSITIONS = GROUP_HEADS > 1 ? 2 : 4;       // loaded at once by such lanes, as registers allow
constexpr int TILE = POSITIONS * (32 / LANES);
static_assert(BLOCK_SIZE % TILE == 0 && BLOCK_ROWS <= WARPS && HEADS_PER_KV % GROUP_HEADS == 0);
static_assert(QKV_SIZE % (CTAS * 16) == 0 && BLOCK_PAIRS % 8 == 0 && HIDDEN % IN_COLUMNS == 0);
static_assert(IN_COLUMNS % (WARPS * 32) == 0 && ATTENDED % O_COLUMNS == 0 && ACTIVATED % DOWN_COLUMNS == 0);
static_assert(BLOCK_HIDDEN % (O_TILES * 16) == 0 && BLOCK_HIDDEN % (DOWN_TILES * 16) == 0);

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
  u64* stamps;            // [blocks, 16], where compiled in: cycles; 14, 15: ns of the first and the last
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

#ifndef UNROLL
#define UNROLL 1
#endif
constexpr int CHUNK_UNROLL = UNROLL;
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
struct AttentionMemory : Memory {
  static constexpr int heads = align(sums + QKV_TILES * WARPS * 16 * ROWS * 4);
  static constexpr int cos_sin = heads + BLOCK_ROWS * QKV_SIZE * 2;
  static constexpr int head_norms = cos_sin + BLOCK_ROWS * HEAD_DIM * 4;
  static constexpr int merged = align(head_norms + 2 * HEAD_DIM * 2);
  static constexpr int merged_stats = merged + ROWS * ROW_BLOCKS * GROUP_HEADS * HEAD_DIM * 4;
  static constexpr int output = align(merged_stats + ROWS * ROW_BLOCKS * GROUP_HEADS * 8);
  static constexpr int ring = align(output + ROWS * pitch(ATTENDED));
};
struct MlpMemory : Memory {
  static constexpr int output = align(sums + GATE_UP_TILES * WARPS * 16 * ROWS * 4);
  static constexpr int ring = align(output + ROWS * pitch(ACTIVATED));
};
static_assert(AttentionMemory::ring <= ATTENTION_FIXED_BYTES && MlpMemory::ring <= MLP_FIXED_BYTES);
static_assert(ATTENTION_STAGES <= 32 && MLP_STAGES <= 32);

DEVICE void stamp(const Arguments& arguments, int index) {
#ifdef STAMPS
  if (thread_index() == 0) {
    u64* stamps = arguments.stamps + block_index() * 16;
    stamps[index] = cycles();
    stamps[index == 0 ? 14 : 15] = time_ns();
  }
#endif
}

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
#pragma unroll CHUNK_UNROLL
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

// ---- attention

struct Sequence {
  int row;         // of the step; -1: none
  int length;      // tokens in the cache, without the new one; -1: padding
  int split;       // of SPLITS: its tiles are split, split + SPLITS, ...
  const int* table;
};

DEVICE Sequence find_sequence(const Arguments& arguments, int rank) {
  const int warp = thread_index() / 32, row = rank / ROW_BLOCKS * BLOCK_ROWS + warp / ROW_WARPS;
  if (row >= arguments.rows) return {-1, -1, 0, nullptr};
  const int split = rank % ROW_BLOCKS * ROW_WARPS + warp % ROW_WARPS;
  return {row, arguments.seq_lens[row] - 1, split, arguments.block_tables + row * arguments.table_stride};
}

DEVICE const u16* tile_address(const Arguments& arguments, const Sequence& sequence, int kv_head, int tile) {
  const i64 block = sequence.table[tile / (BLOCK_SIZE / TILE)], token = tile % (BLOCK_SIZE / TILE) * TILE;
  return arguments.kv_cache + block * arguments.block_stride + kv_head * arguments.head_stride +
         token * arguments.token_stride;
}

// Before `wait_for_inputs`: K and V of earlier steps to L2, tables to shared memory.
DEVICE void prepare_attention(const Arguments& arguments, int rank, int kv_head) {
  char* memory = shared_memory();
  const Sequence sequence = find_sequence(arguments, rank);
  const int lane = thread_index() % 32, tiles = (sequence.length + TILE - 1) / TILE;
  const int tile = sequence.split + lane * SPLITS;
  if (sequence.row >= 0 && tile < tiles && arguments.token_stride == HEAD_DIM) {
    const u16* from = tile_address(arguments, sequence, kv_head, tile);
    prefetch(from, TILE * HEAD_DIM * 2);
    prefetch(from + arguments.value_stride, TILE * HEAD_DIM * 2);
  }
  float* cos_sin = reinterpret_cast<float*>(memory + AttentionMemory::cos_sin);
  for (int i = thread_index(); i < BLOCK_ROWS * HEAD_DIM; i += CONSUMERS) {
    const int row = rank / ROW_BLOCKS * BLOCK_ROWS + i / HEAD_DIM;
    const int length = row < arguments.rows ? arguments.seq_lens[row] - 1 : 0;
    cos_sin[i] = arguments.cos_sin[static_cast<i64>(length < 0 ? 0 : length) * HEAD_DIM + i % HEAD_DIM];
  }
  u16* norms = reinterpret_cast<u16*>(memory + AttentionMemory::head_norms);
  if (arguments.q_norm != nullptr)
    for (int i = thread_index(); i < 2 * HEAD_DIM; i += CONSUMERS)
      norms[i] = i < HEAD_DIM ? arguments.q_norm[i] : arguments.k_norm[i - HEAD_DIM];
}

DEVICE void unpack(const Vector& from, float (&to)[8]) {
  const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[2 * i] = low_bf16(words[i]);
    to[2 * i + 1] = high_bf16(words[i]);
  }
}

// 8 elements of a head after norm and rotation, as bf16. `norm`: in shared memory; null: none.
DEVICE Vector rotate(const Arguments& arguments, const u16* head, const u16* norm, const float* cos_sin) {
  const int part = thread_index() % LANES, angle = part % (LANES / 2) * 8;
  float x[8];
  unpack(load_vector(head + part * 8), x);
  if (norm != nullptr) {
    float weight[8], square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) square += x[i] * x[i];
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) square += from_lane_xor(square, mask);
    const float factor = inverse_sqrt(square / HEAD_DIM + static_cast<float>(arguments.head_eps));
    unpack(load_vector(norm + part * 8), weight);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = x[i] * factor * weight[i];
  }
  const float sign = part < LANES / 2 ? -1.0f : 1.0f;
  float rotated[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const Pair cos = load_pair(cos_sin + angle + i), sin = load_pair(cos_sin + HEAD_DIM / 2 + angle + i);
    rotated[i] = x[i] * cos.x + sign * from_lane_xor(x[i], LANES / 2) * sin.x;
    rotated[i + 1] = x[i + 1] * cos.y + sign * from_lane_xor(x[i + 1], LANES / 2) * sin.y;
  }
  return {pack_bf16(rotated[0], rotated[1]), pack_bf16(rotated[2], rotated[3]), pack_bf16(rotated[4], rotated[5]),
          pack_bf16(rotated[6], rotated[7])};
}

struct KvTile {
  Vector k[POSITIONS], v[POSITIONS];
};

// Position i of this lane is tile * TILE + i * (32 / LANES) + its lane group; zeros past the end.
DEVICE void load_tile(KvTile& to, const Arguments& arguments, const Sequence& sequence, int kv_head, int tile) {
  const bool is_tile = tile * TILE < sequence.length;
  const int first = thread_index() % 32 / LANES, part = thread_index() % LANES;
  const u16* from = is_tile ? tile_address(arguments, sequence, kv_head, tile) : nullptr;
#pragma unroll
  for (int i = 0; i < POSITIONS; i++) {
    const int token = i * (32 / LANES) + first;
    to.k[i] = to.v[i] = {0, 0, 0, 0};
    if (tile * TILE + token < sequence.length) {
      const u16* at = from + token * arguments.token_stride + part * 8;
      to.k[i] = load_vector(at);
      to.v[i] = load_vector(at + arguments.value_stride);
    }
  }
}

struct Attended {
  float max[GROUP_HEADS], sum[GROUP_HEADS], acc[GROUP_HEADS][8];
};

// `count` positions of a lane group are added; scores are base 2.
template <int count>
DEVICE void attend(Attended& to, const float (&q)[GROUP_HEADS][8], const Vector* k, const Vector* v, int valid) {
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; head++) {
    float scores[count], new_max = to.max[head];
#pragma unroll
    for (int i = 0; i < count; i++) {
      float x[8];
      unpack(k[i], x);
      scores[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++) scores[i] += q[head][j] * x[j];
    }
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2)
#pragma unroll
      for (int i = 0; i < count; i++) scores[i] += from_lane_xor(scores[i], mask);
#pragma unroll
    for (int i = 0; i < count; i++)
      if (i < valid) new_max = maximum(new_max, scores[i]);
    const float rescale = exp2_fast(to.max[head] - new_max);
    to.max[head] = new_max;
    to.sum[head] *= rescale;
#pragma unroll
    for (int j = 0; j < 8; j++) to.acc[head][j] *= rescale;
#pragma unroll
    for (int i = 0; i < count; i++) {
      float x[8];
      const float p = i < valid ? exp2_fast(scores[i] - new_max) : 0.0f;
      unpack(v[i], x);
      to.sum[head] += p;
#pragma unroll
      for (int j = 0; j < 8; j++) to.acc[head][j] += p * x[j];
    }
  }
}

DEVICE void merge_lanes(Attended& of) {
#pragma unroll
  for (int mask = LANES; mask < 32; mask *= 2)
#pragma unroll
    for (int head = 0; head < GROUP_HEADS; head++) {
      const float new_max = maximum(of.max[head], from_lane_xor(of.max[head], mask));
      const float rescale = exp2_fast(of.max[head] - new_max);
      of.max[head] = new_max;
      of.sum[head] *= rescale;
      of.sum[head] += from_lane_xor(of.sum[head], mask);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        of.acc[head][j] *= rescale;
        of.acc[head][j] += from_lane_xor(of.acc[head][j], mask);
      }
    }
}

// A warp's splits of its row, to shared memory: per head HEAD_DIM sums, the maximum and the sum of the weights. `tile`
// holds the first one.
DEVICE void attend_splits(const Arguments& arguments, const Sequence& sequence, KvTile& tile, int cluster) {
  char* memory = shared_memory();
  const int warp = thread_index() / 32, lane = thread_index() % 32, part = lane % LANES;
  const int kv_head = cluster * GROUP_HEADS / HEADS_PER_KV, row_in_block = warp / ROW_WARPS;
  const u16* heads = reinterpret_cast<const u16*>(memory + AttentionMemory::heads) + row_in_block * QKV_SIZE;
  const float* cos_sin = reinterpret_cast<const float*>(memory + AttentionMemory::cos_sin) + row_in_block * HEAD_DIM;
  const u16* norms = reinterpret_cast<const u16*>(memory + AttentionMemory::head_norms);
  const bool has_norm = arguments.q_norm != nullptr;
  const float scale = static_cast<float>(arguments.scale_log2);
  float q[GROUP_HEADS][8];
  Attended result;
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; head++) {
    unpack(rotate(arguments, heads + head * HEAD_DIM, has_norm ? norms : nullptr, cos_sin), q[head]);
    result.max[head] = -1.0e30f;
    result.sum[head] = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      q[head][j] *= scale;
      result.acc[head][j] = 0.0f;
    }
  }
  if (sequence.split == SPLITS - 1 && sequence.length >= 0) {  // the new token: this split has the fewest tiles
    const Vector k = rotate(arguments, heads + ATTENDED, has_norm ? norms + HEAD_DIM : nullptr, cos_sin);
    const Vector v = load_vector(heads + ATTENDED + HEAD_DIM + part * 8);
    attend<1>(result, q, &k, &v, lane < LANES ? 1 : 0);
    const i64 slot = arguments.slots[sequence.row];
    if (slot >= 0 && lane < LANES && cluster * GROUP_HEADS % HEADS_PER_KV == 0) {
      u16* to = arguments.kv_cache + slot / BLOCK_SIZE * arguments.block_stride + kv_head * arguments.head_stride +
                slot % BLOCK_SIZE * arguments.token_stride + part * 8;
      *reinterpret_cast<Vector*>(to) = k;
      *reinterpret_cast<Vector*>(to + arguments.value_stride) = v;
    }
  }
  for (int index = sequence.split; index * TILE < sequence.length; index += SPLITS) {
    if (index != sequence.split) load_tile(tile, arguments, sequence, kv_head, index);
    const int left = sequence.length - index * TILE - lane / LANES;
    attend<POSITIONS>(result, q, tile.k, tile.v, left <= 0 ? 0 : (left - 1) / (32 / LANES) + 1);
  }
  merge_lanes(result);
  float* to = reinterpret_cast<float*>(memory + Memory::input) + warp * GROUP_HEADS * (HEAD_DIM + 2);
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; head++, to += HEAD_DIM + 2) {
    if (lane == 0) {
      to[HEAD_DIM] = result.max[head];
      to[HEAD_DIM + 1] = result.sum[head];
    }
    if (lane < LANES)
#pragma unroll
      for (int j = 0; j < 8; j++) to[part * 8 + j] = result.acc[head][j];
  }
}

// The splits of this block merged, to all blocks.
DEVICE void send_splits(const Arguments& arguments, int rank, u64* barrier) {
  char* memory = shared_memory();
  float* merged = reinterpret_cast<float*>(memory + AttentionMemory::merged);
  float* stats = reinterpret_cast<float*>(memory + AttentionMemory::merged_stats);
  spread<BLOCK_ROWS * GROUP_HEADS * HEAD_DIM / 2, CTAS>([&](int item, int first, int step) {
    const int column = item * 2 % HEAD_DIM, head = item * 2 / HEAD_DIM % GROUP_HEADS, in_block = item * 2 / ATTENDED;
    const int row = rank / ROW_BLOCKS * BLOCK_ROWS + in_block;
    if (row >= arguments.rows) return;
    const float* parts = reinterpret_cast<const float*>(memory + Memory::input) +
                         (in_block * ROW_WARPS * GROUP_HEADS + head) * (HEAD_DIM + 2);
    constexpr int stride = GROUP_HEADS * (HEAD_DIM + 2);
    float max = -1.0e30f, sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_WARPS; i++) max = maximum(max, parts[i * stride + HEAD_DIM]);
#pragma unroll
    for (int i = 0; i < ROW_WARPS; i++) {
      const Pair stats = load_pair(parts + i * stride + HEAD_DIM), part = load_pair(parts + i * stride + column);
      const float scale = exp2_fast(stats.x - max);
      sum += stats.y * scale;
      low += part.x * scale;
      high += part.y * scale;
    }
    const int split = (row * ROW_BLOCKS + rank % ROW_BLOCKS) * GROUP_HEADS + head;
    for (int to = first; to < CTAS; to += step) {
      send(to, merged + split * HEAD_DIM + column, low, high, barrier);
      if (column == 0) send(to, stats + split * 2, max, sum, barrier);
    }
  });
}
DEVICE u32 split_bytes(int rows) { return rows * ROW_BLOCKS * GROUP_HEADS * (HEAD_DIM + 2) * 4; }

// The result of attention, bf16, as input of the second product after the next `block_sync`.
DEVICE void merge_splits(const Arguments& arguments) {
  char* memory = shared_memory();
  const float* merged = reinterpret_cast<const float*>(memory + AttentionMemory::merged);
  const float* stats = reinterpret_cast<const float*>(memory + AttentionMemory::merged_stats);
  for (int item = thread_index(); item < arguments.rows * ATTENDED / 2; item += CONSUMERS) {
    const int column = item * 2 % HEAD_DIM, head = item * 2 / HEAD_DIM % GROUP_HEADS, row = item * 2 / ATTENDED;
    const int first = row * ROW_BLOCKS * GROUP_HEADS + head;
    float max = -1.0e30f, sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) max = maximum(max, stats[(first + i * GROUP_HEADS) * 2]);
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS; i++) {
      const int split = first + i * GROUP_HEADS;
      const Pair stat = load_pair(stats + split * 2), part = load_pair(merged + split * HEAD_DIM + column);
      const float scale = exp2_fast(stat.x - max);
      sum += stat.y * scale;
      low += part.x * scale;
      high += part.y * scale;
    }
    const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
    char* to = memory + AttentionMemory::output + row * pitch(ATTENDED) + (head * HEAD_DIM + column) * 2;
    *reinterpret_cast<u32*>(to) = pack_bf16(low * factor, high * factor);
  }
}

// Registers: of the 16,384 of a quarter of a multiprocessor, 3 warps of each kernel take at most 16,128.
KERNEL(ATTENTION_REGISTERS) attention_block(const Arguments arguments) {
#ifndef LATE_LAUNCH
  launch_dependents();
#endif
  char* memory = shared_memory();
  u64* barriers = reinterpret_cast<u64*>(memory + Memory::barriers);
  const int rank = cluster_rank(), cluster = block_index() / CTAS, rows = arguments.rows;
  const int kv_head = cluster * GROUP_HEADS / HEADS_PER_KV;
  Ring<ATTENTION_STAGES, AttentionMemory::ring, QKV_TILES, ATTENDED, O_TILES, O_COLUMNS> ring;
  const int first_row = rank / ROW_BLOCKS * BLOCK_ROWS;
  const int rows_here = rows <= first_row ? 0 : rows - first_row < BLOCK_ROWS ? rows - first_row : BLOCK_ROWS;
  if (thread_index() >= CONSUMERS) {
    const auto weight_row = [&](int tile, int half) {
      const int output = (rank * QKV_TILES + tile) * 16 + half * 8;
      if (output < ATTENDED) return cluster * ATTENDED + output;
      const int first = HEADS * HEAD_DIM + kv_head * HEAD_DIM + output - ATTENDED;
      return output < ATTENDED + HEAD_DIM ? first : first + (KV_HEADS - 1) * HEAD_DIM;
    };
    if (thread_index() == CONSUMERS) {
      ring.init();
      for (int i = 0; i < 3; i++) barrier_init(barriers + i, 1);
      barriers_ready();
      barrier_expect(barriers, norm_bytes(rows));
      barrier_expect(barriers + 1, rows_here * QKV_SIZE * 2);
      barrier_expect(barriers + 2, split_bytes(rows));
    }
    warp_sync();
    cluster_arrive();
    ring.produce(arguments, rank, cluster, weight_row);
    cluster_wait();
    return;
  }
  stamp(arguments, 0);
  load_norm(arguments, rank);
  prepare_attention(arguments, rank, kv_head);
  block_sync(CONSUMERS);
  cluster_arrive();
  cluster_wait();
  stamp(arguments, 1);
  wait_for_inputs();
#ifdef LATE_LAUNCH
  launch_dependents();
#endif
  stamp(arguments, 2);
  add_and_norm(arguments, rank, cluster, barriers);
  stamp(arguments, 3);
  barrier_wait(barriers, 0);
  stamp(arguments, 4);
  find_factors(arguments);
  multiply_in<QKV_TILES>(ring, rows);
  stamp(arguments, 5);
  const Sequence sequence = find_sequence(arguments, rank);
  KvTile tile;
  load_tile(tile, arguments, sequence, kv_head, sequence.split);
  block_sync(CONSUMERS);
  // q, k and v of each row, to the blocks that attend for it.
  spread<QKV_TILES * 8 * ROWS, ROW_BLOCKS>([&](int item, int first, int step) {
    const int pair = item % (QKV_TILES * 8), row = item / (QKV_TILES * 8), tile = pair / 8, in_tile = pair % 8 * 2;
    if (row >= rows) return;
    const Pair outputs = outputs_of(tile, in_tile, row);
    const u32 value = pack_bf16(outputs.x, outputs.y);
    u16* to = reinterpret_cast<u16*>(memory + AttentionMemory::heads) + row % BLOCK_ROWS * QKV_SIZE;
    const int begin = row / BLOCK_ROWS * ROW_BLOCKS;
    for (int block = first; block < ROW_BLOCKS; block += step)
      send(begin + block, to + (rank * QKV_TILES + tile) * 16 + in_tile, value, barriers + 1);
  });
  stamp(arguments, 6);
  barrier_wait(barriers + 1, 0);
  stamp(arguments, 7);
  if (sequence.row >= 0) attend_splits(arguments, sequence, tile, cluster);
  stamp(arguments, 8);
  block_sync(CONSUMERS);
  send_splits(arguments, rank, barriers + 2);
  stamp(arguments, 9);
  barrier_wait(barriers + 2, 0);
  stamp(arguments, 10);
  merge_splits(arguments);
  block_sync(CONSUMERS);
  stamp(arguments, 11);
  multiply_out<ATTENDED, O_TILES, O_COLUMNS>(ring, arguments, memory + AttentionMemory::output, rank, cluster);
  stamp(arguments, 12);
}

DEVICE float silu(float x) { return x / (1.0f + exp2_fast(x * -1.4426950408889634f)); }

KERNEL(MLP_REGISTERS) mlp_block(const Arguments arguments) {
#ifndef LATE_LAUNCH
  launch_dependents();
#endif
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
  stamp(arguments, 0);
  load_norm(arguments, rank);
  block_sync(CONSUMERS);
  cluster_arrive();
  cluster_wait();
  stamp(arguments, 1);
  wait_for_inputs();
#ifdef LATE_LAUNCH
  launch_dependents();
#endif
  stamp(arguments, 2);
  add_and_norm(arguments, rank, cluster, barriers);
  stamp(arguments, 3);
  barrier_wait(barriers, 0);
  stamp(arguments, 4);
  find_factors(arguments);
  multiply_in<GATE_UP_TILES>(ring, rows);
  stamp(arguments, 5);
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
  stamp(arguments, 6);
  barrier_wait(barriers + 1, 0);
  stamp(arguments, 7);
  multiply_out<ACTIVATED, DOWN_TILES, DOWN_COLUMNS>(ring, arguments, memory + MlpMemory::output, rank, cluster);
  stamp(arguments, 8);
}
