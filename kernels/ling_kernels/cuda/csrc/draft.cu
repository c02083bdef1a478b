// DSpark launches.
#include "attend.cuh"
#include "draft.cuh"

// grid: (query heads + 2 kv heads, rows); one warp each. proj: rows of `stride`, heads q‖k‖v (no q for context rows).
// Row r stands at positions[r], or at *length + r where positions is null. q_out [rows, Hq, 128]; keys, values [C, Hkv,
// 128].
extern "C" __global__ void __launch_bounds__(WARP)
    draft_heads(const bf16* proj, int stride, const bf16* q_norm, const bf16* k_norm, const float* rope, int rope_dim,
                int neox, const i64* positions, const i64* length, bf16* q_out, bf16* keys, bf16* values,
                int query_heads, int kv_heads, float eps) {
  __shared__ float own[DRAFT_HEAD];
  wait_for_producer();
  let_next_start();
  const int head = blockIdx.x, row = blockIdx.y;
  const i64 position = positions != nullptr ? positions[row] : *length + row;
  const bf16* from = proj + i64(row) * stride + head * DRAFT_HEAD;
  const float* table = rope + position * rope_dim;
  const int kv = (head - query_heads) % kv_heads;
  if (head < query_heads) {
    draft_head(from, q_norm, table, rope_dim, neox, eps, q_out + (i64(row) * query_heads + head) * DRAFT_HEAD, own);
  } else if (head < query_heads + kv_heads) {
    draft_head(from, k_norm, table, rope_dim, neox, eps, keys + (position * kv_heads + kv) * DRAFT_HEAD, own);
  } else {
    draft_head(from, nullptr, table, rope_dim, neox, eps, values + (position * kv_heads + kv) * DRAFT_HEAD, own);
  }
}

// Tiles: one query head each, its rows those of the block; all see the context and the whole block.
struct DraftView {
  const bf16* queries;  // [n, Hq, 128]
  const bf16* keys;     // [C, Hkv, 128], at this kv head; values likewise
  const bf16* values;
  const i64* length;
  int rows, query_heads, kv_heads, first_head, num_tiles, capacity;
  float scale;

  __device__ int limit(int) const { return int(load_settled(length)) + rows; }
  __device__ int settled() const { return int(load_settled(length)); }
  __device__ const bf16* key(int i) const { return keys + i64(i) * kv_heads * DRAFT_HEAD; }
  __device__ const bf16* value(int i) const { return values + i64(i) * kv_heads * DRAFT_HEAD; }
  __device__ const bf16* q(int tile, int row) const {
    return row < rows ? queries + (i64(row) * query_heads + first_head + tile) * DRAFT_HEAD : nullptr;
  }
};

constexpr int DRAFT_TILES = 4, DRAFT_STAGES = 2;

// grid: (ATTEND_SPLITS, query heads of a kv head / DRAFT_TILES rounded up, kv heads)
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    draft_attend(float* sums, float* stats, const bf16* q, const bf16* keys, const bf16* values, const i64* length,
                 int query_heads, int kv_heads, int rows, int capacity, float scale) {
  DYNAMIC_SHARED(memory);
  using Shared = AttendShared<DRAFT_HEAD, DRAFT_HEAD, DRAFT_TILES, DRAFT_STAGES, false>;
  const int kv = blockIdx.z, each = query_heads / kv_heads;
  const DraftView view{q,    keys + kv * DRAFT_HEAD, values + kv * DRAFT_HEAD, length, rows, query_heads, kv_heads,
                       kv * each, each, capacity, scale};
  attend(view, blockIdx.x, blockIdx.y, kv * each, sums, stats, *reinterpret_cast<Shared*>(memory));
}

// grid: (query heads, rows); 128 threads
extern "C" __global__ void __launch_bounds__(MERGE_GROUPS* DRAFT_HEAD / 4)
    draft_merge(bf16* out, const float* sums, const float* stats, const i64* length, int rows) {
  __shared__ MergeShared<DRAFT_HEAD> shared;
  wait_for_producer();
  let_next_start();
  const int head = blockIdx.x, row = blockIdx.y;
  attend_merge<DRAFT_HEAD>(sums, stats, head, row, int(*length) + rows,
                           out + (i64(row) * gridDim.x + head) * DRAFT_HEAD, shared);
}

// grid: r / 8 rounded up; a warp makes one value of the head's input to W2. gates 1: weight [r, D + r] over
// hidden‖known, out = gate * known. gates 3 (rnn): weight [3r, 2r + D] over state‖known‖hidden, state in and out.
extern "C" __global__ void __launch_bounds__(MARKOV_THREADS)
    markov_input(const bf16* weight, const bf16* bias, const bf16* w1, const bf16* hidden, const float* state_in,
                 float* state_out, float* out, const i64* anchor, const u64* drawn, int blocks, int pick, int rank,
                 int width, int gates) {
  __shared__ int place;
  wait_for_producer();
  let_next_start();
  const bf16* known = w1 + i64(token_before(pick, anchor, drawn, blocks, &place)) * rank;
  const int i = blockIdx.x * MARKOV_WARPS + threadIdx.x / WARP;
  if (i >= rank) return;
  auto from_hidden = [&](int c) { return to_float(hidden[c]); };
  auto from_known = [&](int c) { return to_float(known[c]); };
  if (gates == 1) {
    const float gate = joint_dot(weight + i64(i) * (width + rank), width, from_hidden, rank, from_known);
    if (threadIdx.x % WARP == 0) out[i] = sigmoid(gate + to_float(bias[i])) * from_known(i);
    return;
  }
  auto from_both = [&](int c) {  // state‖known
    return c < rank ? (pick == 0 ? 0.0f : state_in[c]) : from_known(c - rank);
  };
  float joint[3];
#pragma unroll
  for (int part = 0; part < 3; part++) {
    const i64 row = i64(part) * rank + i;
    joint[part] = joint_dot(weight + row * (2 * rank + width), 2 * rank, from_both, width, from_hidden) + to_float(bias[row]);
  }
  if (threadIdx.x % WARP == 0) {
    const float gate = sigmoid(joint[0]), before = pick == 0 ? 0.0f : state_in[i];
    state_out[i] = gate * before + (1.0f - gate) * tanhf(joint[1]);
    out[i] = tanhf(joint[2]);
  }
}

// grid: blocks. bias: the input to W2 from markov_input, or null for W1's own row. The block past the vocabulary's share
// (the last) works out the confidence instead, where there is a head for it.
template <int LANES, int CHUNKS>
__device__ __forceinline__ void markov_pick(const bf16* w1, const bf16* w2, const float* bias, const float* base,
                                            float* logits, u64* drawn_before, u64* drawn, const i64* anchor,
                                            const bf16* hidden, const bf16* sure, const bf16* sure_bias,
                                            const float* temperature, float* confidence, int blocks, int pick,
                                            int vocab, int rank, int width, int with_markov) {
  __shared__ float input[MAX_RANK];
  __shared__ u64 warps[MARKOV_WARPS];
  __shared__ int place;
  if (int(blockIdx.x) < int(gridDim.x) - 1) {
    const Markov job{w2, base, logits, drawn, vocab, rank};
    markov_logits<LANES, CHUNKS>(job, blockIdx.x, gridDim.x - 1, input, warps, [&] {
      wait_for_producer();
      let_next_start();
      const int token = token_before(pick, anchor, drawn_before, blocks, &place);
      for (int i = threadIdx.x; i < rank; i += MARKOV_THREADS) {
        input[i] = bias != nullptr ? bias[i] : to_float(w1[i64(token) * rank + i]);
      }
      __syncthreads();
    });
    return;
  }
  wait_for_producer();
  let_next_start();
  const int token = token_before(pick, anchor, drawn_before, blocks, &place);
  if (threadIdx.x >= WARP) return;
  float score = 1.0f;
  if (sure != nullptr) {
    const float dot = joint_dot(
        sure, width, [&](int c) { return to_float(hidden[c]); }, with_markov ? rank : 0,
        [&](int c) { return to_float(w1[i64(token) * rank + c]); });
    score = sigmoid((dot + to_float(*sure_bias)) / *temperature);
  }
  if (threadIdx.x == 0) *confidence = score;
}

#define MARKOV_PICK(lanes, chunks)                                                                                   \
  extern "C" __global__ void __launch_bounds__(MARKOV_THREADS) markov_pick_##lanes##_##chunks(                      \
      const bf16* w1, const bf16* w2, const float* bias, const float* base, float* logits, u64* drawn_before,        \
      u64* drawn, const i64* anchor, const bf16* hidden, const bf16* sure, const bf16* sure_bias,                    \
      const float* temperature, float* confidence, int blocks, int pick, int vocab, int rank, int width,             \
      int with_markov) {                                                                                             \
    markov_pick<lanes, chunks>(w1, w2, bias, base, logits, drawn_before, drawn, anchor, hidden, sure, sure_bias,     \
                               temperature, confidence, blocks, pick, vocab, rank, width, with_markov);              \
  }

MARKOV_PICK(8, 1)   // rank up to 64
MARKOV_PICK(16, 1)  // 128
MARKOV_PICK(32, 1)  // 256
MARKOV_PICK(32, 2)  // 512
MARKOV_PICK(32, 4)  // 1024

// grid: picks; one warp each. Candidates to ids.
extern "C" __global__ void __launch_bounds__(WARP) markov_tokens(const u64* drawn, int blocks, i64* tokens) {
  wait_for_producer();
  let_next_start();
  const u64 best = best_of(drawn + i64(blockIdx.x) * blocks, blocks);
  if (threadIdx.x == 0) tokens[blockIdx.x] = candidate_id(best);
}
