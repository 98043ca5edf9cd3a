// Products of units of 16 weight rows with a tile of up to eight token rows, from the ring to a finished unit.
//
// A unit is summed in slices of K, each in the accumulators of one warp; slices meet in shared memory and are added in
// ascending order by the last warp to come, so that neither copies nor warps nor the other rows change a sum. A stage
// is given back after what it brought is in the sum: so, when a copy has landed, all copies a whole ring before it are
// summed, and the slots of slices, taken in turn, are free when their turn comes (see kSliceSlots).
#pragma once
#include "core/counters.cuh"
#include "core/ring.cuh"
#include "ptx/bfloat16.cuh"
#include "ptx/mma.cuh"

namespace mk::tasks {

inline constexpr uint32_t kTileBytes = abi::kUnitRows * abi::kTileColumns * spec::kElementBytes;
inline constexpr uint32_t kMostTiles = 8;  // of a slice
inline constexpr uint32_t kOutputs = (abi::kUnitRows * spec::kRows + spec::kWarpThreads - 1) / spec::kWarpThreads;

// How a product is cut: constant for one operator.
struct Cut {
  uint32_t slices;  // of a unit
  uint32_t tiles;   // of a slice

  __device__ __forceinline__ constexpr uint32_t slice_bytes() const { return tiles * kTileBytes; }
};

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

// What a record multiplies its units with, and where its copies begin.
struct Product {
  Cut cut;
  uint32_t units = 0;
  uint32_t first_copy = 0;  // copies before it are not units
  // Activations: the RMS norm of the stream, staged in shared memory, or rows in device memory.
  uint64_t norm = 0;  // 0: not staged
  uint64_t residual = 0;
  uint64_t mlp = 0;
  uint32_t input = 0;  // number of the stream, within step and layer
  uint64_t rows = 0;
  uint32_t row_stride = 0;                 // columns from token row to token row
  uint32_t place_stride = 0;               // and from expert to expert of a row, where units are experts'
  const core::Routing* routing = nullptr;  // of the units' experts
  uint32_t expert_units = 1;               // of each expert, in this record
  uint32_t first_unit = 0;                 // of the record, where K is split
  uint32_t split_units = ~0u;              // units of one K split; all of them where it is not
};

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

  // Multiplies the record's units; `finish(unit, rank, values)` takes each that this warp finished.
  template <class Finish>
  __device__ __forceinline__ bool multiply(const core::Slot& slot, core::Reader& reader, const Product& product,
                                           Finish&& finish) {
    const Cut& cut = product.cut;
    uint32_t lap = spec::kTrace ? core::trace_time(context_) : 0;
#pragma unroll 1
    for (uint32_t copy = reader.first_own(product.first_copy); copy < slot.copies; copy += spec::kConsumerWarps) {
      if (!reader.await_issued(copy)) return false;
      const core::Landed what = reader.what();
      uint32_t unit = what.unit;
      uint32_t slice = what.slice;
      const uint8_t* data = reader.data();
      const uint8_t* end = data + what.bytes_by_16 * 16;
      bool has_landed = false;
#pragma unroll 1
      for (; data != end; data += cut.slice_bytes()) {
        Tiles x;
        fetch(x, product, unit, slice, what.rank);
        if (!has_landed && !reader.await_landed(copy)) return false;
        has_landed = true;
        core::lap(context_, slot, &abi::Trace::waited, lap);
        float sum[4];
        multiply_slice(sum, data, x, cut.tiles, context_.lane);
        const uint32_t first = unit * cut.slices;
        const bool is_last = data + cut.slice_bytes() == end;
        if (keep(sum, first + slice, first, cut.slices)) {
          Unit values;
          add_up(values, first, cut.slices);
          if (is_last) reader.free();
          if (!finish(unit, what.rank, values)) return false;
        } else if (is_last) {
          reader.free();
        }
        if (++slice == cut.slices) {
          slice = 0;
          ++unit;
        }
      }
      core::lap(context_, slot, &abi::Trace::worked, lap);
    }
    base_ = wrapped(product.units * cut.slices);
    return true;
  }

 private:
  // Activations of a slice.
  __device__ __forceinline__ void fetch(Tiles& x, const Product& product, uint32_t unit, uint32_t slice,
                                        uint32_t rank) const {
    const uint32_t tiles = spec::kSlicesAreWhole ? kMostTiles : product.cut.tiles;
    uint32_t column = slice * tiles * abi::kTileColumns + context_.lane % 4 * 8;
    const uint32_t row = context_.lane / 4;
    const bool has_row = spec::kRows == 8 || row < spec::kRows;
    if (product.norm != 0) {
      if constexpr (spec::kProjectKSplits > 1)
        column += (product.first_unit + unit) / product.split_units * kSplitColumns;
      const uint8_t* from = context_.shared.work.x[has_row ? row : 0] + column * spec::kElementBytes;
#pragma unroll
      for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
        x[tile] = {};
        if (tile < tiles && has_row) x[tile] = *reinterpret_cast<const uint4*>(from + tile * kTileRowBytes);
      }
    } else {
      uint32_t place = has_row ? 0 : core::kNoSlot;
      if (product.routing != nullptr && has_row) {
        place = product.routing->slots[row][product.routing->experts[rank]];
      }
      const auto* from = core::at<const uint8_t>(product.rows) +
                         (row * product.row_stride + place * product.place_stride + column) * spec::kElementBytes;
#pragma unroll
      for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
        x[tile] = {};
        if (tile < tiles && place != core::kNoSlot) {
          x[tile] = ptx::load_relaxed_gpu(reinterpret_cast<const uint4*>(from + tile * kTileRowBytes));
        }
      }
    }
  }

  // Sums of one slice: 16 weight rows by 8 token rows. Columns are permuted inside a tile, weights and activations
  // alike.
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
        const uint4 upper = *reinterpret_cast<const uint4*>(at);
        const uint4 lower = *reinterpret_cast<const uint4*>(at + kTileBytes / 2);
        ptx::multiply_add(sum, upper.x, lower.x, upper.y, lower.y, x[tile].x, x[tile].y);
        ptx::multiply_add(other, upper.z, lower.z, upper.w, lower.w, x[tile].z, x[tile].w);
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
#pragma unroll
    for (uint32_t column = 0; column < 2; ++column) {
      const uint32_t token = context_.lane % 4 * 2 + column;
      if (spec::kRows == 8 || token < spec::kRows) {
        part[token][row] = sum[column];
        part[token][row + 8] = sum[column + 2];
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
        const uint32_t token = Unit::token_row(context_.lane, output);
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
