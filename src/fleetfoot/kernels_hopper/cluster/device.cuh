// What only the cluster kernels need of Hopper (sm_90), as inline functions: no other file of this folder contains PTX.
// The tests compile the kernels for a CPU with a header of the same name and functions, which emulates a cluster of
// thread blocks.
#pragma once

#include <intrinsics.cuh>

#define CONSTEXPR __host__ __device__ constexpr
#define KERNEL(registers) extern "C" __global__ void __maxnreg__(registers)

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }

// Barriers in shared memory, by pointers.
DEVICE void barrier_init(u64* barrier, u32 count) { barrier_init(shared_address(barrier), count); }
DEVICE void barrier_expect(u64* barrier, u32 bytes) { barrier_expect(shared_address(barrier), bytes); }  // one arrival
DEVICE void barrier_arrive(u64* barrier) { barrier_arrive(shared_address(barrier)); }
// Acquires for the thread block, which is enough for shared memory: for the cluster it would also empty the L1 cache,
// at each wait of each warp.
DEVICE bool barrier_test(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
#ifdef SPIN_LIMIT
  for (int i = 0; !barrier_test(barrier, parity); i++)
    if (i > SPIN_LIMIT) asm volatile("trap;");
#else
  while (!barrier_test(barrier, parity)) {
  }
#endif
}

// Asynchronous copy of `bytes`, a multiple of 16, to shared memory; the barrier counts them.
DEVICE void copy_async(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
DEVICE void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

DEVICE u32 address_in(u32 rank, const void* pointer) { return address_in(rank, shared_address(pointer)); }
// Store `value` where block `rank` has `to`; its `barrier` counts the bytes.
DEVICE void send(u32 rank, void* to, u32 value, u64* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in(rank, to)),
               "r"(value), "r"(address_in(rank, barrier))
               : "memory");
}
DEVICE void send(u32 rank, void* to, float first, float second, u64* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                   address_in(rank, to)),
               "r"(__float_as_uint(first)), "r"(__float_as_uint(second)), "r"(address_in(rank, barrier))
               : "memory");
}

DEVICE void warp_sync() { __syncwarp(); }
DEVICE int from_lane(int value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
// The same in all lanes, which a shuffle proves to the compiler: what depends on it is computed in uniform registers.
DEVICE int warp_index() { return from_lane(static_cast<int>(thread_index() / 32), 0); }
DEVICE u32 low_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }
DEVICE u32 high_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x7632); }
// sums [16 outputs, 8 rows] += weight [16, 16] x rows [16, 8], bf16, in the fragments of mma.m16n8k16.
DEVICE void mma(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float inverse_sqrt(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
