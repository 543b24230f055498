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
constexpr int LANES = HEAD_DIM / 8;                      // lanes with a head, 16 bytes each
constexpr int TILE = 16;                                 // positions that a warp attends to at once
constexpr int KV_BUFFERS = HEAD_DIM == 64 ? 2 : 1;       // tiles in registers: what there is room for without spills
constexpr int KV_PREFETCHED = 2;                         // tiles ahead that are prefetched to L2
static_assert(BLOCK_SIZE % TILE == 0 && BLOCK_ROWS <= WARPS && HEADS_PER_KV % GROUP_HEADS == 0 && GROUP_HEADS <= 8);
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
  int block;       // of lane i: the KV block of tile i of the split, later of tile 32 + i, and so on
  i64 slot;        // of the new token; negative: its K and V are not written

  int tile(int count) const { return split + count * SPLITS; }
  bool has(int count) const { return tile(count) * TILE < length; }
  // The blocks of 32 tiles, one for each lane.
  void find_blocks(const Arguments& arguments, int count) {
    count += thread_index() % 32;
    const int* blocks = arguments.block_tables + row * arguments.table_stride;
    block = has(count) ? blocks[tile(count) / (BLOCK_SIZE / TILE)] : 0;
  }
};

// Tiles next to each other are of splits in different blocks.
DEVICE Sequence find_sequence(const Arguments& arguments, int rank) {
  const int warp = warp_index(), row = rank / ROW_BLOCKS * BLOCK_ROWS + warp / ROW_WARPS;
  if (row >= arguments.rows) return {-1, -1, 0, 0, -1};
  const int split = warp % ROW_WARPS * ROW_BLOCKS + rank % ROW_BLOCKS;
  Sequence sequence = {row, arguments.seq_lens[row] - 1, split, 0, arguments.slots[row]};
  sequence.find_blocks(arguments, 0);
  return sequence;
}

// K of tile `count`, which is among the 32 of `sequence.block`. By a whole warp.
DEVICE const u16* tile_of(const Arguments& arguments, const Sequence& sequence, int kv_head, int count) {
  const i64 block = from_lane(sequence.block, count % 32);
  return arguments.kv_cache + block * arguments.block_stride + kv_head * arguments.head_stride +
         sequence.tile(count) % (BLOCK_SIZE / TILE) * TILE * HEAD_DIM;
}

// K and V of a tile, to L2: each lane has lines of 128 bytes.
DEVICE void prefetch_tile(const Arguments& arguments, const Sequence& sequence, int kv_head, int count) {
  constexpr int lines = TILE * HEAD_DIM / 64;
  const u16* from = tile_of(arguments, sequence, kv_head, count);
#pragma unroll
  for (int first = 0; first < 2 * lines; first += 32) {
    const int line = first + thread_index() % 32;
    prefetch_line(from + line % lines * 64 + (line < lines ? 0 : arguments.value_stride));
  }
}

// Before `wait_for_inputs`: K and V of earlier steps to L2, tables to shared memory.
DEVICE void prepare_attention(const Arguments& arguments, const Sequence& sequence, int rank, int kv_head) {
  char* memory = shared_memory();
  for (int count = 0; count < KV_PREFETCHED && sequence.has(count); count++)
    prefetch_tile(arguments, sequence, kv_head, count);
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

// Attention by mma: lane = 4 * g + t. Scores [heads, 8 positions] = queries x K: a lane has 16 bytes of position g in
// each 32 elements, which are operands as they are; see `Sums`. Output [16 elements, heads] = V x weights: a lane has
// positions 2 * t and 2 * t + 1 of 8, and their pairs of an element are put together. So the scores of a lane are the
// weights that it needs. Head g of the operands is head g % GROUP_HEADS.
struct KTile {
  Vector x[2][HEAD_DIM / 32];  // of position 8 * i + g: elements 32 * j + 8 * t, ...

  void load(const u16* from) {
    from += thread_index() % 32 / 4 * HEAD_DIM + thread_index() % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 32; j++) x[i][j] = load_vector(from + 8 * i * HEAD_DIM + 32 * j);
  }
};
struct VTile {
  Vector x[4][HEAD_DIM / 64];  // of position 8 * (i / 2) + 2 * t + i % 2: elements 64 * j + 8 * g, ...

  // `from`: K of the tile. `valid`: positions in the cache; zeros stand for the others.
  void load(const Arguments& arguments, const u16* from, int valid) {
    const int first = thread_index() % 4 * 2;
    from += arguments.value_stride + first * HEAD_DIM + thread_index() % 32 / 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int position = i / 2 * 8 + i % 2;
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 64; j++) {
        x[i][j] = {0, 0, 0, 0};
        if (first + position < valid) x[i][j] = load_vector(from + position * HEAD_DIM + 64 * j);
      }
    }
  }
};

struct KvTile {
  KTile k;
  VTile v;
};

DEVICE int valid_positions(const Sequence& sequence, int count) {
  return sequence.length - sequence.tile(count) * TILE;
}

struct Attended {
  float max, sum;                // of head g; the sum is of this lane's positions
  float acc[HEAD_DIM / 16][4];   // of tile i: elements 64 * (i / 4) + 8 * g + 2 * (i % 4) of heads 2 * t and 2 * t + 1,
                                 // and the next one
};

// Queries and the new key, after norm and rotation, as operands of `attend`: in shared memory, of this warp.
DEVICE char* operands_of(int warp) {
  return shared_memory() + Memory::input + warp * GROUP_HEADS * SPLIT_FLOATS * 4;
}
DEVICE Vector load_operand(const char* operands, int head, int j) {
  return load_vector(operands + head * HEAD_DIM * 2 + j * 64 + thread_index() % 4 * 16);
}

// Scores of positions 8 * i + 2 * t and the next one.
DEVICE Pair find_scores(const Vector (&k)[HEAD_DIM / 32], const char* operands, float scale) {
  const int head = thread_index() % 32 / 4 % GROUP_HEADS;
  float low[4] = {}, high[4] = {};
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 32; j++) {
    const Vector q = load_operand(operands, head, j);
    mma(low, q.x, q.y, q.z, q.w, k[j].x, k[j].y);
    mma(high, q.x, q.y, q.z, q.w, k[j].z, k[j].w);
  }
  return {(low[0] + high[2]) * scale, (low[1] + high[3]) * scale};
}

DEVICE u32 word_of(const Vector& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// The tile `count` is attended to, and later ones are loaded instead. Scores are base 2.
DEVICE void attend(Attended& to, KvTile& tile, const Arguments& arguments, Sequence& sequence, int kv_head, int count,
                   const char* operands) {
  const int t = thread_index() % 4, valid = valid_positions(sequence, count);
  const float scale = static_cast<float>(arguments.scale_log2);
  Pair scores[2];
  float new_max = to.max;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scores[i] = find_scores(tile.k.x[i], operands, scale);
    if (8 * i + 2 * t >= valid) scores[i].x = -1.0e30f;
    if (8 * i + 2 * t + 1 >= valid) scores[i].y = -1.0e30f;
    new_max = maximum(new_max, maximum(scores[i].x, scores[i].y));
  }
  const int next = count + KV_BUFFERS;
  const u16* from = nullptr;
  if (sequence.has(next)) {
    if (next % 32 == 0) sequence.find_blocks(arguments, next);
    from = tile_of(arguments, sequence, kv_head, next);
    tile.k.load(from);
    const int later = count + KV_PREFETCHED;
    if (KV_PREFETCHED > KV_BUFFERS && sequence.has(later) && later / 32 == next / 32)
      prefetch_tile(arguments, sequence, kv_head, later);
  }
#pragma unroll
  for (int mask = 2; mask; mask /= 2) new_max = maximum(new_max, from_lane_xor(new_max, mask));
  const float rescale = exp2_fast(to.max - new_max);
  to.max = new_max;
  to.sum *= rescale;
  u32 weights[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    weights[i] = pack_bf16(exp2_fast(scores[i].x - new_max), exp2_fast(scores[i].y - new_max));
    to.sum += low_bf16(weights[i]) + high_bf16(weights[i]);  // as rounded: their shares add up to 1
  }
  const float even = GROUP_HEADS == 1 ? rescale : from_lane(rescale, 8 * t);
  const float odd = GROUP_HEADS == 1 ? rescale : from_lane(rescale, 8 * t + 4);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) to.acc[i][j] *= j % 2 ? odd : even;
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = word_of(tile.v.x[j][i / 4], i % 4);
    mma(to.acc[i], low_halves(words[0], words[1]), high_halves(words[0], words[1]), low_halves(words[2], words[3]),
        high_halves(words[2], words[3]), weights[0], weights[1]);
  }
  if (sequence.has(next)) tile.v.load(arguments, from, valid_positions(sequence, next));
}

// A warp's split of its row, to shared memory: per head HEAD_DIM sums, the maximum and the sum of the weights. The
// first tiles are given.
DEVICE void attend_split(const Arguments& arguments, Sequence& sequence, KvTile (&tiles)[KV_BUFFERS], int cluster) {
  char* memory = shared_memory();
  const int warp = warp_index(), lane = thread_index() % 32, part = lane % LANES, g = lane / 4, t = lane % 4;
  const int kv_head = cluster * GROUP_HEADS / HEADS_PER_KV, row_in_block = warp / ROW_WARPS;
  const u16* heads = reinterpret_cast<const u16*>(memory + AttentionMemory::heads) + row_in_block * QKV_SIZE;
  const float* cos_sin = reinterpret_cast<const float*>(memory + AttentionMemory::cos_sin) + row_in_block * HEAD_DIM;
  const u16* norms = reinterpret_cast<const u16*>(memory + AttentionMemory::head_norms);
  const bool has_new_token = sequence.length >= 0 && sequence.length / TILE % SPLITS == sequence.split;
  char* operands = operands_of(warp);
#pragma unroll
  for (int first = 0; first <= GROUP_HEADS; first += 32 / LANES) {
    const int mine = first + lane / LANES, head = mine < GROUP_HEADS ? mine : GROUP_HEADS;
    const u16* norm = arguments.q_norm == nullptr ? nullptr : norms + head / GROUP_HEADS * HEAD_DIM;
    const Vector rotated = rotate(arguments, heads + head * HEAD_DIM, norm, cos_sin);
    if (mine <= GROUP_HEADS)  // in the order of `input_place`
      *reinterpret_cast<Vector*>(operands + head * HEAD_DIM * 2 + part * 16) = {rotated.x, rotated.z, rotated.y,
                                                                                 rotated.w};
    const i64 slot = sequence.slot;
    const bool is_first = cluster * GROUP_HEADS % HEADS_PER_KV == 0;  // of the clusters with this KV head
    if (mine == GROUP_HEADS && has_new_token && slot >= 0 && is_first) {
      u16* to = arguments.kv_cache + slot / BLOCK_SIZE * arguments.block_stride + kv_head * arguments.head_stride +
                slot % BLOCK_SIZE * HEAD_DIM + part * 8;
      *reinterpret_cast<Vector*>(to) = rotated;
      *reinterpret_cast<Vector*>(to + arguments.value_stride) = load_vector(heads + ATTENDED + HEAD_DIM + part * 8);
    }
  }
  warp_sync();
  Attended result = {-1.0e30f, 0.0f, {}};
  if (has_new_token) {
    float score = 0.0f;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; j++) {
      float q[8], k[8];
      unpack(load_operand(operands, g % GROUP_HEADS, j), q);
      unpack(load_operand(operands, GROUP_HEADS, j), k);
#pragma unroll
      for (int i = 0; i < 8; i++) score += q[i] * k[i];
    }
#pragma unroll
    for (int mask = 2; mask; mask /= 2) score += from_lane_xor(score, mask);
    result.max = score * static_cast<float>(arguments.scale_log2);
    result.sum = t == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
      const u32 v = word_of(load_vector(heads + ATTENDED + HEAD_DIM + i / 4 * 64 + g * 8), i % 4);
      result.acc[i][0] = result.acc[i][1] = low_bf16(v);
      result.acc[i][2] = result.acc[i][3] = high_bf16(v);
    }
  }
#pragma unroll 1
  for (int count = 0; sequence.has(count); count += KV_BUFFERS)
#pragma unroll
    for (int i = 0; i < KV_BUFFERS; i++)
      if (i == 0 || sequence.has(count + i))
        attend(result, tiles[i], arguments, sequence, kv_head, count + i, operands);
#pragma unroll
  for (int mask = 2; mask; mask /= 2) result.sum += from_lane_xor(result.sum, mask);
  warp_sync();  // the results overwrite the operands
  float* to = reinterpret_cast<float*>(operands);
  if (t == 0 && g < GROUP_HEADS) *reinterpret_cast<Pair*>(to + g * SPLIT_FLOATS + HEAD_DIM) = {result.max, result.sum};
#pragma unroll
  for (int head = 0; head < 2; head++)
    if (2 * t + head < GROUP_HEADS)
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; i++)
        *reinterpret_cast<Pair*>(to + (2 * t + head) * SPLIT_FLOATS + i / 4 * 64 + g * 8 + i % 4 * 2) = {
            result.acc[i][head], result.acc[i][2 + head]};
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
                         (in_block * ROW_WARPS * GROUP_HEADS + head) * SPLIT_FLOATS;
    constexpr int stride = GROUP_HEADS * SPLIT_FLOATS;
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

KERNEL(ATTENTION_REGISTERS) attention_block(const Arguments arguments) {
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
  Sequence sequence = find_sequence(arguments, rank);
  prepare_attention(arguments, sequence, rank, kv_head);
  block_sync(CONSUMERS);
  cluster_arrive();
  cluster_wait();
  wait_for_inputs();
  add_and_norm<MLP_CLUSTERS>(arguments, rank, cluster, barriers);
  barrier_wait(barriers, 0);
  find_factors(arguments);
  multiply_in<1>(ring, QKV_TILES, rows);
  KvTile tiles[KV_BUFFERS];
#pragma unroll
  for (int i = 0; i < KV_BUFFERS; i++)
    if (sequence.has(i)) {
      const u16* from = tile_of(arguments, sequence, kv_head, i);
      tiles[i].k.load(from);
      tiles[i].v.load(arguments, from, valid_positions(sequence, i));
    }
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
  if (sequence.row >= 0) attend_split(arguments, sequence, tiles, cluster);
  block_sync(CONSUMERS);
  send_splits(arguments, rank, barriers + 2);
  barrier_wait(barriers + 2, 0);
  merge_splits(arguments);
  block_sync(CONSUMERS);
  multiply_out<1>(ring, arguments, memory + AttentionMemory::output, rank, cluster, groups);
}
