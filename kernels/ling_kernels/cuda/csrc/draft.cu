// DSpark launches.
#include "draft.cuh"
#include "draft_attend.cuh"

// grid: n. x [n, width]: embeddings of the anchor and, after it, of the mask; positions [n]: length, length + 1 ..
extern "C" __global__ void draft_embed(const i64* anchor, const i64* length, const bf16* table, i64 mask, int width,
                                       bf16* x, i64* positions) {
  wait_for_producer();
  let_next_start();
  const int row = blockIdx.x;
  const bf16* from = table + (row == 0 ? *anchor : mask) * width;
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
    *reinterpret_cast<uint4*>(x + i64(row) * width + 8 * i) = load16(from + 8 * i);
  }
  if (threadIdx.x == 0) positions[row] = *length + row;
}

// grid: (2 kv heads, rows, layers); one warp each. Keys, normed and turned, and values of context rows into the caches.
// proj: `layer_rows` rows a layer, heads k‖v; norms [layers, 128]; row r stands at positions[r]; cache [layers, 2,
// capacity, kv heads, 128].
extern "C" __global__ void __launch_bounds__(WARP)
    draft_heads(const bf16* proj, int layer_rows, const bf16* norms, const float* rope, int rope_dim, int neox,
                const i64* positions, bf16* cache, int capacity, int kv_heads, float eps) {
  const int head = blockIdx.x, row = blockIdx.y, layer = blockIdx.z, lane = threadIdx.x % WARP;
  const bool key = head < kv_heads;
  DraftNorm norm[1];
  norm[0].load(norms + layer * DRAFT_HEAD);
  wait_for_producer();
  let_next_start();
  const i64 position = positions[row];
  const bf16* from = proj + ((i64(layer) * layer_rows + row) * 2 * kv_heads + head) * DRAFT_HEAD;
  uint2 out = *reinterpret_cast<const uint2*>(from + 4 * lane);
  if (key) {
    float x[1][4];
    const float* tables[1] = {rope + position * rope_dim};
    draft_unpack(x[0], out);
    draft_scale(x, norm, eps);
    draft_turn(x, tables, rope_dim, neox);
    out = draft_pack(x[0]);
  }
  const i64 place = ((i64(layer) * 2 + !key) * capacity + position) * kv_heads + head % kv_heads;
  *reinterpret_cast<uint2*>(cache + place * DRAFT_HEAD + 4 * lane) = out;
}

// grid: (tiles of a key head * kv heads, splits)
extern "C" __global__ void __launch_bounds__(DRAFT_THREADS)
    draft_attend(float* sums, float* stats, const bf16* proj, const bf16* keys, const bf16* values, const i64* length,
                 const bf16* q_norm, const bf16* k_norm, const float* rope, int rope_dim, int neox, int query_heads,
                 int kv_heads, int rows, int capacity, float eps, float scale) {
  DYNAMIC_SHARED(memory);
  Draft job = {proj, q_norm, k_norm, rope, keys, values, rope_dim, query_heads, kv_heads, rows, capacity};
  const int tiles = gridDim.x / kv_heads;
  job.context = int(load_settled(length));
  job.kv = blockIdx.x / tiles, job.tile = blockIdx.x % tiles;
  job.neox = neox, job.eps = eps, job.scale = scale;
  draft_mix(job, blockIdx.y, gridDim.y, sums, stats, *reinterpret_cast<DraftShared*>(memory));
}

// grid: (query heads, rows)
extern "C" __global__ void __launch_bounds__(DRAFT_MERGERS)
    draft_merge(bf16* out, const float* sums, const float* stats, const i64* length, int splits) {
  __shared__ DraftMergeShared shared;
  const int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, rows = gridDim.y, context = int(load_settled(length));
  wait_for_producer();
  let_next_start();
  draft_combine(sums, stats, head * rows + row, heads * rows, context, splits,
              out + (i64(row) * heads + head) * DRAFT_HEAD, shared);
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
                                            int vocab, int rank, int width, int with_markov, int back, int ahead) {
  __shared__ float input[MAX_RANK];
  __shared__ u64 warps[MARKOV_WARPS];
  __shared__ int place;
  if (int(blockIdx.x) < int(gridDim.x) - 1) {
    const Markov job{w2, base, logits, drawn, vocab, rank, back != 0, ahead};
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
      int with_markov, int back, int ahead) {                                                                        \
    markov_pick<lanes, chunks>(w1, w2, bias, base, logits, drawn_before, drawn, anchor, hidden, sure, sure_bias,     \
                               temperature, confidence, blocks, pick, vocab, rank, width, with_markov, back, ahead); \
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
