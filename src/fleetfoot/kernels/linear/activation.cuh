// The end of gated products.
#pragma once
#include <hopper.cuh>

// silu(gate) * up of two outputs, packed. One reciprocal for both: 1 / a = b * (1 / (a * b)). Below -41 SiLU
// is about 0.
DEVICE u32 silu_and_mul(const float* gates, const float* ups) {
  const u32 gate = pack_bf16(gates[0], gates[1]), up = pack_bf16(ups[0], ups[1]);
  float parts[2] = {low_bf16(gate), high_bf16(gate)}, sums[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    parts[i] = parts[i] < -41.0f ? -41.0f : parts[i];  // NaN stays
    sums[i] = 1.0f + exp2_fast(parts[i] * -1.4426950408889634f);
  }
  const float factor = inverse(sums[0] * sums[1]);
  return pack_bf16(parts[0] * (sums[1] * factor) * low_bf16(up), parts[1] * (sums[0] * factor) * high_bf16(up));
}
