// The functions of src/fleetfoot/kernels/cluster/device.cuh on a CPU, for tests of the kernels' own source.
//
// Each thread of a cluster is a fiber that yields wherever a GPU thread would wait. Copies and stores to other blocks
// arrive one round later, shared memory starts as NaN, and a round in which nothing moves is a deadlock.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

#define __device__
#define DEVICE static inline
#define CONSTEXPR constexpr
#define KERNEL(registers) extern "C" void

namespace cpu {
struct Rendezvous {
  u32 arrived = 0;
  u64 generation = 0;
};
struct Warp : Rendezvous {
  float values[2][32];
  u32 a[32][4], b[32][2];
  float sums[32][4];
};
struct Block {
  char* memory;
  u32 index;
  std::vector<Warp> warps;
  Rendezvous barrier;
};
struct Fiber {
  Block* block;
  u32 thread;
  bool started = false, done = false;
  ucontext_t context;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
};
struct Grid {
  u32 threads_of_block = 0;
  std::vector<Block> blocks;  // of the cluster that runs
  std::vector<Fiber> fibers;
  Rendezvous cluster;
  std::vector<std::function<void()>> in_flight;
  u64 progress = 0;
  std::function<void()> kernel;
};
inline Grid grid;
inline Fiber* fiber;
inline jmp_buf scheduler;

inline void yield() {
  if (_setjmp(fiber->place) == 0) _longjmp(scheduler, 1);
}
inline void wait_until(const std::function<bool()>& is_done) {
  while (!is_done()) yield();
  grid.progress++;
}
inline u64 arrive(Rendezvous& at, u32 count, const std::function<void()>& last = [] {}) {
  const u64 generation = at.generation;
  grid.progress++;
  if (++at.arrived == count) {
    last();
    at.arrived = 0;
    at.generation++;
  }
  return generation;
}
inline void meet(Rendezvous& at, u32 count, const std::function<void()>& last = [] {}) {
  const u64 generation = arrive(at, count, last);
  wait_until([&] { return at.generation != generation; });
}
inline void run_fiber() {
  grid.kernel();
  fiber->done = true;
  grid.progress++;
  _longjmp(scheduler, 1);
}
inline void step(Fiber& next) {
  fiber = &next;
  if (_setjmp(scheduler)) return;
  if (next.started) _longjmp(next.place, 1);
  next.started = true;
  setcontext(&next.context);
}
// One cluster after the other; false: a deadlock.
inline bool launch(std::function<void()> kernel, u32 num_blocks, u32 cluster_size, u32 threads, u32 shared_bytes) {
  constexpr std::size_t stack_bytes = 1 << 16;
  const u32 aligned_bytes = (shared_bytes + 127) / 128 * 128;
  for (u32 first = 0; first < num_blocks; first += cluster_size) {
    grid = Grid();
    grid.kernel = kernel;
    grid.threads_of_block = threads;
    std::unique_ptr<char[]> memory(new char[aligned_bytes * cluster_size + 128]);
    char* aligned = memory.get() + (128 - reinterpret_cast<std::uintptr_t>(memory.get()) % 128);
    std::memset(aligned, 0xff, aligned_bytes * cluster_size);
    for (u32 i = 0; i < cluster_size; i++)
      grid.blocks.push_back({aligned + i * aligned_bytes, first + i, std::vector<Warp>(threads / 32), {}});
    grid.fibers = std::vector<Fiber>(cluster_size * threads);
    for (u32 i = 0; i < grid.fibers.size(); i++) {
      Fiber& made = grid.fibers[i];
      made.block = &grid.blocks[i / threads];
      made.thread = i % threads;
      made.stack.reset(new char[stack_bytes]);
      getcontext(&made.context);
      made.context.uc_stack.ss_sp = made.stack.get();
      made.context.uc_stack.ss_size = stack_bytes;
      made.context.uc_link = nullptr;
      makecontext(&made.context, run_fiber, 0);
    }
    for (bool is_running = true; is_running;) {
      const u64 before = grid.progress;
      std::vector<std::function<void()>> arriving;
      arriving.swap(grid.in_flight);
      is_running = false;
      for (Fiber& next : grid.fibers) {
        if (next.done) continue;
        is_running = true;
        step(next);
      }
      for (auto& transfer : arriving) transfer();
      if (is_running && grid.progress == before && arriving.empty() && grid.in_flight.empty()) return false;
    }
  }
  return true;
}
inline Warp& warp() { return fiber->block->warps[fiber->thread / 32]; }
inline float bf16(u32 bits) {
  const u32 word = bits << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
struct Barrier {
  std::int32_t bytes;
  std::uint8_t count, pending;
  std::uint16_t phase;
};
inline Barrier& barrier(u64* at) { return *reinterpret_cast<Barrier*>(at); }
inline void settle(Barrier& of) {
  grid.progress++;
  if (of.pending == 0 && of.bytes == 0) {
    of.phase ^= 1;
    of.pending = of.count;
  }
}
inline void transfer(void* to, std::vector<char> data, u64* at) {
  grid.in_flight.push_back([=] {
    std::memcpy(to, data.data(), data.size());
    barrier(at).bytes -= static_cast<std::int32_t>(data.size());
    settle(barrier(at));
  });
}
template <class T>
T* in_block(u32 rank, T* pointer) {
  char* address = reinterpret_cast<char*>(pointer);
  return reinterpret_cast<T*>(grid.blocks[rank].memory + (address - fiber->block->memory));
}
}  // namespace cpu

DEVICE u32 thread_index() { return cpu::fiber->thread; }
DEVICE u32 block_index() { return cpu::fiber->block->index; }
DEVICE char* shared_memory() { return cpu::fiber->block->memory; }
DEVICE void launch_dependents() {}
DEVICE void wait_for_inputs() {}

DEVICE void barrier_init(u64* barrier, u32 count) {
  cpu::barrier(barrier) = {0, static_cast<std::uint8_t>(count), static_cast<std::uint8_t>(count), 0};
}
DEVICE void barriers_ready() {}
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
DEVICE void prefetch(const void*, u32) {}

DEVICE u32 cluster_threads() { return cpu::grid.threads_of_block * cpu::grid.blocks.size(); }
DEVICE void cluster_arrive() { cpu::arrive(cpu::grid.cluster, cluster_threads()); }
DEVICE void cluster_wait() {
  cpu::wait_until([] { return cpu::grid.cluster.generation == 1; });  // the kernels have one
}
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

DEVICE void block_sync(u32 threads) { cpu::meet(cpu::fiber->block->barrier, threads); }
DEVICE bool elect_lane() { return thread_index() % 32 == 0; }
DEVICE void warp_sync() { cpu::meet(cpu::warp(), 32); }
DEVICE u32 from_lane(u32 value, u32 lane) {
  cpu::Warp& warp = cpu::warp();
  u32* words = reinterpret_cast<u32*>(warp.values[warp.generation % 2]);
  words[thread_index() % 32] = value;
  cpu::meet(warp, 32);
  return words[lane];
}
DEVICE float from_lane_xor(float value, u32 mask) {
  cpu::Warp& warp = cpu::warp();
  float* values = warp.values[warp.generation % 2];
  values[thread_index() % 32] = value;
  cpu::meet(warp, 32);
  return values[thread_index() % 32 ^ mask];
}

DEVICE void mma(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpu::Warp& warp = cpu::warp();
  const u32 lane = thread_index() % 32, a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  std::memcpy(warp.a[lane], a, sizeof(a));
  std::memcpy(warp.b[lane], b, sizeof(b));
  std::memcpy(warp.sums[lane], sums, sizeof(sums));
  cpu::meet(warp, 32, [&] {
    for (u32 at = 0; at < 32; at++)
      for (u32 i = 0; i < 4; i++) {
        const u32 output = at / 4 + i / 2 * 8, row = at % 4 * 2 + i % 2;
        for (u32 k = 0; k < 16; k++) {
          const u32 weight = warp.a[output % 8 * 4 + k % 8 / 2][k / 8 * 2 + output / 8];
          const u32 input = warp.b[row * 4 + k % 8 / 2][k / 8];
          const u32 shift = k % 2 * 16;
          warp.sums[at][i] += cpu::bf16(weight >> shift & 0xffff) * cpu::bf16(input >> shift & 0xffff);
        }
      }
  });
  std::memcpy(sums, warp.sums[lane], sizeof(sums));
}

DEVICE u32 float_bits(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
DEVICE float bits_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
DEVICE u32 round_bf16(float x) {
  const u32 bits = float_bits(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
DEVICE float low_bf16(u32 packed) { return bits_float(packed << 16); }
DEVICE float high_bf16(u32 packed) { return bits_float(packed & 0xffff0000u); }
DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float inverse(float x) { return 1.0f / x; }
DEVICE float inverse_sqrt(float x) { return 1.0f / std::sqrt(x); }
DEVICE float maximum(float a, float b) { return a > b ? a : b; }
