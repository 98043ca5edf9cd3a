// What the host asks of rows at a step boundary: commands that it writes whole and then counts. The watch brings the
// counts ahead of time; a command itself is read only when there is one.
#pragma once
#include "core/live.cuh"
#include "tasks/tools.cuh"

namespace mk::tasks {

class Mail {
 public:
  __device__ explicit Mail(const core::Context& context) : context_(context) {}

  __device__ __forceinline__ bool halts() const { return word(offsetof(abi::Mailbox, halt)) != 0; }

  // Steps of this launch whose tokens the host has read.
  __device__ __forceinline__ uint32_t read() const { return word(offsetof(abi::Mailbox, read)); }

  // Whether any row has a command that was not carried out.
  __device__ __forceinline__ bool has_posts() const {
    bool has = false;
    for (uint32_t row = 0; row < spec::kRows; ++row) has |= posted(row) != context_.shared.work.taken[row];
    return has;
  }

  // Carries out the row's command but for the row's token, by its warp; what was asked.
  __device__ __forceinline__ abi::Order take(uint32_t row, abi::RowState* state, core::Written& written) const {
    if (context_.launch().mailbox == 0) return abi::Order::kNone;
    uint32_t& taken = context_.shared.work.taken[row];  // this warp's alone to write
    const uint32_t now = __shfl_sync(core::kAllLanes, posted(row), 0);
    if (now == taken) return abi::Order::kNone;
    __syncwarp();
    if (context_.lane == 0) taken = now;
    ptx::fence_system();  // the watch acquired what the count announces
    const abi::Command& command = at(row);
    const auto order = static_cast<abi::Order>(ptx::load_relaxed_system(&command.order));
    if (order == abi::Order::kDrop) return order;
    copy_pages(row, command, written);
    if (order == abi::Order::kExtend) {
      if (context_.lane == 0) written.put(&state->end_position, end_position(row));
    } else {
      const auto* from = reinterpret_cast<const uint32_t*>(&command.state);
      auto* to = reinterpret_cast<uint32_t*>(state);
      if (context_.lane < kStateWords) written.put(to + context_.lane, ptx::load_relaxed_system(from + context_.lane));
    }
    return order;
  }

  __device__ __forceinline__ uint32_t token(uint32_t row) const { return ptx::load_relaxed_system(&at(row).token); }

  __device__ __forceinline__ uint32_t end_position(uint32_t row) const {
    return ptx::load_relaxed_system(&at(row).state.end_position);
  }

 private:
  static constexpr uint32_t kStateWords = sizeof(abi::RowState) / sizeof(uint32_t);
  static_assert(kStateWords <= spec::kWarpThreads && core::kMailWords <= spec::kWarpThreads);

  __device__ __forceinline__ uint32_t word(uint32_t offset) const {
    return ptx::load_acquire_shared(ptx::shared_address(&context_.shared.mail[offset / sizeof(uint32_t)]));
  }

  __device__ __forceinline__ uint32_t posted(uint32_t row) const {
    return word(offsetof(abi::Mailbox, posted) + row * sizeof(uint32_t));
  }

  __device__ __forceinline__ const abi::Command& at(uint32_t row) const {
    return core::at<const abi::Mailbox>(context_.launch().mailbox)->commands[row];
  }

  __device__ __forceinline__ void copy_pages(uint32_t row, const abi::Command& command, core::Written& written) const {
    const abi::Launch& launch = context_.launch();
    const uint32_t begin = ptx::load_relaxed_system(&command.pages_begin);
    const uint32_t end = ptx::load_relaxed_system(&command.pages_end);
#pragma unroll 1
    for (uint32_t group = 0; group < launch.page_groups; ++group) {
      const uint64_t first = (group * spec::kRows + row) * spec::kPagesPerRow;
      const auto* from = core::at<const uint32_t>(launch.pages_in) + first;
      auto* to = core::at<uint32_t>(launch.pages) + first;
#pragma unroll 4
      for (uint32_t page = begin + context_.lane; page < end; page += spec::kWarpThreads) {
        written.put(to + page, ptx::load_relaxed_system(from + page));
      }
    }
  }

  const core::Context& context_;
};

}  // namespace mk::tasks
