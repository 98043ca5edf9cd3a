// What a signal between SMs costs by itself, without a table: one thread of a block adds and polls, another keeps bulk
// copies in flight, which a release waits for. runtime/gpu/signal.py writes the request and reads the result.
//
// No wait outlasts the request's deadline, counted from the block's start; then the thread leaves. Copies land in the
// memory of their block, so who issued them waits for them before it leaves.
#include <cstdint>

#include "ptx/bulk_copy.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/timer.cuh"
#include "rendered.cuh"

namespace mk {

using spec::kCopyBytes, spec::kStages, spec::kThreads;

constexpr uint32_t kStreamer = 32;      // thread that issues copies
constexpr uint32_t kTriesPerLook = 16;  // at the clock
constexpr uint32_t kPauseNs = 2000;     // between looks of who only waits for the end
constexpr uint32_t kLineWords = 32;

// Words of 8 bytes, in the order in which the host writes them.
struct Request {
  uint64_t counter;  // a word, 0 at first
  uint64_t own;      // a line for each block
  uint64_t arena;
  uint64_t arena_copies;  // a multiple of the blocks
  uint64_t result;        // nanoseconds of the timed turns, which stay 0 unless all came; turns that came
  uint64_t players;       // blocks that signal, spread over the grid
  uint64_t meets;         // in every turn all players add, and wait for all; else they take turns
  uint64_t reads_back;    // the arrival: a store, loaded back, and a relaxed add; else a release
  uint64_t cap;           // copies in flight to every SM, at most kStages; 0: none
  uint64_t untimed_turns;
  uint64_t turns;  // with the untimed ones
  uint64_t deadline_cycles;
};

struct Deadline {
  uint64_t since, cycles;

  __device__ bool is_over() const { return ptx::clock() - since > cycles; }
};

class Player {
 public:
  __device__ Player(const Request& request, const Deadline& deadline, uint32_t place)
      : counter_(reinterpret_cast<uint32_t*>(request.counter)),
        own_(reinterpret_cast<uint32_t*>(request.own) + blockIdx.x * kLineWords),
        deadline_(deadline),
        place_(place),
        players_(static_cast<uint32_t>(request.players)),
        turns_(static_cast<uint32_t>(request.turns)),
        meets_(request.meets != 0),
        reads_back_(request.reads_back != 0) {}

  // The turns of this player; the first of the players keeps the time.
  __device__ void run(const Request& request) const {
    const uint32_t untimed = static_cast<uint32_t>(request.untimed_turns);
    uint64_t begin = 0;
    uint32_t turn = meets_ ? 0 : place_;
    for (; turn < turns_; turn += meets_ ? 1 : players_) {
      if (turn == untimed) begin = ptx::card_time();
      if (meets_) add(turn);
      if (!await(meets_ ? (turn + 1) * players_ : turn)) break;
      if (!meets_) add(turn);
    }
    if (place_ != 0) return;
    auto* result = reinterpret_cast<volatile uint64_t*>(request.result);
    if (turn >= turns_) result[0] = ptx::card_time() - begin;
    result[1] = turn;
  }

  // The same end for who does not play.
  __device__ void look_on() const {
    const uint32_t all = meets_ ? turns_ * players_ : turns_;
    while (static_cast<int32_t>(ptx::load_relaxed_gpu(counter_) - all) < 0) {
      if (deadline_.is_over()) return;
      ptx::pause(kPauseNs);
    }
  }

 private:
  __device__ void add(uint32_t turn) const {
    if (reads_back_) {
      ptx::store_relaxed_gpu(own_, turn);
      ptx::add_relaxed_gpu(counter_, ptx::load_relaxed_gpu(own_) == turn ? 1 : 2);
    } else {
      ptx::add_release_gpu(counter_, 1);
    }
  }

  __device__ bool await(uint32_t target) const {
    for (uint32_t tries = 1;; ++tries) {
      const uint32_t seen = reads_back_ ? ptx::load_relaxed_gpu(counter_) : ptx::load_acquire_gpu(counter_);
      if (static_cast<int32_t>(seen - target) >= 0) return true;
      if (tries % kTriesPerLook == 0 && deadline_.is_over()) return false;
    }
  }

  uint32_t* counter_;
  uint32_t* own_;
  const Deadline& deadline_;
  uint32_t place_, players_, turns_;
  bool meets_, reads_back_;
};

// Keeps copies in flight until `over`; a stage's copy has landed before the next one is issued to it, as the cap is no
// larger than the ring.
__device__ void stream(const Request& request, const Deadline& deadline, uint32_t ring, uint32_t barriers,
                       uint32_t over) {
  const uint32_t cap = static_cast<uint32_t>(request.cap);
  const auto landed = [&](uint32_t copy) {
    while (!ptx::mbarrier_try_wait(barriers + copy % kStages * sizeof(uint64_t), copy / kStages & 1)) {
      if (deadline.is_over()) return false;
    }
    return true;
  };
  uint32_t copy = 0;
  for (uint64_t at = blockIdx.x; ptx::load_acquire_shared(over) == 0 && !deadline.is_over(); ++copy) {
    if (copy >= cap && !landed(copy - cap)) break;
    const uint32_t stage = copy % kStages;
    ptx::mbarrier_arrive_expect(barriers + stage * sizeof(uint64_t), kCopyBytes);
    ptx::bulk_copy(ring + stage * kCopyBytes, request.arena + at * kCopyBytes, kCopyBytes,
                   barriers + stage * sizeof(uint64_t));
    at += gridDim.x;
    if (at >= request.arena_copies) at = blockIdx.x;
  }
  const Deadline longer{ptx::clock(), deadline.cycles};
  for (uint32_t open = copy > kStages ? copy - kStages : 0; open < copy; ++open) {
    while (!ptx::mbarrier_try_wait(barriers + open % kStages * sizeof(uint64_t), open / kStages & 1) &&
           !longer.is_over()) {
    }
  }
}

}  // namespace mk

extern "C" __global__ void __launch_bounds__(mk::kThreads, 1) signals(const mk::Request* in_memory) {
  using namespace mk;
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t barriers[kStages];
  __shared__ uint32_t over;
  __shared__ Request request;
  const Deadline deadline{ptx::clock(), in_memory->deadline_cycles};
  if (threadIdx.x == 0) {
    over = 0;
    request = *in_memory;
    for (uint64_t& barrier : barriers) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t apart = gridDim.x / static_cast<uint32_t>(request.players);
    const Player player(request, deadline, blockIdx.x / apart);
    if (blockIdx.x % apart == 0 && blockIdx.x / apart < request.players) {
      player.run(request);
    } else if (request.cap != 0) {
      player.look_on();
    }
    ptx::store_release_shared(ptx::shared_address(&over), 1);
  } else if (threadIdx.x == kStreamer && request.cap != 0) {
    stream(request, deadline, ptx::shared_address(ring), ptx::shared_address(barriers), ptx::shared_address(&over));
  }
}
