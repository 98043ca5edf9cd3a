// Rows of the vocabulary's matrix, in units.
#pragma once
#include "tasks/stream.cuh"
#include "tasks/units.cuh"

namespace mk::tasks {

struct Head {
  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live&,
                                              Visit& visit) {
    return visit_units(context.launch().head, slot.record.begin, slot.record.end, unit_bytes(spec::kHidden), visit);
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    return stream(context, slot, reader, 0);
  }
};

}  // namespace mk::tasks
