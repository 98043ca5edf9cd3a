// The kernel: its name is fixed, and its one argument is the address of a launch record in device memory.
#include "decode_step.cuh"

extern "C" __global__ void __launch_bounds__(mk::spec::kBlockThreads, 1) decode_steps(const mk::abi::Launch* launch) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  mk::decode_steps(*reinterpret_cast<mk::core::Shared*>(shared_bytes), launch);
}
