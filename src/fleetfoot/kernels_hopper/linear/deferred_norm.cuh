// What a product has to do with the RMSNorm before it: see `DeferredRMSNorm`. INPUTS: the size of the norm; PARTS:
// partial sums of squares of a row, at most.
#pragma once

// 1/rms of row `lane % 16` of a warp's 16 rows. The squares are loaded before the product, and added up after it.
struct Factor {
  float squares[(PARTS + 1) / 2 + 1];

  // squares: [num_parts, num_rows]
  __device__ void load(const float* from, int num_parts, int num_rows, int first_row) {
    const int lane = threadIdx.x % 32, row = first_row + lane % 16;
#pragma unroll
    for (int i = 0; i < (PARTS + 1) / 2; i++) {
      const int part = 2 * i + lane / 16;
      const bool is_part = part < num_parts && row < num_rows;
      squares[i] = is_part ? __ldcg(from + part * num_rows + row) : 0.0f;
    }
  }
  __device__ float get(float eps) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (PARTS + 1) / 2; i++) sum += squares[i];
    sum += from_lane_xor(sum, 16);
    return 1.0f / sqrtf(sum / INPUTS + eps);
  }
};

// Multiply the sums of a thread's row, in one half of a warp's 16 rows, by its factor. `factor`: of row `lane % 16`.
template <int count>
DEVICE void scale_half(float (&sums)[count], int half, float factor) {
  const float scale = from_lane(factor, threadIdx.x % 32 / 4 + half * 8);
#pragma unroll
  for (int i = 0; i < count / 4; i++) {
    sums[i * 4 + half * 2] *= scale;
    sums[i * 4 + half * 2 + 1] *= scale;
  }
}
