// Clusters of thread blocks on a CPU, for tests of the kernels' own source.
//
// Each thread of a cluster is a fiber that yields wherever a GPU thread would wait. Copies and stores to other blocks
// arrive one round later, shared memory starts as NaN, and a round in which nothing moves is a deadlock.
//
// Headers of the standard library that take longer to compile than a kernel are left out.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <vector>

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

extern "C" float sqrtf(float) noexcept;
extern "C" float exp2f(float) noexcept;

#define __device__
#define DEVICE static inline

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
  Rendezvous barrier, all;  // of some threads, and of all
};
struct Fiber {
  Block* block;
  u32 thread;
  bool started = false, done = false;
  u64 cluster_generation = 0;  // when it arrived
  ucontext_t context;
  jmp_buf place;
};
struct Work {
  virtual void run() = 0;
  virtual ~Work() = default;
};
template <class Function>
struct WorkOf final : Work {
  explicit WorkOf(Function function) : function(function) {}
  void run() override { function(); }
  Function function;
};
struct Memory {
  explicit Memory(u64 bytes) : bytes(new char[bytes]) {}
  ~Memory() { delete[] bytes; }
  Memory(const Memory&) = delete;
  char* bytes;
};
struct Grid {
  u32 threads_of_block = 0, num_blocks = 0;
  std::vector<Block> blocks;  // of the cluster that runs
  std::vector<Fiber> fibers;
  Rendezvous cluster;
  std::vector<Work*> in_flight;
  u64 progress = 0;
  Work* kernel = nullptr;
};
inline Grid grid;
inline Fiber* fiber;
inline jmp_buf scheduler;

inline void yield() {
  if (_setjmp(fiber->place) == 0) _longjmp(scheduler, 1);
}
template <class IsDone>
void wait_until(IsDone is_done) {
  while (!is_done()) yield();
  grid.progress++;
}
template <class Last = void (*)()>
u64 arrive(Rendezvous& at, u32 count, Last last = [] {}) {
  const u64 generation = at.generation;
  grid.progress++;
  if (++at.arrived == count) {
    last();
    at.arrived = 0;
    at.generation++;
  }
  return generation;
}
template <class Last = void (*)()>
void meet(Rendezvous& at, u32 count, Last last = [] {}) {
  const u64 generation = arrive(at, count, last);
  wait_until([&] { return at.generation != generation; });
}
inline void run_fiber() {
  grid.kernel->run();
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
inline bool launch(Work& kernel, u32 num_blocks, u32 cluster_size, u32 threads, u32 shared_bytes) {
  constexpr std::size_t stack_bytes = 1 << 16;
  const u32 aligned_bytes = (shared_bytes + 127) / 128 * 128;
  for (u32 first = 0; first < num_blocks; first += cluster_size) {
    grid = Grid();
    grid.kernel = &kernel;
    grid.threads_of_block = threads;
    grid.num_blocks = num_blocks;
    const Memory memory(aligned_bytes * cluster_size + 128), stacks(stack_bytes * cluster_size * threads);
    char* aligned = memory.bytes + (128 - reinterpret_cast<std::uintptr_t>(memory.bytes) % 128);
    std::memset(aligned, 0xff, aligned_bytes * cluster_size);
    for (u32 i = 0; i < cluster_size; i++)
      grid.blocks.push_back({aligned + i * aligned_bytes, first + i, std::vector<Warp>(threads / 32), {}, {}});
    grid.fibers = std::vector<Fiber>(cluster_size * threads);
    for (u32 i = 0; i < grid.fibers.size(); i++) {
      Fiber& made = grid.fibers[i];
      made.block = &grid.blocks[i / threads];
      made.thread = i % threads;
      getcontext(&made.context);
      made.context.uc_stack.ss_sp = stacks.bytes + i * stack_bytes;
      made.context.uc_stack.ss_size = stack_bytes;
      made.context.uc_link = nullptr;
      makecontext(&made.context, run_fiber, 0);
    }
    for (bool is_running = true; is_running;) {
      const u64 before = grid.progress;
      std::vector<Work*> arriving;
      arriving.swap(grid.in_flight);
      is_running = false;
      for (Fiber& next : grid.fibers) {
        if (next.done) continue;
        is_running = true;
        step(next);
      }
      for (Work* transfer : arriving) {
        transfer->run();
        delete transfer;
      }
      if (is_running && grid.progress == before && arriving.empty() && grid.in_flight.empty()) return false;
    }
  }
  return true;
}
template <class Function>
bool launch(Function kernel, u32 num_blocks, u32 cluster_size, u32 threads, u32 shared_bytes) {
  WorkOf<Function> work(kernel);
  return launch(static_cast<Work&>(work), num_blocks, cluster_size, threads, shared_bytes);
}
template <class Function>
void run_later(Function function) {
  grid.in_flight.push_back(new WorkOf<Function>(function));
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
  run_later([=] {
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

// What all kernels use: the functions of src/fleetfoot/kernels/runtime/intrinsics.cuh, but for those of addresses.
DEVICE void launch_dependents() {}
DEVICE void wait_for_inputs() {}
DEVICE void barriers_ready() {}
DEVICE u32 cluster_threads() { return cpu::grid.threads_of_block * cpu::grid.blocks.size(); }
DEVICE void cluster_arrive() { cpu::fiber->cluster_generation = cpu::arrive(cpu::grid.cluster, cluster_threads()); }
DEVICE void cluster_wait() {
  cpu::wait_until([] { return cpu::grid.cluster.generation != cpu::fiber->cluster_generation; });
}
DEVICE void block_sync(u32 threads) { cpu::meet(cpu::fiber->block->barrier, threads); }
DEVICE bool elect_lane() { return cpu::fiber->thread % 32 == 0; }
DEVICE void warp_sync() { cpu::meet(cpu::warp(), 32); }
template <class Value>
DEVICE Value from_lane(Value value, u32 lane) {
  cpu::Warp& warp = cpu::warp();
  Value* values = reinterpret_cast<Value*>(warp.values[warp.generation % 2]);
  values[cpu::fiber->thread % 32] = value;
  cpu::meet(warp, 32);
  return values[lane];
}
DEVICE int warp_index() { return cpu::fiber->thread / 32; }
DEVICE float from_lane_xor(float value, u32 mask) {
  cpu::Warp& warp = cpu::warp();
  float* values = warp.values[warp.generation % 2];
  values[cpu::fiber->thread % 32] = value;
  cpu::meet(warp, 32);
  return values[cpu::fiber->thread % 32 ^ mask];
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
namespace cpu {
inline u32 bf16_bits(float x) {
  const u32 bits = float_bits(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
}  // namespace cpu
DEVICE u32 pack_bf16(float low, float high) { return cpu::bf16_bits(low) | cpu::bf16_bits(high) << 16; }
DEVICE float low_bf16(u32 packed) { return bits_float(packed << 16); }
DEVICE float high_bf16(u32 packed) { return bits_float(packed & 0xffff0000u); }
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float inverse(float x) { return 1.0f / x; }
namespace cpu {
// A warp's product of 16 outputs and 8 rows over 16 inputs, as of ``mma.m16n8k16``. `value_of`: a number of its 16 bits.
template <class Value>
void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], Value value_of) {
  Warp& of = warp();
  const u32 lane = fiber->thread % 32;
  std::memcpy(of.a[lane], a, sizeof(a));
  std::memcpy(of.b[lane], b, sizeof(b));
  std::memcpy(of.sums[lane], sums, sizeof(sums));
  meet(of, 32, [&] {
    for (u32 at = 0; at < 32; at++)
      for (u32 i = 0; i < 4; i++) {
        const u32 output = at / 4 + i / 2 * 8, row = at % 4 * 2 + i % 2;
        for (u32 k = 0; k < 16; k++) {
          const u32 weight = of.a[output % 8 * 4 + k % 8 / 2][k / 8 * 2 + output / 8];
          const u32 input = of.b[row * 4 + k % 8 / 2][k / 8], shift = k % 2 * 16;
          of.sums[at][i] += value_of(weight >> shift & 0xffff) * value_of(input >> shift & 0xffff);
        }
      }
  });
  std::memcpy(sums, of.sums[lane], sizeof(sums));
}
}  // namespace cpu
