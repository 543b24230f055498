// What all kernels in CUDA C++ need of Hopper (sm_90), as inline functions of addresses in shared memory.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE static __device__ __forceinline__

DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Programmatic dependent launch: see fleetfoot.kernels.runtime.dependent_launch for the rules.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Barriers in shared memory, which count arrivals and bytes.
DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Barriers initialised before this are visible to the cluster and to asynchronous copies.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u32 barrier, u32 bytes) {  // one arrival
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The cluster: a barrier over all its threads, after which `barriers_ready` is seen, and addresses in the shared memory
// of block `rank`.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 address_in(u32 rank, u32 address) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Barrier of the first `threads` threads of a block.
DEVICE void block_sync(u32 threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
DEVICE bool elect_lane() {  // of a whole warp
  u32 is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_elected));
  return is_elected;
}
DEVICE float from_lane(float value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE float from_lane_xor(float value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
DEVICE float low_bf16(u32 packed) { return __uint_as_float(packed << 16); }
DEVICE float high_bf16(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
DEVICE float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Within 2 ulp, without a branch for special cases.
DEVICE float inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
