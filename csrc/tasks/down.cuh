// Down product by output columns: the same units of every expert that the rows chose, in ascending order of expert.
#pragma once
#include "tasks/stream.cuh"
#include "tasks/units.cuh"

namespace mk::tasks {

struct Down {
  static constexpr uint32_t kUnits = spec::kHidden / abi::kUnitRows;  // of one expert

  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live& live,
                                              Visit& visit) {
    const abi::Record& record = slot.record;
    const uint32_t bytes = unit_bytes(context.shared.layer.mlp_width);
    if (context.shared.layer.num_experts == 0) return visit_units(context.shared.layer.down, record.begin, record.end, bytes, visit);

    const uint32_t experts = live.experts(slot.step, record.layer, context.shared.layer.top_k);
    for (uint32_t rank = 0; rank < experts; ++rank) {
      const uint32_t first = live.expert(rank) * kUnits;
      if (!visit_units(context.shared.layer.down, first + record.begin, first + record.end, bytes, visit)) return false;
    }
    return true;
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    return stream(context, slot, reader, 0);
  }
};

}  // namespace mk::tasks
