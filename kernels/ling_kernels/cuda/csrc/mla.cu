// MLA launches: projections to queries and cache rows, attention by splits, merge, value projection with gate.
#include "attend.cuh"
#include "mla.cuh"

// grid: rows. The low-rank query of a row, from the projection (rows of `stride`) to its own rows of `width`, normed.
extern "C" __global__ void __launch_bounds__(MLA_THREADS)
    mla_query_norm(bf16* out, const bf16* proj, int stride, const bf16* weight, int width, float eps) {
  __shared__ float sums[MLA_WARPS];
  wait_for_producer();
  let_next_start();
  const bf16* from = proj + i64(blockIdx.x) * stride;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < width; i += MLA_THREADS) sum = fmaf(to_float(from[i]), to_float(from[i]), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < MLA_WARPS; w++) total += sums[w];
  const float scale = rsqrtf(total / width + eps);
  for (int i = threadIdx.x; i < width; i += MLA_THREADS) {
    out[i64(blockIdx.x) * width + i] = to_bf16(to_float(from[i]) * scale * to_float(weight[i]));
  }
}

// grid: 8 H blocks that absorb, then one for each live row that writes its cache entry. latent: column of the
// projection where latent‖key start; w_uk: heads lie head_stride apart.
extern "C" __global__ void __launch_bounds__(MLA_THREADS)
    mla_prepare(bf16* q, bf16* cache, const bf16* query, int query_stride, const bf16* latent, int proj_stride,
                const bf16* w_uk, i64 head_stride, const bf16* kv_norm, const float* rope, const i64* positions,
                int heads, int rows, float eps) {
  __shared__ MlaAbsorbShared shared;
  const int task = blockIdx.x, absorbing = heads * MLA_SLICES;
  if (task < absorbing) {
    const int head = task / MLA_SLICES;
    mla_absorb(query, query_stride, w_uk + head * head_stride, rope, positions, q, heads, head, task % MLA_SLICES, rows,
               shared);
    return;
  }
  wait_for_producer();
  let_next_start();
  const int row = task - absorbing;
  mla_cache_row(latent + i64(row) * proj_stride, kv_norm, rope + positions[row] * MLA_ROPE,
                cache + positions[row] * MLA_ROW, eps, shared.q[0]);
}

// Tiles: 16 heads of one row; the last of a row may have fewer.
struct MlaView {
  const bf16* queries;  // [16, H, 576]
  const bf16* cache;    // [C, 576]
  const i64* positions;
  int heads, tiles_per_row, num_tiles, capacity;
  float scale;

  __device__ int limit(int tile) const { return int(load_settled(positions + tile / tiles_per_row)) + 1; }
  __device__ int settled() const { return int(load_settled(positions)); }
  __device__ const bf16* key(int i) const { return cache + i64(i) * MLA_ROW; }
  __device__ const bf16* value(int i) const { return key(i); }
  __device__ const bf16* q(int tile, int row) const {
    const int head = tile % tiles_per_row * 16 + row;
    return head < heads ? queries + (i64(tile / tiles_per_row) * heads + head) * MLA_ROW : nullptr;
  }
};

template <int TILES, int STAGES>
__device__ __forceinline__ void mla_attend(float* sums, float* stats, const bf16* q, const bf16* cache,
                                           const i64* positions, int heads, int rows, int capacity, float scale) {
  DYNAMIC_SHARED(memory);
  using Shared = AttendShared<MLA_ROW, MLA_LATENT, TILES, STAGES, true>;
  const int tiles = (heads + 15) / 16;
  const MlaView view{q, cache, positions, heads, tiles, rows * tiles, capacity, scale};
  attend(view, blockIdx.x, blockIdx.y, 0, sums, stats, *reinterpret_cast<Shared*>(memory));
}

// grid: (ATTEND_SPLITS, tiles / TILES rounded up). Two forms, by the shared memory that a block may have; same bits.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    mla_attend_large(float* sums, float* stats, const bf16* q, const bf16* cache, const i64* positions, int heads,
                     int rows, int capacity, float scale) {
  mla_attend<3, 2>(sums, stats, q, cache, positions, heads, rows, capacity, scale);
}

extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    mla_attend_small(float* sums, float* stats, const bf16* q, const bf16* cache, const i64* positions, int heads,
                     int rows, int capacity, float scale) {
  mla_attend<1, 1>(sums, stats, q, cache, positions, heads, rows, capacity, scale);
}

// grid: (H, rows); 512 threads
extern "C" __global__ void __launch_bounds__(MERGE_GROUPS* MLA_LATENT / 4)
    mla_merge(bf16* latent, const float* sums, const float* stats, const i64* positions, int heads) {
  __shared__ MergeShared<MLA_LATENT> shared;
  wait_for_producer();
  let_next_start();
  const int head = blockIdx.x, row = blockIdx.y, tiles = (heads + 15) / 16;
  attend_merge<MLA_LATENT>(sums, stats, row * tiles + head / 16, head % 16, int(positions[row]) + 1,
                           latent + (i64(row) * heads + head) * MLA_LATENT, shared);
}

// grid: (8, H)
extern "C" __global__ void __launch_bounds__(MLA_THREADS)
    mla_values(bf16* out, const bf16* latent, const bf16* w_uv, i64 head_stride, const bf16* gate, int proj_stride,
               int heads, int rows) {
  __shared__ MlaValueShared shared;
  const int head = blockIdx.y;
  mla_value(w_uv + head * head_stride, latent, gate, proj_stride, out, heads, head, blockIdx.x * MLA_OUT, rows, shared);
}
