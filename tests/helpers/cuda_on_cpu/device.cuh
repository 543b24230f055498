// The functions of src/fleetfoot/kernels_hopper/cluster/device.cuh on a CPU.
#pragma once
#include "fibers.h"

#define CONSTEXPR constexpr
#define KERNEL(registers) extern "C" void

DEVICE u32 thread_index() { return cpu::fiber->thread; }
DEVICE u32 block_index() { return cpu::fiber->block->index; }
DEVICE char* shared_memory() { return cpu::fiber->block->memory; }
DEVICE void barrier_init(u64* barrier, u32 count) {
  cpu::barrier(barrier) = {0, static_cast<std::uint8_t>(count), static_cast<std::uint8_t>(count), 0};
}
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  cpu::barrier(barrier).bytes += bytes;
  cpu::barrier(barrier).pending--;
  cpu::settle(cpu::barrier(barrier));
}
DEVICE void barrier_arrive(u64* barrier) { barrier_expect(barrier, 0); }
DEVICE void barrier_wait(u64* barrier, u32 parity) {
  cpu::wait_until([=] { return cpu::barrier(barrier).phase != parity; });
}
DEVICE void copy_async(void* to, const void* from, u32 bytes, u64* barrier) {
  const char* data = static_cast<const char*>(from);
  cpu::transfer(to, std::vector<char>(data, data + bytes), barrier);
}
DEVICE void prefetch_line(const void*) {}

template <class... Values>
void send_values(u32 rank, void* to, u64* barrier, Values... values) {
  std::vector<char> data(4 * sizeof...(values));
  char* at = data.data();
  ((std::memcpy(at, &values, 4), at += 4), ...);
  cpu::transfer(cpu::in_block(rank, static_cast<char*>(to)), data, cpu::in_block(rank, barrier));
}
DEVICE void send(u32 rank, void* to, u32 value, u64* barrier) { send_values(rank, to, barrier, value); }
DEVICE void send(u32 rank, void* to, float first, float second, u64* barrier) {
  send_values(rank, to, barrier, first, second);
}

DEVICE void mma(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpu::multiply(sums, {a0, a1, a2, a3}, {b0, b1}, cpu::bf16);
}

DEVICE u32 low_halves(u32 low, u32 high) { return high << 16 | low & 0xffff; }
DEVICE u32 high_halves(u32 low, u32 high) { return high & 0xffff0000 | low >> 16; }
DEVICE float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }
DEVICE float maximum(float a, float b) { return a > b ? a : b; }
