// Router rows, published early, then units of the packed Q, K, V projection; either may be absent.
#pragma once
#include "tasks/stream.cuh"
#include "tasks/units.cuh"

namespace mk::tasks {

struct Project {
  static constexpr uint32_t kRouterRowBytes = spec::kHidden * spec::kElementBytes;

  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live&, Visit& visit) {
    const abi::Record& record = slot.record;
    return visit_units(context.shared.layer.router, record.router_begin, record.router_end, kRouterRowBytes, visit) &&
           visit_units(context.shared.layer.project, record.begin, record.end, unit_bytes(spec::kHidden / spec::kProjectKSplits),
                       visit);
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    const uint32_t bytes = (slot.record.router_end - slot.record.router_begin) * kRouterRowBytes;
    return stream(context, slot, reader, (bytes + spec::kCopyBytes - 1) / spec::kCopyBytes);
  }
};

}  // namespace mk::tasks
