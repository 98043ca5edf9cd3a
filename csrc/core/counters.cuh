// Counters in device memory: they only grow, step after step, and wrap; compared by signed difference.
#pragma once
#include "core/patience.cuh"

namespace mk::core {

__device__ __forceinline__ uint32_t* counter_word(const abi::Launch& launch, uint32_t counter) {
  return at<uint32_t>(launch.counters) + counter * spec::kCounterStride;
}

// Value that a counter has once `need` arrivals of step `step - lag` are in: all steps before it came in whole.
__device__ __forceinline__ uint32_t counter_target(uint32_t step, uint32_t lag, uint32_t total, uint32_t need) {
  return (step - lag) * total + need;
}

// What one lane of a polling warp looks at: all waits of a record at once, one a lane, because each look is a trip to
// L2. Waits of `marks` end when all have arrived but for one in spec::kLogitsAhead.
struct Poll {
  const uint32_t* word = nullptr;
  uint32_t counter = abi::kNone;
  uint32_t target = 0;
  bool is_met = true;

  __device__ __forceinline__ Poll(const Context& context, const abi::Wait* waits, const uint32_t* targets,
                                  uint32_t count, uint32_t marks = 0) {
    if (context.lane >= count) return;
    counter = waits[context.lane].counter;
    target = targets[context.lane];
    if constexpr (spec::kLogitsAhead > 0) {
      if (marks >> context.lane & 1) target -= waits[context.lane].need / spec::kLogitsAhead;
    }
    word = counter_word(context.launch(), counter);
    is_met = false;
  }

  // Value of this lane's counter. Acquire at gpu scope, which empties the SM's cache; with read-back arrivals, whose
  // results are neither written nor read through that cache, relaxed: loads go out after this one has come back.
  __device__ __forceinline__ uint32_t value() const {
    return spec::kArriveReadBack ? ptx::load_relaxed_gpu(word) : ptx::load_acquire_gpu(word);
  }

  // Whether this lane's counter has come far enough. A warp barrier passes it on to the other lanes.
  __device__ __forceinline__ bool look() {
    if (!is_met) {
      is_met = static_cast<int32_t>(value() - target) >= 0;
      if constexpr (spec::kPollPauseNs > 0) {
        if (!is_met) ptx::pause(spec::kPollPauseNs);
      }
    }
    return is_met;
  }

  __device__ __forceinline__ Waiting waiting(abi::Place place) const { return {place, target, counter}; }
};
static_assert(abi::kMaxLoadWaits <= spec::kWarpThreads && abi::kMaxRunWaits <= spec::kWarpThreads);

// Waits for all load waits of the record in `slot`, for every lane.
__device__ __forceinline__ bool await_loads(const Context& context, const Slot& slot) {
  if (slot.record.num_load_waits == 0) return true;
  Poll poll(context, slot.record.load_waits, context.shared.load_targets, slot.record.num_load_waits,
            spec::kLogitsAhead > 0 ? slot.record.reserved[0] : 0);
  const bool met = await(context, [&] { return poll.look(); }, [&] { return poll.waiting(abi::Place::kLoadWait); });
  __syncwarp();
  return met;
}

// What a lane wrote to device memory for other SMs to read. With read-back arrivals it is loaded again, from L2 where
// all SMs meet: once the loads have returned, the stores are there, and the arrival needs no fence. A fence would wait
// for all copies in flight to the SM besides.
class Written {
 public:
  template <class T>
  __device__ __forceinline__ void put(T* to, T value) {
    ptx::store_relaxed_gpu(to, value);
    confirm(to);
  }

  // Asks for what was stored at `to`; the answer is looked at later, so that trips overlap.
  template <class T>
  __device__ __forceinline__ void confirm(const T* to) {
    if constexpr (spec::kArriveReadBack) {
      fold(coming_);
      coming_ = ptx::load_relaxed_gpu(reinterpret_cast<const Word<sizeof(T)>*>(to));
    }
  }

  // The same for several words of a buffer at once.
  template <uint32_t kCount>
  __device__ __forceinline__ void confirm(const uint32_t* of, const uint32_t (&words)[kCount]) {
    if constexpr (spec::kArriveReadBack) {
      uint32_t back[kCount];
#pragma unroll
      for (uint32_t item = 0; item < kCount; ++item) back[item] = ptx::load_relaxed_gpu(of + words[item]);
#pragma unroll
      for (uint32_t item = 0; item < kCount; ++item) fold(back[item]);
    }
  }

  // Number of arrivals that this warp's end counts for: one, once all lanes' writes are where they should be.
  __device__ __forceinline__ uint32_t settled() {
    if constexpr (!spec::kArriveReadBack) return 1;
    // Words are what they are: the comparison makes the thread wait for them. A warp counts once either way.
    return __any_sync(kAllLanes, (folded_ ^ coming_) == spec::kUnlikely) ? ptx::kept(1) : 1;
  }

 private:
  // Waits for a word, here and not later.
  __device__ __forceinline__ void fold(uint32_t word) { folded_ = ptx::exclusive_or(folded_, word); }

  template <uint32_t kBytes>
  struct WordOf {
    using Type = uint32_t;
  };
  template <>
  struct WordOf<2> {
    using Type = uint16_t;
  };
  template <uint32_t kBytes>
  using Word = typename WordOf<kBytes>::Type;

  uint32_t coming_ = 0;
  uint32_t folded_ = 0;
};

// One arrival by one thread, which has seen the end of what it announces. Release at gpu scope, unless the host asked
// for less: a fence waits until all copies in flight to this SM have landed, whoever issued them.
__device__ __forceinline__ void arrive(const abi::Launch& launch, uint32_t counter) {
  if (counter == abi::kNone) return;
  uint32_t* word = counter_word(launch, counter);
  if constexpr (spec::kArriveRelaxed) {
    ptx::add_relaxed_gpu(word, 1);
  } else if constexpr (spec::kArriveReadBack && !spec::kStreaming) {
    ptx::add_relaxed_gpu(word, 1);
  } else if constexpr (spec::kArriveReadBack) {
    // What a run's last store would cost: a trip to L2 and back, on which the arrival depends.
    uint32_t* own = at<uint32_t>(launch.sink) + (1 + blockIdx.x) * abi::kSinkWords;
    ptx::store_relaxed_gpu(own, 0);
    ptx::add_relaxed_gpu(word, ptx::load_relaxed_gpu(own) == spec::kUnlikely ? 2 : 1);
  } else if constexpr (spec::kArriveWithFence) {
    ptx::fence_gpu();
    ptx::add_relaxed_gpu(word, 1);
  } else {
    ptx::add_release_gpu(word, 1);
  }
}

}  // namespace mk::core
