// What a record multiplies: found once by the planner, which has time, and read by all consumers, who have none.
#pragma once
#include "specialization.cuh"

namespace mk::core {

inline constexpr uint32_t kTileBytes = abi::kUnitRows * abi::kTileColumns * spec::kElementBytes;

// How a product is cut: constant for one operator.
struct Cut {
  uint32_t slices;  // of a unit
  uint32_t tiles;   // of a slice

  __device__ __forceinline__ constexpr uint32_t slice_bytes() const { return tiles * kTileBytes; }
};

struct alignas(16) Product {
  // Activations: the RMS norm of the stream, staged in shared memory, or rows in device memory.
  uint64_t norm = 0;  // 0: not staged
  uint64_t residual = 0;
  uint64_t mlp = 0;
  uint64_t rows = 0;
  Cut cut;
  uint32_t units = 0;
  uint32_t first_copy = 0;  // copies before it are not units
  // What copies hold follows by arithmetic where units are whole copies; otherwise the issuer says it with each copy.
  uint32_t copy_slices = 0;  // of a copy; 0: the issuer says
  uint32_t unit_step = 0;    // from the end of a warp's copy to its next one: units, and slices
  uint32_t slice_step = 0;
  uint32_t expert_units = 1;   // of each expert, in this record
  uint32_t rank = 0;           // of the expert of the first unit
  uint32_t rank_end = ~0u;     // first unit of the next expert
  uint32_t rank_units = ~0u;   // units of each expert after it
  uint32_t row_stride = 0;     // columns from token row to token row
  uint32_t place_stride = 0;   // and from expert to expert of a row, where units are experts'
  uint32_t first_unit = 0;     // of the record, where K is split
  uint32_t split_units = ~0u;  // units of one K split; all of them where it is not
  uint16_t input = 0;          // number of the stream, within step and layer
  uint8_t is_routed = 0;       // rows are those of the units' experts
  uint8_t stages = 0;          // the stream does not stand in the workspace yet
};

}  // namespace mk::core
