// The persistent loop. Every block walks its list of records, step after step, in three roles that share nothing but
// shared memory: a warp that plans loads, several records ahead; a thread that issues their copies; and warps that run.
// A fourth warp watches that nobody waits for ever. A record goes through the phases that simulator, interpreter and
// timeline name alike: load wait, load, run wait, run, arrive.
//
// The two waits are the loop's; what a kind loads and runs is the kind's. A run begins only after its own record's load
// waits were met, so it knows all that its load knew.
#pragma once
#include "core/fetch.cuh"
#include "core/live.cuh"
#include "core/plan.cuh"
#include "core/trace.cuh"
#include "ptx/elect.cuh"
#include "ptx/registers.cuh"
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
      bool is_open = true;
      goes_on = await_boundary(step, is_open);
      if (!goes_on || !is_open) break;
      for (uint32_t index = 0; index < context_.records(); ++index) {
        if (!plan(launch.first_step + step, index)) {
          goes_on = false;
          break;
        }
        ++planned;
        cursor_.advance();
      }
    }
    if (goes_on && end_records()) queue_.end();
    if (context_.lane == 0) core::at<abi::Progress>(launch.progress)[context_.sm].loaded = planned;
  }

 private:
  // Whether step `step` of the launch comes, which the boundary before the last one says: planning is never further
  // ahead than that, so all blocks plan the same steps.
  __device__ __forceinline__ bool await_boundary(uint32_t step, bool& is_open) {
    if (spec::kStreaming || step < 2) return true;
    const auto* word = core::at<const uint64_t>(context_.launch().boundary);
    return core::await(
        context_,
        [&] {
          const uint64_t boundary = ptx::load_relaxed_gpu(word);
          is_open = static_cast<uint32_t>(boundary) > step;
          return is_open || boundary >> 32 != 0;
        },
        [&] { return core::Waiting{abi::Place::kBoundary, step}; });
  }

  // Tells the consumers that nothing follows.
  __device__ __forceinline__ bool end_records() {
    if (!await_slot()) return false;
    if (context_.lane == 0) {
      context_.shared.slots[cursor_.slot].index = core::kNoRecord;
      ptx::mbarrier_arrive(ptx::shared_address(&context_.shared.ready[cursor_.slot]));
    }
    return true;
  }

  __device__ __forceinline__ bool await_slot() {
    const uint32_t done = ptx::shared_address(&context_.shared.done[cursor_.slot]);
    return core::await(
        context_, [&] { return ptx::mbarrier_try_wait(done, cursor_.parity ^ 1); },
        [] { return core::Waiting{abi::Place::kRecordSlot, 0}; });
  }

  __device__ __forceinline__ bool plan(uint32_t step, uint32_t index) {
    core::Shared& shared = context_.shared;
    core::Slot& slot = shared.slots[cursor_.slot];
    if (context_.lane == 0) core::note_record(context_, step, index, abi::kNone);
    if (!await_slot()) return false;
    fetch_.put(slot, step, index);
    const abi::Record& record = slot.record;
    if (context_.lane == 0) core::note_record(context_, step, index, record.task);
    if (!tasks::is_built(record.kind)) {
      if (context_.lane == 0) {
        const core::Waiting unbuilt{abi::Place::kLoad, record.kind};
        core::Note& own = shared.notes[context_.role];
        core::note(own, unbuilt);
        own.state = core::kUnbuilt;
      }
      return false;
    }
    if (!core::await_loads(context_, slot)) return false;
    core::stamp(context_, slot, &abi::Trace::load_start);
    // A look at the run waits, which are often met long before their turn: the consumers then need no trip to memory.
    core::Poll runs(context_, record.run_waits, slot.run_targets, record.num_run_waits);
    runs.look();
    core::spend(context_.launch().load_cycles[record.kind]);
    core::fuzz(context_, step, record.task, 0);
    const auto kind = static_cast<abi::TaskKind>(record.kind);
    const bool is_up = kind == abi::TaskKind::kUp;
    if (!spec::kLinearWalk && slot.layer.num_experts != 0 && (is_up || kind == abi::TaskKind::kDown)) {
      if (!live_.route(slot, slot.inputs[is_up ? 2 : 1])) return false;
    }
    tasks::find_units(context_, slot, live_);
    tasks::describe(context_, slot, staged_);
    queue_.begin(cursor_.slot);
    slot.go = __all_sync(core::kAllLanes, runs.is_met);
    queue_.counts = !tasks::count(context_, slot, queue_);
    if (!queue_.counts) publish(slot);
#pragma unroll 1
    for (;;) {
      if (!tasks::walk(context_, slot, live_, queue_)) return false;
      if (!queue_.counts) return true;
      publish(slot);
      queue_.counts = false;
    }
  }

  // Hands the record to the consumers, before its first copy: their waits need not wait for room in the ring.
  __device__ __forceinline__ void publish(core::Slot& slot) {
    if (context_.lane == 0) {
      slot.copies = queue_.copies;
      if constexpr (spec::kTrace) slot.trace.bytes = queue_.bytes;
    }
    __syncwarp();
    if (context_.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&context_.shared.ready[cursor_.slot]));
  }

  const core::Context& context_;
  core::Fetch fetch_;
  core::Live live_;
  core::Queue queue_;
  SlotCursor cursor_;
  tasks::Staged staged_;
};

// Run wait, run, arrive: one warp of the consumers.
class Consumer {
 public:
  __device__ explicit Consumer(const core::Context& context) : context_(context), tools_(context) {}

  __device__ __forceinline__ void run() {
    uint32_t step = context_.launch().first_step;
    uint32_t index = 0;
    while (run_record(step, index)) {
      ++ran_;
      cursor_.advance();
      if (++index == context_.records()) {
        index = 0;
        ++step;
      }
    }
    leave();
  }

 private:
  // False when nothing follows, or the kernel is to be left.
  __device__ __forceinline__ bool run_record(uint32_t step, uint32_t index) {
    core::Shared& shared = context_.shared;
    core::Slot& slot = shared.slots[cursor_.slot];
    if (context_.lane == 0) core::note_record(context_, step, index, abi::kNone);
    const uint32_t ready = ptx::shared_address(&shared.ready[cursor_.slot]);
    if (!core::await(
            context_, [&] { return ptx::mbarrier_try_wait(ready, cursor_.parity); },
            [] { return core::Waiting{abi::Place::kRecord, 0}; })) {
      return false;
    }
    if (slot.index == core::kNoRecord) return false;
    core::stamp(context_, slot, &abi::Trace::run_wait);
    if (!await_runs(slot)) return false;
    core::stamp(context_, slot, &abi::Trace::run_start);
    core::fuzz(context_, step, slot.record.task, context_.warp + 1);
    if (!tasks::run(context_, slot, tools_)) return false;
    tools_.reader.skip(slot.copies);
    end(slot);
    return true;
  }

  // The first kPollers warps poll the counters, each at its own moments; the first to see them all lets the others go
  // on through shared memory. More pollers see an arrival earlier, but all of the card's polls meet in one place.
  __device__ __forceinline__ bool await_runs(core::Slot& slot) {
    const abi::Record& record = slot.record;
    const uint32_t go = ptx::shared_address(&slot.go);
    if (ptx::load_acquire_shared(go) != 0) return true;
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
        [&] { return poll.waiting(abi::Place::kRunWait); });
    __syncwarp();
    if (met && polls && context_.lane == 0) ptx::store_release_shared(go, 1);
    return met;
  }

  // The last warp to end the run arrives for the block; every warp gives the slot back.
  __device__ __forceinline__ void end(core::Slot& slot) {
    __syncwarp();
    if constexpr (spec::kTrace && !spec::kStreaming) {
      if (context_.lane == 0) slot.trace.landed = core::trace_time(context_);  // the last warp's stays
    }
    const uint32_t ended = tools_.written.settled();
    if (context_.lane != 0) return;
    if (ptx::add_shared(slot.run_warps, ended) == spec::kConsumerWarps - 1) {
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
  tasks::Tools tools_;
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
  auto* work = reinterpret_cast<uint32_t*>(&shared.work);
  for (uint32_t word = thread; word < sizeof(core::Workspace) / sizeof(uint32_t); word += spec::kBlockThreads)
    work[word] = 0;
  if (thread == 0) {
    shared.stop = shared.left = 0;
    for (uint32_t& word : shared.mail) word = 0;
    for (core::Note& note : shared.notes) note = {};  // runs, and waits for nothing
    shared.arrived = shared.queued = shared.taken = shared.issued = 0;
    for (uint32_t stage = 0; stage < spec::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.landed[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.freed[stage]), 1);
    }
    for (uint32_t slot = 0; slot < spec::kSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.done[slot]), spec::kConsumerWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.consumers), spec::kConsumerWarps);
    for (uint32_t team = 0; team < spec::kTeams; ++team) {
      ptx::mbarrier_init(ptx::shared_address(&shared.teams[team]), spec::kConsumerWarps / spec::kTeams);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (thread == 0) {
    const auto* offsets = core::at<const uint32_t>(shared.launch.offsets) + blockIdx.x;
    shared.list_begin = offsets[0];
    shared.list_records = offsets[1] - offsets[0];
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
  const core::Context context{shared, sm, threadIdx.x % spec::kWarpThreads, runs ? warp : 0,
                              min(warp, core::kRoles - 1)};
  if (context.records() == 0) return;
  bool leads = context.lane == 0;
  if (runs) {
    if constexpr (spec::kMovesRegisters) ptx::take_registers<spec::kManyRegisters>();
    Consumer(context).run();
  } else {
    if constexpr (spec::kMovesRegisters) ptx::give_registers<spec::kFewRegisters>();
    if (warp == spec::kConsumerWarps) {
      Planner(context).run();
    } else if (warp == spec::kConsumerWarps + 1) {
      const bool issues = ptx::elect_one();
      // Every turn of the issuer's loops yields to lanes that wait for it.
      if (spec::kIssuesAlone && !issues) return;
      if (issues) core::Issuer(context).run();
      if constexpr (spec::kIssuesAlone) {
        leads = true;
      } else {
        __syncwarp();
      }
    } else if (warp == spec::kConsumerWarps + 2) {
      core::Watch(context).run();
    }
  }
  if (warp < core::kRoles && leads) {
    core::Note& own = shared.notes[context.role];
    if (own.state == core::kRuns) own.state = core::kLeft;
    ptx::add_shared(shared.left, 1);
  }
  if constexpr (spec::kTrace) {
    if (threadIdx.x == 0) {
      auto& clocks = core::at<abi::Clocks>(launch.clocks)[sm];
      core::read_tick(clocks.end_cycles, clocks.end_ns);
    }
  }
}

}  // namespace mk
