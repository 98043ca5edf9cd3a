// Every spin of the kernel: a note of what it waits for, and the watch that reads the notes.
//
// A wait that lasts is noted in shared memory, and goes on until it is met or the block is told to stop. One warp of
// the block does nothing but watch: it looks at the notes, the deadline and the card's abort word, and tells the block
// to stop. So a wait is a few instructions, in a kernel whose instructions hardly fit their caches. A deadline counts
// only once every block has reported present. All lanes of a warp wait together and agree on the outcome, so that no
// lane is left behind in a later warp instruction.
#pragma once
#include "core/context.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"

namespace mk::core {

inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr uint32_t kTriesPerLook = 16;  // at whether to stop

// What a thread waits for, for the report.
struct Waiting {
  abi::Place place;
  uint32_t wanted;                // value of a counter, or a number that the place explains
  uint32_t counter = abi::kNone;  // none
};

// Says which record a role is at; waits then need not. By one thread.
__device__ __forceinline__ void note_record(const Context& context, uint32_t step, uint32_t index, uint32_t task) {
  *reinterpret_cast<uint4*>(&context.shared.notes[context.role]) = {step, index, task, kRuns};
}

__device__ __forceinline__ void note(Note& to, const Waiting& waiting) {
  to.what = {static_cast<uint32_t>(waiting.place) << 16 | waiting.counter, waiting.wanted};
}

__device__ __forceinline__ bool must_stop(const Context& context) {
  return ptx::load_acquire_shared(ptx::shared_address(&context.shared.stop)) != 0;
}

// Waits until `ready()` holds in all lanes of a warp; false when the kernel is to be left. `describe()` is for the
// note, made by the lanes that are not ready.
template <class Ready, class Describe>
__device__ __forceinline__ bool await(const Context& context, Ready&& ready, Describe&& describe) {
#pragma unroll 1
  for (uint32_t tries = 1;; ++tries) {
    const bool is_ready = ready();
    if (__all_sync(kAllLanes, is_ready)) return true;
    if (tries % kTriesPerLook == 0) {
      if (!is_ready) note(context.shared.notes[context.role], describe());
      if (__any_sync(kAllLanes, must_stop(context))) return false;
    }
  }
}

// The same for a thread on its own.
template <class Ready, class Describe>
__device__ __forceinline__ bool await_alone(const Context& context, Ready&& ready, Describe&& describe) {
#pragma unroll 1
  for (uint32_t tries = 1;; ++tries) {
    if (ready()) return true;
    if (tries % kTriesPerLook == 0) {
      note(context.shared.notes[context.role], describe());
      if (must_stop(context)) return false;
    }
  }
}

// The watch: one warp, a lane a role. A role whose note has not changed for as long as the deadline waits in vain.
// Leaves when all roles have left, or when it has told them to.
class Watch {
 public:
  __device__ explicit Watch(const Context& context) : context_(context), since_(ptx::clock()) {}

  __device__ __forceinline__ void run() {
    Shared& shared = context_.shared;
    const uint32_t left = ptx::shared_address(&shared.left);
#pragma unroll 1
    while (ptx::load_acquire_shared(left) < kRoles) {
      look_at_mail();
      const bool aborted = ptx::load_relaxed_gpu(at<uint32_t>(context_.launch().abort)) != 0;
      const uint32_t overdue = __ballot_sync(kAllLanes, is_overdue());
      if (aborted || overdue != 0) {
        if (!aborted && context_.lane == __ffs(overdue) - 1) report(shared.notes[context_.lane]);
        __syncwarp();
        if (context_.lane == 0) ptx::store_release_shared(ptx::shared_address(&shared.stop), 1);
        return;
      }
      ptx::pause(kPauseNs);
    }
  }

 private:
  static constexpr uint32_t kPauseNs = 500;

  // One block reads what the host writes, and ahead of time: a trip to the host's memory is on nobody's path then.
  __device__ __forceinline__ void look_at_mail() {
    const abi::Launch& launch = context_.launch();
    if (launch.mailbox == 0 || launch.mailbox_sm != context_.sm || context_.lane >= kMailWords) return;
    const uint32_t word = ptx::load_acquire_system(at<const uint32_t>(launch.mailbox) + context_.lane);
    ptx::store_release_shared(ptx::shared_address(&context_.shared.mail[context_.lane]), word);
  }

  // Whether this lane's role has waited too long, or has given up.
  __device__ __forceinline__ bool is_overdue() {
    if (context_.lane >= kRoles) return false;
    const volatile Note& own = context_.shared.notes[context_.lane];
    if (own.state == kUnbuilt) return true;
    const uint64_t now = ptx::clock();
    const uint32_t step = own.step, index = own.index, what = own.what.x, wanted = own.what.y;
    const bool moves = step != step_ || index != index_ || what != what_ || wanted != wanted_;
    // Who waits for the planner is not late: the planner is, or there is nothing for it to plan.
    const bool idles = what >> 16 == static_cast<uint32_t>(abi::Place::kRecord);
    if (own.state == kLeft || moves || idles ||
        ptx::load_relaxed_gpu(at<uint32_t>(context_.launch().present)) != spec::kNumSms) {
      since_ = now;
      step_ = step;
      index_ = index;
      what_ = what;
      wanted_ = wanted;
      return false;
    }
    return now - since_ > context_.launch().deadline_cycles;
  }

  // Takes the abort word; the first block to take it writes the report, for the host to read even if nothing else comes
  // back.
  __device__ __forceinline__ void report(const Note& of) {
    const abi::Launch& launch = context_.launch();
    if (ptx::compare_swap_gpu(at<uint32_t>(launch.abort), 0, 1) != 0) return;
    auto* report = at<volatile abi::Report>(launch.report);
    report->place = of.what.x >> 16;
    report->sm = context_.sm;
    report->step = of.step;
    report->record = of.index;
    report->task = of.task;
    const uint32_t counter = of.what.x & 0xffff;
    report->counter = counter;
    report->wanted = of.what.y;
    const bool counts = counter < spec::kNumCounters;
    report->seen = counts ? ptx::load_relaxed_gpu(at<uint32_t>(launch.counters) + counter * spec::kCounterStride) : 0;
    report->present = ptx::load_relaxed_gpu(at<uint32_t>(launch.present));
    report->waited_cycles = ptx::clock() - since_;
    ptx::fence_system();
    report->stop = static_cast<uint32_t>(of.state == kUnbuilt ? abi::Stop::kUnbuilt : abi::Stop::kLate);
    ptx::fence_system();  // the stop is last: the report is whole once it is set
  }

  const Context& context_;
  uint64_t since_;  // this lane's role has not moved
  uint32_t step_ = 0, index_ = 0, what_ = 0, wanted_ = 0;
};

}  // namespace mk::core
