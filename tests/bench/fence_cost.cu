// What ordering costs an SM whose ring is filling: cycles of a fence, of a releasing add and of a trip to L2, by one thread,
// while another thread of the block keeps `cap` bulk copies of 8 KB in flight on all 132 SMs.
//
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I csrc -o fence_cost tests/bench/fence_cost.cu && ./fence_cost
//
// Every wait here ends by itself: copies land, and the thread that is timed counts its turns.
#include <cstdint>
#include <cstdio>

#include "ptx/bulk_copy.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/timer.cuh"

namespace {

constexpr int kSms = 132, kStages = 24, kCopyBytes = 8192, kTurns = 300, kWarmUpCycles = 20000, kPauseCycles = 800;
constexpr size_t kBytes = size_t{8} << 30;

enum Kind { kFence, kStoreAndFence, kReleasingAdd, kStoreAndReadBack, kLoad, kNumKinds };
const char* const kNames[] = {"fence.acq_rel.gpu", "store, fence.acq_rel.gpu", "red.release.gpu", "store, load it back",
                              "ld.relaxed.gpu"};

__device__ void act(Kind kind, uint32_t* word, uint32_t turn, uint32_t* sink) {
  using namespace mk::ptx;
  if (kind == kStoreAndFence) *reinterpret_cast<volatile uint32_t*>(word) = turn;
  if (kind == kFence || kind == kStoreAndFence) fence_gpu();
  if (kind == kReleasingAdd) add_release_gpu(word, 1);
  if (kind == kStoreAndReadBack) store_relaxed_gpu(word, turn);
  if ((kind == kStoreAndReadBack || kind == kLoad) && load_relaxed_gpu(word) == ~0u) *sink = turn;
}

__device__ bool landed(uint64_t* barriers, uint32_t copy) {
  return mk::ptx::mbarrier_try_wait(mk::ptx::shared_address(&barriers[copy % kStages]), copy / kStages & 1);
}

__global__ void measure(uint64_t from, uint32_t* words, uint32_t* cycles, Kind kind, uint32_t cap) {
  extern __shared__ __align__(128) char ring[];
  __shared__ uint64_t barriers[kStages];
  __shared__ volatile int over;
  if (threadIdx.x == 0) {
    over = 0;
    for (uint64_t& barrier : barriers) mk::ptx::mbarrier_init(mk::ptx::shared_address(&barrier), 1);
    mk::ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const uint64_t since = mk::ptx::clock(); mk::ptx::clock() - since < kWarmUpCycles;) {
    }
    uint64_t sum = 0;
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint64_t begin = mk::ptx::clock();
      act(kind, words + blockIdx.x * 64, turn, words);
      const uint64_t end = mk::ptx::clock();
      sum += end - begin;
      while (mk::ptx::clock() - end < kPauseCycles) {
      }
    }
    over = 1;
    cycles[blockIdx.x] = static_cast<uint32_t>(sum / kTurns);
  } else if (threadIdx.x == 32 && cap > 0) {
    uint32_t copy = 0;
    size_t at = size_t{blockIdx.x} * kCopyBytes;
    for (; !over; ++copy) {
      if (copy >= cap) {
        while (!landed(barriers, copy - cap)) {
        }
      }
      const uint32_t barrier = mk::ptx::shared_address(&barriers[copy % kStages]);
      mk::ptx::mbarrier_arrive_expect(barrier, kCopyBytes);
      mk::ptx::bulk_copy(mk::ptx::shared_address(ring + copy % kStages * kCopyBytes), from + at, kCopyBytes, barrier);
      at += size_t{kSms} * kCopyBytes;
      if (at + kCopyBytes > kBytes) at = size_t{blockIdx.x} * kCopyBytes;
    }
    for (uint32_t open = copy > kStages ? copy - kStages : 0; open < copy; ++open) {
      while (!landed(barriers, open)) {
      }
    }
  }
}

}  // namespace

int main() {
  char* bytes;
  uint32_t *words, *cycles;
  cudaMalloc(&bytes, kBytes);
  cudaMemset(bytes, 0x5a, kBytes);
  cudaMalloc(&words, 1 << 20);
  cudaMemset(words, 0, 1 << 20);
  cudaMalloc(&cycles, kSms * sizeof(uint32_t));
  cudaFuncSetAttribute(measure, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kCopyBytes);
  const uint32_t caps[] = {0, 1, 2, 3, 4, 5, 6, 8, 12, 24};
  std::printf("%-26s", "copies of 8 KB in flight");
  for (uint32_t cap : caps) std::printf("%8u", cap);
  std::printf("\n");
  for (int kind = 0; kind < kNumKinds; ++kind) {
    std::printf("%-26s", kNames[kind]);
    for (uint32_t cap : caps) {
      measure<<<kSms, 64, kStages * kCopyBytes>>>(reinterpret_cast<uint64_t>(bytes), words, cycles,
                                                  static_cast<Kind>(kind), cap);
      uint32_t host[kSms];
      if (cudaMemcpy(host, cycles, sizeof host, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
      double sum = 0;
      for (uint32_t each : host) sum += each;
      std::printf("%8.0f", sum / kSms);
    }
    std::printf("\n");
  }
  return 0;
}
