// The persistent loop. Every block walks its list of records, step after step, in three roles that share nothing but
// shared memory: a warp that plans loads, several records ahead; a thread that issues their copies; and warps that run. A
// record goes through the phases that simulator, interpreter and timeline name alike: load wait, load, run wait, run,
// arrive.
//
// The two waits are the loop's; what a kind loads and runs is the kind's. A run begins only after its own record's load
// waits were met, so it knows all that its load knew.
#pragma once
#include "core/fetch.cuh"
#include "core/live.cuh"
#include "core/plan.cuh"
#include "core/trace.cuh"
#include "ptx/elect.cuh"
#include "tasks/dispatch.cuh"

namespace mk {

// A slot of the window between planner and consumers, and the parity of its present use.
struct SlotCursor {
  uint32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == spec::kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Load wait, and what to load. Returns when all steps are planned or the kernel is to be left.
class Planner {
 public:
  __device__ explicit Planner(const core::Context& context)
      : context_(context), fetch_(context), live_(context), queue_(context) {}

  __device__ __forceinline__ void run() {
    const abi::Launch& launch = context_.launch();
    uint32_t planned = 0;
    bool goes_on = true;
    for (uint32_t step = 0; step < launch.num_steps && goes_on; ++step) {
      for (uint32_t index = 0; index < context_.records; ++index) {
        if (!plan(launch.first_step + step, index)) {
          goes_on = false;
          break;
        }
        ++planned;
        cursor_.advance();
      }
    }
    if (goes_on) queue_.end();
    if (context_.lane == 0) core::at<abi::Progress>(launch.progress)[context_.sm].loaded = planned;
  }

 private:
  __device__ __forceinline__ bool plan(uint32_t step, uint32_t index) {
    core::Shared& shared = context_.shared;
    core::Slot& slot = shared.slots[cursor_.slot];
    const uint32_t done = ptx::shared_address(&shared.done[cursor_.slot]);
    if (!core::await(
            context_, [&] { return ptx::mbarrier_try_wait(done, cursor_.parity ^ 1); },
            [&] { return core::Waiting{abi::Place::kRecordSlot, step, index, abi::kNone, abi::kNone, 0}; })) {
      return false;
    }
    fetch_.put(slot, step, index);
    const abi::Record& record = slot.record;
    if (!tasks::is_built(record.kind)) {
      if (context_.lane == 0) {
        const core::Waiting unbuilt{abi::Place::kLoad, step, index, record.task, abi::kNone, record.kind};
        core::give_up(&shared.launch, context_.sm, abi::Stop::kUnbuilt, unbuilt, 0, 0);
      }
      return false;
    }
    if (!core::await_loads(context_, slot)) return false;
    core::stamp(context_, slot, &abi::Trace::load_start);
    core::spend(context_.launch().load_cycles[record.kind]);
    queue_.begin(cursor_.slot);
    return tasks::dispatch(record.kind, [&](auto task) {
      core::Count count;
      decltype(task)::walk(context_, slot, live_, count);
      publish(slot, count);
      return decltype(task)::walk(context_, slot, live_, queue_);
    });
  }

  // Hands the record to the consumers, before its first copy: their waits need not wait for room in the ring.
  __device__ __forceinline__ void publish(core::Slot& slot, const core::Count& count) {
    if (context_.lane == 0) {
      slot.copies = count.copies;
      if constexpr (spec::kTrace) slot.trace.bytes = count.bytes;
    }
    __syncwarp();
    if (context_.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&context_.shared.ready[cursor_.slot]));
  }

  const core::Context& context_;
  core::Fetch fetch_;
  core::Live live_;
  core::Queue queue_;
  SlotCursor cursor_;
};

// Run wait, run, arrive: one warp of the consumers.
class Consumer {
 public:
  __device__ explicit Consumer(const core::Context& context) : context_(context), reader_(context) {}

  __device__ __forceinline__ void run() {
    const abi::Launch& launch = context_.launch();
    for (uint32_t step = 0; step < launch.num_steps; ++step) {
      for (uint32_t index = 0; index < context_.records; ++index) {
        if (!run_record(launch.first_step + step, index)) {
          leave();
          return;
        }
        ++ran_;
        cursor_.advance();
      }
    }
    leave();
  }

 private:
  __device__ __forceinline__ bool run_record(uint32_t step, uint32_t index) {
    core::Shared& shared = context_.shared;
    core::Slot& slot = shared.slots[cursor_.slot];
    const uint32_t ready = ptx::shared_address(&shared.ready[cursor_.slot]);
    if (!core::await(
            context_, [&] { return ptx::mbarrier_try_wait(ready, cursor_.parity); },
            [&] { return core::Waiting{abi::Place::kRecord, step, index, abi::kNone, abi::kNone, 0}; })) {
      return false;
    }
    core::stamp(context_, slot, &abi::Trace::run_wait);
    if (!await_runs(slot)) return false;
    core::stamp(context_, slot, &abi::Trace::run_start);
    if (!tasks::dispatch(slot.record.kind, [&](auto task) { return decltype(task)::run(context_, slot, reader_); })) {
      return false;
    }
    end(slot);
    return true;
  }

  // The first kPollers warps poll the counters, each at its own moments; the first to see them all lets the others go on
  // through shared memory. More pollers see an arrival earlier, but all of the card's polls meet in one place.
  __device__ __forceinline__ bool await_runs(core::Slot& slot) {
    const abi::Record& record = slot.record;
    if (record.num_run_waits == 0) return true;
    const uint32_t go = ptx::shared_address(&slot.go);
    const bool polls = context_.warp < spec::kPollers;
    const uint64_t since = spec::kPollers > 1 ? ptx::clock() : 0;
    core::Poll poll(context_, record.run_waits, slot.run_targets, polls ? record.num_run_waits : 0);
    const bool met = core::await(
        context_,
        [&] {
          if (spec::kPollers > 1 || !polls) {
            if (ptx::load_acquire_shared(go) != 0) return true;
            if (!polls || ptx::clock() - since < context_.warp * spec::kPollStaggerCycles) return false;
          }
          return poll.look();
        },
        [&] { return poll.waiting(slot, abi::Place::kRunWait); }, [&] { return poll.value; });
    __syncwarp();
    if (met && polls && context_.lane == 0) ptx::store_release_shared(go, 1);
    return met;
  }

  // The last warp to end the run arrives for the block; every warp gives the slot back.
  __device__ __forceinline__ void end(core::Slot& slot) {
    __syncwarp();
    if (context_.lane != 0) return;
    if (ptx::add_shared(slot.run_warps, 1) == spec::kConsumerWarps - 1) {
      const abi::Launch& launch = context_.launch();
      core::arrive(launch, slot.record.arrive);
      context_.shared.arrived = ran_ + 1;
      core::write_trace(context_, slot);
    }
    ptx::mbarrier_arrive(ptx::shared_address(&context_.shared.done[cursor_.slot]));
  }

  // The last warp to leave knows the block's progress; the others' older news don't hide it.
  __device__ __forceinline__ void leave() {
    if (context_.lane != 0) return;
    auto* progress = core::at<abi::Progress>(context_.launch().progress) + context_.sm;
    const volatile uint32_t& arrived = context_.shared.arrived;
    ptx::max_relaxed_gpu(&progress->arrived, arrived);
  }

  const core::Context& context_;
  core::Reader reader_;
  SlotCursor cursor_;
  uint32_t ran_ = 0;
};

__device__ __forceinline__ void prepare(core::Shared& shared, const abi::Launch* launch) {
  const uint32_t thread = threadIdx.x;
  const auto* from = reinterpret_cast<const uint32_t*>(launch);
  auto* to = reinterpret_cast<uint32_t*>(&shared.launch);
  for (uint32_t word = thread; word < sizeof(abi::Launch) / sizeof(uint32_t); word += spec::kBlockThreads) {
    to[word] = from[word];
  }
  if (thread == 0) {
    shared.arrived = shared.queued = shared.taken = 0;
    for (uint32_t stage = 0; stage < spec::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.landed[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.freed[stage]), 1);
    }
    for (uint32_t slot = 0; slot < spec::kSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.done[slot]), spec::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

// One block of the grid. Nothing stays behind: a block leaves when its list is done or when any block gave up.
__device__ __forceinline__ void decode_steps(core::Shared& shared, const abi::Launch* launch_in_memory) {
  prepare(shared, launch_in_memory);
  const abi::Launch& launch = shared.launch;
  const uint32_t sm = blockIdx.x;
  const uint32_t warp = threadIdx.x / spec::kWarpThreads;
  const bool runs = warp < spec::kConsumerWarps;
  if (threadIdx.x == 0) {
    ptx::add_relaxed_gpu(core::at<uint32_t>(launch.present), 1);
    if constexpr (spec::kTrace) {
      auto& clocks = core::at<abi::Clocks>(launch.clocks)[sm];
      core::read_tick(shared.begin_cycles, clocks.begin_ns);
      clocks.begin_cycles = shared.begin_cycles;
    }
  }
  if constexpr (spec::kTrace) __syncthreads();
  const auto* offsets = core::at<const uint32_t>(launch.offsets);
  const core::Context context{
      shared, sm, offsets[sm], offsets[sm + 1] - offsets[sm], threadIdx.x % spec::kWarpThreads, runs ? warp : 0,
  };
  if (context.records == 0) return;
  if (runs) {
    Consumer(context).run();
  } else if (warp == spec::kConsumerWarps) {
    Planner(context).run();
  } else if (ptx::elect_one()) {
    core::Issuer(context).run();
  }
  if constexpr (spec::kTrace) {
    if (threadIdx.x == 0) {
      auto& clocks = core::at<abi::Clocks>(launch.clocks)[sm];
      core::read_tick(clocks.end_cycles, clocks.end_ns);
    }
  }
}

}  // namespace mk
