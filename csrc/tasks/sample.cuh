// Next token of every active row, and the step boundary: what becomes of the rows, what the host asks of them, whether
// another step follows. One block does it for all rows, so that all SMs see one state of a step, by the same arrival
// that gives them its tokens. Nothing goes through the ring.
#pragma once
#include "tasks/filter.cuh"
#include "tasks/mail.cuh"

namespace mk::tasks {

struct Sample {
  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, Tools& tools) {
    static_assert(spec::kRows <= spec::kConsumerWarps, "a row is one warp's");
    const uint32_t row = min(context.lane, spec::kRows - 1);
    const auto* states = core::at<abi::RowState>(context.launch().rows);
    const uint2 at = ptx::load_relaxed_gpu(reinterpret_cast<const uint2*>(states + row));  // position, active
    const uint4 how = ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(&states[row].temperature));
    const uint32_t active = __ballot_sync(core::kAllLanes, context.lane < spec::kRows && at.y != 0);
    const uint32_t filtered = __ballot_sync(core::kAllLanes, active >> context.lane & 1 && filters(how));

    Found found;
    if (context.warp < spec::kRows) found = find(context, slot, context.warp);
    if (filtered != 0 && !filter(context, slot, tools, filtered, found)) return false;
    if (context.launch().mailbox != 0) {
      if (context.warp == 0) decide(context, slot.step, active);
      if (!tools.consumers.meet()) return false;  // a command may change what the others look at above
    } else if (context.warp == 0) {
      open(context, slot.step, false);
    }
    if (context.warp < spec::kRows) {
      const uint32_t position = __shfl_sync(core::kAllLanes, at.x, context.warp);
      settle(context, slot, tools.written, context.warp, active >> context.warp & 1, position, found);
    }
    return true;
  }

 private:
  // What the head's tasks found for a row.
  struct Found {
    float value = -ptx::kInfinity;
    uint32_t token = ~0u;
    float peak = -ptx::kInfinity;

    __device__ __forceinline__ bool is_finite() const { return fabsf(peak) < ptx::kInfinity; }
  };

  // Whether a row, of which `how` is temperature, top_p, min_p and top_k, leaves tokens out before it draws.
  __device__ static __forceinline__ bool filters(const uint4& how) {
    if (__uint_as_float(how.x) == 0.0f || how.w == 1) return false;
    return __uint_as_float(how.y) < 1.0f || __uint_as_float(how.z) > 0.0f || (how.w > 0 && how.w < spec::kVocab);
  }
  static_assert(offsetof(abi::RowState, temperature) == 16 && offsetof(abi::RowState, top_p) == 20 &&
                offsetof(abi::RowState, min_p) == 24 && offsetof(abi::RowState, top_k) == 28);

  __device__ static __forceinline__ Found find(const core::Context& context, const core::Slot& slot, uint32_t row) {
    const auto* best = core::at<const uint4>(slot.inputs[1]) + row * spec::kHeadTasks;
    Found found;
#pragma unroll 4
    for (uint32_t task = context.lane; task < spec::kHeadTasks; task += spec::kWarpThreads) {
      const uint4 other = ptx::load_relaxed_gpu(best + task);
      keep_better(found.value, found.token, __uint_as_float(other.x), other.y);
      found.peak = fmaxf(found.peak, __uint_as_float(other.z));
    }
#pragma unroll 1
    for (uint32_t step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(core::kAllLanes, found.value, step);
      const uint32_t other_token = __shfl_xor_sync(core::kAllLanes, found.token, step);
      keep_better(found.value, found.token, other, other_token);
      found.peak = fmaxf(found.peak, __shfl_xor_sync(core::kAllLanes, found.peak, step));
    }
    return found;
  }

  // Row by row, by all warps: the token of each that leaves tokens out; its own warp keeps it.
  __device__ static __forceinline__ bool filter(const core::Context& context, const core::Slot& slot, Tools& tools,
                                                uint32_t filtered, Found& own) {
#pragma unroll 1
    for (uint32_t row = 0; row < spec::kRows; ++row) {
      if ((filtered >> row & 1) == 0) continue;
      const Found found = find(context, slot, row);
      if (!found.is_finite()) continue;
      const auto* state = core::at<abi::RowState>(context.launch().rows) + row;
      const uint64_t noise = noise_state(ptx::load_relaxed_gpu(&state->seed), ptx::load_relaxed_gpu(&state->position));
      uint32_t token;
      if (!Filter(context, tools, slot.inputs[0], state, row, found.peak).draw(token, found.token, noise)) return false;
      if (row == context.warp) own.token = token;
    }
    return true;
  }

  // Whether another step follows the next. Rows that were active in this step keep the chain going.
  __device__ static __forceinline__ void decide(const core::Context& context, uint32_t step, uint32_t active) {
    const abi::Launch& launch = context.launch();
    const Mail mail(context);
    const uint32_t unread = step + 1 - launch.first_step - mail.read();
    open(context, step,
         mail.halts() || unread + kSpareSteps >= launch.tokens_out_steps || (active == 0 && !mail.has_posts()));
  }

  // Steps that are still made, at most, once the host is seen to have fallen behind.
  static constexpr uint32_t kSpareSteps = 4;

  // Tells the planners how many of the launch's steps they may plan: two more than were made, or one and no more.
  __device__ static __forceinline__ void open(const core::Context& context, uint32_t step, bool ends) {
    uint32_t& has_ended = context.shared.work.has_ended;
    if (context.lane != 0 || has_ended != 0) return;
    const abi::Launch& launch = context.launch();
    has_ended = ends;
    const uint64_t steps = step - launch.first_step + (ends ? 2 : 3);
    ptx::store_relaxed_gpu(core::at<uint64_t>(launch.boundary), steps | static_cast<uint64_t>(ends) << 32);
  }

  // A row ends after a stop id, when its next position is its last, or when nothing can be drawn.
  __device__ static __forceinline__ void settle(const core::Context& context, const core::Slot& slot,
                                                core::Written& written, uint32_t row, bool is_active, uint32_t position,
                                                const Found& found) {
    auto* state = core::at<abi::RowState>(context.launch().rows) + row;
    uint2 ends = ptx::load_relaxed_gpu(reinterpret_cast<const uint2*>(&state->end_position));
    const Mail mail(context);
    const abi::Order order = mail.take(row, state, written);
    if (order == abi::Order::kExtend) ends.x = mail.end_position(row);
    uint32_t word = abi::kTokenIdle;
    uint32_t token = 0;
    bool stops = !is_active;
    if (is_active) {
      word = abi::kTokenNone;
      if (found.is_finite()) word = token = found.token;
      stops = word == abi::kTokenNone || position + 1 >= ends.x;
      for (uint32_t stop = 0; stop < ends.y; ++stop) stops |= ptx::load_relaxed_gpu(&state->stops[stop]) == word;
      if (stops) word |= abi::kTokenEnded;
    }
    if (order != abi::Order::kNone) {
      word |= abi::kTokenTaken;
      ptx::fence_system();  // the host may write the command anew once it sees the word
    }
    if (context.lane != 0) return;
    auto* tokens = core::at<uint32_t>(slot.outputs[0]);
    if (order == abi::Order::kJoin) {
      written.put(tokens + row, mail.token(row));
    } else if (is_active) {
      written.put(tokens + row, token);
      const bool goes_on = !stops && order != abi::Order::kDrop;
      written.put(reinterpret_cast<uint2*>(state), uint2{position + 1, goes_on ? 1u : 0u});
    }
    leave_token(context, slot.step, row, word);
  }

  // For the host, which reads it while the launch goes on: the step that made it, and the token, in one word.
  __device__ static __forceinline__ void leave_token(const core::Context& context, uint32_t step, uint32_t row,
                                                     uint32_t word) {
    const abi::Launch& launch = context.launch();
    if (launch.tokens_out == 0) return;
    const uint64_t at = static_cast<uint64_t>(step & (launch.tokens_out_steps - 1)) * spec::kRows + row;
    ptx::store_relaxed_system(core::at<uint64_t>(launch.tokens_out) + at, static_cast<uint64_t>(step + 1) << 32 | word);
  }
};

}  // namespace mk::tasks
