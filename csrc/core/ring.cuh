// The ring of an SM, never drained from launch to end: one thread issues copies in order, the consumers use them in
// order.
//
// Landed data is as deep as the ring, data in flight as shallow as the cap: copy i is issued once copy i - cap has
// landed, because with the whole ring in flight the memory serves somebody's next phase before somebody else's present
// one. And copies are issued no closer to each other than the pace allows.
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

  __device__ __forceinline__ Cursor behind(uint32_t copies) const {
    return stage >= copies ? Cursor{stage - copies, parity} : Cursor{stage + spec::kStages - copies, parity ^ 1};
  }
};

// The issuer's end: one thread takes runs of copies off the planner's queue and issues them.
//
// It is a thread on its own for two reasons. An instruction that takes its operands from uniform registers costs a loop
// over lanes wherever several lanes might be active. And after a stall it has to catch up, copy by copy: everything
// that is done once a record - fetching, waiting, finding addresses - is the planner's, and what a copy needs is done
// before the wait for the cap, so that nothing is left between a landing and the next copy.
class Issuer {
 public:
  __device__ explicit Issuer(const Context& context)
      : context_(context),
        ring_(ptx::kept(ptx::shared_address(context.shared.ring))),
        landed_(ptx::kept(ptx::shared_address(context.shared.landed))),
        freed_(ptx::kept(ptx::shared_address(context.shared.freed))),
        stages_(ptx::kept(ptx::shared_address(context.shared.stages))),
        issued_word_(ptx::kept(ptx::shared_address(&context.shared.issued))) {
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
              [&] { return Waiting{abi::Place::kRecord, taken}; })) {
        break;
      }
      const Pieces pieces = shared.queue[entry];
      entry = entry + 1 < spec::kQueue ? entry + 1 : 0;
      if (pieces.is_first) {
        const Slot& slot = shared.slots[pieces.slot];
        note_record(context_, slot.step, slot.index, slot.record.task);
      }
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
    uint32_t unit = pieces.unit;
    uint32_t slice = 0;  // of the unit
    const uint32_t slices = pieces.piece_slices;
    for (uint32_t left = pieces.bytes; left > 0;) {
      const uint32_t landed = landed_ + next_.stage * sizeof(uint64_t);
      const uint32_t freed = freed_ + next_.stage * sizeof(uint64_t);
      const uint32_t to = ring_ + next_.stage * spec::kCopyBytes;
      const uint32_t size = min(left, pieces.piece);
      // The stage's last copy is freed; a stage that was never used counts as freed.
      if (!await_alone(
              context_, [&] { return ptx::mbarrier_try_wait(freed, next_.parity ^ 1); },
              [&] { return Waiting{abi::Place::kStage, issued_}; })) {
        return false;
      }
      ptx::store_shared(stages_ + next_.stage * sizeof(Landed),
                        {size / 16 | unit << 16, slice | static_cast<uint32_t>(pieces.rank) << 16});
      ptx::mbarrier_arrive_expect(landed, size);
      if constexpr (spec::kCapCopies < spec::kStages) {
        const uint32_t before = landed_ + before_.stage * sizeof(uint64_t);
        if (issued_ >= spec::kCapCopies && !await_alone(
                                               context_, [&] { return ptx::mbarrier_try_wait(before, before_.parity); },
                                               [&] { return Waiting{abi::Place::kInFlightCap, issued_}; })) {
          return false;
        }
        before_.advance(1);
      }
      keep_pace();
      if constexpr (spec::kTrace) {
        abi::Trace& trace = context_.shared.slots[pieces.slot].trace;
        trace.last_issue = trace_time(context_);
        if (trace.first_issue == 0) trace.first_issue = trace.last_issue;
      }
      if constexpr (spec::kEvictFirst) {
        ptx::bulk_copy_with_policy(to, from, size, landed, policy_);
      } else {
        ptx::bulk_copy(to, from, size, landed);
      }
      next_.advance(1);
      ++issued_;
      ptx::store_release_shared(issued_word_, issued_);
      for (slice += slices; slice >= pieces.unit_slices; slice -= pieces.unit_slices) ++unit;
      left -= size;
      from += static_cast<int64_t>(step);
      const int32_t last = step;
      step = other;
      other = last;
    }
    return true;
  }

  // After a stall the ring has room for many copies. Issued at once they stand before everybody's small loads in the
  // memory's queues, so they go out not much faster than the memory can serve all SMs.
  __device__ __forceinline__ void keep_pace() {
    if constexpr (spec::kPaceCycles > 0) {
      uint32_t now = ptx::cycles();
      while (now - last_ < spec::kPaceCycles) now = ptx::cycles();
      last_ = now;
    }
  }

  // Shared memory must outlive the copies into it. Copies land whatever the others do, so this has no report, but an
  // end.
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

  const Context& context_;
  const uint32_t ring_, landed_, freed_, stages_, issued_word_;  // addresses in shared memory
  Cursor next_;
  Cursor before_;  // the copy that must have landed before the next one is issued
  uint32_t issued_ = 0;
  uint32_t last_ = 0;  // when the last copy was issued, in cycles
  uint64_t policy_ = 0;
};

// The consumers' end: which copies of a record are this warp's is the kind's business, as long as each is taken by one
// warp.
//
// A parity says no more than whether the phase before is over, so a warp must know that the copy a whole ring before
// its own has landed. Mostly it does from the last copy that it saw land: with it have all that were issued before the
// cap let it go. Otherwise it asks how many copies were issued. Copies are counted from the start of the launch; a
// launch has fewer than 2^32 of them.
class Reader {
 public:
  __device__ explicit Reader(const Context& context)
      : context_(context),
        landed_(ptx::kept(ptx::shared_address(context.shared.landed))),
        freed_(ptx::kept(ptx::shared_address(context.shared.freed))),
        issued_word_(ptx::kept(ptx::shared_address(&context.shared.issued))) {}

  // First of the record's copies, from `copy` on, that is this warp's if they go round.
  __device__ __forceinline__ uint32_t first_own(uint32_t copy = 0) const {
    return copy + (context_.warp + spec::kConsumerWarps - (base_ + copy) % spec::kConsumerWarps) % spec::kConsumerWarps;
  }

  // Turns to copy `copy` of the record.
  __device__ __forceinline__ void turn_to(uint32_t copy) {
    index_ = base_ + copy;
    stage_ = index_ % spec::kStages;
    parity_ = index_ / spec::kStages & 1;
  }

  // Turns to the copy that is this warp's next, if they go round.
  __device__ __forceinline__ void go_round() {
    if constexpr (spec::kConsumerWarps > spec::kStages) {
      turn_to(index_ - base_ + spec::kConsumerWarps);
    } else {
      index_ += spec::kConsumerWarps;
      stage_ += spec::kConsumerWarps;
      if (stage_ >= spec::kStages) {
        stage_ -= spec::kStages;
        parity_ ^= 1;
      }
    }
  }

  // Waits until the copy is on its way: what will lie in its stage is known.
  __device__ __forceinline__ bool await_issued() {
    return await(
        context_, [&] { return static_cast<int32_t>(ptx::load_acquire_shared(issued_word_) - index_) > 0; },
        [&] { return waiting(); });
  }

  // Waits until it has landed. A warp sees its copies in ascending order.
  __device__ __forceinline__ bool await_landed() {
    if (index_ - seen_ > kSureCopies && !await_issued()) return false;
    seen_ = index_;
    const uint32_t landed = landed_ + stage_ * sizeof(uint64_t);
    return await(context_, [&] { return ptx::mbarrier_try_wait(landed, parity_); }, [&] { return waiting(); });
  }

  __device__ __forceinline__ const uint8_t* data() const { return context_.shared.ring[stage_]; }
  // What lies in the stage of another copy of the record, which somebody has seen land.
  __device__ __forceinline__ const uint8_t* data_of(uint32_t copy) const {
    return context_.shared.ring[(base_ + copy) % spec::kStages];
  }
  __device__ __forceinline__ const Landed& what() const { return context_.shared.stages[stage_]; }
  __device__ __forceinline__ uint32_t bytes() const { return what().bytes_by_16 * 16; }

  // Gives the stage back; all lanes have read what they need.
  __device__ __forceinline__ void free() { give_back(stage_); }
  __device__ __forceinline__ void free_of(uint32_t copy) { give_back((base_ + copy) % spec::kStages); }

  // Goes on to the next record.
  __device__ __forceinline__ void skip(uint32_t copies) { base_ += copies; }

 private:
  __device__ __forceinline__ void give_back(uint32_t stage) {
    __syncwarp();
    if (context_.lane == 0) ptx::mbarrier_arrive(freed_ + stage * sizeof(uint64_t));
  }

  const Context& context_;
  __device__ __forceinline__ Waiting waiting() const { return {abi::Place::kData, index_ - base_}; }

  // So far behind a copy that has landed, the one a whole ring before has too.
  static constexpr uint32_t kSureCopies = spec::kStages - spec::kCapCopies;

  const uint32_t landed_, freed_, issued_word_;
  uint32_t base_ = 0;   // copies of the records before
  uint32_t index_ = 0;  // of the copy, in the launch
  uint32_t seen_ = 0;   // last copy that this warp waited for
  uint32_t stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace mk::core
