// A linear layer for the 17 to 256 rows of a decode step, with the RMSNorms on its two sides: see `DeferredRMSNorm`.
//
// A tile is ROWS rows by OUTPUTS rows of the weight. The SPLITS thread blocks of a cluster share it: each multiplies a
// range of the inputs, and then finishes a part of the tile: the others send its sums to this shared memory. They are
// added in the order of the ranges, so bits do not depend on timing. Without splits, PEERS blocks of a cluster have the
// same rows of the weight: each copies a part of them for all. A block has a producer warp, which copies the weight
// before the kernel before has finished, and a warp group for each 64 rows.
//
// M of the tensor core instructions is rows, so that what concerns a row is in four neighboring threads. The copies of
// the weight arrange its rows so that a thread has contiguous outputs: of each 8 * RUN outputs, thread t of four has
// 2 * RUN, from 2 * RUN * t on.
#include <activation.cuh>
#include <deferred_norm.cuh>

#define GATED 1     // silu(gate) * up, with the rows of gate first in the weight
#define RESIDUAL 2  // the residual sum, and its deferred norm
#define QKV 3       // heads of q and k are normed and rotated, k and v are written to the cache
#ifndef BESIDE_ATTENTION
#define BESIDE_ATTENTION 0  // QKV: a program of decode attention has room on the same multiprocessor
#endif
#ifndef BIAS
#define BIAS 0  // QKV: whether the layer has one
#endif

constexpr int GROUPS = ROWS / 64, WARPS = GROUPS * 4, CONSUMERS = WARPS * 32;
constexpr int CHUNK = 64;  // inputs, 128 bytes: the width of the swizzle
constexpr int CHUNKS = INPUTS / CHUNK / SPLITS;
constexpr int BLOCKS = OUTPUTS / 8 / SPLITS;  // blocks of 8 outputs that a warp finishes
constexpr int RUN = BLOCKS % 4 ? 2 : 4;       // blocks of which a thread's outputs are contiguous
constexpr int OWNED = WARPS / SPLITS;         // blocks of 16 rows that a thread block finishes
constexpr int ROW_BYTES = ROWS * CHUNK * 2, WEIGHT_BYTES = OUTPUTS * CHUNK * 2, STAGE = ROW_BYTES + WEIGHT_BYTES;
constexpr int SENT = BLOCKS * 512;  // bytes of a warp for another
// Shared memory next to the ring: angles of rotations, or what other thread blocks send.
#if EPILOGUE == QKV
constexpr int ANGLES = HEAD_DIM * 4 + 16;  // bytes of a row's cosines and sines: rows start at different banks
// Beside attention, the angles replace chunks LAST_CHUNKS and LAST_CHUNKS + 1, which no others follow in the ring.
constexpr int SCRATCH = BESIDE_ATTENTION ? 0 : ROWS * ANGLES, LAST_CHUNKS = CHUNKS - STAGES;
static_assert(!BESIDE_ATTENTION || (STAGES >= 3 && LAST_CHUNKS >= 0 && ROWS / 2 * ANGLES <= STAGE));
#else
constexpr int SCRATCH = SPLITS > 1 ? SPLITS * WARPS * SENT : 0;
#endif
static_assert(INPUTS % (CHUNK * SPLITS) == 0 && WARPS % SPLITS == 0 && OUTPUTS % (16 * SPLITS) == 0);
static_assert(PEERS == 1 || (SPLITS == 1 && (EPILOGUE != GATED || PEERS == 2)));
static_assert(SHARED_BYTES >= 1024 + STAGES * STAGE + SCRATCH + 512);

struct Arguments {
  TensorMap x, weight;
  const float* squares;    // [num_parts, rows] of the deferred norm of x; PARTS at most. Not for RESIDUAL
  const u16* residual;     // [rows, outputs]
  const u16* norm;         // [outputs], of the norm after
  u16* out;                // [rows, outputs]; RESIDUAL: the sum times the norm's weight; QKV: query
  u16* total;              // the residual sum
  float* squares_out;      // [outputs / OUTPUTS, rows]
  int rows, num_outputs, row_tiles, num_parts;
  int padded_rows;         // of `out`, if not QKV: those after `rows` are zeros (`row_padding.py` has the reason)
  float eps;
  // QKV
  u16* kv_cache;
  i64 block_stride, kind_stride, head_stride, offset_stride;
  const i64* slots;
  const i64* positions;
  const float* cos_sin;    // [positions, HEAD_DIM]
  const u16* q_norm;       // [HEAD_DIM]; null: none
  const u16* k_norm;
  const u16* bias;         // [all heads, HEAD_DIM], with BIAS
  float head_eps;
  int num_heads, num_kv_heads;
};

template <int words>
struct alignas(words * 4) Run {  // of 2 * words bf16
  u32 word[words];
};
using Outputs = Run<RUN>;

// The place of a thread block.
struct Block {
  char* memory;
  u32 ring, scratch, full, empty, received;  // addresses in shared memory
  int rank, peer, first_row, column;

  __device__ char* at(u32 address) const { return memory + (address - shared_address(memory)); }
};

// The producer of a block's chunks.
DEVICE void produce(const Arguments& arguments, const Block& block) {
  const u32 ring = block.ring, full = block.full, empty = block.empty;
  const int output = block.column * (EPILOGUE == GATED ? OUTPUTS / 2 : OUTPUTS), chunk = block.rank * CHUNKS;
  auto copy_weight = [&](int stage, int at) {
    const u32 barrier = full + stage * 8, to = ring + stage * STAGE + ROW_BYTES;
    barrier_expect(barrier, STAGE);
    const int first = output / (8 * RUN), ups = arguments.num_outputs / (8 * RUN);
    if (PEERS > 1) {  // a part of the tile, for all
      const int part = EPILOGUE == GATED ? block.peer * ups : block.peer * (OUTPUTS / PEERS / (8 * RUN));
      copy_weight_box_to(to + block.peer * (WEIGHT_BYTES / PEERS), arguments.weight, barrier, at * CHUNK, first + part,
                         (1 << PEERS) - 1);
      return;
    }
    copy_weight_box(to, arguments.weight, barrier, at * CHUNK, first);
    if (EPILOGUE == GATED)  // the box is half of the tile
      copy_weight_box(to + WEIGHT_BYTES / 2, arguments.weight, barrier, at * CHUNK, first + ups);
  };
  constexpr int first = CHUNKS < STAGES ? CHUNKS : STAGES;
#pragma unroll 1
  for (int i = 0; i < first; i++) copy_weight(i, chunk + i);
  wait_for_inputs();
  int stage = 0;
  u32 phase = 1;
#pragma unroll 1
  for (int i = 0; i < CHUNKS; i++) {
    if (i >= first) {
      barrier_wait(empty + stage * 8, phase);
      copy_weight(stage, chunk + i);
    }
    copy_box(ring + stage * STAGE, arguments.x, full + stage * 8, (chunk + i) * CHUNK, block.first_row);
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// An epilogue of a kind has `begin`, what is loaded before the product, and `finish`, which makes its results of sums.
#if EPILOGUE == RESIDUAL
struct Epilogue {
  static constexpr int runs = BLOCKS / RUN;
  int row;  // this thread finishes it and `row` + 8, `runs` runs of outputs
  i64 place, below;
  Outputs norm[runs], residual[2][runs];

  __device__ void begin(const Arguments& arguments, const Block& block) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = block.first_row + (block.rank * OWNED + warp / SPLITS) * 16 + lane / 4;
    place = static_cast<i64>(row) * arguments.num_outputs + block.column * OUTPUTS + warp % SPLITS * BLOCKS * 8 +
            lane % 4 * RUN * 2;
    below = place + 8 * static_cast<i64>(arguments.num_outputs);
#pragma unroll
    for (int i = 0; i < runs; i++)
      norm[i] = *reinterpret_cast<const Outputs*>(arguments.norm + place -
                                                  static_cast<i64>(row) * arguments.num_outputs + i * RUN * 8);
    wait_for_inputs();
#pragma unroll
    for (int i = 0; i < runs; i++) {
      residual[0][i] = residual[1][i] = {};
      if (row < arguments.rows)
        residual[0][i] = *reinterpret_cast<const Outputs*>(arguments.residual + place + i * RUN * 8);
      if (row + 8 < arguments.rows)
        residual[1][i] = *reinterpret_cast<const Outputs*>(arguments.residual + below + i * RUN * 8);
    }
  }

  // The sums of all ranges of the inputs, for the blocks of 8 outputs that this thread finishes.
  __device__ void add_ranges(const Block& block, const float (&sums)[OUTPUTS / 2], float (&finished)[BLOCKS * 4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (SPLITS == 1) {
#pragma unroll
      for (int i = 0; i < BLOCKS * 4; i++) finished[i] = sums[i];
      return;
    }
    cluster_wait();
    const int owner = warp / OWNED;
    const u32 barriers = address_in(owner, block.received);
    const u32 base = address_in(owner, block.scratch) + block.rank * (WARPS * SENT);
#pragma unroll
    for (int part = 0; part < SPLITS; part++) {
      const int to = warp % OWNED * SPLITS + part;
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        send(base + to * SENT + i * 512 + lane * 16, sums + (part * BLOCKS + i) * 4, barriers + to * 8);
    }
    barrier_wait(block.received + warp * 8, 0);
    const char* parts = block.at(block.scratch) + warp * SENT + lane * 16;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
      for (int k = 0; k < 4; k++) finished[i * 4 + k] = 0.0f;
#pragma unroll
      for (int part = 0; part < SPLITS; part++) {
        const float4 sent = *reinterpret_cast<const float4*>(parts + part * (WARPS * SENT) + i * 512);
        finished[i * 4] += sent.x;
        finished[i * 4 + 1] += sent.y;
        finished[i * 4 + 2] += sent.z;
        finished[i * 4 + 3] += sent.w;
      }
    }
  }

  __device__ void finish(const Arguments& arguments, const Block& block, const float (&sums)[OUTPUTS / 2]) {
    float finished[BLOCKS * 4];
    add_ranges(block, sums, finished);
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < runs; i++) {
        Outputs total, weighted;
#pragma unroll
        for (int k = 0; k < RUN; k++) {
          const float* sum = finished + (i * RUN + k) * 4 + half * 2;
          const u32 rounded = pack_bf16(sum[0], sum[1]), added = residual[half][i].word[k], scale = norm[i].word[k];
          total.word[k] = pack_bf16(low_bf16(rounded) + low_bf16(added), high_bf16(rounded) + high_bf16(added));
          const float low = low_bf16(total.word[k]), high = high_bf16(total.word[k]);
          weighted.word[k] = pack_bf16(low * low_bf16(scale), high * high_bf16(scale));
          squares[half] += low * low + high * high;
        }
        const i64 to = (half ? below : place) + i * RUN * 8;
        if (row + half * 8 < arguments.rows) {
          *reinterpret_cast<Outputs*>(arguments.total + to) = total;
          *reinterpret_cast<Outputs*>(arguments.out + to) = weighted;
        } else if (row + half * 8 < arguments.padded_rows) {
          *reinterpret_cast<Outputs*>(arguments.out + to) = Outputs{};
        }
      }
    write_squares(arguments, block, squares);
  }

  // The warps of a row have different outputs. The ring is free: all of it has been multiplied.
  __device__ void write_squares(const Arguments& arguments, const Block& block, float (&squares)[2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      squares[half] += from_lane_xor(squares[half], 1);
      squares[half] += from_lane_xor(squares[half], 2);
    }
    float* shared = reinterpret_cast<float*>(block.at(block.ring));
    block_sync(CONSUMERS);
    if (lane % 4 == 0) {
      shared[warp * 16 + lane / 4] = squares[0];
      shared[warp * 16 + lane / 4 + 8] = squares[1];
    }
    block_sync(CONSUMERS);
    if (threadIdx.x < OWNED * 16) {
      const int mine = block.first_row + block.rank * OWNED * 16 + threadIdx.x;
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < SPLITS; part++)
        sum += shared[(threadIdx.x / 16 * SPLITS + part) * 16 + threadIdx.x % 16];
      if (mine < arguments.rows) arguments.squares_out[block.column * arguments.rows + mine] = sum;
    }
  }
};

#elif EPILOGUE == GATED
struct Epilogue {
  int warp_row;
  Factor factor_of;

  __device__ void begin(const Arguments& arguments, const Block& block) {
    warp_row = block.first_row + threadIdx.x / 32 * 16;
    wait_for_inputs();
    factor_of.load(arguments.squares, arguments.num_parts, arguments.rows, warp_row);
  }

  __device__ void finish(const Arguments& arguments, const Block& block, float (&sums)[OUTPUTS / 2]) {
    constexpr int width = OUTPUTS / 2;
    const int lane = threadIdx.x % 32;
    const float factor = factor_of.get(arguments.eps);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      scale_half(sums, half, factor);
      const int row = warp_row + lane / 4 + half * 8;
      u16* to = arguments.out + static_cast<i64>(row) * arguments.num_outputs + block.column * width +
                lane % 4 * RUN * 2;
      if (row < arguments.padded_rows) {
#pragma unroll
        for (int i = 0; i < width / (8 * RUN); i++) {
          Outputs result;
#pragma unroll
          for (int k = 0; k < RUN; k++) {
            const float *gate = sums + (i * RUN + k) * 4 + half * 2, *up = gate + OUTPUTS / 4;
            result.word[k] = row < arguments.rows ? activate_and_mul(gate, up) : 0;
          }
          *reinterpret_cast<Outputs*>(to + i * RUN * 8) = result;
        }
      }
    }
  }
};

#else
// A head in four threads: of each 32 elements 8 contiguous ones, from 8 * t on.
DEVICE void write_head(const Arguments& arguments, const float (&sums)[64], int half_row, int first, int head, int row,
                       const char* angles, i64 slot) {
  constexpr int groups = HEAD_DIM / 32, half = groups / 2;
  const int t = threadIdx.x % 4;
  const bool is_value = head >= arguments.num_heads + arguments.num_kv_heads, is_query = head < arguments.num_heads;
  float x[groups][8];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < groups; i++) {
#if BIAS
    const Run<4> bias = *reinterpret_cast<const Run<4>*>(arguments.bias + head * HEAD_DIM + i * 32 + t * 8);
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float sum = sums[((first + i) * 4 + k / 2) * 4 + half_row * 2 + k % 2];
#if BIAS
      sum += k % 2 ? high_bf16(bias.word[k / 2]) : low_bf16(bias.word[k / 2]);
#endif
      x[i][k] = round_bf16(sum);
      squares += x[i][k] * x[i][k];
    }
  }
  squares += from_lane_xor(squares, 1);
  squares += from_lane_xor(squares, 2);
  if (row >= arguments.rows || (slot < 0 && !is_query)) return;
  u16* to = arguments.out + (static_cast<i64>(row) * arguments.num_heads + head) * HEAD_DIM;
  if (!is_query) {
    const int kv_head = head - arguments.num_heads - (is_value ? arguments.num_kv_heads : 0);
    to = arguments.kv_cache + slot / BLOCK_SIZE * arguments.block_stride + slot % BLOCK_SIZE * arguments.offset_stride +
         is_value * arguments.kind_stride + kv_head * arguments.head_stride;
  }
  Run<4> packed[groups];
  if (!is_value) {
    const float* cos_sin = reinterpret_cast<const float*>(angles) + t * 8;
    const u16* weight = is_query ? arguments.q_norm : arguments.k_norm;
    if (weight != nullptr) {
      const float factor = 1.0f / sqrtf(squares / HEAD_DIM + arguments.head_eps);
#pragma unroll
      for (int i = 0; i < groups; i++) {
        const Run<4> norm = *reinterpret_cast<const Run<4>*>(weight + i * 32 + t * 8);
#pragma unroll
        for (int k = 0; k < 8; k++)
          x[i][k] = x[i][k] * factor * (k % 2 ? high_bf16(norm.word[k / 2]) : low_bf16(norm.word[k / 2]));
      }
    }
#pragma unroll
    for (int i = 0; i < half; i++)
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        const float4 cos = *reinterpret_cast<const float4*>(cos_sin + i * 32 + k);
        const float4 sin = *reinterpret_cast<const float4*>(cos_sin + HEAD_DIM / 2 + i * 32 + k);
        const float cosines[4] = {cos.x, cos.y, cos.z, cos.w}, sines[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const float low = x[i][k + m], high = x[i + half][k + m];
          x[i][k + m] = low * cosines[m] - high * sines[m];
          x[i + half][k + m] = high * cosines[m] + low * sines[m];
        }
      }
  }
#pragma unroll
  for (int i = 0; i < groups; i++) {
#pragma unroll
    for (int k = 0; k < 4; k++) packed[i].word[k] = pack_bf16(x[i][2 * k], x[i][2 * k + 1]);
    *reinterpret_cast<Run<4>*>(to + i * 32 + t * 8) = packed[i];
  }
}

struct Epilogue {
  static constexpr int lanes = HEAD_DIM / 4;  // that copy a row's angles
  int warp_row;
  Factor factor_of;
  i64 slots[2];
  bool has_angles;  // v has none
  u32 angles_at;
  int position;  // of row `lane % 16`

  // Nothing of the slots and angles of the warp's rows depends on the kernel before.
  __device__ void begin(const Arguments& arguments, const Block& block) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, last = arguments.rows - 1;
    warp_row = block.first_row + warp * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = warp_row + lane / 4 + half * 8;
      slots[half] = row < arguments.rows ? arguments.slots[row] : 0;
    }
    has_angles = block.column * (OUTPUTS / HEAD_DIM) < arguments.num_heads + arguments.num_kv_heads;
    const int mine = warp_row + lane % 16 < last ? warp_row + lane % 16 : last;
#if BESIDE_ATTENTION
    angles_at = block.ring + (LAST_CHUNKS + warp / (WARPS / 2)) % STAGES * STAGE + warp % (WARPS / 2) * 16 * ANGLES;
    position = static_cast<int>(arguments.positions[mine]);
#else
    angles_at = block.scratch + warp * 16 * ANGLES;
    if (has_angles) {
      position = static_cast<int>(arguments.positions[mine]);
      load_angles(arguments, block.at(angles_at));
    }
#endif
    wait_for_inputs();
    factor_of.load(arguments.squares, arguments.num_parts, arguments.rows, warp_row);
  }

  __device__ void load_angles(const Arguments& arguments, char* angles) {
    constexpr int rows = 32 / lanes;
    const int lane = threadIdx.x % 32;
    float4 loaded[16 / rows];
#pragma unroll
    for (int i = 0; i < 16 / rows; i++) {
      const int from = __shfl_sync(0xffffffffu, position, i * rows + lane / lanes);
      loaded[i] = *reinterpret_cast<const float4*>(arguments.cos_sin + static_cast<i64>(from) * HEAD_DIM +
                                                   lane % lanes * 4);
    }
#pragma unroll
    for (int i = 0; i < 16 / rows; i++)
      *reinterpret_cast<float4*>(angles + (i * rows + lane / lanes) * ANGLES + lane % lanes * 16) = loaded[i];
    __syncwarp();
  }

#if BESIDE_ATTENTION
  // Replaces two chunks when all warps have multiplied them.
  __device__ void copy_angles(const Arguments& arguments) {
    block_sync(CONSUMERS);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 16; i += 32 / lanes) {
      const int to = i + lane / lanes, from = __shfl_sync(0xffffffffu, position, to);
      copy_16_bytes(angles_at + to * ANGLES + lane % lanes * 16,
                    arguments.cos_sin + static_cast<i64>(from) * HEAD_DIM + lane % lanes * 4);
    }
  }
#endif

  __device__ void finish(const Arguments& arguments, const Block& block, float (&sums)[OUTPUTS / 2]) {
    constexpr int heads = OUTPUTS / HEAD_DIM;
#if BESIDE_ATTENTION
    copies_wait();
    __syncwarp();
#endif
    const float factor = factor_of.get(arguments.eps);
    const char* angles = block.at(angles_at);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      scale_half(sums, half, factor);
      const int in_warp = threadIdx.x % 32 / 4 + half * 8;
#pragma unroll
      for (int i = 0; i < heads; i++)
        write_head(arguments, sums, half, i * (HEAD_DIM / 32), block.column * heads + i, warp_row + in_warp,
                   angles + in_warp * ANGLES, slots[half]);
    }
  }
};
#endif

extern "C" __global__ void __maxnreg__(REGISTERS) decode_product(const __grid_constant__ Arguments arguments) {
  launch_dependents();
  char* memory = shared_memory();
  const u32 ring = (shared_address(memory) + 1023) / 1024 * 1024, scratch = ring + STAGES * STAGE;
  const u32 full = scratch + SCRATCH, empty = full + STAGES * 8, received = empty + STAGES * 8;
  const int rank = blockIdx.x % SPLITS, peer = blockIdx.x % PEERS, tile = blockIdx.x / SPLITS;
  const int first_row = tile % arguments.row_tiles * ROWS, column = tile / arguments.row_tiles;
  const Block block{memory, ring, scratch, full, empty, received, rank, peer, first_row, column};
  const int warp = threadIdx.x / 32, group = warp / 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, WARPS * PEERS);
    }
    for (int i = 0; i < WARPS && SPLITS > 1; i++) {
      barrier_init(received + i * 8, 1);
      barrier_expect(received + i * 8, SPLITS * SENT);
    }
    barriers_ready();
    prefetch_map(arguments.weight);
    prefetch_map(arguments.x);
  }
  __syncthreads();
  if (SPLITS * PEERS > 1) cluster_arrive();
  if (warp == WARPS) {
    if (PEERS > 1) cluster_wait();  // they have barriers
    if (elect_lane()) produce(arguments, block);
    return;
  }

  Epilogue epilogue;
  epilogue.begin(arguments, block);
  float sums[OUTPUTS / 2];
  int stage = 0, previous = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    barrier_wait(full + stage * 8, phase);
    const u64 rows = matrix_of(ring + stage * STAGE + group * (64 * CHUNK * 2));
    const u64 weight = matrix_of(ring + stage * STAGE + ROW_BYTES);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(sums, rows + k * 2, weight + k * 2, chunk + k);
    products_commit();
    products_wait<1>();
    if (chunk > 0 && chunk - 1 + STAGES < CHUNKS) {  // it is filled again
      if (PEERS > 1) {
        if (lane < PEERS) barrier_arrive_in(lane, empty + previous * 8);
      } else if (lane == 0) {
        barrier_arrive(empty + previous * 8);
      }
    }
#if EPILOGUE == QKV && BESIDE_ATTENTION
    if (chunk == LAST_CHUNKS + 2 && epilogue.has_angles) epilogue.copy_angles(arguments);
#endif
    previous = stage;
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  products_wait<0>();
  epilogue.finish(arguments, block, sums);
}
