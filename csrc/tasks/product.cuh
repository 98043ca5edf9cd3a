// Products of units of 16 weight rows with a tile of up to eight token rows, from the ring to a finished unit.
//
// A unit is summed in slices of K, each in the accumulators of one warp; slices meet in shared memory and are added in
// ascending order by the last warp to come, so that neither copies nor warps nor the other rows change a sum. A stage
// is given back after what it brought is in the sum: so, when a copy has landed, all copies a whole ring before it are
// summed, and the slots of slices, taken in turn, are free when their turn comes (see kSliceSlots).
#pragma once
#include "core/live.cuh"
#include "core/ring.cuh"
#include "ptx/bfloat16.cuh"
#include "ptx/mma.cuh"

namespace mk::tasks {

using core::Cut;
using core::kTileBytes;
using core::Product;

inline constexpr uint32_t kMostTiles = 8;  // of a slice
inline constexpr uint32_t kOutputs = (abi::kUnitRows * spec::kRows + spec::kWarpThreads - 1) / spec::kWarpThreads;

__device__ __forceinline__ constexpr Cut cut(uint32_t columns, uint32_t slice_columns) {
  return {columns / slice_columns, slice_columns / abi::kTileColumns};
}

// Units [begin, end) of weights at `base`, that a record copies in one run; `unit` of the record is the first.
struct UnitRun {
  uint64_t base;
  uint32_t begin;
  uint32_t end;
  uint32_t unit;
  uint32_t rank;  // of their expert
};

// Bytes of a full copy: whole slices. The streaming mode needs none, and takes what a stage holds.
__device__ __forceinline__ uint32_t piece_bytes(const Cut& cut) {
  const uint32_t slice = cut.slice_bytes();
  return spec::kStreaming ? spec::kCopyBytes : spec::kCopyBytes / slice * slice;
}

// Copies of a unit; 0 where copies hold parts of several.
__device__ __forceinline__ uint32_t unit_copies(const Cut& cut) {
  const uint32_t unit = cut.slices * cut.slice_bytes();
  const uint32_t piece = piece_bytes(cut);
  const uint32_t copies = unit / piece;
  return copies * piece == unit ? copies : 0;
}

// The run as copies of whole slices.
__device__ __forceinline__ core::Pieces pieces_of(const UnitRun& run, const Cut& cut) {
  const uint32_t slice = cut.slice_bytes();
  const uint32_t bytes = cut.slices * slice;
  const uint32_t piece = piece_bytes(cut);
  core::Pieces pieces{run.base + static_cast<uint64_t>(run.begin) * bytes, (run.end - run.begin) * bytes, piece,
                      static_cast<int32_t>(piece), static_cast<int32_t>(piece)};
  pieces.slice_bytes = static_cast<uint16_t>(slice);
  pieces.unit_slices = static_cast<uint16_t>(cut.slices);
  pieces.unit = static_cast<uint16_t>(run.unit);
  pieces.rank = static_cast<uint16_t>(run.rank);
  return pieces;
}

inline constexpr uint32_t kSplitColumns = spec::kHidden / spec::kProjectKSplits;

// This lane's part of a tile of eight token rows, as the matrix instruction takes it: 8 columns of row lane / 4.
using Tiles = uint4[kMostTiles];

// One finished unit as a warp holds it: output i of a lane is weight row (lane + 32 i) % 16 of token row (lane + 32 i)
// / 16.
struct Unit {
  float values[kOutputs];

  __device__ static __forceinline__ uint32_t weight_row(uint32_t lane) { return lane % abi::kUnitRows; }
  __device__ static __forceinline__ uint32_t token_row(uint32_t lane, uint32_t output) {
    return (lane + output * spec::kWarpThreads) / abi::kUnitRows;
  }
};

// Takes a warp's share of a record's products; lives as long as the warp, because slots are taken in turn.
class Multiplier {
 public:
  __device__ explicit Multiplier(const core::Context& context) : context_(context) {}

  // Multiplies the record's units; `announce()` is called now and then, `finish(unit, rank, values)` takes each unit
  // that this warp finished.
  template <class Announce, class Finish>
  __device__ __forceinline__ bool multiply(const core::Slot& slot, core::Reader& reader, const Product& product,
                                           Announce&& announce, Finish&& finish) {
    const Cut& cut = product.cut;
    uint32_t lap = spec::kTrace ? core::trace_time(context_) : 0;
    const uint32_t copies = slot.copies;
    uint32_t copy = reader.first_own(product.first_copy);
    uint32_t unit = 0;
    uint32_t slice = (copy - product.first_copy) * product.copy_slices;
    uint32_t rank = product.rank;
    uint32_t rank_end = product.rank_end;
    Tiles x;
    uint32_t held = ~0u;  // slice whose activations x has, of those that are staged
    reader.turn_to(copy);
#pragma unroll 1
    for (; copy < copies; copy += spec::kConsumerWarps) {
      uint32_t left = product.copy_slices;
      if (left != 0) {
#pragma unroll 1
        for (; slice >= cut.slices; slice -= cut.slices) ++unit;
#pragma unroll 1
        for (; unit >= rank_end; rank_end += product.rank_units) ++rank;
      } else {
        if (!reader.await_issued()) return false;
        const core::Landed what = reader.what();
        left = what.bytes_by_16 * 16 / cut.slice_bytes();
        unit = what.unit;
        slice = what.slice;
        rank = what.rank;
      }
      const uint8_t* data = reader.data();
      bool has_landed = false;
#pragma unroll 1
      for (;; data += cut.slice_bytes()) {
        if (product.norm == 0) {
          fetch_rows(x, slot, product, slice, rank);
        } else if (slice != held || !kHolds) {
          fetch_staged(x, product, unit, slice);
          held = slice;
        }
        if (!has_landed && !reader.await_landed()) return false;
        has_landed = true;
        core::come_together();
        core::lap(context_, slot, &abi::Trace::waited, lap);
        float sum[4];
        multiply_slice(sum, data, x, cut.tiles, context_.lane);
        announce();
        const uint32_t first = unit * cut.slices;
        const bool is_last = --left == 0;
        if (keep(sum, first + slice, first, cut.slices)) {
          Unit values;
          add_up(values, first, cut.slices);
          if (is_last) reader.free();
          if (!finish(unit, rank, values)) return false;
        } else if (is_last) {
          reader.free();
        }
        core::come_together();
        if (is_last) break;
        if (++slice == cut.slices) {
          slice = 0;
          ++unit;
        }
      }
      core::lap(context_, slot, &abi::Trace::worked, lap);
      unit += product.unit_step;
      slice += product.slice_step;
      reader.go_round();
    }
    base_ = wrapped(product.units * cut.slices);
    return true;
  }

 private:
  // Staged activations of a slice stay in registers for the next copy, unless many rows need them otherwise.
  static constexpr bool kHolds = spec::kRows <= 2 && spec::kProjectKSplits == 1;

  // Activations of a slice, from the staged norm.
  __device__ __forceinline__ void fetch_staged(Tiles& x, const Product& product, uint32_t unit, uint32_t slice) const {
    const uint32_t tiles = spec::kSlicesAreWhole ? kMostTiles : product.cut.tiles;
    uint32_t column = slice * tiles * abi::kTileColumns + context_.lane % 4 * 8;
    if constexpr (spec::kProjectKSplits > 1) {
      column += (product.first_unit + unit) / product.split_units * kSplitColumns;
    }
    const uint32_t row = core::kAlike ? 0 : context_.lane / 4;
    const bool has_row = core::kAlike || spec::kRows == 8 || row < spec::kRows;
    const uint8_t* from = context_.shared.work.x[has_row ? row : 0] + column * spec::kElementBytes;
#pragma unroll
    for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
      x[tile] = {};
      if (tile < tiles && has_row) x[tile] = *reinterpret_cast<const uint4*>(from + tile * kTileRowBytes);
    }
  }

  // The same from rows in device memory, of the unit's expert where there are experts.
  __device__ __forceinline__ void fetch_rows(Tiles& x, const core::Slot& slot, const Product& product, uint32_t slice,
                                             uint32_t rank) const {
    const uint32_t tiles = spec::kSlicesAreWhole ? kMostTiles : product.cut.tiles;
    const uint32_t column = slice * tiles * abi::kTileColumns + context_.lane % 4 * 8;
    const uint32_t row = core::kAlike ? 0 : context_.lane / 4;
    const bool has_row = core::kAlike || spec::kRows == 8 || row < spec::kRows;
    uint32_t place = has_row ? 0 : core::kNoSlot;
    if (product.is_routed && has_row) {
      const core::Routing& routing = core::routing(context_, slot);
      place = routing.slots[row][routing.experts[rank]];
      // Of one row never so, which chose all experts there are; without it registers fall otherwise than was timed.
      if (core::kAlike && place == core::kNoSlot) place = 0;
    }
    const auto* from = core::at<const uint8_t>(product.rows) +
                       (row * product.row_stride + place * product.place_stride + column) * spec::kElementBytes;
#pragma unroll
    for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
      x[tile] = {};
      if (tile < tiles && (core::kAlike || place != core::kNoSlot)) {
        x[tile] = ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(from + tile * kTileRowBytes));
      }
    }
  }

  // Sums of one slice: 16 weight rows by 8 token rows. Columns are permuted inside a tile, weights and activations
  // alike; a lane's 16 bytes are what the instruction takes, register by register (see runtime/weights.py).
  __device__ static __forceinline__ void multiply_slice(float (&sum)[4], const uint8_t* slice, const Tiles& x,
                                                        uint32_t tiles, uint32_t lane) {
    if constexpr (spec::kSlicesAreWhole) tiles = kMostTiles;
    float other[4] = {};
#pragma unroll
    for (uint32_t value = 0; value < 4; ++value) sum[value] = 0.0f;
#pragma unroll
    for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
      if (tile < tiles) {
        const uint8_t* at = slice + tile * kTileBytes + lane * sizeof(uint4);
        const uint4 near = *reinterpret_cast<const uint4*>(at);
        const uint4 far = *reinterpret_cast<const uint4*>(at + kTileBytes / 2);
        ptx::multiply_add(sum, near.x, near.y, near.z, near.w, x[tile].x, x[tile].y);
        ptx::multiply_add(other, far.x, far.y, far.z, far.w, x[tile].z, x[tile].w);
      }
    }
#pragma unroll
    for (uint32_t value = 0; value < 4; ++value) sum[value] += other[value];
  }

  // Slot of a slice of the record.
  __device__ __forceinline__ uint32_t wrapped(uint32_t slice) const { return (base_ + slice) % spec::kSliceSlots; }

  // Leaves a slice's sums for whoever adds them up; true for the warp that brought the last slice of its unit.
  __device__ __forceinline__ bool keep(const float (&sum)[4], uint32_t slice, uint32_t first, uint32_t slices) {
    core::Workspace& work = context_.shared.work;
    const uint32_t row = context_.lane / 4;
    auto& part = work.parts[wrapped(slice)];
    if constexpr (core::kAlike) {
      const bool counts = core::own_lane(context_.lane) % 4 == 0;  // the others go to the padding
      const uint32_t at = counts ? row : abi::kUnitRows;
      part[0][at] = sum[0];
      part[0][counts ? at + 8 : at] = sum[2];
    } else {
#pragma unroll
      for (uint32_t column = 0; column < 2; ++column) {
        const uint32_t token = context_.lane % 4 * 2 + column;
        if (spec::kRows == 8 || token < spec::kRows) {
          part[token][row] = sum[column];
          part[token][row + 8] = sum[column + 2];
        }
      }
    }
    __syncwarp();
    uint32_t before = 0;
    uint32_t& done = work.units_done[wrapped(first)];
    if (context_.lane == 0) before = ptx::add_shared(done, 1);
    before = __shfl_sync(core::kAllLanes, before, 0);
    if (before + 1 < slices) return false;
    if (context_.lane == 0) done = 0;
    return true;
  }

  __device__ __forceinline__ void add_up(Unit& unit, uint32_t first, uint32_t slices) const {
    const uint32_t row = Unit::weight_row(context_.lane);
    uint32_t slot = wrapped(first);
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) unit.values[output] = 0.0f;
#pragma unroll 4
    for (uint32_t slice = 0; slice < slices; ++slice) {
#pragma unroll
      for (uint32_t output = 0; output < kOutputs; ++output) {
        const uint32_t token = core::kAlike ? 0 : Unit::token_row(context_.lane, output);
        if (token < spec::kRows) unit.values[output] += context_.shared.work.parts[slot][token][row];
      }
      slot = slot + 1 < spec::kSliceSlots ? slot + 1 : 0;
    }
  }

  static constexpr uint32_t kTileRowBytes = abi::kTileColumns * spec::kElementBytes;

  const core::Context& context_;
  uint32_t base_ = 0;  // slot of the record's first slice
};

}  // namespace mk::tasks
