// MLA launches: projections to queries and cache rows, attention by splits, merge, value projection with gate.
#include "mla.cuh"

// grid: H * MLA_SLICES blocks that make queries, one for each live row that writes its cache entry, and `asking` ones
// that ask the memory for what comes next: the cache, if it holds at most `most` rows, and the hint. query: rows of the
// projection (of `stride`), low-rank if there is a q_b; latent: where their latent‖key start; w_uk: heads lie
// head_stride apart.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 1)
    mla_query(bf16* q, bf16* cache, const bf16* query, const bf16* latent, int stride, const bf16* q_norm,
              const bf16* q_b, int rank, const bf16* w_uk, i64 head_stride, const bf16* kv_norm, const float* rope,
              const i64* positions, int heads, int rows, float eps, int asking, int most, Ahead ahead) {
  DYNAMIC_SHARED(memory);
  MlaQueryShared& shared = *reinterpret_cast<MlaQueryShared*>(memory);
  const i64 position = load_settled(positions);
  const int task = blockIdx.x, absorbing = heads * MLA_SLICES;
  if (task < absorbing) {
    const int head = task / MLA_SLICES;
    const MlaSource source{query, stride, q_norm, q_b, rank, eps};
    mla_absorb(source, w_uk + head * head_stride, rope, position, q, heads, head, task % MLA_SLICES, rows, shared);
    return;
  }
  const int row = task - absorbing;
  if (row < rows) {
    mla_cache_row(latent + i64(row) * stride, kv_norm, rope + (position + row) * MLA_ROPE,
                  cache + (position + row) * MLA_ROW, eps, shared.scale);
    return;
  }
  const int block = row - rows;
  if (threadIdx.x < WARP) {
    if (position > 0 && position <= most) {
      const u32 bytes = u32(position) * MLA_ROW * sizeof(bf16);
      for (u32 at = (threadIdx.x * asking + block) * AHEAD_PIECE; at < bytes; at += WARP * asking * AHEAD_PIECE) {
        prefetch_l2(reinterpret_cast<const u8*>(cache) + at, min(AHEAD_PIECE, bytes - at));
      }
    }
    ask_ahead(ahead, block, asking);
  }
  wait_for_producer();
  let_next_start();
}

template <int KEYS, int TILES>
__device__ __forceinline__ void mla_attend(bf16* partial, float* stats, const bf16* q, const bf16* cache,
                                           const i64* positions, int heads, int rows, int together, int capacity,
                                           float scale) {
  DYNAMIC_SHARED(memory);
  const Attend job{q, cache, heads, rows, capacity, int(load_settled(positions)), int(blockIdx.y) * together * 16};
  attend(job, blockIdx.x, scale, partial, stats, *reinterpret_cast<AttendShared<KEYS, TILES>*>(memory));
}

// grid: (ATTEND_SPLITS, tiles / together rounded up), together <= TILES. Forms with equal KEYS leave the same bits.
#define MLA_ATTEND(keys, tiles)                                                                                     \
  extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 1) mla_attend_##keys##_##tiles(                      \
      bf16* partial, float* stats, const bf16* q, const bf16* cache, const i64* positions, int heads, int rows,     \
      int together, int capacity, float scale) {                                                                    \
    mla_attend<keys, tiles>(partial, stats, q, cache, positions, heads, rows, together, capacity, scale);           \
  }

MLA_ATTEND(128, 1)
MLA_ATTEND(128, 3)
MLA_ATTEND(128, 5)
MLA_ATTEND(64, 1)  // where a block may have 99 KB of shared memory

// grid: (H, rows)
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    mla_merge(bf16* latent, const bf16* partial, const float* stats, const i64* positions, int heads) {
  __shared__ MergeShared shared;
  const int query = blockIdx.y * heads + blockIdx.x, limit = int(load_settled(positions)) + int(blockIdx.y) + 1;
  wait_for_producer();
  let_next_start();
  attend_merge(partial, stats, query, ROW_TILE * heads, limit, latent + i64(query) * MLA_LATENT, shared);
}

// grid: (8, H)
extern "C" __global__ void __launch_bounds__(MLA_THREADS)
    mla_values(bf16* out, const bf16* latent, const bf16* w_uv, i64 head_stride, const bf16* gate, int proj_stride,
               int heads, int rows) {
  __shared__ MlaValueShared shared;
  const int head = blockIdx.y;
  mla_value(w_uv + head * head_stride, latent, gate, proj_stride, out, heads, head, blockIdx.x * MLA_OUT, rows, shared);
}
