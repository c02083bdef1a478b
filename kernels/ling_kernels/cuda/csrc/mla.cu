// MLA launches: projections to queries and cache rows, attention by splits, merge, value projection with gate.
#include "mla.cuh"

// grid: H * MLA_SLICES. query: rows of the projection (of `stride`), low-rank if there is a q_b; latent: where their
// latent‖key start; w_uk: heads lie head_stride apart; fragments: queries for attention by blocks of one tile. As few
// blocks as have the weights on time: attention takes whole multiprocessors, and should find them free long before it has
// queries.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 1)
    mla_query(bf16* q, bf16* cache, const bf16* query, const bf16* latent, int stride, const bf16* q_norm,
              const bf16* q_b, int rank, const bf16* w_uk, i64 head_stride, const bf16* kv_norm, const float* rope,
              const i64* positions, int heads, int rows, int fragments, float eps) {
  DYNAMIC_SHARED(memory);
  const int head = blockIdx.x / MLA_SLICES;
  const MlaSource source{query, stride, q_norm, q_b, rank, eps};
  mla_absorb(source, {latent, kv_norm, cache}, w_uk + head * head_stride, rope, load_settled(positions), q, fragments, heads,
             head, blockIdx.x % MLA_SLICES, rows, *reinterpret_cast<MlaQueryShared*>(memory));
}

__device__ __forceinline__ Attend attend_job(const bf16* q, const bf16* cache, const i64* positions, int heads, int rows,
                                             int together, int capacity) {
  const int first = int(blockIdx.y) * together * 16;
  return {q, cache, heads, rows, capacity, int(settled_for_all(positions)), first, min(first + together * 16, rows * heads)};
}

// grid: (ATTEND_SPLITS, tiles / together rounded up), together <= TILES. Forms with equal KEYS leave the same bits.
#define MLA_ATTEND(keys, tiles)                                                                                     \
  extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 1) mla_attend_##keys##_##tiles(                      \
      bf16* partial, float* stats, const bf16* q, const bf16* cache, const i64* positions, int heads, int rows,     \
      int together, int capacity, float scale) {                                                                    \
    DYNAMIC_SHARED(memory);                                                                                         \
    attend(attend_job(q, cache, positions, heads, rows, together, capacity), blockIdx.x, scale, partial, stats,     \
           *reinterpret_cast<AttendShared<keys, tiles>*>(memory));                                                  \
  }

MLA_ATTEND(128, 1)
MLA_ATTEND(128, 3)
MLA_ATTEND(128, 5)
MLA_ATTEND(64, 1)  // where a block may have 99 KB of shared memory

// grid: (H, rows, latent columns / MERGE_COLUMNS)
extern "C" __global__ void __launch_bounds__(MERGE_THREADS<MERGE_COLUMNS>, 3)
    mla_merge(bf16* latent, const bf16* partial, const float* stats, const i64* positions, int heads) {
  __shared__ MergeShared<MERGE_COLUMNS> shared;
  const int query = blockIdx.y * heads + blockIdx.x, limit = int(settled_for_all(positions)) + int(blockIdx.y) + 1;
  const int begin = blockIdx.z * MERGE_COLUMNS;
  const MergePlaces<MERGE_COLUMNS> from(partial, stats, query, ROW_TILE * heads, limit, begin);
  let_next_start_early();
  wait_for_producer();
  attend_merge(from, latent + i64(query) * MLA_LATENT + begin, shared);
}

// grid: (128 / MLA_OUT, H). gate: rows of `proj_stride`, a value a head; latent [16, H, 512]; out [16, H * 128].
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 1)
    mla_values(bf16* out, const bf16* latent, const bf16* w_uv, i64 head_stride, const bf16* gate, int proj_stride,
               int heads, int rows) {
  __shared__ MlaValueShared<1> shared;
  const int head = blockIdx.y, first = blockIdx.x * MLA_OUT, row = threadIdx.x / MLA_OUT;
  MlaValueRows weights;
  weights.load(w_uv + head * head_stride, first);
  let_next_start_early();
  wait_for_producer();
  const bf16 own = load_activation(gate + (row < rows ? row : 0) * proj_stride + head);
  auto of = [&](int at, int column) { return load_activations(latent + (at * heads + head) * MLA_LATENT + column); };
  mla_value(weights, of, own, out + head * MLA_VALUE + first, heads * MLA_VALUE, rows, shared);
}

// Both for a window of one row, with the same bits. grid: (128 / ONE_OUT, H)
extern "C" __global__ void __launch_bounds__(ONE_THREADS, 1)
    mla_merge_values(bf16* out, const bf16* partial, const float* stats, const i64* positions, const bf16* w_uv,
                     i64 head_stride, const bf16* gate, int heads) {
  __shared__ MlaOneShared shared;
  const int head = blockIdx.y, first = blockIdx.x * ONE_OUT;
  MlaValueRows weights;
  weights.load(w_uv + head * head_stride, first + int(threadIdx.x) / MLA_THREADS * MLA_OUT);
  const int limit = int(settled_for_all(positions)) + 1;
  const MergePlaces<MLA_LATENT> from(partial, stats, head, ROW_TILE * heads, limit, 0);
  let_next_start_early();
  wait_for_producer();
  const bf16 own = load_activation(gate + head);
  attend_merge(from, shared.latent, shared.merge);
  __syncthreads();
  auto of = [&](int, int column) { return load16(shared.latent + column); };
  mla_value(weights, of, own, out + head * MLA_VALUE + first, 0, 1, shared.values);
}
