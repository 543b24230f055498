// A kernel of src/fleetfoot/kernels/linear as a function: 0, or 1 if threads wait forever.
#include SOURCE

extern "C" int run(const Arguments* arguments, u32 blocks, u32 cluster, u32 threads, u32 shared_bytes) {
  return !cpu::launch([=] { FUNCTION(*arguments); }, blocks, cluster, threads, shared_bytes);
}
