// What one compilation is for. `rendered.cuh` is written by runtime/gpu/specialize.py from a built step, a chip and
// kernel options, and exists only in the compiler's memory; it defines the constants of `mk::spec`. This file says what
// must hold between them, so that no other file has to ask.
#pragma once
#include "abi.cuh"
#include "rendered.cuh"

namespace mk::spec {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kConsumerThreads = kConsumerWarps * kWarpThreads;
// And a group of four warps with planner and issuer, whose registers the consumers take: these need few.
inline constexpr uint32_t kBlockThreads = kConsumerThreads + 4 * kWarpThreads;
inline constexpr uint32_t kFewRegisters = 104;
inline constexpr uint32_t kManyRegisters = 200;
inline constexpr bool kMovesRegisters = !kStreaming && kConsumerWarps == 8;
inline constexpr uint32_t kQueue = 8;         // runs of copies between planner and issuer
inline constexpr uint32_t kElementBytes = 2;  // weights and KV are bfloat16

// Whether all slices of all products are of the largest size.
inline constexpr uint32_t kMostSlice = 256;
inline constexpr bool kSlicesAreWhole =
    kProjectSlice == kMostSlice && kHiddenSlice == kMostSlice && kQSlice == kMostSlice && kMlpSlice == kMostSlice;

inline constexpr uint32_t kCapCopies = kInFlightCapBytes > 0 ? kInFlightCapBytes / kCopyBytes : kStages;
// An issuer whose warp is its own is quick enough to want a pace.
inline constexpr bool kIssuesAlone = kPaceCycles > 0;
inline constexpr uint32_t kPagesPerChunk = kChunkTokens / kPageTokens;
inline constexpr uint32_t kPageHalfBytes = kPageTokens * kHeadDim * kElementBytes;  // K, or V, of one KV head

// Tokens of the pieces that pages are copied in: whole blocks of keys, as many as a copy holds.
inline constexpr uint32_t piece_tokens() {
  uint32_t tokens = kPageTokens;
  while (tokens * kHeadDim * kElementBytes > kCopyBytes && tokens / 2 % kBlockTokens == 0) tokens /= 2;
  return tokens;
}
inline constexpr uint32_t kPieceTokens = piece_tokens();
inline constexpr uint32_t kChunkPieces = kChunkTokens / kPieceTokens;
inline constexpr uint32_t kTeams = kStreaming ? 1 : kConsumerWarps / kChunkPieces;  // of warps, a chunk each

static_assert(kCopyBytes % 16 == 0, "a bulk copy is whole 16-byte words");
static_assert(kStages >= 2, "one stage lands while another is used");
static_assert(kCapCopies >= 1 && kCapCopies <= kStages, "the cap is from one copy to the whole ring");
static_assert(kPollers >= 1 && kPollers <= kConsumerWarps);
static_assert(kLinearWalk || kChunkTokens % kPageTokens == 0, "a chunk is whole pages");
static_assert(kStreaming || kRows <= 8, "a product takes one tile of token rows");
static_assert(kStreaming || (kPageTokens % kBlockTokens == 0 && kBlockTokens % 16 == 0),
              "a page is whole blocks of keys");
static_assert(kStreaming || (kHeadDim % 16 == 0 && kHeadDim <= 128), "a lane holds four dims of a head");
static_assert(kStreaming || (kChunkPieces <= kConsumerWarps && kConsumerWarps % kChunkPieces == 0), "a warp a piece");
static_assert(kStreaming || kGroup <= 8, "query heads are one tile of the matrix instruction");
static_assert(kStreaming || !kArriveRelaxed, "a relaxed arrival orders no results");
static_assert(kStreaming || kConsumerWarps == 8, "the order of sums depends on the number of warps");
static_assert(kLogitsAhead != 1, "row states are of a step whose first arrival was seen");
static_assert(kLogitsAhead == 0 || (kRows == 1 && kLayers < 256 && kArriveReadBack && !kStreaming),
              "one row's logits carry tags, whose layer has eight bits, and are looked at past every cache");
static_assert(kSlots >= 2, "one record is loaded while another runs");

}  // namespace mk::spec
