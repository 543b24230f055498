// What the two kernels of a decoder layer for a few rows, one token each, have in common: `attention_block` computes
// norm, qkv, attention and o, `mlp_block` norm, gate, up and down.
//
// A cluster of CTAS thread blocks owns the query heads [cluster * GROUP_HEADS, ...) of the first kernel with their KV
// head, and a slice of the intermediate size of the second. Its blocks exchange activations through distributed shared
// memory. Only the residual stream goes through global memory: a kernel leaves a partial sum of each cluster, and the
// next one adds them to the residual in a fixed order.
//
// Each block has a producer warp, which copies weights into a ring of slots in shared memory. It does not wait for the
// kernel before, so memory keeps streaming. In all products the rows are the 16-row operand of an mma and 8 rows of a
// weight its 8-column one, so that the 16 bytes that a lane loads of a weight row are operands as they are; see `Sums`.
// The order of the inputs in an mma is free: a lane's bytes of a weight row and of an input row are the same inputs.
// The bits of a row do not depend on the other rows.
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
constexpr int SPLIT_FLOATS = HEAD_DIM + 4;               // of a head of a split: sums, maximum, sum of weights; padding
constexpr int GROUP = 32;                                // inputs that a warp multiplies at once: 64 bytes of a row
static_assert(HIDDEN % IN_COLUMNS == 0 && IN_COLUMNS % (WARPS * GROUP) == 0);

// Rows in shared memory start 64 bytes apart modulo 128: reading two of them at once uses all banks.
CONSTEXPR int pitch(int columns) { return columns * 2 + (columns % 64 ? 0 : 64); }
CONSTEXPR int maximum_of(int a, int b) { return a > b ? a : b; }
CONSTEXPR int align(int bytes) { return (bytes + 127) / 128 * 128; }

struct Arguments {
  const float* partials;  // [clusters, rows, HIDDEN] of the kernel before; null: there is none
  const u16* residual;    // [rows, HIDDEN]
  u16* residual_out;      // the same plus the partial sums
  float* partials_out;
  const u16* norm;        // [HIDDEN]
  const u16* weight_in;   // [outputs, HIDDEN] of qkv; of gate and up
  const u16* weight_out;  // [HIDDEN, inputs] of o; of down
  i64 rows;
  double eps;
  // Attention only. Strides in elements; the tokens of a head in a block are contiguous.
  u16* kv_cache;          // [num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
  i64 block_stride, value_stride, head_stride;
  const int* seq_lens;     // [rows], with the new token; 0: padding
  const int* block_tables;
  i64 table_stride;
  const i64* slots;       // [rows]; negative: K and V are not written
  const float* cos_sin;   // [positions, HEAD_DIM]
  const u16* q_norm;      // [HEAD_DIM]
  const u16* k_norm;
  double head_eps, scale_log2;
};

constexpr int BARRIER_BYTES = 128;  // of those that blocks of a cluster send to
struct Memory {
  static constexpr int ring_barriers = 0;  // full and empty, of up to 32 slots
  static constexpr int barriers = ring_barriers + 2 * 32 * 8;
  static constexpr int factors = barriers + BARRIER_BYTES;
  static constexpr int squares = factors + 64;
  static constexpr int norm = squares + ROWS * SQUARES * 4;
  static constexpr int input = align(norm + BLOCK_HIDDEN * 2);
  // Later the splits of attention, of the warps.
  static constexpr int splits_bytes = WARPS * GROUP_HEADS * SPLIT_FLOATS * 4;
  static constexpr int sums = align(input + maximum_of(ROWS * pitch(HIDDEN), splits_bytes));
};

// The inputs of the second product that a cluster has, MOST groups at most, in chunks of `per_chunk`; the last one may
// have fewer. A stage has a chunk of TILES * 16 rows, and WARPS / TILES warps share the groups of a tile.
template <int TILES, int CHUNKS, int MOST>
struct OutGroups {
  static constexpr int rows = TILES * 16, blocks = BLOCK_HIDDEN / rows, chunks = CHUNKS, splits = WARPS / TILES;
  static constexpr int per_warp = ((MOST + CHUNKS - 1) / CHUNKS + splits - 1) / splits;
  static constexpr int per_chunk = CHUNKS == 1 ? MOST : per_warp * splits;
  static constexpr int padded = CHUNKS * per_warp * splits;

  int first, count;
  int size(int chunk) const { return chunk < CHUNKS - 1 ? per_chunk : count - chunk * per_chunk; }
};

// One after the other: tiles of 16 rows of the first weight in chunks of IN_COLUMNS, then the stages of `Groups`.
template <int STAGES, int RING, int SLOT_BYTES>
struct Ring {
  static constexpr int in_chunks = HIDDEN / IN_COLUMNS;

  char* memory = shared_memory();
  u64* full = reinterpret_cast<u64*>(memory + Memory::ring_barriers);
  u64* empty = full + 32;
  int slot = 0;
  u32 phase = 0;

  char* data() const { return memory + RING + slot * SLOT_BYTES; }
  void advance() {
    if (++slot == STAGES) {
      slot = 0;
      phase ^= 1;
    }
  }
  // By one thread.
  void init() {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, WARPS);
    }
  }
  // By the producer warp. `in_row(tile, half)`: the first of 8 rows of the first weight. All addresses are the same in
  // all lanes, so that they are computed in uniform registers: a copy takes its operands from there, and with addresses
  // of lanes each takes 110 cycles.
  template <class InRow, class Groups>
  void produce(const Arguments& arguments, int rank, int in_tiles, InRow in_row, const Groups& groups,
                          int all_inputs) {
    const bool is_elected = elect_lane();
#pragma unroll 1
    for (int stage = 0; stage < in_tiles * in_chunks; stage++) {
      barrier_wait(empty + slot, phase ^ 1);
      if (is_elected) {
        constexpr int bytes = IN_COLUMNS * 2;
        barrier_expect(full + slot, 16 * bytes);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const i64 row = in_row(stage / in_chunks, half);
          const u16* from = arguments.weight_in + row * HIDDEN + stage % in_chunks * IN_COLUMNS;
          char* to = data() + half * (8 * bytes + 64);
#pragma unroll
          for (int i = 0; i < 8; i++) copy_async(to + i * bytes, from + i * HIDDEN, bytes, full + slot);
        }
      }
      warp_sync();
      advance();
    }
    const u16* first = arguments.weight_out + static_cast<i64>(rank) * BLOCK_HIDDEN * all_inputs + groups.first * GROUP;
#pragma unroll 1
    for (int stage = 0; stage < Groups::blocks * Groups::chunks; stage++) {
      barrier_wait(empty + slot, phase ^ 1);
      if (is_elected) {
        const int chunk = stage % Groups::chunks, bytes = groups.size(chunk) * 64;
        barrier_expect(full + slot, Groups::rows * bytes);
        const u16* from = first + static_cast<i64>(stage / Groups::chunks) * Groups::rows * all_inputs;
        from += chunk * (Groups::per_chunk * GROUP);
#pragma unroll 16
        for (int i = 0; i < Groups::rows; i++)
          copy_async(data() + i * bytes + i / (Groups::rows / 2) * 64, from + i * all_inputs, bytes, full + slot);
      }
      warp_sync();
      advance();
    }
  }
  void await() { barrier_wait(full + slot, phase); }
  // What this warp needs of the slot has been loaded.
  void release() {
    warp_sync();
    if (thread_index() % 32 == 0) barrier_arrive(empty + slot);
    advance();
  }
};

// The start of a kernel. The barriers expect so many bytes each; true: this is the producer warp, which is done.
template <class AnyRing, int NUM_BARRIERS, class InRow, class Groups>
DEVICE bool begin(AnyRing& ring, const Arguments& arguments, u64* barriers, const u32 (&expected)[NUM_BARRIERS],
                  int rank, int in_tiles, InRow in_row, const Groups& groups, int all_inputs) {
  launch_dependents();
  if (warp_index() < WARPS) return false;
  if (thread_index() == CONSUMERS) {
    ring.init();
    for (int i = 0; i < NUM_BARRIERS; i++) barrier_init(barriers + i, 1);
    barriers_ready();
    for (int i = 0; i < NUM_BARRIERS; i++) barrier_expect(barriers + i, expected[i]);
  }
  warp_sync();
  cluster_arrive();
  ring.produce(arguments, rank, in_tiles, in_row, groups, all_inputs);
  cluster_wait();
  return true;
}

struct alignas(16) Vector {
  u32 x, y, z, w;
};
DEVICE Vector load_vector(const void* from) { return *static_cast<const Vector*>(from); }

struct alignas(8) Pair {
  float x, y;
};
DEVICE Pair load_pair(const void* from) { return *static_cast<const Pair*>(from); }

// Where a pair of columns of an input row lies, in bytes: the middle two of each four pairs are exchanged.
DEVICE int input_place(int column) {
  const int pair = column / 2 % 4;
  return (column - pair * 2 + (pair == 1 ? 4 : pair == 2 ? 2 : pair * 2)) * 2;
}

// A lane's part of GROUPS groups of inputs: weight rows `low` and `high`, and of the lanes with a row their input.
template <int GROUPS>
struct Fragment {
  static constexpr int groups = GROUPS;
  Vector low[GROUPS], high[GROUPS], x[GROUPS];
};

// Sums of 8 outputs of the low and of the high rows, in chains that do not wait for each other.
//
// The 16 bytes of an input are the operand of two rows of an mma, g and g + 8: the first and second pair, and the third
// and fourth. The weight's first two pairs are multiplied with both, of which row g is right, then the others, of which
// row g + 8 is. Half of the sums mean nothing, and no register is moved.
template <int CHAINS>
struct Sums {
  float low[2 * CHAINS][4], high[2 * CHAINS][4];

  template <int GROUPS>
  void add(const Fragment<GROUPS>& of) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      const Vector &x = of.x[i], &a = of.low[i], &b = of.high[i];
      const int chain = i % CHAINS * 2;
      mma(low[chain], x.x, x.y, x.z, x.w, a.x, a.y);
      mma(high[chain], x.x, x.y, x.z, x.w, b.x, b.y);
      mma(low[chain + 1], x.x, x.y, x.z, x.w, a.z, a.w);
      mma(high[chain + 1], x.x, x.y, x.z, x.w, b.z, b.w);
    }
  }
  // Of the row `lane / 4` and the weight row (i % 2) * half + i / 2 * 4 + lane % 4, if the second half of the rows lies
  // `half` rows on.
  float of(int i) const {
    const auto& from = i < 2 ? low : high;
    float sum = from[0][i % 2] + from[1][i % 2 + 2];
#pragma unroll
    for (int chain = 1; chain < CHAINS; chain++) sum += from[2 * chain][i % 2] + from[2 * chain + 1][i % 2 + 2];
    return sum;
  }
};

// `count` sums, each of STAGES stages with GROUPS groups of inputs. One half of a stage is loaded while the other one,
// or the end of the stage before, is multiplied. `load(fragment, group, stage)` loads from a group of the present stage
// on.
template <int GROUPS, int STAGES, int CHAINS, class AnyRing, class Load, class Finish>
DEVICE void multiply_stages(AnyRing& ring, int count, Load load, Finish finish) {
  constexpr int first = (GROUPS + 1) / 2, second = GROUPS - first;
  Fragment<first> a = {};
  Fragment<second ? second : 1> b = {};
  if (count > 0) {
    ring.await();
    load(a, 0, 0);
  }
#pragma unroll 1
  for (int sum = 0; sum < count; sum++) {
    Sums<CHAINS> sums = {};
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
      if (second) load(b, first, stage);
      ring.release();
      sums.add(a);
      if (stage + 1 < STAGES || sum + 1 < count) {
        ring.await();
        load(a, 0, (stage + 1) % STAGES);
      }
      if (second) sums.add(b);
    }
    finish(sum, sums);
  }
}

// Before `wait_for_inputs`: the weight of the norm for this block's columns.
DEVICE void load_norm(const Arguments& arguments, int rank) {
  const u32* from = reinterpret_cast<const u32*>(arguments.norm + rank * BLOCK_HIDDEN);
  u32* norm = reinterpret_cast<u32*>(shared_memory() + Memory::norm);
  for (int i = thread_index(); i < BLOCK_HIDDEN / 2; i += CONSUMERS) norm[i] = from[i];
}

// The residual sum of this block's columns, times the norm's weight, to the inputs of all blocks.
template <int PARTS>  // partial sums
DEVICE void add_and_norm(const Arguments& arguments, int rank, int cluster, u64* barrier) {
  char* memory = shared_memory();
  const int lane = thread_index() % 32, rows = arguments.rows;
  const u32* norm = reinterpret_cast<const u32*>(memory + Memory::norm);
  float* squares = reinterpret_cast<float*>(memory + Memory::squares);
  for (int item = warp_index(); item < rows * NORM_CHUNKS; item += WARPS) {
    const int row = item / NORM_CHUNKS, chunk = item % NORM_CHUNKS;
    const int in_block = chunk * 64 + lane * 2, column = rank * BLOCK_HIDDEN + in_block;
    const bool is_column = in_block < BLOCK_HIDDEN;
    float low = 0.0f, high = 0.0f;
    if (is_column) {
      u32 total = *reinterpret_cast<const u32*>(arguments.residual + row * HIDDEN + column);
      if (arguments.partials != nullptr) {
        const float* from = arguments.partials + row * HIDDEN + column;
        Pair parts[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; i++) parts[i] = load_pair(from + static_cast<i64>(i) * rows * HIDDEN);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
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
        send(to, memory + Memory::input + row * pitch(HIDDEN) + input_place(column), input, barrier);
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
  for (int row = warp_index(); row < arguments.rows; row += WARPS) {
    float sum = 0.0f;
    for (int i = lane; i < SQUARES; i += 32) sum += all_squares[row * SQUARES + i];
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane == 0) factors[row] = inverse_sqrt(sum / HIDDEN + static_cast<float>(arguments.eps));
  }
}

// The first product: each warp multiplies a slice of the inputs. Its sums [tiles, WARPS, ROWS, 16] are in shared memory
// after the next `block_sync`.
template <int CHAINS, class AnyRing>
DEVICE void multiply_in(AnyRing& ring, int tiles, int rows) {
  constexpr int groups = IN_COLUMNS / (WARPS * GROUP), chunks = HIDDEN / IN_COLUMNS;
  const int warp = warp_index(), g = thread_index() % 32 / 4, t = thread_index() % 4;
  const int in_slot = (g % 2 * 8 + g / 2) * (IN_COLUMNS * 2) + g % 2 * 64 + warp * groups * 64 + t * 16;
  const char* input = ring.memory + Memory::input + g * pitch(HIDDEN) + warp * groups * 64 + t * 16;
  float* all_sums = reinterpret_cast<float*>(ring.memory + Memory::sums) + (warp * ROWS + g) * 16 + t;
  const bool has_row = g < rows;
  const auto load = [&](auto& to, int group, int chunk) {
    const char *low = ring.data() + in_slot + group * 64, *x = input + chunk * (IN_COLUMNS * 2) + group * 64;
#pragma unroll
    for (int i = 0; i < to.groups; i++) {
      to.low[i] = load_vector(low + i * 64);
      to.high[i] = load_vector(low + 4 * IN_COLUMNS * 2 + i * 64);
      if (has_row) to.x[i] = load_vector(x + i * 64);
    }
  };
  multiply_stages<groups, chunks, CHAINS>(ring, tiles, load, [&](int tile, const auto& sums) {
    float* to = all_sums + tile * (WARPS * 16 * ROWS);
    if (g < ROWS)
#pragma unroll
      for (int i = 0; i < 4; i++) to[i % 2 * 8 + i / 2 * 4] = sums.of(i);
  });
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

// The second product, of this cluster's inputs [rows, `Groups::padded` groups] at `input`: its partial sums, to global
// memory. The inputs of groups that the cluster does not have are zeros.
template <int CHAINS, class AnyRing, class Groups>
DEVICE void multiply_out(AnyRing& ring, const Arguments& arguments, const char* input, int rank, int cluster,
                         const Groups& groups) {
  constexpr int out_rows = Groups::rows, splits = Groups::splits;
  const int warp = warp_index(), g = thread_index() % 32 / 4, t = thread_index() % 4, rows = arguments.rows;
  const int tile = warp % (WARPS / splits), split = warp / (WARPS / splits);
  const int weight_row = g % 2 * (out_rows / 2) + tile * 8 + g / 2;
  const bool has_row = g < rows;
  input += g * pitch(Groups::padded * GROUP) + t * 16 + split * 64;
  float* partials = arguments.partials_out + static_cast<i64>(cluster) * rows * HIDDEN + rank * BLOCK_HIDDEN;
  float* shared = reinterpret_cast<float*>(ring.memory + Memory::input);  // [splits, ROWS, BLOCK_HIDDEN]
  const auto load = [&](auto& to, int group, int chunk) {
    const int size = groups.size(chunk);
    const char* low = ring.data() + weight_row * (size * 64) + g % 2 * 64 + t * 16;
    const char* x = input + (chunk * Groups::per_chunk + group * splits) * 64;
#pragma unroll
    for (int i = 0; i < to.groups; i++) {
      const int wanted = split + (group + i) * splits, at = wanted < size ? wanted : size - 1;
      to.low[i] = load_vector(low + at * 64);
      to.high[i] = load_vector(low + (size * 4 + at) * 64);
      if (has_row) to.x[i] = load_vector(x + i * splits * 64);
    }
  };
  constexpr int per_warp = Groups::per_warp, chunks = Groups::chunks;
  multiply_stages<per_warp, chunks, CHAINS>(ring, Groups::blocks, load, [&](int block, const auto& sums) {
    const int first = block * out_rows + tile * 8 + t;
    float* to = splits > 1 ? shared + (split * ROWS + g) * BLOCK_HIDDEN + first : partials + g * HIDDEN + first;
    if (has_row)
#pragma unroll
      for (int i = 0; i < 4; i++) to[i % 2 * (out_rows / 2) + i / 2 * 4] = sums.of(i);
  });
  if (splits == 1) return;
  block_sync(CONSUMERS);
  for (int item = thread_index(); item < rows * (BLOCK_HIDDEN / 2); item += CONSUMERS) {
    const int row = item / (BLOCK_HIDDEN / 2), column = item % (BLOCK_HIDDEN / 2) * 2;
    Pair sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < splits; i++) {
      const Pair part = load_pair(shared + (i * ROWS + row) * BLOCK_HIDDEN + column);
      sum.x += part.x;
      sum.y += part.y;
    }
    *reinterpret_cast<Pair*>(partials + row * HIDDEN + column) = sum;
  }
}

// Runs `step(item, part, parts)` for `count` items, each by up to `most` threads if there are few.
template <int count, int most, class Step>
DEVICE void spread(Step step) {
  constexpr int wanted = CONSUMERS / count, parts = wanted < 1 ? 1 : wanted > most ? most : wanted;
  for (int i = thread_index(); i < count * parts; i += CONSUMERS) step(i % count, i / count, parts);
}
