// The first half of a decoder layer for a few rows, one token each: norm, qkv, attention and o.
#include <layer_block.cuh>

constexpr int HEADS_PER_KV = HEADS / KV_HEADS;
constexpr int QKV_SIZE = (GROUP_HEADS + 2) * HEAD_DIM;   // outputs of a cluster: its query heads, K, V
constexpr int QKV_TILES = QKV_SIZE / CTAS / 16;
constexpr int O_GROUPS = ATTENDED / GROUP;

// Attention: blocks of a row, or rows of a block.
constexpr int ROW_BLOCKS = CTAS > ROWS ? CTAS / ROWS : 1, BLOCK_ROWS = ROWS > CTAS ? ROWS / CTAS : 1;
constexpr int ROW_WARPS = WARPS / BLOCK_ROWS;            // warps of a row in a block
constexpr int SPLITS = ROW_BLOCKS * ROW_WARPS;
constexpr int LANES = HEAD_DIM / 8;                      // lanes with a position: 16 bytes each
constexpr int POSITIONS = 2;                             // of a lane in a tile
constexpr int TILE = POSITIONS * (32 / LANES);
static_assert(BLOCK_SIZE % TILE == 0 && BLOCK_ROWS <= WARPS && HEADS_PER_KV % GROUP_HEADS == 0);
static_assert(QKV_SIZE % (CTAS * 16) == 0 && ATTENDED % GROUP == 0 && BLOCK_HIDDEN % (O_TILES * 16) == 0);
static_assert(OutGroups<O_TILES, O_CHUNKS, O_GROUPS>::padded == O_GROUPS);

struct AttentionMemory : Memory {
  static constexpr int heads = align(sums + QKV_TILES * WARPS * 16 * ROWS * 4);
  static constexpr int cos_sin = heads + BLOCK_ROWS * QKV_SIZE * 2;
  static constexpr int head_norms = cos_sin + BLOCK_ROWS * HEAD_DIM * 4;
  static constexpr int merged = align(head_norms + 2 * HEAD_DIM * 2);
  static constexpr int merged_stats = merged + ROWS * ROW_BLOCKS * GROUP_HEADS * HEAD_DIM * 4;
  static constexpr int output = align(merged_stats + ROWS * ROW_BLOCKS * GROUP_HEADS * 8);
  static constexpr int ring = align(output + ROWS * pitch(ATTENDED));
};
static_assert(AttentionMemory::ring <= ATTENTION_FIXED_BYTES && ATTENTION_STAGES <= 32);

struct Sequence {
  int row;         // of the step; -1: none
  int length;      // tokens in the cache, without the new one; -1: padding
  int split;       // of SPLITS: its tiles are split, split + SPLITS, ...
  int block;       // of lane i: the KV block of tile i of the split
  i64 slot;        // of the new token; negative: its K and V are not written
};

DEVICE const int* block_of(const Arguments& arguments, int row, int tile) {
  return arguments.block_tables + row * arguments.table_stride + tile / (BLOCK_SIZE / TILE);
}

DEVICE Sequence find_sequence(const Arguments& arguments, int rank) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int row = rank / ROW_BLOCKS * BLOCK_ROWS + warp / ROW_WARPS;
  if (row >= arguments.rows) return {-1, -1, 0, 0, -1};
  const int split = rank % ROW_BLOCKS * ROW_WARPS + warp % ROW_WARPS, length = arguments.seq_lens[row] - 1;
  const int tile = split + lane * SPLITS;
  const int block = tile * TILE < length ? *block_of(arguments, row, tile) : 0;
  return {row, length, split, block, arguments.slots[row]};
}

DEVICE const u16* tile_address(const Arguments& arguments, int block, int kv_head, int tile) {
  return arguments.kv_cache + static_cast<i64>(block) * arguments.block_stride + kv_head * arguments.head_stride +
         tile % (BLOCK_SIZE / TILE) * TILE * arguments.token_stride;
}

// Before `wait_for_inputs`: K and V of earlier steps to L2, tables to shared memory.
DEVICE void prepare_attention(const Arguments& arguments, const Sequence& sequence, int rank, int kv_head) {
  char* memory = shared_memory();
  const int tile = sequence.split + static_cast<int>(thread_index() % 32) * SPLITS;
  if (tile * TILE < sequence.length && arguments.token_stride == HEAD_DIM) {
    const u16* from = tile_address(arguments, sequence.block, kv_head, tile);
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

// The tile `count` of the split, by a whole warp. Position i of this lane is i * (32 / LANES) + its lane group; what is
// not in the cache is zeros.
DEVICE void load_tile(KvTile& to, const Arguments& arguments, const Sequence& sequence, int kv_head, int count) {
  const int tile = sequence.split + count * SPLITS, begin = tile * TILE;
  int block = from_lane(sequence.block, count % 32);
  if (count >= 32 && begin < sequence.length) block = *block_of(arguments, sequence.row, tile);
  const int first = thread_index() % 32 / LANES, part = thread_index() % LANES;
  const u16* from = tile_address(arguments, block, kv_head, tile);
#pragma unroll
  for (int i = 0; i < POSITIONS; i++) {
    const int token = i * (32 / LANES) + first;
    to.k[i] = to.v[i] = {0, 0, 0, 0};
    if (begin + token < sequence.length) {
      const u16* at = from + token * arguments.token_stride + part * 8;
      to.k[i] = load_vector(at);
      to.v[i] = load_vector(at + arguments.value_stride);
    }
  }
}

struct Attended {
  float max[GROUP_HEADS], sum[GROUP_HEADS], acc[GROUP_HEADS][8];
};

// The first `valid` positions of a lane group are added; scores are base 2.
DEVICE void attend(Attended& to, const float (&q)[GROUP_HEADS][8], const KvTile& tile, int valid) {
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; head++) {
    float scores[POSITIONS], new_max = to.max[head];
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      float x[8];
      unpack(tile.k[i], x);
      scores[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++) scores[i] += q[head][j] * x[j];
    }
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2)
#pragma unroll
      for (int i = 0; i < POSITIONS; i++) scores[i] += from_lane_xor(scores[i], mask);
#pragma unroll
    for (int i = 0; i < POSITIONS; i++)
      if (i < valid) new_max = maximum(new_max, scores[i]);
    const float rescale = exp2_fast(to.max[head] - new_max);
    to.max[head] = new_max;
    to.sum[head] *= rescale;
#pragma unroll
    for (int j = 0; j < 8; j++) to.acc[head][j] *= rescale;
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) {
      float x[8];
      const float p = i < valid ? exp2_fast(scores[i] - new_max) : 0.0f;
      unpack(tile.v[i], x);
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

// A warp's split of its row, to shared memory: per head HEAD_DIM sums, the maximum and the sum of the weights. The
// first two tiles are given; a further one is loaded while one is attended to.
DEVICE void attend_split(const Arguments& arguments, const Sequence& sequence, KvTile& tile, KvTile& next,
                         int cluster) {
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
  for (int count = 0; (sequence.split + count * SPLITS) * TILE <= sequence.length; count++) {
    const int new_token = sequence.length - (sequence.split + count * SPLITS) * TILE;  // its place in the tile
    if (new_token < TILE) {
      const Vector k = rotate(arguments, heads + ATTENDED, has_norm ? norms + HEAD_DIM : nullptr, cos_sin);
      const Vector v = load_vector(heads + ATTENDED + HEAD_DIM + part * 8);
#pragma unroll
      for (int i = 0; i < POSITIONS; i++)
        if (i * (32 / LANES) + lane / LANES == new_token) {
          tile.k[i] = k;
          tile.v[i] = v;
        }
      const i64 slot = sequence.slot;
      if (slot >= 0 && lane < LANES && cluster * GROUP_HEADS % HEADS_PER_KV == 0) {
        u16* to = arguments.kv_cache + slot / BLOCK_SIZE * arguments.block_stride + kv_head * arguments.head_stride +
                  slot % BLOCK_SIZE * arguments.token_stride + part * 8;
        *reinterpret_cast<Vector*>(to) = k;
        *reinterpret_cast<Vector*>(to + arguments.value_stride) = v;
      }
    }
    const int left = new_token + 1 - lane / LANES;
    attend(result, q, tile, left <= 0 ? 0 : (left - 1) / (32 / LANES) + 1);
    tile = next;
    load_tile(next, arguments, sequence, kv_head, count + 2);
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
    const float factor = sum > 0.0f ? inverse(sum) : 0.0f;
    char* to = memory + AttentionMemory::output + row * pitch(ATTENDED) + input_place(head * HEAD_DIM + column);
    *reinterpret_cast<u32*>(to) = pack_bf16(low * factor, high * factor);
  }
}

KERNEL(REGISTERS) attention_block(const Arguments arguments) {
  char* memory = shared_memory();
  u64* barriers = reinterpret_cast<u64*>(memory + Memory::barriers);
  const int rank = block_index() % CTAS, cluster = block_index() / CTAS, rows = arguments.rows;
  const int kv_head = cluster * GROUP_HEADS / HEADS_PER_KV;
  const OutGroups<O_TILES, O_CHUNKS, O_GROUPS> groups = {cluster * O_GROUPS, O_GROUPS};
  Ring<ATTENTION_STAGES, AttentionMemory::ring, ATTENTION_SLOT_BYTES> ring;
  const int first_row = rank / ROW_BLOCKS * BLOCK_ROWS;
  const int rows_here = rows <= first_row ? 0 : rows - first_row < BLOCK_ROWS ? rows - first_row : BLOCK_ROWS;
  const u32 expected[] = {norm_bytes(rows), rows_here * QKV_SIZE * 2u, split_bytes(rows)};
  const auto weight_row = [&](int tile, int half) {
    const int output = (rank * QKV_TILES + tile) * 16 + half * 8;
    if (output < ATTENDED) return cluster * ATTENDED + output;
    const int first = HEADS * HEAD_DIM + kv_head * HEAD_DIM + output - ATTENDED;
    return output < ATTENDED + HEAD_DIM ? first : first + (KV_HEADS - 1) * HEAD_DIM;
  };
  if (begin(ring, arguments, barriers, expected, rank, QKV_TILES, weight_row, groups, CLUSTERS * ATTENDED)) return;
  load_norm(arguments, rank);
  const Sequence sequence = find_sequence(arguments, rank);
  prepare_attention(arguments, sequence, rank, kv_head);
  block_sync(CONSUMERS);
  cluster_arrive();
  cluster_wait();
  wait_for_inputs();
  add_and_norm<MLP_CLUSTERS>(arguments, rank, cluster, barriers);
  barrier_wait(barriers, 0);
  find_factors(arguments);
  multiply_in<1>(ring, QKV_TILES, rows);
  KvTile tiles[2];
  load_tile(tiles[0], arguments, sequence, kv_head, 0);
  load_tile(tiles[1], arguments, sequence, kv_head, 1);
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
  barrier_wait(barriers + 1, 0);
  if (sequence.row >= 0) attend_split(arguments, sequence, tiles[0], tiles[1], cluster);
  block_sync(CONSUMERS);
  send_splits(arguments, rank, barriers + 2);
  barrier_wait(barriers + 2, 0);
  merge_splits(arguments);
  block_sync(CONSUMERS);
  multiply_out<1>(ring, arguments, memory + AttentionMemory::output, rank, cluster, groups);
}
