// The functions of src/fleetfoot/kernels/linear/hopper.cuh on a CPU, and what its kernels use of CUDA.
//
// An address is an offset in the shared memory of a block, in its upper bits the block's rank + 1 in the cluster; 0:
// the thread's own. Copies and products apply the 128-byte swizzle to addresses, as the GPU does.
#pragma once
#include "fibers.h"

#define __global__
#define __grid_constant__
#define __maxnreg__(registers)
#define __launch_bounds__(...)

struct float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
namespace cpu {
struct Index {
  u32 x;
};
struct alignas(64) TensorMap {  // 128 bytes, as `CUtensorMap`; see tensor_map in the test's helper
  char* data;
  u64 rank, sizes[5], strides[4];  // bytes, without the innermost dimension
  u32 box[5];
};
static_assert(sizeof(TensorMap) == 128);

inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline char* at(u32 address) {
  const u32 rank = address >> 24;
  Block* block = rank ? &grid.blocks[rank - 1] : fiber->block;
  return block->memory + (address & 0xffffff);
}
inline u64* barrier_at(u32 address) { return reinterpret_cast<u64*>(at(address)); }
inline u32 rank_of_block() { return static_cast<u32>(fiber->block - grid.blocks.data()); }
inline u32 in_rank(u32 rank, u32 address) { return (rank + 1) << 24 | (address & 0xffffff); }

// A box with these coordinates, innermost first, to every block in `blocks`.
inline void copy(u32 to, const TensorMap& map, u32 barrier, std::vector<i64> place, u32 blocks) {
  place.resize(5);
  const u32* box = map.box;
  std::vector<char> data;
  for (u32 e = 0; e < box[4]; e++)
    for (u32 d = 0; d < box[3]; d++)
      for (u32 c = 0; c < box[2]; c++)
        for (u32 b = 0; b < box[1]; b++) {
          const i64 index[5] = {place[0], place[1] + b, place[2] + c, place[3] + d, place[4] + e};
          bool is_inside = true;
          i64 offset = index[0] * 2;
          for (int i = 1; i < 5; i++) {
            is_inside = is_inside && index[i] < static_cast<i64>(map.sizes[i]);
            offset += index[i] * static_cast<i64>(map.strides[i - 1]);
          }
          const std::size_t begin = data.size();
          data.resize(begin + box[0] * 2);  // zeros
          if (is_inside) std::memcpy(data.data() + begin, map.data + offset, box[0] * 2);
        }
  for (u32 rank = 0; rank < grid.blocks.size(); rank++) {
    if (!(blocks >> rank & 1)) continue;
    char* memory = grid.blocks[rank].memory;
    run_later([=] {
      for (u32 i = 0; i < data.size(); i += 16) std::memcpy(memory + swizzled(to + i), data.data() + i, 16);
      Barrier& of = cpu::barrier(reinterpret_cast<u64*>(memory + barrier));
      of.bytes -= static_cast<std::int32_t>(data.size());
      settle(of);
    });
  }
}
inline void copy(u32 to, const TensorMap& map, u32 barrier, const std::vector<i64>& place) {
  copy(to, map, barrier, place, 1u << rank_of_block());
}
}  // namespace cpu
using TensorMap = cpu::TensorMap;

#define threadIdx (cpu::Index{cpu::fiber->thread})
#define blockIdx (cpu::Index{cpu::fiber->block->index})
#define gridDim (cpu::Index{cpu::grid.num_blocks})
DEVICE void __syncthreads() { cpu::meet(cpu::fiber->block->all, cpu::grid.threads_of_block); }
DEVICE void __syncwarp() { warp_sync(); }
template <class T>
T __shfl_sync(u32, T value, u32 lane) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  bits = from_lane(bits, lane);
  std::memcpy(&value, &bits, 4);
  return value;
}
DEVICE float __ldcg(const float* from) { return *from; }

DEVICE char* shared_memory() { return cpu::fiber->block->memory; }
DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(static_cast<const char*>(pointer) - cpu::fiber->block->memory);
}
DEVICE void barrier_init(u32 barrier, u32 count) {
  cpu::barrier(cpu::barrier_at(barrier)) = {0, static_cast<std::uint8_t>(count), static_cast<std::uint8_t>(count), 0};
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  cpu::Barrier& of = cpu::barrier(cpu::barrier_at(barrier));
  of.bytes += bytes;
  of.pending--;
  cpu::settle(of);
}
DEVICE void barrier_arrive(u32 barrier) { barrier_expect(barrier, 0); }
DEVICE u32 address_in(u32 rank, u32 address) { return cpu::in_rank(rank, address); }
DEVICE void barrier_arrive_in(u32 rank, u32 barrier) { barrier_arrive(address_in(rank, barrier)); }
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  cpu::wait_until([=] { return cpu::barrier(cpu::barrier_at(barrier)).phase != parity; });
}
DEVICE void prefetch_map(const TensorMap&) {}
DEVICE void copy_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer) {
  cpu::copy(to, map, barrier, {inner, outer});
}
DEVICE void copy_box_to(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u16 blocks) {
  cpu::copy(to, map, barrier, {inner, outer}, blocks);
}
DEVICE void copy_weight_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer) {
  cpu::copy(to, map, barrier, {inner, 0, 0, 0, outer});
}
DEVICE void copy_weight_box_to(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u16 blocks) {
  cpu::copy(to, map, barrier, {inner, 0, 0, 0, outer}, blocks);
}
DEVICE void copy_gated_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer) {
  cpu::copy(to, map, barrier, {inner, 0, 0, outer});
}
DEVICE void copy_16_bytes(u32 to, const void* from) { std::memcpy(cpu::at(to), from, 16); }
DEVICE void copies_wait() {}
DEVICE void send(u32 to, const float* values, u32 barrier) {
  const char* data = reinterpret_cast<const char*>(values);
  cpu::transfer(cpu::at(to), std::vector<char>(data, data + 16), cpu::barrier_at(barrier));
}

DEVICE float round_bf16(float x) { return low_bf16(pack_bf16(x, 0.0f)); }

DEVICE u64 matrix_of(u32 address) { return address >> 4; }
DEVICE void products_begin() {}
DEVICE void products_commit() {}
template <int pending>
DEVICE void products_wait() {}
DEVICE void keep_order(float&) {}
template <std::size_t count>
DEVICE void multiply(float (&sums)[count], u64 rows, u64 weight, int adds) {
  const u32 lane = cpu::fiber->thread % 32, warp = cpu::fiber->thread / 32 % 4;
  const auto load = [](u64 matrix, u32 row, float (&values)[16]) {
    for (u32 half = 0; half < 2; half++) {
      const char* from = cpu::fiber->block->memory +
                         cpu::swizzled(static_cast<u32>(matrix << 4) + row * 128 + half * 16);
      u16 bits[8];
      std::memcpy(bits, from, 16);
      for (u32 k = 0; k < 8; k++) values[half * 8 + k] = cpu::bf16(bits[k]);
    }
  };
  float left[2][16], right[16];
  for (u32 half = 0; half < 2; half++) load(rows, warp * 16 + lane / 4 + half * 8, left[half]);
  for (u32 i = 0; i < count / 4; i++)
    for (u32 column = 0; column < 2; column++) {
      load(weight, i * 8 + lane % 4 * 2 + column, right);
      for (u32 half = 0; half < 2; half++) {
        float& sum = sums[i * 4 + half * 2 + column];
        float added = adds ? sum : 0.0f;
        for (u32 k = 0; k < 16; k++) added += left[half][k] * right[k];
        sum = added;
      }
    }
}
