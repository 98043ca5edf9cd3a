// Every spin of the kernel: a deadline, the abort word, and the report of the first block that gave up.
//
// A deadline counts only once every block has reported present: before, it starts again. All lanes of a warp wait together
// and agree on the outcome, so that no lane is left behind in a later warp instruction.
#pragma once
#include "core/context.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"

namespace mk::core {

inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr uint32_t kTriesPerCheck = 64;

// What a thread waits for, for the report.
struct Waiting {
  abi::Place place;
  uint32_t step;
  uint32_t index;  // of the record in the list
  uint32_t task;
  uint32_t counter;  // kNone: none
  uint32_t wanted;
};

// Takes the abort word; the first to take it writes the report, for the host to read even if nothing else comes back.
//
// This and the next function are slow paths, out of line and with all arguments by value: an address that escaped would
// make the loop reload its own variables around every barrier.
__device__ __noinline__ void give_up(const abi::Launch* launch, uint32_t sm, abi::Stop stop, Waiting waiting,
                                     uint32_t seen, uint64_t waited_cycles) {
  if (ptx::compare_swap_gpu(at<uint32_t>(launch->abort), 0, 1) != 0) return;
  auto* report = at<volatile abi::Report>(launch->report);
  report->place = static_cast<uint32_t>(waiting.place);
  report->sm = sm;
  report->step = waiting.step;
  report->record = waiting.index;
  report->task = waiting.task;
  report->counter = waiting.counter;
  report->wanted = waiting.wanted;
  report->seen = seen;
  report->present = ptx::load_relaxed_gpu(at<uint32_t>(launch->present));
  report->waited_cycles = waited_cycles;
  ptx::fence_system();
  report->stop = static_cast<uint32_t>(stop);  // last: the report is whole once this is set
  ptx::fence_system();
}

inline constexpr uint64_t kStopWaiting = 0;

// Called now and then by one thread that waits: when its wait counts from, or kStopWaiting because somebody gave up or
// this wait is over its deadline.
__device__ __noinline__ uint64_t out_of_patience(const abi::Launch* launch, uint32_t sm, Waiting waiting, uint32_t seen,
                                                 uint64_t since) {
  if (ptx::load_relaxed_gpu(at<uint32_t>(launch->abort)) != 0) return kStopWaiting;
  const uint64_t now = ptx::clock();
  if (now - since <= launch->deadline_cycles) return since;
  if (ptx::load_relaxed_gpu(at<uint32_t>(launch->present)) != spec::kNumSms) return now;
  give_up(launch, sm, abi::Stop::kLate, waiting, seen, now - since);
  return kStopWaiting;
}

// Waits until `ready()` holds in all lanes of a warp; false when the kernel is to be left. `describe()` and `seen()` are for
// the report, and cost nothing before; the first lane that is not ready makes it.
template <class Ready, class Describe, class Seen>
__device__ __forceinline__ bool await(const Context& context, Ready&& ready, Describe&& describe, Seen&& seen) {
  if (__all_sync(kAllLanes, ready())) return true;
  uint64_t since = ptx::clock();
  for (uint32_t tries = 1;; ++tries) {
    const uint32_t unready = __ballot_sync(kAllLanes, !ready());
    if (unready == 0) return true;
    if (tries % kTriesPerCheck == 0) {
      const uint32_t first = __ffs(unready) - 1;
      if (context.lane == first) since = out_of_patience(&context.shared.launch, context.sm, describe(), seen(), since);
      since = __shfl_sync(kAllLanes, since, first);
      if (since == kStopWaiting) return false;
    }
  }
}

template <class Ready, class Describe>
__device__ __forceinline__ bool await(const Context& context, Ready&& ready, Describe&& describe) {
  return await(context, ready, describe, [] { return 0u; });
}

// The same for a thread on its own.
template <class Ready, class Describe>
__device__ __forceinline__ bool await_alone(const Context& context, Ready&& ready, Describe&& describe) {
  if (ready()) return true;
  uint64_t since = ptx::clock();
  for (uint32_t tries = 1;; ++tries) {
    if (ready()) return true;
    if (tries % kTriesPerCheck == 0) {
      since = out_of_patience(&context.shared.launch, context.sm, describe(), 0, since);
      if (since == kStopWaiting) return false;
    }
  }
}

}  // namespace mk::core
