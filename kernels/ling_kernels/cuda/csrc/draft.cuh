// Markov picks of a DSpark draft (dspark.md sections 5 and 6).
#pragma once
#include "sample.cuh"

constexpr int MARKOV_THREADS = 256, MARKOV_WARPS = MARKOV_THREADS / WARP, MARKOV_ROWS = 4, MAX_RANK = 1024;

// Which token stands before pick `pick`: the anchor, or what the candidates of the pick before say. A whole block
// calls it; place: one word of shared memory.
__device__ __forceinline__ int token_before(int pick, const i64* anchor, const u64* drawn, int blocks, int* place) {
  if (threadIdx.x < WARP) {
    const int token = pick == 0 ? int(*anchor) : candidate_id(best_of(drawn + i64(pick - 1) * blocks, blocks));
    if (threadIdx.x == 0) *place = token;
  }
  __syncthreads();
  return *place;
}

// Dot product of a row of bf16 weights with x‖y (n and m floats or bf16 widened by the caller's loaders), by one warp.
template <class First, class Second>
__device__ __forceinline__ float joint_dot(const bf16* weights, int n, First first, int m, Second second) {
  const int lane = threadIdx.x % WARP;
  float sum = 0.0f;
  for (int i = lane; i < n; i += WARP) sum = fmaf(to_float(weights[i]), first(i), sum);
  for (int i = lane; i < m; i += WARP) sum = fmaf(to_float(weights[n + i]), second(i), sum);
  return warp_sum(sum);
}

// ---- the bias over the vocabulary -------------------------------------------------------------------------------
// LANES lanes share a row of W2 [V, r], each with CHUNKS pieces of 8; a warp has MARKOV_ROWS rows for each of its lane
// groups in flight, and the next ones on their way.

template <int LANES, int CHUNKS>
struct MarkovRows {
  static constexpr int AT_ONCE = WARP / LANES * MARKOV_ROWS;
  uint4 w[MARKOV_ROWS][CHUNKS];

  // rows first + group + (WARP / LANES) * i
  __device__ void load(const bf16* w2, int first, int end, int rank) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < MARKOV_ROWS; i++) {
      const int row = first + lane / LANES + WARP / LANES * i;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int at = (c * LANES + lane % LANES) * 8;
        w[i][c] = load_weights(w2 + i64(row) * rank + at, row < end && at < rank);
      }
    }
  }
};

__device__ __forceinline__ float dot8(uint4 w, const float* x, float sum) {
  sum = fmaf(low_float(w.x), x[0], sum);
  sum = fmaf(high_float(w.x), x[1], sum);
  sum = fmaf(low_float(w.y), x[2], sum);
  sum = fmaf(high_float(w.y), x[3], sum);
  sum = fmaf(low_float(w.z), x[4], sum);
  sum = fmaf(high_float(w.z), x[5], sum);
  sum = fmaf(low_float(w.w), x[6], sum);
  return fmaf(high_float(w.w), x[7], sum);
}

struct Markov {
  const bf16* w2;      // [V, r]
  const float* base;   // [V] of this pick
  float* logits;       // [V], or null where only the best is wanted
  u64* drawn;          // [blocks]: this pick's candidates, or null
  int vocab, rank;
  bool back;  // walk from the end: what the pick before read last is still in L2
  int ahead;  // steps that are asked for before the token before is known
};

// Bias and logits of this block's share of the vocabulary. known: fills `rank` floats of shared memory and ends with a
// block barrier; it runs after the first weights are on their way and holds the wait for the producer.
template <int LANES, int CHUNKS, class Known>
__device__ __forceinline__ void markov_logits(const Markov& job, int block, int blocks, float* input, u64* warps,
                                              Known known) {
  using Rows = MarkovRows<LANES, CHUNKS>;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int stride = blocks * MARKOV_WARPS * Rows::AT_ONCE, least = (block * MARKOV_WARPS + warp) * Rows::AT_ONCE;
  int left = least < job.vocab ? (job.vocab - least + stride - 1) / stride : 0;  // steps
  int first = job.back ? least + max(left - 1, 0) * stride : least;
  const int step = job.back ? -stride : stride;
  Rows rows;
  rows.load(job.w2, first, left > 0 ? job.vocab : 0, job.rank);
  if (lane > 0 && lane <= job.ahead && lane < left) {
    const int from = first + lane * step, count = min(Rows::AT_ONCE, job.vocab - from);
    prefetch_l2(job.w2 + i64(from) * job.rank, u32(count * job.rank) * sizeof(bf16));
  }
  for (int i = threadIdx.x; i < LANES * CHUNKS * 8; i += MARKOV_THREADS) input[i] = 0.0f;
  known();
  float x[CHUNKS][8];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int e = 0; e < 8; e++) x[c][e] = input[(c * LANES + lane % LANES) * 8 + e];
  }
  u64 best = 0;
  for (; left > 0; left--, first += step) {  // uniform in a warp: rows past the end are loaded as zeros
    Rows next;
    next.load(job.w2, left > 1 ? first + step : first, left > 1 ? job.vocab : 0, job.rank);
    float base[MARKOV_ROWS];
#pragma unroll
    for (int i = 0; i < MARKOV_ROWS; i++) {
      base[i] = job.base[min(first + lane / LANES + WARP / LANES * i, job.vocab - 1)];
    }
#pragma unroll
    for (int i = 0; i < MARKOV_ROWS; i++) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) sum = dot8(rows.w[i][c], x[c], sum);
#pragma unroll
      for (int half = LANES / 2; half > 0; half /= 2) sum += __shfl_xor_sync(ALL, sum, half);
      const int row = first + lane / LANES + WARP / LANES * i;
      if (lane % LANES == 0 && row < job.vocab) {
        sum += base[i];
        if (job.logits != nullptr) job.logits[row] = sum;
        const u64 c = candidate(sum, row);
        best = c > best ? c : best;
      }
    }
    rows = next;
  }
  if (job.drawn == nullptr) return;
  best = block_best(best, warps);
  if (threadIdx.x == 0) job.drawn[block] = best;
}
