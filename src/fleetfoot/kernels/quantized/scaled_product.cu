// x @ weight.T of up to 8 rows with a weight in FP8, where a multiprocessor's registers hold what is on its way from
// memory. A block has 16 outputs, or 32; its warps have every WARPS-th group of 128 inputs. A thread loads the weight
// straight into registers, AHEAD groups of them before the kernel before has ended, and makes float16 of it there, the
// operands of tensor core instructions: those of Hopper that take e4m3 read it from shared memory. Sums of 128 inputs are scaled and added in float32.
//
// One row is quantized here, by every block; more rows have been.
#include <e4m3.cuh>

constexpr int THREADS = WARPS * 32, SPAN = 128, GROUPS = INPUTS / SPAN, PER_WARP = (GROUPS + WARPS - 1) / WARPS;
constexpr int OUTPUTS = GATED ? 16 : 16 * TILES;  // of a block
constexpr int ROWS = IS_ONE ? 1 : 8;
constexpr int SCALES = SCALE_ROWS % 16 == 0 ? 1 : 2;  // of a thread's two rows of a tile
constexpr int FIRST = AHEAD < PER_WARP ? AHEAD : PER_WARP;
constexpr int PITCH = INPUTS / 16 + 4;  // of rows of e4m3 in shared memory: those of two rows are in different banks
enum { TOKEN = 1, GROUP = 2, STATIC = 3 };  // KIND: what inputs share a scale
static_assert(INPUTS % SPAN == 0 && (!GATED || TILES == 2));

struct Arguments {
  const void* x;          // [1, INPUTS] bfloat16, or [rows, INPUTS] e4m3
  const float* x_scales;  // of e4m3: [rows, GROUPS] or [rows, 1]; [1] of STATIC
  const unsigned char* weight;
  const float* scales;  // [outputs / SCALE_ROWS, GROUPS], or 1 in place of GROUPS
  const u16* bias;
  const float* squares_in;  // [num_parts, rows] of a deferred norm of x
  const u16 *residual, *norm_weight;
  u16 *out, *total;
  float* squares;  // [gridDim.x, rows] of the total
  int rows, num_outputs, num_parts;
  float eps, factor;
};

DEVICE u32 part_of(const uint4& words, int index) {
  return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}
DEVICE u16 to_bf16(float value) { return pack_bf16(value, 0.0f) & 0xffffu; }
DEVICE float rounded(float value) { return low_bf16(pack_bf16(value, 0.0f)); }
DEVICE float most_of(float a, float b) { return a > b ? a : b; }
DEVICE float magnitude(float x) { return x < 0.0f ? -x : x; }
DEVICE float scale_of(float largest) { return most_of(divided(largest, 448.0f), 1e-12f); }
DEVICE float largest_of(const uint4& words) {  // of 8 numbers in bfloat16
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 pair = part_of(words, j);
    most = most_of(most_of(magnitude(low_bf16(pair)), magnitude(high_bf16(pair))), most);
  }
  return most;
}

// sums += the products of 64 inputs: a thread has 16 adjacent ones of its two outputs and its row, parts of four
// instructions, which sum 16 inputs in any order.
DEVICE void multiply_words(float (&sums)[4], const uint4& above, const uint4& below, const u32 (&x)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 a[2], b[2];
    widen(a, part_of(above, j));
    widen(b, part_of(below, j));
    multiply_pairs(sums, a, b, x[j * 2], x[j * 2 + 1]);
  }
}

// Two numbers in bfloat16 divided by a scale, as e4m3. The rounding of the quotients is that of a division, since ties
// between two values in e4m3 are common; `inverse`: of the scale.
DEVICE u32 quotients(u32 numbers, float scale, float inverse) {
  const float low = low_bf16(numbers), high = high_bf16(numbers), about[2] = {low * inverse, high * inverse};
  const float low_left = fmaf(-about[0], scale, low), high_left = fmaf(-about[1], scale, high);
  return to_e4m3(fmaf(low_left, inverse, about[0]), fmaf(high_left, inverse, about[1]));
}

// A group of a warp: of each tile 16 bytes of two rows in each half of the group.
struct Words {
  uint4 rows[TILES][2][2];
  float scales[TILES][SCALES];
};

struct Place {  // of a thread in the weight
  const unsigned char* rows[TILES][2];
  const float* scales[TILES][SCALES];

  __device__ Place(const Arguments& arguments) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int output = blockIdx.x * OUTPUTS + (GATED ? 0 : tile * 16) + lane / 4 + half * 8;
        output = output < arguments.num_outputs ? output : arguments.num_outputs - 1;
        const int row = output + (GATED && tile ? arguments.num_outputs : 0);
        rows[tile][half] = arguments.weight + static_cast<i64>(row) * INPUTS + lane % 4 * 16;
        if (half < SCALES) scales[tile][half] = arguments.scales + static_cast<i64>(row / SCALE_ROWS) * GROUPS;
      }
  }
  __device__ void load(Words& words, int group) const {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int row = 0; row < 2; row++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          words.rows[tile][row][half] = load_weight(rows[tile][row] + group * SPAN + half * (SPAN / 2));
      if (HAS_GROUPS)
#pragma unroll
        for (int row = 0; row < SCALES; row++) words.scales[tile][row] = load_scale(scales[tile][row] + group);
    }
  }
};

struct Shared {
  uint4 x[IS_ONE ? INPUTS / 8 : ROWS * PITCH];  // the only row in float16, or all in e4m3
  float x_scales[ROWS][HAS_GROUPS ? GROUPS : 1];
  float sums[WARPS][TILES * 16 * ROWS];
  float factors[ROWS];  // of a deferred norm
  float largest[WARPS];
};
static_assert(SHARED_BYTES >= sizeof(Shared));

// Round the only row to e4m3.
DEVICE void quantize(const Arguments& arguments, Shared& shared) {
  constexpr int PIECES = INPUTS / 8, EACH = (PIECES + THREADS - 1) / THREADS;  // of 8 inputs
  const uint4* from = static_cast<const uint4*>(arguments.x);
  uint4 pieces[EACH];
  float largest[EACH], of_row = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int piece = i * THREADS + threadIdx.x;
    pieces[i] = piece < PIECES ? __ldcg(from + piece) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float most = largest_of(pieces[i]);
    if (KIND == GROUP)
#pragma unroll
      for (int mask = 8; mask > 0; mask /= 2) most = most_of(most, from_lane_xor(most, mask));
    largest[i] = most;
    of_row = most_of(of_row, most);
  }
  if (KIND == TOKEN) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) of_row = most_of(of_row, from_lane_xor(of_row, mask));
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = of_row;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) of_row = most_of(of_row, shared.largest[warp]);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece >= PIECES) break;
    const float scale = KIND == STATIC ? *arguments.x_scales : scale_of(KIND == TOKEN ? of_row : largest[i]);
    const float factor = inverse_rounded(scale);
    const u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
    u32 pairs[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 first = words[j * 2], second = words[j * 2 + 1];
      const u32 low = quotients(first, scale, factor), high = quotients(second, scale, factor);
      widen(pairs[j], low | high << 16);
    }
    shared.x[piece] = {pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]};
    if (KIND == GROUP && threadIdx.x % 16 == 0) shared.x_scales[0][piece / 16] = scale;
    if (KIND != GROUP && piece == 0) shared.x_scales[0][0] = scale;
  }
}

DEVICE void load_factors(const Arguments& arguments, Shared& shared) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < arguments.rows; row += WARPS) {
    float sum = 0.0f;
    for (int part = lane; part < arguments.num_parts; part += 32)
      sum += __ldcg(arguments.squares_in + part * arguments.rows + row);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane == 0) shared.factors[row] = inverse_rounded(square_root(divided(sum, INPUTS) + arguments.eps));
  }
}

// gate * sigmoid(gate) * up, or with GELU, of numbers in bfloat16
DEVICE float activated(float gate, float up) {
  float exponent = -gate;
  if (GATED == 2) exponent = -most_of(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate), -80.0f);
  return gate / (1.0f + exponential(exponent)) * up;
}

DEVICE void finish(const Arguments& arguments, Shared& shared) {
  constexpr int ITEMS = OUTPUTS * ROWS, EACH = (ITEMS + THREADS - 1) / THREADS;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int item = i * THREADS + threadIdx.x, row = item / OUTPUTS, in_block = item % OUTPUTS;
    const int output = blockIdx.x * OUTPUTS + in_block;
    const bool is_written = item < ITEMS && row < arguments.rows && output < arguments.num_outputs;
    float results[GATED ? 2 : 1] = {};
    if (is_written) {
#pragma unroll
      for (int half = 0; half < (GATED ? 2 : 1); half++) {
        const int of_weight = output + half * arguments.num_outputs;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
          sum += shared.sums[warp][(half * 16 + in_block) * ROWS + row];
        if (!HAS_GROUPS) sum *= arguments.scales[of_weight / SCALE_ROWS] * shared.x_scales[row][0];
        if (DEFERRED) sum *= shared.factors[row];
        if (HAS_BIAS) sum += low_bf16(arguments.bias[of_weight]);
        results[half] = sum;
      }
    }
    float result = results[0];
    if (SCALED) result *= arguments.factor;
    if (GATED) result = activated(rounded(result), rounded(results[GATED ? 1 : 0]));
    const i64 place = static_cast<i64>(row) * arguments.num_outputs + output;
    if (IS_SUM) {
      float total = 0.0f;
      if (is_written) {
        total = rounded(rounded(result) + low_bf16(arguments.residual[place]));
        arguments.total[place] = to_bf16(total);
        result = total * low_bf16(arguments.norm_weight[output]);
      }
      float squares = total * total;
#pragma unroll
      for (int mask = OUTPUTS / 2; mask > 0; mask /= 2) squares += from_lane_xor(squares, mask);
      if (is_written && in_block == 0) arguments.squares[blockIdx.x * arguments.rows + row] = squares;
    }
    if (is_written) arguments.out[place] = to_bf16(result);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
scaled_product(const __grid_constant__ Arguments arguments) {
  launch_dependents();
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Place place(arguments);
  Words ahead[FIRST];
#pragma unroll
  for (int i = 0; i < FIRST; i++)  // weights do not depend on the kernel before
    if (warp + i * WARPS < GROUPS) place.load(ahead[i], warp + i * WARPS);
  wait_for_inputs();
  if (DEFERRED) load_factors(arguments, shared);
  const int row = lane / 4;  // of x
  if (IS_ONE) {
    quantize(arguments, shared);
  } else {
    const int scales_of_row = HAS_GROUPS ? GROUPS : 1;
    for (int i = threadIdx.x; i < arguments.rows * scales_of_row; i += THREADS) {
      const int of_row = i / scales_of_row;
      shared.x_scales[of_row][i % scales_of_row] = __ldcg(arguments.x_scales + (KIND == STATIC ? 0 : i));
    }
    const uint4* codes = static_cast<const uint4*>(arguments.x);
#pragma unroll 8
    for (int i = threadIdx.x; i < arguments.rows * (INPUTS / 16); i += THREADS)
      shared.x[i / (INPUTS / 16) * PITCH + i % (INPUTS / 16)] = __ldcg(codes + i);
  }
  __syncthreads();

  float sums[TILES][4] = {};
  const bool has_row = row < arguments.rows;
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    const int group = warp + i * WARPS;
    Words& words = ahead[i % FIRST];
    if (group < GROUPS) {
      u32 inputs[2][8] = {};  // pairs of each half
      if (has_row)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int first = group * (SPAN / 16) + half * 4 + lane % 4;
          if (IS_ONE) {
#pragma unroll
            for (int j = 0; j < 8; j++) inputs[half][j] = part_of(shared.x[first * 2 + j / 4], j % 4);
          } else {
            const uint4 codes = shared.x[row * PITCH + first];
#pragma unroll
            for (int j = 0; j < 4; j++) {
              u32 pairs[2];
              widen(pairs, part_of(codes, j));
              inputs[half][j * 2] = pairs[0];
              inputs[half][j * 2 + 1] = pairs[1];
            }
          }
        }
      float own[2] = {1.0f, 1.0f};  // scales of the two rows of x that this thread has sums of
      if (HAS_GROUPS) {
        own[0] = IS_ONE ? shared.x_scales[0][group] : shared.x_scales[lane % 4 * 2 % ROWS][group];
        own[1] = IS_ONE ? 0.0f : shared.x_scales[(lane % 4 * 2 + 1) % ROWS][group];
      }
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float part[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++)
          multiply_words(part, words.rows[tile][0][half], words.rows[tile][1][half], inputs[half]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float scale = HAS_GROUPS ? words.scales[tile][SCALES == 2 ? j / 2 : 0] * own[j % 2] : 1.0f;
          sums[tile][j] += part[j] * scale;
        }
      }
    }
    if (i + FIRST < PER_WARP && group + FIRST * WARPS < GROUPS) place.load(words, group + FIRST * WARPS);
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int of_row = lane % 4 * 2 + j % 2;
      if (of_row < ROWS) shared.sums[warp][(tile * 16 + lane / 4 + j / 2 * 8) * ROWS + of_row] = sums[tile][j];
    }
  __syncthreads();
  finish(arguments, shared);
}
