// The end of gated products.
#pragma once
#include <hopper.cuh>

#ifndef GELU
#define GELU 0  // in place of SiLU: x * sigmoid(2 * y), by the approximation with tanh(y)
#endif

// silu(gate) * up of two outputs, packed. One reciprocal for both: 1 / a = b * (1 / (a * b)). Below the limit both
// activations are about 0.
DEVICE u32 activate_and_mul(const float* gates, const float* ups) {
  constexpr float limit = GELU ? -7.5f : -41.0f;
  const u32 gate = pack_bf16(gates[0], gates[1]), up = pack_bf16(ups[0], ups[1]);
  float parts[2] = {low_bf16(gate), high_bf16(gate)}, sums[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    parts[i] = parts[i] < limit ? limit : parts[i];  // NaN stays
    float exponent = parts[i];
    if (GELU) exponent = 1.5957691216f * (exponent + 0.044715f * exponent * exponent * exponent);  // 2 * sqrt(2 / pi)
    sums[i] = 1.0f + exp2_fast(exponent * -1.4426950408889634f);
  }
  const float factor = inverse(sums[0] * sums[1]);
  return pack_bf16(parts[0] * (sums[1] * factor) * low_bf16(up), parts[1] * (sums[0] * factor) * high_bf16(up));
}
