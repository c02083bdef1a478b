// What the experts' kernels share: a block is eight warps that multiply and one that sends weights ahead of them, in
// copies of whole rows, into a ring of stages in shared memory.
#pragma once
#include "gemm.cuh"

constexpr int WORKERS = 8;                           // warps that multiply
constexpr int RING_THREADS = (WORKERS + 1) * WARP;   // of a block
constexpr int SPAN = 512;                            // values of K in a row of a stage, at most
constexpr int MAX_STAGES = 16;
constexpr int WORKERS_BARRIER = 1;

__device__ __forceinline__ bool sends() { return threadIdx.x / WARP == WORKERS; }

// Bytes from row to row in shared memory: the 16 bytes that lanes (g, t) read at 16 t of row g are in different banks.
__device__ __forceinline__ int row_bytes(int values) { return (values * 2 + 127) / 128 * 128 + 64; }

// A warp's view of the ring: all walk through it by themselves.
struct Ring {
  u8* stages;
  u64* barriers;  // [2][MAX_STAGES]: full, empty
  int depth, bytes;  // of a stage
  int stage = 0;
  u32 phase = 0;

  // By all threads, once.
  __device__ __forceinline__ void make() const {
    if (int(threadIdx.x) < depth) {
      barrier_init(barriers + threadIdx.x, FULL_ARRIVALS);
      barrier_init(barriers + MAX_STAGES + threadIdx.x, WORKERS);
    }
  }
  __device__ __forceinline__ u8* place() const { return stages + stage * bytes; }
  __device__ __forceinline__ void next() {
    if (++stage == depth) stage = 0, phase ^= 1;
  }

  // The sender's: each lane gives its row.
  __device__ __forceinline__ void send(int offset, const bf16* from, int values) {
    barrier_wait(barriers + MAX_STAGES + stage, phase ^ 1);
    send_rows(barriers + stage, place() + offset, from, u32(values) * 2);
    next();
  }

  // The workers'.
  __device__ __forceinline__ const u8* receive() const {
    barrier_wait(barriers + stage, phase);
    return place();
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(barriers + MAX_STAGES + stage);
    next();
  }
};

// What the workers summed for 16 rows: at(token, row) adds them in the order of the warps. [WORKERS][live][PITCH]
template <int NT>
struct LiveSums {
  float* all;
  int live;

  __device__ __forceinline__ int size() const { return WORKERS * live * PITCH; }
  __device__ __forceinline__ void put(const float (&sums)[NT][4]) const {
    const int warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, pair = threadIdx.x % 4 * 2;
    float* to = all + warp * live * PITCH;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = n * 8 + pair + i % 2;
        if (token < live) to[token * PITCH + group + i / 2 * 8] = sums[n][i];
      }
    }
  }
  __device__ __forceinline__ float at(int token, int row) const {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WORKERS; ++warp) total += all[(warp * live + token) * PITCH + row];
    return total;
  }
};
