// MLA in its absorbed form (ling3-model.md 4.2): projections to latent queries and cache rows, and latent sums to
// gated heads. Sizes: latent 512, rope 64, nope and value 128.
#pragma once
#include "arch.cuh"

constexpr int MLA_LATENT = 512, MLA_ROPE = 64, MLA_NOPE = 128, MLA_VALUE = 128;
constexpr int MLA_ROW = MLA_LATENT + MLA_ROPE;   // a cache row, and a query after absorption
constexpr int MLA_QUERY = MLA_NOPE + MLA_ROPE;   // a head's query before it
constexpr int MLA_SLICE = 64;                    // latent columns that a block absorbs
constexpr int MLA_SLICES = MLA_LATENT / MLA_SLICE;
constexpr int MLA_THREADS = 256, MLA_WARPS = 8;

struct MlaAbsorbShared {
  float q[ROW_TILE][MLA_NOPE];
  float parts[MLA_WARPS][ROW_TILE][MLA_SLICE];
};

// One pair of rope: values at 2i, 2i+1 turned by the angle of a position; table rows are cos‖sin.
__device__ __forceinline__ u32 rope_pair(float a, float b, const float* table, int i) {
  const float cosine = table[i], sine = table[MLA_ROPE / 2 + i];
  return pack_bf16(a * cosine - b * sine, b * cosine + a * sine);
}

// Latent columns slice*64 .. of one head's absorbed queries, for all rows; slice 0 also turns the rope part.
// query: rows of `stride`, this head's 192 values at head * 192. w_uk: this head's [128, 512]. q [16, H, 576].
__device__ __forceinline__ void mla_absorb(const bf16* query, int stride, const bf16* w_uk, const float* rope,
                                           const i64* positions, bf16* q, int heads, int head, int slice, int rows,
                                           MlaAbsorbShared& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
  constexpr int SHARE = MLA_NOPE / MLA_WARPS;  // rows of w_uk for each warp; a lane has two columns
  u32 weights[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const bf16* from = w_uk + i64(warp * SHARE + i) * MLA_LATENT + slice * MLA_SLICE + 2 * lane;
    weights[i] = *reinterpret_cast<const u32*>(from);
  }
  wait_for_producer();
  let_next_start();
  for (int i = tid; i < rows * MLA_NOPE; i += MLA_THREADS) {
    const int r = i / MLA_NOPE, c = i % MLA_NOPE;
    s.q[r][c] = to_float(query[i64(r) * stride + head * MLA_QUERY + c]);
  }
  __syncthreads();
  for (int r = 0; r < rows; r++) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const float x = s.q[r][warp * SHARE + i];
      sum.x = fmaf(x, low_float(weights[i]), sum.x);
      sum.y = fmaf(x, high_float(weights[i]), sum.y);
    }
    *reinterpret_cast<float2*>(&s.parts[warp][r][2 * lane]) = sum;
  }
  __syncthreads();
  for (int i = tid; i < rows * (MLA_SLICE / 2); i += MLA_THREADS) {
    const int r = i / (MLA_SLICE / 2), c = i % (MLA_SLICE / 2) * 2;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < MLA_WARPS; w++) sum.x += s.parts[w][r][c], sum.y += s.parts[w][r][c + 1];
    bf16* to = q + (i64(r) * heads + head) * MLA_ROW + slice * MLA_SLICE + c;
    *reinterpret_cast<u32*>(to) = pack_bf16(sum.x, sum.y);
  }
  if (slice > 0) return;
  for (int i = tid; i < rows * (MLA_ROPE / 2); i += MLA_THREADS) {
    const int r = i / (MLA_ROPE / 2), pair = i % (MLA_ROPE / 2);
    const bf16* from = query + i64(r) * stride + head * MLA_QUERY + MLA_NOPE + 2 * pair;
    bf16* to = q + (i64(r) * heads + head) * MLA_ROW + MLA_LATENT + 2 * pair;
    *reinterpret_cast<u32*>(to) =
        rope_pair(to_float(from[0]), to_float(from[1]), rope + positions[r] * MLA_ROPE, pair);
  }
}

// One row's cache entry: normed latent, then the turned key. latent: 512 values, then the key's 64. Two values a thread.
__device__ __forceinline__ void mla_cache_row(const bf16* latent, const bf16* norm, const float* table, bf16* to,
                                              float eps, float* sums) {
  const int tid = threadIdx.x;
  const float a = to_float(latent[2 * tid]), b = to_float(latent[2 * tid + 1]);
  const float part = warp_sum(fmaf(a, a, b * b));
  if (tid % WARP == 0) sums[tid / WARP] = part;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < MLA_WARPS; w++) total += sums[w];
  const float scale = rsqrtf(total / MLA_LATENT + eps);
  *reinterpret_cast<u32*>(to + 2 * tid) =
      pack_bf16(a * scale * to_float(norm[2 * tid]), b * scale * to_float(norm[2 * tid + 1]));
  if (tid < MLA_ROPE / 2) {
    const bf16* key = latent + MLA_LATENT + 2 * tid;
    *reinterpret_cast<u32*>(to + MLA_LATENT + 2 * tid) = rope_pair(to_float(key[0]), to_float(key[1]), table, tid);
  }
}

constexpr int MLA_OUT = 16;                              // values of a head for each block
constexpr int MLA_CHUNKS = MLA_LATENT / 32 / MLA_WARPS;  // of 32 latent columns, for each warp

struct MlaValueShared {
  float parts[MLA_WARPS][2][WARP][4];
};

// 16 values of one head for all rows: w_uv rows first .. first+15 times the rows' latent sums, times the head's gate.
// w_uv: this head's [128, 512]; latent [16, H, 512]; gate: rows of `stride`, at this head; out [16, H * 128].
__device__ __forceinline__ void mla_value(const bf16* w_uv, const bf16* latent, const bf16* gate, int stride, bf16* out,
                                          int heads, int head, int first, int rows, MlaValueShared& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  uint4 low[MLA_CHUNKS], high[MLA_CHUNKS];
#pragma unroll
  for (int i = 0; i < MLA_CHUNKS; i++) {
    const bf16* from = w_uv + i64(first + g) * MLA_LATENT + (warp + MLA_WARPS * i) * 32 + 8 * t;
    low[i] = load_weights(from, true);
    high[i] = load_weights(from + 8 * MLA_LATENT, true);
  }
  wait_for_producer();
  let_next_start();
#pragma unroll
  for (int n = 0; n < 2; n++) {
    if (8 * n >= rows) break;
    float acc[4] = {};
    const int row = 8 * n + g;
#pragma unroll
    for (int i = 0; i < MLA_CHUNKS; i++) {
      const i64 at = (i64(row) * heads + head) * MLA_LATENT + (warp + MLA_WARPS * i) * 32 + 8 * t;
      const uint4 x = load16(latent + at, row < rows);
      mma_bf16(acc, low[i].x, high[i].x, low[i].y, high[i].y, x.x, x.y);
      mma_bf16(acc, low[i].z, high[i].z, low[i].w, high[i].w, x.z, x.w);
    }
    *reinterpret_cast<float4*>(s.parts[warp][n][lane]) = make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
  __syncthreads();
  const int row = tid / MLA_OUT, value = tid % MLA_OUT;
  if (row >= rows) return;
  const int owner = value % 8 * 4 + row % 8 / 2, word = value / 8 * 2 + row % 2;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < MLA_WARPS; w++) sum += s.parts[w][row / 8][owner][word];
  sum *= sigmoid(to_float(gate[i64(row) * stride + head]));
  out[(i64(row) * heads + head) * MLA_VALUE + first + value] = to_bf16(sum);
}
