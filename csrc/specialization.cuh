// What one compilation is for. `rendered.cuh` is written by runtime/gpu/specialize.py from a built step, a chip and
// kernel options, and exists only in the compiler's memory; it defines the constants of `mk::spec`. This file says what
// must hold between them, so that no other file has to ask.
#pragma once
#include "abi.cuh"
#include "rendered.cuh"

namespace mk::spec {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kConsumerThreads = kConsumerWarps * kWarpThreads;
inline constexpr uint32_t kBlockThreads = kConsumerThreads + 2 * kWarpThreads;  // and planner and issuer
inline constexpr uint32_t kQueue = 8;  // runs of copies between planner and issuer
inline constexpr uint32_t kElementBytes = 2;  // weights and KV are bfloat16

inline constexpr uint32_t kCapCopies = kInFlightCapBytes > 0 ? kInFlightCapBytes / kCopyBytes : kStages;
inline constexpr uint32_t kPagesPerChunk = kChunkTokens / kPageTokens;
inline constexpr uint32_t kPageHalfBytes = kPageTokens * kHeadDim * kElementBytes;  // K, or V, of one KV head

static_assert(kCopyBytes % 16 == 0, "a bulk copy is whole 16-byte words");
static_assert(kStages >= 2, "one stage lands while another is used");
static_assert(kCapCopies >= 1 && kCapCopies <= kStages, "the cap is from one copy to the whole ring");
static_assert(!kTrace || !kArriveReadBack, "a read-back arrival uses the trace's memory");
static_assert(kPollers >= 1 && kPollers <= kConsumerWarps);
static_assert(kChunkTokens % kPageTokens == 0, "a chunk is whole pages");
static_assert(kSlots >= 2, "one record is loaded while another runs");

}  // namespace mk::spec
