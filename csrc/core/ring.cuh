// The ring of an SM, never drained from launch to end: one thread issues copies in order, the consumers use them in order.
//
// Landed data is as deep as the ring, data in flight as shallow as the cap: copy i is issued once copy i - cap has landed,
// because with the whole ring in flight the memory serves somebody's next phase before somebody else's present one.
#pragma once
#include "core/patience.cuh"
#include "core/trace.cuh"
#include "ptx/bulk_copy.cuh"

namespace mk::core {

// A point in the ring: a stage, and the parity of the phase that its present copy ends.
struct Cursor {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(uint32_t copies) {
    stage += copies;
    if (stage >= spec::kStages) {
      stage -= spec::kStages;
      parity ^= 1;
    }
  }

  // The same over any number of turns of the ring.
  __device__ __forceinline__ void advance_far(uint32_t copies) {
    parity ^= copies / spec::kStages & 1;
    advance(copies % spec::kStages);
  }

  __device__ __forceinline__ Cursor behind(uint32_t copies) const {
    return stage >= copies ? Cursor{stage - copies, parity} : Cursor{stage + spec::kStages - copies, parity ^ 1};
  }
};

// The issuer's end: one thread takes runs of copies off the planner's queue and issues them.
//
// It is a thread on its own for two reasons. An instruction that takes its operands from uniform registers costs a loop
// over lanes wherever several lanes might be active. And after a stall it has to catch up, copy by copy: everything that
// is done once a record - fetching, waiting, finding addresses - is the planner's, and what a copy needs is done before
// the wait for the cap, so that nothing is left between a landing and the next copy.
class Issuer {
 public:
  __device__ explicit Issuer(const Context& context)
      : context_(context),
        ring_(ptx::kept(ptx::shared_address(context.shared.ring))),
        landed_(ptx::kept(ptx::shared_address(context.shared.landed))),
        freed_(ptx::kept(ptx::shared_address(context.shared.freed))),
        bytes_(ptx::kept(ptx::shared_address(context.shared.stage_bytes))) {
    if constexpr (spec::kEvictFirst) policy_ = ptx::evict_first_policy();
    before_ = next_.behind(spec::kCapCopies % spec::kStages);
  }

  // Issues until the end of the launch, or until the kernel is to be left; then waits for all that is on its way.
  __device__ __forceinline__ void run() {
    Shared& shared = context_.shared;
    const uint32_t queued = ptx::kept(ptx::shared_address(&shared.queued));
    uint32_t entry = 0;
    for (uint32_t taken = 0;; ++taken) {
      if (!await_alone(
              context_, [&] { return ptx::load_acquire_shared(queued) != taken; },
              [&] { return Waiting{abi::Place::kRecord, 0, 0, abi::kNone, abi::kNone, taken}; })) {
        break;
      }
      const Pieces pieces = shared.queue[entry];
      entry = entry + 1 < spec::kQueue ? entry + 1 : 0;
      if constexpr (spec::kTrace) {
        if (pieces.is_first) stamp(context_, shared.slots[pieces.slot], &abi::Trace::load_start);
      }
      ptx::store_release_shared(ptx::shared_address(&shared.taken), taken + 1);
      if constexpr (spec::kProxyFence) {
        // What the planner acquired for this record may be data of ordinary stores, such as a step's new KV.
        if (pieces.is_first) ptx::fence_proxy_async_global();
      }
      if (pieces.bytes == 0 || !issue(pieces)) break;
    }
    drain();
  }

 private:
  __device__ __forceinline__ bool issue(const Pieces& pieces) {
    uint64_t from = pieces.from;
    int32_t step = pieces.even;
    int32_t other = pieces.odd;
    for (uint32_t left = pieces.bytes; left > 0;) {
      const uint32_t landed = landed_ + next_.stage * sizeof(uint64_t);
      const uint32_t freed = freed_ + next_.stage * sizeof(uint64_t);
      const uint32_t to = ring_ + next_.stage * spec::kCopyBytes;
      const uint32_t size = min(left, pieces.piece);
      // The stage's last copy is freed; a stage that was never used counts as freed.
      if (!await_alone(
              context_, [&] { return ptx::mbarrier_try_wait(freed, next_.parity ^ 1); },
              [&] { return waiting(abi::Place::kStage, pieces.slot); })) {
        return false;
      }
      ptx::store_shared(bytes_ + next_.stage * sizeof(uint32_t), size);
      ptx::mbarrier_arrive_expect(landed, size);
      if constexpr (spec::kCapCopies < spec::kStages) {
        const uint32_t before = landed_ + before_.stage * sizeof(uint64_t);
        if (issued_ >= spec::kCapCopies &&
            !await_alone(
                context_, [&] { return ptx::mbarrier_try_wait(before, before_.parity); },
                [&] { return waiting(abi::Place::kInFlightCap, pieces.slot); })) {
          return false;
        }
        before_.advance(1);
      }
      if constexpr (spec::kEvictFirst) {
        ptx::bulk_copy_with_policy(to, from, size, landed, policy_);
      } else {
        ptx::bulk_copy(to, from, size, landed);
      }
      next_.advance(1);
      ++issued_;
      left -= size;
      from += static_cast<int64_t>(step);
      const int32_t last = step;
      step = other;
      other = last;
    }
    return true;
  }

  // Shared memory must outlive the copies into it. Copies land whatever the others do, so this has no report, but an end.
  __device__ __forceinline__ void drain() const {
    const uint64_t since = ptx::clock();
    const uint32_t open = min(issued_, spec::kStages);
    for (uint32_t back = 1; back <= open; ++back) {
      const Cursor place = next_.behind(back);
      while (!ptx::mbarrier_try_wait(landed_ + place.stage * sizeof(uint64_t), place.parity) &&
             ptx::clock() - since < context_.launch().deadline_cycles) {
      }
    }
  }

  __device__ __forceinline__ Waiting waiting(abi::Place place, uint32_t slot_index) const {
    const Slot& slot = context_.shared.slots[slot_index];
    return {place, slot.step, slot.index, slot.record.task, abi::kNone, issued_};
  }

  const Context& context_;
  const uint32_t ring_, landed_, freed_, bytes_;  // addresses in shared memory
  Cursor next_;
  Cursor before_;  // the copy that must have landed before the next one is issued
  uint32_t issued_ = 0;
  uint64_t policy_ = 0;
};

// The consumers' end. A stage belongs to one warp for good, so that several warps use copies at once, and a warp waits for a
// stage only after it has itself freed what was there before: never more than one phase ahead, whatever lands first.
class Reader {
 public:
  __device__ explicit Reader(const Context& context)
      : context_(context),
        landed_(ptx::kept(ptx::shared_address(context.shared.landed))),
        freed_(ptx::kept(ptx::shared_address(context.shared.freed))) {
    own_.stage = context.warp;
    ahead_ = context.warp;
  }

  // Takes this warp's share of the list's next `copies` copies: waits for each, calls `use(data, bytes)`, frees its stage.
  template <class Use>
  __device__ __forceinline__ bool read(const Slot& slot, uint32_t copies, Use&& use) {
    Shared& shared = context_.shared;
    if (context_.warp >= spec::kStages) return true;  // a small ring has fewer owners than warps
    while (ahead_ < copies) {
      const uint32_t stage = own_.stage;
      if (!await(
              context_, [&] { return ptx::mbarrier_try_wait(landed_ + stage * sizeof(uint64_t), own_.parity); },
              [&] {
                return Waiting{abi::Place::kData, slot.step, slot.index, slot.record.task, abi::kNone, ahead_};
              })) {
        return false;
      }
      use(shared.ring[stage], shared.stage_bytes[stage]);
      __syncwarp();
      if (context_.lane == 0) ptx::mbarrier_arrive(freed_ + stage * sizeof(uint64_t));
      const bool wraps = stage + spec::kConsumerWarps >= spec::kStages;
      const uint32_t next = wraps ? spec::kStages - stage + context_.warp : spec::kConsumerWarps;
      own_.advance(next);
      ahead_ += next;
    }
    ahead_ -= copies;
    return true;
  }

 private:
  const Context& context_;
  const uint32_t landed_, freed_;
  Cursor own_;      // this warp's next stage
  uint32_t ahead_;  // copies of other warps before it
};

}  // namespace mk::core
