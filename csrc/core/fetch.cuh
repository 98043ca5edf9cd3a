// The planner's view of its list: records come from memory two ahead, so that no plan waits for a record.
//
// A record is 32 words, one a lane. What depends on it - the layer's addresses, the totals of the counters it waits for
// - is asked for when the record has come, and used when the record's turn is there.
#pragma once
#include "core/counters.cuh"

namespace mk::core {

inline constexpr uint32_t kRecordWords = sizeof(abi::Record) / sizeof(uint32_t);
inline constexpr uint32_t kLayerWords = sizeof(abi::Layer) / sizeof(uint32_t);
inline constexpr uint32_t kFirstWaitWord = offsetof(abi::Record, load_waits) / sizeof(uint32_t);
inline constexpr uint32_t kWaitWords = sizeof(abi::Wait) / sizeof(uint32_t);
inline constexpr uint32_t kFirstBufferWord = offsetof(abi::Record, inputs) / sizeof(uint32_t);
inline constexpr uint32_t kBuffers = abi::kMaxInputs + abi::kMaxOutputs;
static_assert(offsetof(abi::Record, inputs) % 4 == 0 &&
              offsetof(abi::Record, outputs) == offsetof(abi::Record, inputs) + abi::kMaxInputs * 2);
static_assert(offsetof(Slot, outputs) == offsetof(Slot, inputs) + sizeof(uint64_t) * abi::kMaxInputs);
static_assert(kRecordWords == spec::kWarpThreads, "one word a lane");
static_assert(kLayerWords <= spec::kWarpThreads);
static_assert(kWaitWords == 2 && offsetof(abi::Wait, counter) == 0 && offsetof(abi::Wait, need) == 4);
static_assert(offsetof(abi::Record, kind) == 0 && offsetof(abi::Record, layer) == 2);

class Fetch {
 public:
  __device__ explicit Fetch(const Context& context) : context_(context) {
    coming_ = word(0);
    ask();
    coming_ = word(next(0));
  }

  // Writes record `index` of step `step`, whose turn it is, into `slot`, and asks for the ones after it.
  __device__ __forceinline__ void put(Slot& slot, uint32_t step, uint32_t index) {
    const uint32_t lane = own_lane(context_.lane);
    reinterpret_cast<uint32_t*>(&slot.record)[lane] = word_;
    if (lane < kLayerWords) reinterpret_cast<uint32_t*>(&slot.layer)[lane] = layer_;
    const uint32_t need = __shfl_down_sync(kAllLanes, word_, 1);
    if (lane >= kFirstWaitWord && (lane - kFirstWaitWord) % kWaitWords == 0) {
      const uint32_t wait = (lane - kFirstWaitWord) / kWaitWords;
      const uint32_t target = counter_target(step, word_ >> 16, total_, need);
      if (wait < abi::kMaxLoadWaits) {
        context_.shared.load_targets[wait] = target;
      } else {
        slot.run_targets[wait - abi::kMaxLoadWaits] = target;
      }
    }
    if (lane < kBuffers) slot.inputs[lane] = address_;
    if (lane == 0) {
      slot.step = step;
      slot.index = index;
      slot.early_warps = 0;
      slot.run_warps = 0;
      if constexpr (spec::kTrace) slot.trace = {};
    }
    ask();
    coming_ = word(next(next(index)));
    __syncwarp();
  }

 private:
  __device__ __forceinline__ uint32_t next(uint32_t index) const {
    return index + 1 < context_.records() ? index + 1 : 0;
  }

  __device__ __forceinline__ uint32_t word(uint32_t index) const {
    const uint32_t* record = at<const uint32_t>(context_.launch().records) + (context_.begin() + index) * kRecordWords;
    return record[context_.lane];
  }

  // The record that has come is the next one; asks for what it names.
  __device__ __forceinline__ void ask() {
    const uint32_t lane = own_lane(context_.lane);
    const abi::Launch& launch = context_.launch();
    word_ = coming_;
    const uint32_t layer = __shfl_sync(kAllLanes, word_, 0) >> 16;
    layer_ = 0;
    if (!spec::kLinearWalk && layer != abi::kNone && lane < kLayerWords) {
      layer_ = at<const uint32_t>(launch.layers)[layer * kLayerWords + lane];
    }
    total_ = 0;
    const uint32_t counter = word_ & 0xffff;
    const bool is_wait = lane >= kFirstWaitWord && (lane - kFirstWaitWord) % kWaitWords == 0;
    if (is_wait && counter < spec::kNumCounters) total_ = at<const uint32_t>(launch.totals)[counter];
    const uint32_t pair = __shfl_sync(kAllLanes, word_, kFirstBufferWord + min(lane, kBuffers - 1) / 2);
    const uint32_t buffer = lane % 2 == 0 ? pair & 0xffff : pair >> 16;
    address_ = 0;
    if (!spec::kLinearWalk && lane < kBuffers && buffer != abi::kNone) {
      address_ = at<const uint64_t>(launch.buffers)[buffer];
    }
  }

  const Context& context_;
  uint32_t coming_;   // word of the record after the next
  uint32_t word_;     // word of the next record
  uint32_t layer_;    // word of its layer
  uint32_t total_;    // total of the counter that this lane's word names
  uint64_t address_;  // of buffer `lane` of the record
};

}  // namespace mk::core
