// Units of the output projection.
#pragma once
#include "tasks/stream.cuh"
#include "tasks/units.cuh"

namespace mk::tasks {

struct Output {
  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live&, Visit& visit) {
    return visit_units(context.shared.layer.output, slot.record.begin, slot.record.end, unit_bytes(spec::kQSize), visit);
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    return stream(context, slot, reader, 0);
  }
};

}  // namespace mk::tasks
