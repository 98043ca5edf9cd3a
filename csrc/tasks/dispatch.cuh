// From a record's kind to the code of that kind. A kind that the table was not compiled for is refused by the planner.
#pragma once
#include "tasks/attend.cuh"
#include "tasks/embed.cuh"
#include "tasks/linear.cuh"
#include "tasks/merge.cuh"
#include "tasks/products.cuh"
#include "tasks/sample.cuh"

namespace mk::tasks {

__device__ __forceinline__ constexpr bool is_built(uint32_t kind) {
  return kind < abi::kMaxKinds && (spec::kBuiltKinds >> kind & 1) != 0;
}

// Shows `visit` what a record loads, copy run by copy run; false when the kernel is to be left.
template <class Visit>
__device__ __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live& live,
                                     Visit& visit) {
  using abi::TaskKind;
  if constexpr (spec::kLinearWalk) {
    return Linear::walk(context, slot, live, visit);
  } else {
    switch (static_cast<TaskKind>(slot.record.kind)) {
      case TaskKind::kEmbed:
      case TaskKind::kMerge:
      case TaskKind::kSample:
        return true;  // nothing goes through the ring
      case TaskKind::kAttend:
        return Attend::walk(context, slot, live, visit);
      default:
        return walk_product(context, slot, visit);
    }
  }
}

// Says what a record multiplies, if it does.
__device__ __forceinline__ void describe(const core::Context& context, core::Slot& slot, Staged& staged) {
  if constexpr (!spec::kLinearWalk) {
    switch (static_cast<abi::TaskKind>(slot.record.kind)) {
      case abi::TaskKind::kEmbed:
      case abi::TaskKind::kAttend:
      case abi::TaskKind::kMerge:
      case abi::TaskKind::kSample:
        return;
      default:
        describe_product(context, slot, staged);
    }
  }
}

// Finds the units of a record's share; lane 0's slot is everybody's, so all lanes write alike.
__device__ __forceinline__ void find_units(const core::Context& context, core::Slot& slot, core::Live& live) {
  if constexpr (!spec::kLinearWalk) {
    const auto kind = static_cast<abi::TaskKind>(slot.record.kind);
    if (kind == abi::TaskKind::kAttend) Attend::find_units(slot, live);
    if (kind == abi::TaskKind::kUp) Up::find_units(context, slot);
    __syncwarp();
  }
}

// Counts the copies of a record without walking them; false when it has to be walked.
__device__ __forceinline__ bool count(const core::Context& context, const core::Slot& slot, core::Queue& queue) {
  if constexpr (spec::kLinearWalk) {
    return false;
  } else {
    switch (static_cast<abi::TaskKind>(slot.record.kind)) {
      case abi::TaskKind::kEmbed:
      case abi::TaskKind::kMerge:
      case abi::TaskKind::kSample:
        return true;
      case abi::TaskKind::kAttend: {
        const uint32_t units = slot.end_unit - slot.first_unit;
        queue.copies = units * spec::kPagesPerChunk * (2 * spec::kPageHalfBytes / Attend::kPieceBytes);
        queue.bytes = units * spec::kPagesPerChunk * 2 * spec::kPageHalfBytes;
        return 2 * spec::kPageHalfBytes % Attend::kPieceBytes == 0;
      }
      default:
        return count_product(slot, queue);
    }
  }
}

// The run of a record, whose run waits are met.
__device__ __forceinline__ bool run(const core::Context& context, core::Slot& slot, Tools& tools) {
  using abi::TaskKind;
  if constexpr (spec::kStreaming) {
    const bool routes = !spec::kLinearWalk && slot.record.early != abi::kNone;
    return stream(context, slot, tools, routes ? Project::router_copies(slot) : 0);
  } else {
    switch (static_cast<TaskKind>(slot.record.kind)) {
      case TaskKind::kEmbed:
        return Embed::run(context, slot, tools);
      case TaskKind::kAttend:
        return Attend::run(context, slot, tools);
      case TaskKind::kMerge:
        return Merge::run(context, slot, tools);
      case TaskKind::kSample:
        return Sample::run(context, slot, tools);
      default:
        return run_product(context, slot, tools);
    }
  }
}

}  // namespace mk::tasks
