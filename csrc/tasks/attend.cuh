// Partial attention over this share's (row, KV head, chunk) units, which live lengths decide.
//
// A chunk's K and V come in pairs of copies, each pair a piece of a page. A team of warps attends a chunk: each member
// scores the keys of its own piece, all meet, and each sums the values of all pieces for its own dims, so that no sums
// need to be added up afterwards, and neither the size of a copy nor the share changes one. The current token's K and V
// come from the projection, and go to the page. Keys outside the row's context are selected away, in K and in V: what
// lies there may be anything.
#pragma once
#include "core/live.cuh"
#include "tasks/heads.cuh"
#include "tasks/stage.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Attend {
  // Pages are copied in pieces, K and the V that meets it in turn.
  static constexpr uint32_t kTokenBytes = spec::kHeadDim * spec::kElementBytes;
  static constexpr uint32_t kPieceTokens = spec::kPieceTokens;
  static constexpr uint32_t kPieceBytes = kPieceTokens * kTokenBytes;
  static constexpr uint32_t kPairs = spec::kChunkTokens / kPieceTokens;  // of a chunk
  static constexpr uint32_t kTeam = kPairs;                              // warps
  static constexpr uint32_t kSteps = spec::kChunkTokens / 16;  // of the matrix instruction, over a chunk's keys
  static constexpr uint32_t kPieceSteps = kPieceTokens / 16;
  static constexpr uint32_t kDims16 = spec::kHeadDim / 16;
  static constexpr uint32_t kOwnDims16 = (kDims16 + kTeam - 1) / kTeam;  // summed by one member, at most
  static_assert(spec::kStreaming || kPieceBytes <= spec::kCopyBytes, "a copy holds a block of keys");
  static_assert(spec::kStreaming || 2 * kPairs <= spec::kStages, "values are kept until all keys are scored");

  // One (row, KV head, chunk).
  struct Place {
    uint32_t row;
    uint32_t head;
    uint32_t chunk;
    uint32_t first_chunk;  // of the row
    uint32_t end_chunk;
    uint32_t position;
  };

  // This record's share of all units of the step.
  __device__ static __forceinline__ void find_units(core::Slot& slot, core::Live& live) {
    const core::RowAt* rows = live.rows(slot.step);
    uint32_t total = 0;
#pragma unroll 1
    for (uint32_t row = 0; row < spec::kRows; ++row) total += units(rows[row], slot.layer.window_tokens);
    slot.first_unit = abi::share_begin(total, slot.record.share, slot.record.shares);
    slot.end_unit = abi::share_begin(total, slot.record.share + 1, slot.record.shares);
  }

  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context& context, const core::Slot& slot, core::Live& live,
                                              Visit& visit) {
    const core::RowAt* rows = live.rows(slot.step);
    uint32_t first = slot.first_unit;
    const uint32_t end = slot.end_unit;
    uint32_t before = 0;  // units of earlier rows
#pragma unroll 1
    for (uint32_t row = 0; row < spec::kRows && first < end; ++row) {
      const uint32_t mine = units(rows[row], slot.layer.window_tokens);
      if (first < before + mine) {
        Place place = find(rows, slot.layer.window_tokens, first);
        const uint32_t last = min(end, before + mine);
        for (; first < last; ++first) {
          if (!visit_chunk(context, slot, place, visit)) return false;
          if (++place.chunk == place.end_chunk) {
            place.chunk = place.first_chunk;
            ++place.head;
          }
        }
      }
      before += mine;
    }
    return true;
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, Tools& tools) {
#pragma unroll 1
    for (uint32_t unit = context.warp / kTeam; slot.first_unit + unit < slot.end_unit; unit += spec::kTeams) {
      const Place place = find(context.shared.rows, slot.layer.window_tokens, slot.first_unit + unit);
      if (!attend_chunk(context, slot, tools, place, 2 * unit * kPairs)) return false;
    }
    return true;
  }

 private:
  __device__ static __forceinline__ uint32_t units(const core::RowAt& row, uint32_t window) {
    return abi::attend_units(row.active, row.position, window, spec::kChunkTokens, spec::kKvHeads);
  }

  __device__ static __forceinline__ Place find(const core::RowAt* rows, uint32_t window, uint32_t unit) {
    uint32_t row = 0;
#pragma unroll 1
    for (; row + 1 < spec::kRows; ++row) {
      const uint32_t mine = units(rows[row], window);
      if (unit < mine) break;
      unit -= mine;
    }
    const uint32_t position = rows[row].position;
    const uint32_t first = abi::chunk_begin(position, window, spec::kChunkTokens);
    const uint32_t end = abi::chunk_end(position, spec::kChunkTokens);
    return {row, unit / (end - first), first + unit % (end - first), first, end, position};
  }

  template <class Visit>
  __device__ static __forceinline__ bool visit_chunk(const core::Context& context, const core::Slot& slot,
                                                     const Place& place, Visit& visit) {
    // One page id a lane: a chunk's ids cost one trip to memory, and none where only copies are counted.
    const uint32_t* ids = core::at<const uint32_t>(slot.layer.pages) + place.row * spec::kPagesPerRow;
    const uint32_t first = place.chunk * spec::kPagesPerChunk;
    uint32_t id = 0;
    for (uint32_t page = 0; page < spec::kPagesPerChunk; ++page) {
      const uint32_t turn = page % spec::kWarpThreads;
      if (!visit.counts && turn == 0 && page + context.lane < spec::kPagesPerChunk) {
        id = ptx::load_relaxed_gpu(ids + first + page + context.lane);
      }
      constexpr int32_t kToValues = spec::kPageHalfBytes;
      constexpr int32_t kToNextKeys = static_cast<int32_t>(kPieceBytes) - kToValues;  // back from V
      const uint64_t keys = page_at(slot, __shfl_sync(core::kAllLanes, id, turn), place.head);
      if (!visit({keys, 2 * spec::kPageHalfBytes, kPieceBytes, kToValues, kToNextKeys})) return false;
    }
    return true;
  }

  __device__ static __forceinline__ uint64_t page_at(const core::Slot& slot, uint32_t page, uint32_t head) {
    return slot.layer.kv + (static_cast<uint64_t>(page) * spec::kKvHeads + head) * 2 * spec::kPageHalfBytes;
  }

  // All meet who attend the chunk.
  __device__ static __forceinline__ bool meet(Tools& tools) {
    if constexpr (kTeam > 1) return tools.team.meet();
    __syncwarp();
    return true;
  }

  // One unit, whose first copy is `copy` of the record.
  __device__ static __forceinline__ bool attend_chunk(const core::Context& context, const core::Slot& slot,
                                                      Tools& tools, const Place& place, uint32_t copy) {
    core::Reader& reader = tools.reader;
    const uint32_t team = context.warp / kTeam;
    const uint32_t member = context.warp % kTeam;
    const uint32_t begin = place.chunk * spec::kChunkTokens;
    const uint32_t window = slot.layer.window_tokens;
    const uint32_t from = window > 0 && place.position + 1 > window ? place.position + 1 - window : 0;
    const bool has_current = place.chunk + 1 == place.end_chunk;
    uint32_t lap = spec::kTrace ? core::trace_time(context) : 0;

    HeadPairs q;
    load_queries(q, context, slot, place);
    if (has_current && member + 1 == kTeam) stage_current(context, slot, place, q, team);
    core::lap(context, slot, &abi::Trace::staged, lap);
    const uint32_t keys = copy + 2 * member;
    if (!reader.await_issued(keys) || !reader.await_landed(keys)) return false;
    core::lap(context, slot, &abi::Trace::waited, lap);
    score(q, context, team, ptx::shared_address(reader.data()), begin, member * kPieceTokens, from, place.position);
    reader.free();
    if (!meet(tools)) return false;

    uint32_t weights[kSteps][2];  // of keys, as the second product takes them
    float2 mass;                  // maximum and mass, of head lane / 4
    float current;                // weight of the current token
    weigh(weights, mass, current, context, team, has_current);

    float sums[kOwnDims16][4] = {};
#pragma unroll 1
    for (uint32_t piece = 0; piece < kPairs; ++piece) {
      const uint32_t values = copy + 2 * piece + 1;
      if (!reader.await_issued(values) || !reader.await_landed(values)) return false;
      sum(sums, weights, context, ptx::shared_address(reader.data()), begin, piece, member, from, place.position);
    }
    leave(context, slot, place, team, member, sums, mass, has_current, current, tools.written);
    if (has_current && member + 1 == kTeam) append(context, slot, place, team, tools.written);
    if (!meet(tools)) return false;  // all have read the values, and the scores
    reader.await_issued(copy + 2 * member + 1);
    reader.free();
    core::lap(context, slot, &abi::Trace::worked, lap);
    return true;
  }

  // Queries of a unit, of head lane / 4.
  __device__ static __forceinline__ void load_queries(HeadPairs& q, const core::Context& context,
                                                      const core::Slot& slot, const Place& place) {
    const uint32_t group = min(context.lane / 4, spec::kGroup - 1);  // lanes without a head repeat the last
    Angles angles;
    angles.load(slot.layer.rotary, place.position, context.lane);
    load_head(q, slot.inputs[0], place.row, (place.head * spec::kGroup + group) * spec::kHeadDim, context.lane);
    if constexpr (spec::kQkNorm) norm_head(q, slot.layer.q_norm, context.lane);
    angles.turn(q);
  }

  // The current token's key and value, as pairs of dims, and its score for every head, into the workspace.
  __device__ static __forceinline__ void stage_current(const core::Context& context, const core::Slot& slot,
                                                       const Place& place, const HeadPairs& q, uint32_t team) {
    constexpr uint32_t kKvSize = spec::kKvHeads * spec::kHeadDim;
    core::Workspace& work = context.shared.work;
    float score = 0.0f;
#pragma unroll 1
    for (uint32_t is_value = 0; is_value < 2; ++is_value) {
      HeadPairs head;
      const uint32_t column = spec::kQSize + is_value * kKvSize + place.head * spec::kHeadDim;
      load_head(head, slot.inputs[0], place.row, column, context.lane);
      if (is_value == 0) {
        Angles angles;
        angles.load(slot.layer.rotary, place.position, context.lane);
        if constexpr (spec::kQkNorm) norm_head(head, slot.layer.k_norm, context.lane);
        angles.turn(head);
#pragma unroll
        for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
          score += ptx::low(q[tile]) * ptx::low(head[tile]) + ptx::high(q[tile]) * ptx::high(head[tile]);
        }
      }
      uint32_t* to = is_value == 0 ? work.current_k[team] : work.current_v[team];
      if (context.lane < 4) {
#pragma unroll
        for (uint32_t tile = 0; tile < kDimTiles; ++tile) to[tile * 4 + context.lane] = head[tile];
      }
    }
    score += __shfl_xor_sync(core::kAllLanes, score, 1);
    score += __shfl_xor_sync(core::kAllLanes, score, 2);
    if (context.lane % 4 == 0 && context.lane / 4 < spec::kGroup)
      work.current_scores[team][context.lane / 4] = score * spec::kScale;
    __syncwarp();
  }

  // Row of four 8 x 8 tiles that this lane names: two tiles of tokens and two of dims, tokens first or dims first.
  __device__ static __forceinline__ uint32_t tile_row(uint32_t half, uint32_t token_tile, uint32_t dim_tile,
                                                      uint32_t lane) {
    constexpr uint32_t kTile = 8 * 8 * spec::kElementBytes;
    return half + (token_tile * kDimTiles + dim_tile) * kTile + lane % 8 * 16;
  }

  // Scores of a piece's keys, of all heads, into the workspace; of keys outside [from, end), minus infinity.
  __device__ static __forceinline__ void score(const HeadPairs& q, const core::Context& context, uint32_t team,
                                               uint32_t keys, uint32_t begin, uint32_t offset, uint32_t from,
                                               uint32_t end) {
    const uint32_t lane = context.lane;
    float scores[kPieceSteps][4] = {};
#pragma unroll
    for (uint32_t dims = 0; dims < kDimTiles; dims += 2) {
#pragma unroll
      for (uint32_t step = 0; step < kPieceSteps; ++step) {
        uint32_t a[4];
        ptx::load_matrices(a, tile_row(keys, step * 2 + (lane / 8 & 1), dims + lane / 16, lane));
        ptx::multiply_add(scores[step], a[0], a[1], a[2], a[3], q[dims], q[dims + 1]);
      }
    }
#pragma unroll
    for (uint32_t step = 0; step < kPieceSteps; ++step) {
#pragma unroll
      for (uint32_t value = 0; value < 4; ++value) {
        const uint32_t at = offset + step * 16 + value / 2 * 8 + lane / 4;
        const uint32_t head = lane % 4 * 2 + value % 2;
        const bool is_in = begin + at >= from && begin + at < end;
        if (spec::kGroup == 8 || head < spec::kGroup) {
          context.shared.work.scores[team][head][at] = is_in ? scores[step][value] * spec::kScale : -ptx::kInfinity;
        }
      }
    }
  }

  // Weights of the chunk's keys and of the current token, exp(score - maximum), of head lane / 4.
  __device__ static __forceinline__ void weigh(uint32_t (&weights)[kSteps][2], float2& mass, float& current,
                                               const core::Context& context, uint32_t team, bool has_current) {
    core::Workspace& work = context.shared.work;
    const uint32_t head = min(context.lane / 4, spec::kGroup - 1);
    const float* row = work.scores[team][head] + context.lane % 4 * 2;
    float2 scores[kSteps][2];
    const float own = has_current ? work.current_scores[team][head] : -ptx::kInfinity;
    float peak = own;
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        scores[step][half] = *reinterpret_cast<const float2*>(row + step * 16 + half * 8);
        peak = fmaxf(peak, fmaxf(scores[step][half].x, scores[step][half].y));
      }
    }
    peak = fmaxf(peak, __shfl_xor_sync(core::kAllLanes, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(core::kAllLanes, peak, 2));
    float sum = 0.0f;
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float first = __expf(scores[step][half].x - peak);
        const float second = __expf(scores[step][half].y - peak);
        sum += first + second;
        weights[step][half] = ptx::pack(first, second);
      }
    }
    sum += __shfl_xor_sync(core::kAllLanes, sum, 1);
    sum += __shfl_xor_sync(core::kAllLanes, sum, 2);
    const float weight = __expf(own - peak);
    mass = {peak, sum + weight};
    current = ptx::rounded(weight);
  }

  // Adds a piece's values, weighted, for this member's dims: of every 16, those of lane / 4 and 8 further, for heads
  // 2t, 2t+1.
  __device__ static __forceinline__ void sum(float (&sums)[kOwnDims16][4], const uint32_t (&weights)[kSteps][2],
                                             const core::Context& context, uint32_t values, uint32_t begin,
                                             uint32_t piece, uint32_t member, uint32_t from, uint32_t end) {
    const uint32_t lane = context.lane;
    const bool is_whole = begin >= from && begin + spec::kChunkTokens <= end;
#pragma unroll
    for (uint32_t step = 0; step < kPieceSteps; ++step) {
      uint32_t near = ~0u;
      uint32_t far = ~0u;
      if (!is_whole) {
        const uint32_t token = begin + piece * kPieceTokens + step * 16 + lane % 4 * 2;
        near = mask(token, from, end);
        far = mask(token + 8, from, end);
      }
      uint32_t first = weights[step][0];
      uint32_t second = weights[step][1];
#pragma unroll
      for (uint32_t other = 1; other < kPairs; ++other) {  // registers have no index
        first = piece == other ? weights[other * kPieceSteps + step][0] : first;
        second = piece == other ? weights[other * kPieceSteps + step][1] : second;
      }
#pragma unroll
      for (uint32_t own = 0; own < kOwnDims16; ++own) {
        const uint32_t dims = (member + own * kTeam) * 2;
        if (kDims16 % kTeam == 0 || dims < kDimTiles) {
          uint32_t a[4];
          ptx::load_matrices_transposed(a, tile_row(values, step * 2 + lane / 16, dims + (lane / 8 & 1), lane));
          ptx::multiply_add(sums[own], a[0] & near, a[1] & near, a[2] & far, a[3] & far, first, second);
        }
      }
    }
  }

  // Ones where a pair's tokens are inside.
  __device__ static __forceinline__ uint32_t mask(uint32_t token, uint32_t from, uint32_t end) {
    return (token >= from && token < end ? 0xffffu : 0u) | (token + 1 >= from && token + 1 < end ? 0xffff0000u : 0u);
  }

  // The current token's K and V into the row's page. A copy of another warp may still read around them; what it brings
  // from there is selected away.
  __device__ static __forceinline__ void append(const core::Context& context, const core::Slot& slot,
                                                const Place& place, uint32_t team, core::Written& written) {
    const core::Workspace& work = context.shared.work;
    const uint32_t* ids = core::at<const uint32_t>(slot.layer.pages) + place.row * spec::kPagesPerRow;
    const uint32_t page = ptx::load_relaxed_gpu(ids + place.position / spec::kPageTokens);
    const uint32_t token = place.position % spec::kPageTokens;
    const uint64_t to = page_at(slot, page, place.head) + token / 8 * (kDimTiles * 128) + token % 8 * 16;
    for (uint32_t tile = context.lane / 4; tile < kDimTiles; tile += 8) {
      auto* word = core::at<uint32_t>(to + tile * 128) + context.lane % 4;
      const uint32_t pair = tile * 4 + context.lane % 4;
      written.put(word, work.current_k[team][pair]);
      written.put(word + spec::kPageHalfBytes / sizeof(uint32_t), work.current_v[team][pair]);
    }
  }

  // Leaves a chunk for the merge: weighted sums [row, query head, chunk, dim], and after all of them maxima and masses
  // [row, query head, chunk].
  __device__ static __forceinline__ void leave(const core::Context& context, const core::Slot& slot, const Place& place,
                                               uint32_t team, uint32_t member, const float (&sums)[kOwnDims16][4],
                                               const float2& mass, bool has_current, float current,
                                               core::Written& written) {
    core::Workspace& work = context.shared.work;
    const uint32_t first_head = (place.row * spec::kKvHeads + place.head) * spec::kGroup;
    const uint64_t first = static_cast<uint64_t>(first_head) * spec::kMostChunks + place.chunk - place.first_chunk;
    auto* to = core::at<uint32_t>(slot.outputs[0]) + first * spec::kHeadDim;
    constexpr uint32_t kStride = spec::kMostChunks * spec::kHeadDim;  // from head to head
    const auto* current_v = reinterpret_cast<const uint16_t*>(work.current_v[team]);
    const uint32_t* places[kOwnDims16 * 4];
#pragma unroll
    for (uint32_t head = 0; head < 2; ++head) {
      const uint32_t group = context.lane % 4 * 2 + head;
      const float weight = __shfl_sync(core::kAllLanes, current, group * 4);
#pragma unroll
      for (uint32_t own = 0; own < kOwnDims16; ++own) {
        const uint32_t dims = (member + own * kTeam) * 16 + context.lane / 4;
        const bool is_own =
            (spec::kGroup == 8 || group < spec::kGroup) && (kDims16 % kTeam == 0 || dims < spec::kHeadDim);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t dim = dims + half * 8;
          // A lane without such a head or dim asks for what the first one of all wrote.
          uint32_t* place = is_own ? to + group * kStride + dim : to;
          places[(head * kOwnDims16 + own) * 2 + half] = place;
          float total = sums[own][half * 2 + head];
          if (has_current && is_own) total += weight * ptx::widen(current_v[dim]);
          if (is_own) ptx::store_relaxed_gpu(place, __float_as_uint(total));
        }
      }
    }
    written.confirm(places);
    if (member == 0 && context.lane % 4 == 0 && context.lane / 4 < spec::kGroup) {
      auto* masses = core::at<uint2>(slot.outputs[0] + kStatsBegin) + first + context.lane / 4 * spec::kMostChunks;
      written.put(masses, uint2{__float_as_uint(mass.x), __float_as_uint(mass.y)});
    }
  }
};

}  // namespace mk::tasks
