// Partial attention over this share's (row, KV head, chunk) units, which live lengths decide.
//
// A chunk's K and V come in pairs of copies, each pair a piece of a page. A team of warps attends a chunk, a piece
// each: scores and weights of a block of keys against the block's own peak, and its weighted sum of values, all in the
// warp's registers; the sums go where the piece's values were, all meet, and each member adds up the blocks for its own
// dims, in ascending order. Blocks are as long whatever a copy holds, so neither copies nor the share change a sum. The
// current token's K and V come from the projection, and go to the page. Keys outside the row's context are selected
// away, in K and in V: what lies there may be anything.
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
  static constexpr uint32_t kPairs = spec::kChunkTokens / kPieceTokens;         // of a chunk
  static constexpr uint32_t kTeam = kPairs;                                     // warps
  static constexpr uint32_t kBlocks = spec::kChunkTokens / spec::kBlockTokens;  // of a chunk
  static constexpr uint32_t kPieceBlocks = kPieceTokens / spec::kBlockTokens;
  static constexpr uint32_t kSteps = spec::kBlockTokens / 16;  // of the matrix instruction, over a block's keys
  static constexpr uint32_t kBlockBytes = spec::kBlockTokens * kTokenBytes;
  static constexpr uint32_t kQuads = spec::kHeadDim / 4;  // of a head
  static constexpr uint32_t kMembers = kTeam * spec::kWarpThreads;
  static constexpr uint32_t kTurns = (spec::kGroup * kQuads + kMembers - 1) / kMembers;
  static constexpr float kScale = spec::kScale * 1.4426950408889634f;  // scores are powers of two
  static_assert(spec::kStreaming || kPieceBytes <= spec::kCopyBytes, "a copy holds a block of keys");
  static_assert(spec::kStreaming || 2 * kPairs <= spec::kStages, "all copies of a chunk are held together");
  static_assert(spec::kGroup * sizeof(float) <= spec::kBlockTokens * spec::kElementBytes, "sums lie where keys were");

  using Places = uint32_t[2 * kTurns];  // words of the partial results

  using Place = core::Place;

  // This record's share of all units of the step.
  __device__ static __forceinline__ void find_units(core::Slot& slot, core::Live& live) {
    const core::RowAt* rows = live.rows(slot.step);
    uint32_t total = 0;
#pragma unroll 1
    for (uint32_t row = 0; row < spec::kRows; ++row) total += units(rows[row], slot.layer.window_tokens);
    slot.first_unit = abi::share_begin(total, slot.record.share, slot.record.shares);
    slot.end_unit = abi::share_begin(total, slot.record.share + 1, slot.record.shares);
    if (slot.first_unit < slot.end_unit) slot.place = find(rows, slot.layer.window_tokens, slot.first_unit);
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
        Place place = first == slot.first_unit ? slot.place : find(rows, slot.layer.window_tokens, first);
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
    HeadPairs q;
    uint32_t queries = ~0u;  // row and head that they are of
#pragma unroll 1
    for (uint32_t unit = context.warp / kTeam; slot.first_unit + unit < slot.end_unit; unit += spec::kTeams) {
      Place place = slot.place;
      place.chunk += unit;
#pragma unroll 1
      for (; place.chunk >= place.end_chunk; place.chunk -= place.end_chunk - place.first_chunk) ++place.head;
      if (spec::kRows > 1 && place.head >= spec::kKvHeads) {  // of another row
        place = find(context.shared.rows, slot.layer.window_tokens, slot.first_unit + unit);
      }
      if (!attend_chunk(context, slot, tools, place, 2 * unit * kPairs, q, queries)) return false;
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

  // One unit, whose first copy is `copy` of the record. `q` holds the queries of `queries`.
  __device__ static __forceinline__ bool attend_chunk(const core::Context& context, const core::Slot& slot,
                                                      Tools& tools, const Place& place, uint32_t copy, HeadPairs& q,
                                                      uint32_t& queries) {
    core::Reader& reader = tools.reader;
    const uint32_t team = context.warp / kTeam;
    const uint32_t member = context.warp % kTeam;
    const uint32_t window = slot.layer.window_tokens;
    const uint32_t from = window > 0 && place.position + 1 > window ? place.position + 1 - window : 0;
    const bool has_current = place.chunk + 1 == place.end_chunk;
    uint32_t lap = spec::kTrace ? core::trace_time(context) : 0;

    // What follows from the lane is found here, not kept from record to record.
    const uint32_t lane = ptx::kept(context.lane);
    // The current token's key is the last member's, its value the one's before.
    const bool has_key = has_current && member + 1 == kTeam;
    const bool has_value = has_current && member + 1 == max(kTeam - 1, 1u);
    const uint32_t wanted = place.row * spec::kKvHeads + place.head;
    if (queries != wanted) {
      load_queries(q, lane, slot, place);
      queries = wanted;
    }
    if (has_key) stage_key(lane, context.shared.work, slot, place, q, team);
    if (has_value) stage_value(lane, context.shared.work, slot, place, team);
    core::come_together();
    core::lap(context, slot, &abi::Trace::staged, lap);
    const uint32_t keys = copy + 2 * member;
    reader.turn_to(keys);
    if (!reader.await_landed()) return false;
    core::come_together();
    core::lap(context, slot, &abi::Trace::waited, lap);
    const uint32_t values = keys + 1;
#pragma unroll 1
    for (uint32_t block = 0; block < kPieceBlocks; ++block) {
      const uint32_t number = member * kPieceBlocks + block;
      const uint32_t first = place.chunk * spec::kChunkTokens + number * spec::kBlockTokens;
      const uint32_t offset = block * kBlockBytes;
      uint32_t weights[2 * kSteps];
      weigh(weights, q, context.shared.work.stats[team][number], lane,
            ptx::shared_address(reader.data_of(keys)) + offset, first, from, place.position);
      if (block == 0) {
        reader.turn_to(values);
        if (!reader.await_landed()) return false;
      }
      sum(weights, lane, ptx::shared_address(reader.data_of(keys)) + offset,
          ptx::shared_address(reader.data_of(values)) + offset, first, from, place.position);
    }
    reader.free_of(values);
    ptx::fence_proxy_async_shared();  // the next copy into the keys' stage comes after the sums
    if (!meet(tools)) return false;
    Places places;
    leave(places, context, slot, place, team, member, reader, copy, has_current);
    if (has_current && member == 0) append(context, slot, place, team, tools.written);
    if (!meet(tools)) return false;  // all have read the sums
    reader.free_of(keys);
    tools.written.confirm(core::at<const uint32_t>(slot.outputs[0]), places);
    core::come_together();
    core::lap(context, slot, &abi::Trace::worked, lap);
    return true;
  }

  // Queries of a unit, of head lane / 4.
  __device__ static __forceinline__ void load_queries(HeadPairs& q, uint32_t lane, const core::Slot& slot,
                                                      const Place& place) {
    const uint32_t group = min(lane / 4, spec::kGroup - 1);  // lanes without a head repeat the last
    Angles angles;
    angles.load(slot.layer.rotary, place.position, lane);
    load_head(q, slot.inputs[0], place.row, (place.head * spec::kGroup + group) * spec::kHeadDim, lane);
    if constexpr (spec::kQkNorm) norm_head(q, slot.layer.q_norm, lane);
    angles.turn(q);
  }

  // The current token's key, as pairs of dims, and its score for every head, into the workspace.
  __device__ static __forceinline__ void stage_key(uint32_t lane, core::Workspace& work, const core::Slot& slot,
                                                   const Place& place, const HeadPairs& q, uint32_t team) {
    HeadPairs key;
    Angles angles;
    angles.load(slot.layer.rotary, place.position, lane);
    load_head(key, slot.inputs[0], place.row, spec::kQSize + place.head * spec::kHeadDim, lane);
    if constexpr (spec::kQkNorm) norm_head(key, slot.layer.k_norm, lane);
    angles.turn(key);
    float score = 0.0f;
#pragma unroll
    for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
      score += ptx::low(q[tile]) * ptx::low(key[tile]) + ptx::high(q[tile]) * ptx::high(key[tile]);
      if (lane < 4) work.current_k[team][tile * 4 + lane] = key[tile];
    }
    score += __shfl_xor_sync(core::kAllLanes, score, 1);
    score += __shfl_xor_sync(core::kAllLanes, score, 2);
    if (lane % 4 == 0 && lane / 4 < spec::kGroup) work.current_scores[team][lane / 4] = score * kScale;
  }

  // The current token's value, as pairs of dims, into the workspace.
  __device__ static __forceinline__ void stage_value(uint32_t lane, core::Workspace& work, const core::Slot& slot,
                                                     const Place& place, uint32_t team) {
    HeadPairs value;
    load_head(value, slot.inputs[0], place.row, spec::kQSize + (spec::kKvHeads + place.head) * spec::kHeadDim, lane);
#pragma unroll
    for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
      if (lane < 4) work.current_v[team][tile * 4 + lane] = value[tile];
    }
  }

  // Row of four 8 x 8 tiles that this lane names: of tokens [8 token_tile, + 8) and dims [8 dim_tile, + 8).
  __device__ static __forceinline__ uint32_t tile_row(uint32_t half, uint32_t token_tile, uint32_t dim_tile,
                                                      uint32_t lane) {
    constexpr uint32_t kTile = 8 * 8 * spec::kElementBytes;
    return half + (token_tile * kDimTiles + dim_tile) * kTile + lane % 8 * 16;
  }

  // Weights of a block's keys, 2^(score - peak) as pairs of bfloat16, of head lane / 4: keys 2t, 2t+1 and 8 further of
  // every 16. The block's peaks and masses go to `stats`; keys outside [from, end) weigh nothing.
  __device__ static __forceinline__ void weigh(uint32_t (&weights)[2 * kSteps], const HeadPairs& q,
                                               float2 (&stats)[spec::kGroup], uint32_t lane, uint32_t keys,
                                               uint32_t first, uint32_t from, uint32_t end) {
    float scores[kSteps][4] = {};  // of keys lane / 4 and 8 further, heads 2t, 2t+1
#pragma unroll
    for (uint32_t dims = 0; dims < kDimTiles; dims += 2) {
#pragma unroll
      for (uint32_t step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        ptx::load_matrices(a, tile_row(keys, step * 2 + (lane / 8 & 1), dims + lane / 16, lane));
        ptx::multiply_add(scores[step], a[0], a[1], a[2], a[3], q[dims], q[dims + 1]);
      }
    }
    const bool is_whole = first >= from && first + spec::kBlockTokens <= end;
    float2 peak = {-ptx::kInfinity, -ptx::kInfinity};
#pragma unroll
    for (uint32_t tile = 0; tile < 2 * kSteps; ++tile) {
      const uint32_t at = first + tile * 8 + lane / 4;
      const bool is_in = is_whole || (at >= from && at < end);
      float& one = scores[tile / 2][tile % 2 * 2];
      float& other = scores[tile / 2][tile % 2 * 2 + 1];
      one = is_in ? one * kScale : -ptx::kInfinity;
      other = is_in ? other * kScale : -ptx::kInfinity;
      peak = {fmaxf(peak.x, one), fmaxf(peak.y, other)};
    }
#pragma unroll
    for (uint32_t step = 4; step < spec::kWarpThreads; step *= 2) {
      peak.x = fmaxf(peak.x, __shfl_xor_sync(core::kAllLanes, peak.x, step));
      peak.y = fmaxf(peak.y, __shfl_xor_sync(core::kAllLanes, peak.y, step));
    }
    // 0 for a block without a key
    const float2 base = {peak.x == -ptx::kInfinity ? 0.0f : peak.x, peak.y == -ptx::kInfinity ? 0.0f : peak.y};
    float2 mass = {};
#pragma unroll
    for (uint32_t tile = 0; tile < 2 * kSteps; ++tile) {
      const float one = ptx::power_of_two(scores[tile / 2][tile % 2 * 2] - base.x);
      const float other = ptx::power_of_two(scores[tile / 2][tile % 2 * 2 + 1] - base.y);
      mass = {mass.x + one, mass.y + other};
      weights[tile] = ptx::transposed(ptx::pack(one, other));
    }
#pragma unroll
    for (uint32_t step = 4; step < spec::kWarpThreads; step *= 2) {
      mass.x += __shfl_xor_sync(core::kAllLanes, mass.x, step);
      mass.y += __shfl_xor_sync(core::kAllLanes, mass.y, step);
    }
    const uint32_t head = lane * 2;
    if (head < spec::kGroup) stats[head] = {peak.x, mass.x};
    if (head + 1 < spec::kGroup) stats[head + 1] = {peak.y, mass.y};
  }

  // Column of a block's sums, so that lanes meet all banks.
  __device__ static __forceinline__ uint32_t swizzled(uint32_t head, uint32_t dim) {
    return dim ^ (head / 2 % (kDimTiles % 4 == 0 ? 4 : 2)) * 8;
  }

  // Weighted values of a block, for all heads, to where its keys were: [head, swizzled dim].
  __device__ static __forceinline__ void sum(const uint32_t (&weights)[2 * kSteps], uint32_t lane, uint32_t to,
                                             uint32_t values, uint32_t first, uint32_t from, uint32_t end) {
    const bool is_whole = first >= from && first + spec::kBlockTokens <= end;
    uint32_t masks[2 * kSteps];  // of the lane's pairs of tokens
#pragma unroll
    for (uint32_t tile = 0; tile < 2 * kSteps; ++tile) {
      masks[tile] = is_whole ? ~0u : mask(first + tile * 8 + lane % 4 * 2, from, end);
    }
    __syncwarp();  // all lanes have read the keys
#pragma unroll 2
    for (uint32_t dims = 0; dims < kDimTiles; dims += 2) {
      float sums[4] = {};  // of dims lane / 4 and 8 further, heads 2t, 2t+1
#pragma unroll
      for (uint32_t step = 0; step < kSteps; ++step) {
        const uint32_t near = masks[step * 2];
        const uint32_t far = masks[step * 2 + 1];
        uint32_t a[4];
        ptx::load_matrices_transposed(a, tile_row(values, step * 2 + lane / 16, dims + (lane / 8 & 1), lane));
        ptx::multiply_add(sums, a[0] & near, a[1] & near, a[2] & far, a[3] & far, weights[step * 2],
                          weights[step * 2 + 1]);
      }
#pragma unroll
      for (uint32_t item = 0; item < 4; ++item) {
        const uint32_t head = lane % 4 * 2 + item % 2;
        const uint32_t at = head * spec::kHeadDim + swizzled(head, (dims + item / 2) * 8) + lane / 4;
        if (spec::kGroup == 8 || head < spec::kGroup) {
          ptx::store_shared(to + at * sizeof(float), __float_as_uint(sums[item]));
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
    constexpr uint32_t kWords = (kDimTiles + 7) / 8;  // of a lane, in K and in V
    constexpr uint32_t kToValues = spec::kPageHalfBytes / sizeof(uint32_t);
    auto* words = core::at<uint32_t>(to) + context.lane % 4;
    uint32_t places[2 * kWords];
#pragma unroll
    for (uint32_t word = 0; word < kWords; ++word) {
      const uint32_t tile = min(context.lane / 4 + word * 8, kDimTiles - 1);  // lanes without one repeat the last
      const uint32_t pair = tile * 4 + context.lane % 4;
      ptx::store_relaxed_gpu(words + tile * 32, work.current_k[team][pair]);
      ptx::store_relaxed_gpu(words + tile * 32 + kToValues, work.current_v[team][pair]);
      places[2 * word] = tile * 32;
      places[2 * word + 1] = tile * 32 + kToValues;
    }
    written.confirm(words, places);
  }

  // Leaves a chunk for the merge: weighted sums [row, query head, chunk, dim], and after all of them peaks and masses
  // [row, query head, chunk]. Each member adds up some quads of dims over all blocks. `places` are the words it stored.
  __device__ static __forceinline__ void leave(Places& places, const core::Context& context, const core::Slot& slot,
                                               const Place& place, uint32_t team, uint32_t member,
                                               const core::Reader& reader, uint32_t copy, bool has_current) {
    const core::Workspace& work = context.shared.work;
    const uint32_t first_head = (place.row * spec::kKvHeads + place.head) * spec::kGroup;
    const uint32_t first = first_head * spec::kMostChunks + place.chunk - place.first_chunk;
    auto* to = core::at<uint4>(slot.outputs[0]);
    auto* masses = core::at<uint2>(slot.outputs[0] + kStatsBegin);
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t index = turn * kMembers + member * spec::kWarpThreads + context.lane;
      const uint32_t head = index / kQuads;
      const uint32_t dim = index % kQuads * 4;
      const bool is_own = kTurns * kMembers == spec::kGroup * kQuads || head < spec::kGroup;
      places[2 * turn] = places[2 * turn + 1] = 0;  // of lanes with less to do: any
      if (!is_own) continue;
      const float current = has_current ? work.current_scores[team][head] : -ptx::kInfinity;
      float peak = current;
#pragma unroll
      for (uint32_t block = 0; block < kBlocks; ++block) peak = fmaxf(peak, work.stats[team][block][head].x);
      float mass = 0.0f;
      float4 total = {};
#pragma unroll
      for (uint32_t block = 0; block < kBlocks; ++block) {
        const float2 own = work.stats[team][block][head];
        const float weight = ptx::power_of_two(own.x - peak);
        const uint8_t* sums = reader.data_of(copy + block / kPieceBlocks * 2) + block % kPieceBlocks * kBlockBytes;
        const float4 values =
            *reinterpret_cast<const float4*>(sums + (head * spec::kHeadDim + swizzled(head, dim)) * sizeof(float));
        mass += weight * own.y;
        total.x += weight * values.x;
        total.y += weight * values.y;
        total.z += weight * values.z;
        total.w += weight * values.w;
      }
      if (has_current) {
        const float weight = ptx::power_of_two(current - peak);
        const uint2 value = *reinterpret_cast<const uint2*>(work.current_v[team] + dim / 2);
        mass += weight;
        total.x += weight * ptx::low(value.x);
        total.y += weight * ptx::high(value.x);
        total.z += weight * ptx::low(value.y);
        total.w += weight * ptx::high(value.y);
      }
      const uint32_t at = first + head * spec::kMostChunks;
      const uint32_t quad = at * kQuads + dim / 4;
      ptx::store_relaxed_gpu(to + quad, uint4{__float_as_uint(total.x), __float_as_uint(total.y),
                                              __float_as_uint(total.z), __float_as_uint(total.w)});
      if (dim == 0) ptx::store_relaxed_gpu(masses + at, uint2{__float_as_uint(peak), __float_as_uint(mass)});
      places[2 * turn] = quad * 4;
      places[2 * turn + 1] = dim == 0 ? kStatsBegin / sizeof(uint32_t) + at * 2 : quad * 4;
    }
  }
};

}  // namespace mk::tasks
