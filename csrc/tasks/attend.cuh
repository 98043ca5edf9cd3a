// Partial attention over this share's (row, KV head, chunk) units, which live lengths decide.
#pragma once
#include "tasks/stream.cuh"
#include "core/live.cuh"

namespace mk::tasks {

struct Attend {
  // Pages of a chunk are copied in pieces, K and the V that meets it in turn, so that a run keeps two pieces at most.
  static constexpr uint32_t kPieceBytes =
      spec::kCopyBytes < spec::kPageHalfBytes ? spec::kCopyBytes : spec::kPageHalfBytes;

  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live& live,
                                              Visit& visit) {
    const abi::Record& record = slot.record;
    const uint32_t window = context.shared.layer.window_tokens;
    const abi::RowState* rows = live.rows(slot.step);
    uint32_t total = 0;
    for (uint32_t row = 0; row < spec::kRows; ++row) total += units(rows[row], window);
    uint32_t first = abi::share_begin(total, record.share, record.shares);
    const uint32_t end = abi::share_begin(total, record.share + 1, record.shares);
    uint32_t before = 0;  // units of earlier rows
    for (uint32_t row = 0; row < spec::kRows && first < end; ++row) {
      const uint32_t mine = units(rows[row], window);
      if (first < before + mine) {
        const uint32_t chunk_begin = abi::chunk_begin(rows[row].position, window, spec::kChunkTokens);
        const uint32_t chunk_end = abi::chunk_end(rows[row].position, spec::kChunkTokens);
        const uint32_t chunks = chunk_end - chunk_begin;
        uint32_t head = (first - before) / chunks;
        uint32_t chunk = chunk_begin + (first - before) % chunks;
        const uint32_t last = min(end, before + mine);
        for (; first < last; ++first) {
          if (!visit_chunk(context, context.shared.layer.kv, row, head, chunk, visit)) return false;
          if (++chunk == chunk_end) {
            chunk = chunk_begin;
            ++head;
          }
        }
      }
      before += mine;
    }
    return true;
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    return stream(context, slot, reader, 0);
  }

 private:
  __device__ static __forceinline__ uint32_t units(const abi::RowState& row, uint32_t window) {
    return abi::attend_units(row.active, row.position, window, spec::kChunkTokens, spec::kKvHeads);
  }

  template <class Visit>
  __device__ static __forceinline__ bool visit_chunk(const core::Context& context, uint64_t pool, uint32_t row,
                                                     uint32_t head, uint32_t chunk, Visit& visit) {
    // One page id a lane: a chunk's ids cost one trip to memory, and none where only copies are counted.
    const uint32_t* ids = core::at<const uint32_t>(context.launch().pages) + row * spec::kPagesPerRow;
    const uint32_t first = chunk * spec::kPagesPerChunk;
    uint32_t id = 0;
    for (uint32_t page = 0; page < spec::kPagesPerChunk; ++page) {
      const uint32_t turn = page % spec::kWarpThreads;
      if constexpr (Visit::kNeedsAddress) {
        if (turn == 0 && page + context.lane < spec::kPagesPerChunk) {
          id = ptx::load_relaxed_gpu(ids + first + page + context.lane);
        }
      }
      const uint64_t index = static_cast<uint64_t>(__shfl_sync(core::kAllLanes, id, turn)) * spec::kKvHeads + head;
      const uint64_t keys = pool + index * 2 * spec::kPageHalfBytes;
      if constexpr (spec::kPageHalfBytes % kPieceBytes == 0) {
        constexpr int32_t kToValues = spec::kPageHalfBytes;
        constexpr int32_t kToNextKeys = static_cast<int32_t>(kPieceBytes) - kToValues;  // back from V
        if (!visit({keys, 2 * spec::kPageHalfBytes, kPieceBytes, kToValues, kToNextKeys})) return false;
      } else {
        for (uint32_t piece = 0; piece < spec::kPageHalfBytes; piece += kPieceBytes) {
          const uint32_t bytes = min(kPieceBytes, spec::kPageHalfBytes - piece);
          if (!visit({keys + piece, bytes}) || !visit({keys + spec::kPageHalfBytes + piece, bytes})) return false;
        }
      }
    }
    return true;
  }
};

}  // namespace mk::tasks
