// From a record's kind to the code of that kind. Kinds that the table lacks are not compiled in.
#pragma once
#include "tasks/attend.cuh"
#include "tasks/down.cuh"
#include "tasks/embed.cuh"
#include "tasks/head.cuh"
#include "tasks/linear.cuh"
#include "tasks/merge.cuh"
#include "tasks/output.cuh"
#include "tasks/project.cuh"
#include "tasks/sample.cuh"
#include "tasks/up.cuh"

namespace mk::tasks {

__device__ __forceinline__ constexpr bool is_built(uint32_t kind) {
  return kind < abi::kMaxKinds && (spec::kBuiltKinds >> kind & 1) != 0;
}

template <abi::TaskKind kKind, class Task, class Call>
__device__ __forceinline__ bool call_if_built(Call&& call) {
  if constexpr (is_built(static_cast<uint32_t>(kKind))) {
    return call(Task{});
  } else {
    return false;
  }
}

// Calls `call` with the task of this kind; the caller has made sure that it is built.
template <class Call>
__device__ __forceinline__ bool dispatch(uint32_t kind, Call&& call) {
  using abi::TaskKind;
  if constexpr (spec::kLinearWalk) {
    return call(Linear{});
  } else {
    switch (static_cast<TaskKind>(kind)) {
      case TaskKind::kEmbed: return call_if_built<TaskKind::kEmbed, Embed>(call);
      case TaskKind::kProject: return call_if_built<TaskKind::kProject, Project>(call);
      case TaskKind::kAttend: return call_if_built<TaskKind::kAttend, Attend>(call);
      case TaskKind::kMerge: return call_if_built<TaskKind::kMerge, Merge>(call);
      case TaskKind::kOutput: return call_if_built<TaskKind::kOutput, Output>(call);
      case TaskKind::kUp: return call_if_built<TaskKind::kUp, Up>(call);
      case TaskKind::kDown: return call_if_built<TaskKind::kDown, Down>(call);
      case TaskKind::kHead: return call_if_built<TaskKind::kHead, Head>(call);
      case TaskKind::kSample: return call_if_built<TaskKind::kSample, Sample>(call);
    }
    return false;
  }
}

}  // namespace mk::tasks
