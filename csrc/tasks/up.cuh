// Gate and up products: static units of a dense MLP, or this share's (expert, tile) units of the routed experts.
#pragma once
#include "tasks/stream.cuh"
#include "tasks/units.cuh"

namespace mk::tasks {

struct Up {
  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live& live,
                                              Visit& visit) {
    const abi::Record& record = slot.record;
    const uint32_t bytes = unit_bytes(spec::kHidden);
    if (context.shared.layer.num_experts == 0) return visit_units(context.shared.layer.up, record.begin, record.end, bytes, visit);

    const uint32_t tiles = context.shared.layer.mlp_width / abi::kPairedColumns;
    const uint32_t total = live.experts(slot.step, record.layer, context.shared.layer.top_k) * tiles;
    uint32_t unit = abi::share_begin(total, record.share, record.shares);
    const uint32_t end = abi::share_begin(total, record.share + 1, record.shares);
    uint32_t rank = abi::expert_rank(unit, tiles);
    uint32_t tile = abi::expert_tile(unit, tiles);
    while (unit < end) {
      const uint32_t count = min(end - unit, tiles - tile);
      const uint32_t first = live.expert(rank) * tiles + tile;
      if (!visit_units(context.shared.layer.up, first, first + count, bytes, visit)) return false;
      unit += count;
      tile = 0;
      ++rank;
    }
    return true;
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    return stream(context, slot, reader, 0);
  }
};

}  // namespace mk::tasks
