// The functions of src/fleetfoot/kernels/quantized/e4m3.cuh on a CPU.
#pragma once
#include "hopper.cuh"

extern "C" float expf(float) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" float nearbyintf(float) noexcept;

struct alignas(8) uint2 {
  u32 x, y;
};
DEVICE uint4 __ldcg(const uint4* from) { return *from; }

DEVICE uint4 load_weight(const unsigned char* from) {
  uint4 words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}
DEVICE float load_scale(const float* from) { return *from; }

namespace cpu {
// The exponent of a number's last place among numbers with `bits` of mantissa and this least exponent.
inline int last_place(float magnitude, int bits, int least) {
  int exponent = static_cast<int>(float_bits(magnitude) >> 23) - 127;
  return (exponent < least ? least : exponent) - bits;
}
inline u32 e4m3_bits(float x) {
  const u32 sign = float_bits(x) >> 31 << 7;
  const float magnitude = bits_float(float_bits(x) & 0x7fffffff);
  if (x != x) return 0x7f;
  if (magnitude >= 448.0f) return sign | 0x7e;
  const int place = last_place(magnitude, 3, -6);
  const u32 count = static_cast<u32>(nearbyintf(ldexpf(magnitude, -place)));  // 16: the next exponent
  return sign | (count < 8 ? count : static_cast<u32>(place + 3 + 7) * 8 + (count - 8));
}
inline float e4m3(u32 bits) {  // in the low byte
  const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return bits_float(0x7fc00000);
  const float magnitude = exponent ? ldexpf(8.0f + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return bits & 0x80 ? -magnitude : magnitude;
}
}  // namespace cpu

DEVICE u32 to_e4m3(float low, float high) { return cpu::e4m3_bits(low) | cpu::e4m3_bits(high) << 8; }
// A pair is two codes here too, in the low bytes of its halves.
DEVICE void widen(u32 (&pairs)[2], u32 word) {
  for (u32 i = 0; i < 2; i++) pairs[i] = (word >> i * 16 & 0xff) | (word >> i * 16 + 8 & 0xff) << 16;
}
DEVICE void multiply_pairs(float (&sums)[4], const u32 (&above)[2], const u32 (&below)[2], u32 x, u32 x_next) {
  cpu::multiply(sums, {above[0], below[0], above[1], below[1]}, {x, x_next}, cpu::e4m3);
}
DEVICE float divided(float x, float y) { return x / y; }
DEVICE float inverse_rounded(float x) { return 1.0f / x; }
DEVICE float square_root(float x) { return sqrtf(x); }
DEVICE float exponential(float x) { return expf(x); }
