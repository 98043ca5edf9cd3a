// Matrix instructions on bfloat16 with fp32 sums, and the loads that feed them. All 32 lanes call together; g is lane /
// 4, t is lane % 4.
#pragma once
#include <cstdint>

namespace mk::ptx {

// c += a * b: a is 16 x 16 (a0 row g, columns 2t, 2t+1; a1 row g+8; a2, a3 the same rows, columns 8 further), b is 16 x
// 8 (b0 rows 2t, 2t+1 of column g; b1 rows 8 further), c is 16 x 8 (c0, c1 row g, columns 2t, 2t+1; c2, c3 row g+8).
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r names row r of matrix i, 16 bytes in shared memory.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements that the lanes hold, transposed: row g, columns 2t, 2t+1, before and after.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

}  // namespace mk::ptx
