// Fences; each names what it orders.
#pragma once

namespace mk::ptx {

// Orders barrier initialisation before its use by the asynchronous proxy and other threads. Release, cluster scope.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's ordinary accesses to global memory (and what it acquired) before its later bulk copies.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Orders this thread's ordinary accesses to shared memory before bulk copies into it that others start later.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders this thread's earlier writes before its later ones for everybody, the host included. System scope.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Orders this thread's earlier accesses before its later ones for the whole card. Acquire and release, gpu scope.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace mk::ptx
