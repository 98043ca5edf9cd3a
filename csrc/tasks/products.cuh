// The run of all kinds that multiply: one loop, whose code stays in the SM's caches whatever the kind. A kind says what
// it multiplies (`describe`) and what becomes of a finished unit (`finish`).
#pragma once
#include "tasks/down.cuh"
#include "tasks/head.cuh"
#include "tasks/output.cuh"
#include "tasks/project.cuh"
#include "tasks/up.cuh"

namespace mk::tasks {

// Calls `call` with the kind that multiplies.
template <class Call>
__device__ __forceinline__ bool dispatch_product(abi::TaskKind kind, Call&& call) {
  switch (kind) {
    case abi::TaskKind::kProject:
      return call(Project{});
    case abi::TaskKind::kOutput:
      return call(Output{});
    case abi::TaskKind::kUp:
      return call(Up{});
    case abi::TaskKind::kDown:
      return call(Down{});
    default:
      return call(Head{});
  }
}

// Whose activations stand in the workspace once the records planned so far have run.
struct Staged {
  uint32_t step = 0;
  uint32_t stream = ~0u;  // layer and number
};

// Describes what a record multiplies, for its consumers.
__device__ __forceinline__ void describe_product(const core::Context& context, core::Slot& slot, Staged& staged) {
  Product product;
  dispatch_product(static_cast<abi::TaskKind>(slot.record.kind), [&](auto task) {
    decltype(task)::describe(context, slot, product);
    return true;
  });
  const Cut& cut = product.cut;
  if (unit_copies(cut) != 0) {
    product.copy_slices = piece_bytes(cut) / cut.slice_bytes();
    const uint32_t step = (spec::kConsumerWarps - 1) * product.copy_slices + 1;
    product.unit_step = step / cut.slices;
    product.slice_step = step % cut.slices;
  }
  if (product.norm != 0) {
    const uint32_t stream = static_cast<uint32_t>(slot.record.layer) << 16 | product.input;
    product.stages = staged.step != slot.step || staged.stream != stream;
    staged = {slot.step, stream};
  }
  if (context.lane == 0) slot.product = product;
  __syncwarp();
}

// Copies of a record, where units are whole copies; otherwise they have to be walked.
__device__ __forceinline__ bool count_product(const core::Slot& slot, core::Queue& queue) {
  const Product product = slot.product;
  const uint32_t copies = unit_copies(product.cut);
  if (copies == 0) return false;
  queue.copies = product.first_copy + product.units * copies;
  queue.bytes = product.units * product.cut.slices * product.cut.slice_bytes() +
                (slot.record.router_end - slot.record.router_begin) * Project::kRouterRowBytes;
  return true;
}

// What a record copies: the router's rows, then run after run of its kind.
template <class Visit>
__device__ __forceinline__ bool walk_product(const core::Context& context, const core::Slot& slot, Visit& visit) {
  const auto kind = static_cast<abi::TaskKind>(slot.record.kind);
  bool has_router = slot.record.router_begin < slot.record.router_end;
#pragma unroll 1
  for (uint32_t number = 0;;) {
    core::Pieces pieces;
    if (has_router) {
      has_router = false;
      Project::router_rows(slot, pieces);
    } else {
      UnitRun run;
      Cut of;
      if (!dispatch_product(kind, [&](auto task) { return decltype(task)::run_of(context, slot, number, run, of); })) {
        return true;
      }
      ++number;
      pieces = pieces_of(run, of);
      if (pieces.bytes == 0) continue;
    }
    if (!visit(pieces)) return false;
  }
}

__device__ __forceinline__ bool run_product(const core::Context& context, core::Slot& slot, Tools& tools) {
  const auto kind = static_cast<abi::TaskKind>(slot.record.kind);
  uint32_t lap = spec::kTrace ? core::trace_time(context) : 0;
  const Product product = slot.product;
  if (product.stages) {
    if (kind == abi::TaskKind::kHead) Head::stage_drawing(context);
    if (!stage_normed(context, tools, product)) return false;
  } else if (product.norm == 0 && product.residual != 0) {
    ask_stream(context, slot, tools, product);
  }
  if (slot.record.early != abi::kNone && !Project::route(context, slot, tools)) return false;
  if (kind == abi::TaskKind::kHead) tools.forget_best();
  core::come_together();
  core::lap(context, slot, &abi::Trace::staged, lap);
  // A trip to memory passes while the first copy is multiplied.
  const auto announce = [&] {
    if (spec::kLogitsAhead == 0 && tools.has_news) Project::announce(context, slot, tools);
  };
  const bool goes_on = tools.multiplier.multiply(
      slot, tools.reader, product, announce, [&](uint32_t unit, uint32_t rank, const Unit& values) {
        return dispatch_product(
            kind, [&](auto task) { return decltype(task)::finish(context, slot, tools, product, unit, rank, values); });
      });
  if (!goes_on) return false;
  announce();
  if (kind == abi::TaskKind::kHead && !Head::leave_best(context, slot, tools)) return false;
  if (kind == abi::TaskKind::kDown) tools.sums = (tools.sums + product.expert_units) % spec::kSumSlots;
  return true;
}

}  // namespace mk::tasks
