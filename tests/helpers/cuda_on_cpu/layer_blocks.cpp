// The kernels of a decoder layer as functions: 0, or 1 if threads wait forever.
#include "attention_block.cu"
#include "mlp_block.cu"

extern "C" int run_attention_block(const Arguments* arguments, u32 blocks, u32 shared_bytes) {
  return !cpu::launch([=] { attention_block(*arguments); }, blocks, CTAS, CONSUMERS + 32, shared_bytes);
}
extern "C" int run_mlp_block(const Arguments* arguments, u32 blocks, u32 shared_bytes) {
  return !cpu::launch([=] { mlp_block(*arguments); }, blocks, CTAS, CONSUMERS + 32, shared_bytes);
}
