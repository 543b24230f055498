// What only the products need of Hopper (sm_90a), as inline functions: no other file of this folder contains PTX. The
// tests compile the kernels for a CPU with a header of the same name and functions.
#pragma once

#include <intrinsics.cuh>

struct alignas(64) TensorMap {  // `CUtensorMap`
  u64 opaque[16];
};

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Asynchronous copies of boxes of a tensor to shared memory; the barrier counts the bytes.
DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
DEVICE void copy_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(barrier), "r"(inner), "r"(outer)
      : "memory");
}
// The same to all blocks of the cluster in `blocks`, a bit for each; each has the barrier, too.
DEVICE void copy_box_to(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(inner), "r"(outer), "h"(blocks)
      : "memory");
}
DEVICE void copy_weight_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %4, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(inner), "r"(0), "r"(outer)
      : "memory");
}
DEVICE void copy_weight_box_to(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(inner), "r"(0), "r"(outer), "h"(blocks)
      : "memory");
}

// Gates and ups of 8 outputs each in turn, from output 8 * `outer` on.
DEVICE void copy_gated_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(inner), "r"(0), "r"(outer)
      : "memory");
}

// Copies that a thread waits for itself, through L1 (`.ca`). Past L1 (`.cg`), the angles of rows with one position,
// which all blocks copy at once, made a product of 256 rows take 13 us longer.
DEVICE void copy_16_bytes(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Without a qualifier for the cluster, which would be compiled to a fence of the whole GPU.
DEVICE void barrier_arrive_in(u32 rank, u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, barrier)) : "memory");
}
// A store to the shared memory of another block; its `barrier` counts the bytes.
DEVICE void send(u32 to, const float* values, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   to),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
               : "memory");
}

DEVICE float round_bf16(float x) { return low_bf16(pack_bf16(x, 0.0f)); }

// --- products of a warp group ----------------------------------------------------------------------------------------

// Of a tile in shared memory: rows of 128 bytes in the 128-byte swizzle, aligned to 1,024 bytes.
DEVICE u64 matrix_of(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// What reads a sum is not moved before this, which is after the wait.
DEVICE void keep_order(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

// Operands of the instructions, in groups of eight registers.
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 4)
#define NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_2 NAMES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_3 NAMES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_4 NAMES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_5 NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_6 NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_7 NAMES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_8 NAMES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_9 NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_10 NAMES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_11 NAMES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_12 NAMES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_13 NAMES_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_14 NAMES_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_15 NAMES_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_16 NAMES_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_1(d) EIGHT(d, 0)
#define SUMS_2(d) SUMS_1(d), EIGHT(d, 8)
#define SUMS_3(d) SUMS_2(d), EIGHT(d, 16)
#define SUMS_4(d) SUMS_3(d), EIGHT(d, 24)
#define SUMS_5(d) SUMS_4(d), EIGHT(d, 32)
#define SUMS_6(d) SUMS_5(d), EIGHT(d, 40)
#define SUMS_7(d) SUMS_6(d), EIGHT(d, 48)
#define SUMS_8(d) SUMS_7(d), EIGHT(d, 56)
#define SUMS_9(d) SUMS_8(d), EIGHT(d, 64)
#define SUMS_10(d) SUMS_9(d), EIGHT(d, 72)
#define SUMS_11(d) SUMS_10(d), EIGHT(d, 80)
#define SUMS_12(d) SUMS_11(d), EIGHT(d, 88)
#define SUMS_13(d) SUMS_12(d), EIGHT(d, 96)
#define SUMS_14(d) SUMS_13(d), EIGHT(d, 104)
#define SUMS_15(d) SUMS_14(d), EIGHT(d, 112)
#define SUMS_16(d) SUMS_15(d), EIGHT(d, 120)

// sums [64 rows, outputs] (+)= rows [64, 16] x weight [outputs, 16], with `groups` * 16 outputs: a thread has of each 8
// outputs two of row lane / 4, and two of the row 8 below. `adds`: 0: the sums are overwritten. `next` to `last`: the
// operands after the sums.
#define MULTIPLY(groups, count, outputs, next, second, last)                                                     \
  DEVICE void multiply(float (&sums)[count], u64 rows, u64 weight, int adds) {                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #last ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #outputs "k16.f32.bf16.bf16 {" NAMES_##groups "}, "         \
                 "%" #next ", %" #second ", p, 1, 1, 0, 0;\n}"                                                   \
                 : SUMS_##groups(sums)                                                                           \
                 : "l"(rows), "l"(weight), "r"(adds));                                                           \
  }
MULTIPLY(4, 32, 64, 32, 33, 34)
MULTIPLY(6, 48, 96, 48, 49, 50)
MULTIPLY(7, 56, 112, 56, 57, 58)
MULTIPLY(8, 64, 128, 64, 65, 66)
MULTIPLY(9, 72, 144, 72, 73, 74)
MULTIPLY(10, 80, 160, 80, 81, 82)
MULTIPLY(11, 88, 176, 88, 89, 90)
MULTIPLY(12, 96, 192, 96, 97, 98)
MULTIPLY(13, 104, 208, 104, 105, 106)
MULTIPLY(14, 112, 224, 112, 113, 114)
MULTIPLY(16, 128, 256, 128, 129, 130)
