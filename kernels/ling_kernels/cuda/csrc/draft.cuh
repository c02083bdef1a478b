// DSpark draft (dspark.md sections 3 to 6): heads' norm and rope, attention of a block over the context, Markov picks.
#pragma once
#include "sample.cuh"

constexpr int DRAFT_HEAD = 128;
constexpr int MARKOV_THREADS = 256, MARKOV_WARPS = MARKOV_THREADS / WARP, MARKOV_ROWS = 4, MAX_RANK = 1024;

// One head of one row by one warp, four values a lane: copied if norm is null, else normed and turned. Values past
// rope_dim stay. own: 128 floats of shared memory. to: bf16, 8-byte aligned.
__device__ __forceinline__ void draft_head(const bf16* from, const bf16* norm, const float* table, int rope_dim,
                                           bool neox, float eps, bf16* to, float* own) {
  const int lane = threadIdx.x % WARP, first = 4 * lane;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = to_float(from[first + i]);
  if (norm != nullptr) {
    const float sum = warp_sum((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
    const float scale = rsqrtf(sum / DRAFT_HEAD + eps);
#pragma unroll
    for (int i = 0; i < 4; i++) own[first + i] = x[i] * scale * to_float(norm[first + i]);
    __syncwarp();
    const int half = rope_dim / 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int c = first + i;
      x[i] = own[c];
      if (c >= rope_dim) continue;
      const int pair = neox ? c % half : c / 2;
      const bool second = neox ? c >= half : c % 2 == 1;
      const float other = own[neox ? (second ? c - half : c + half) : (second ? c - 1 : c + 1)];
      const float sine = table[half + pair];
      x[i] = x[i] * table[pair] + (second ? other : -other) * sine;
    }
  }
  *reinterpret_cast<uint2*>(to + first) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

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
};

// Bias and logits of this block's share of the vocabulary. known: fills `rank` floats of shared memory and ends with a
// block barrier; it runs after the first weights are on their way and holds the wait for the producer.
template <int LANES, int CHUNKS, class Known>
__device__ __forceinline__ void markov_logits(const Markov& job, int block, int blocks, float* input, u64* warps,
                                              Known known) {
  using Rows = MarkovRows<LANES, CHUNKS>;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int step = blocks * MARKOV_WARPS * Rows::AT_ONCE;
  int first = (block * MARKOV_WARPS + warp) * Rows::AT_ONCE;
  Rows rows;
  rows.load(job.w2, first, job.vocab, job.rank);
  for (int i = threadIdx.x; i < LANES * CHUNKS * 8; i += MARKOV_THREADS) input[i] = 0.0f;
  known();
  float x[CHUNKS][8];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int e = 0; e < 8; e++) x[c][e] = input[(c * LANES + lane % LANES) * 8 + e];
  }
  u64 best = 0;
  for (; first < job.vocab; first += step) {  // uniform in a warp: rows past the end are loaded as zeros
    Rows next;
    next.load(job.w2, first + step, job.vocab, job.rank);
#pragma unroll
    for (int i = 0; i < MARKOV_ROWS; i++) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) sum = dot8(rows.w[i][c], x[c], sum);
#pragma unroll
      for (int half = LANES / 2; half > 0; half /= 2) sum += __shfl_xor_sync(ALL, sum, half);
      const int row = first + lane / LANES + WARP / LANES * i;
      if (lane % LANES == 0 && row < job.vocab) {
        sum += job.base[row];
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
