// The linear walk: every kind loads copies [begin, end) of its list's own sequence from one arena, whatever it is
// called.
//
// Copy i of list b lies at (num_sms * i + b) copies from the arena's start. Programs without a model - skeletons of a
// step, microbenchmarks - are tables of such records.
#pragma once
#include "core/live.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Linear {
  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live&,
                                              Visit& visit) {
    constexpr uint64_t kStride = static_cast<uint64_t>(spec::kNumSms) * spec::kCopyBytes;
    constexpr int32_t kStep = static_cast<int32_t>(kStride);
    static_assert(kStep == kStride);
    const abi::Record& record = slot.record;
    const uint64_t from = context.launch().arena + record.begin * kStride + context.sm * spec::kCopyBytes;
    const uint32_t bytes = (record.end - record.begin) * spec::kCopyBytes;
    return bytes == 0 || visit({from, bytes, spec::kCopyBytes, kStep, kStep});
  }
};

}  // namespace mk::tasks
