// What products with weights in e4m3 need of Hopper besides: no other file of this folder contains PTX. The tests compile
// the kernel for a CPU with a header of the same name and functions.
#pragma once
#include <intrinsics.cuh>

// 16 bytes of a weight, which is read once.
DEVICE uint4 load_weight(const unsigned char* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}
DEVICE float load_scale(const float* from) {
  float scale;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"(from));
  return scale;
}
// Two numbers as e4m3, the largest magnitude for what is larger.
DEVICE u32 to_e4m3(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// Four values of 8 bits as two pairs in float16.
DEVICE void widen(u32 (&pairs)[2], u32 word) {
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(word));
}
// sums [16 outputs, 8 rows] += weight [16, 16] x x [8, 16] in float16, of pairs: a thread has inputs lane % 4 * 2 and 8
// further of outputs lane / 4 and 8 further, and of row lane / 4 of x; and sums of rows lane % 4 * 2 and the next one.
DEVICE void multiply_pairs(float (&sums)[4], const u32 (&above)[2], const u32 (&below)[2], u32 x, u32 x_next) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(above[0]), "r"(below[0]), "r"(above[1]), "r"(below[1]), "r"(x), "r"(x_next));
}
DEVICE float divided(float x, float y) { return __fdiv_rn(x, y); }
DEVICE float inverse_rounded(float x) { return __frcp_rn(x); }
DEVICE float square_root(float x) { return __fsqrt_rn(x); }
DEVICE float exponential(float x) { return __expf(x); }
