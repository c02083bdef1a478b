// attend.cuh's work by groups of four warps, where there are products for them: keys are the rows of a product and
// queries its columns, so that every key in shared memory meets all queries of the block at once, with no fragment in a
// register.
//
// Shared memory holds 16-byte pieces, column by column: piece c of row r lies beside piece c of row r + 1. Read one way
// eight of them are 8 keys of 8 columns, read the other way 8 columns of 8 keys, so keys are values where they stand.
#pragma once
#include "attend.cuh"

#ifdef WARP_GROUPS
constexpr int GROUP_KEYS = 128, GROUP_WARPS = 4, GROUP_TILE = 64;    // rows of a product
constexpr int GROUP_PIECES = MLA_ROW / 8;                            // of a row
constexpr int GROUP_PARTS = 4, GROUP_PART = GROUP_PIECES / GROUP_PARTS;  // of the queries' columns, fetched one by one
constexpr u32 GROUP_PIECE = 16, GROUP_NEXT = 8 * GROUP_PIECE;        // bytes; to the next 8 rows
constexpr u32 GROUP_KEY_COLUMN = (GROUP_KEYS + 1) * GROUP_PIECE;     // one more: columns fall into different banks
constexpr int GROUP_OUT = MLA_LATENT + 8;

// Where the QUERIES are many, the last part takes the place of the first. The second becomes the weights' place.
template <int QUERIES>
struct GroupShared {
  static constexpr int BUFFERS = QUERIES > 48 ? 3 : 4;
  static constexpr u32 COLUMN = (QUERIES + 1) * GROUP_PIECE;
  alignas(16) u8 keys[GROUP_PIECES * GROUP_KEY_COLUMN];  // in the end the results, bf16 [QUERIES][GROUP_OUT]
  alignas(16) u8 q[BUFFERS][GROUP_PART * COLUMN];
  float warp_top[ATTEND_WARPS][QUERIES];
  float warp_sum[ATTEND_WARPS][QUERIES];
  float top[QUERIES];      // as in AttendShared
  float sum[QUERIES];
  float minus[QUERIES];
  float rescale[QUERIES];
  int live[QUERIES];

  __device__ u8* weights() { return q[1]; }  // piece n of key k: queries 8 n on
};

// Keys from `first` on; groups of 16 that are all past `end` stay away.
template <int QUERIES>
__device__ __forceinline__ void group_fetch_keys(const Attend& job, int first, int end, GroupShared<QUERIES>& s) {
#pragma unroll 4
  for (int i = threadIdx.x; i < GROUP_KEYS * GROUP_PIECES; i += ATTEND_THREADS) {
    const int r = i / GROUP_PIECES, c = i % GROUP_PIECES;
    if (first + r / 16 * 16 >= end) break;
    copy16(s.keys + c * GROUP_KEY_COLUMN + r * GROUP_PIECE,
           job.cache + i64(min(first + r, job.capacity - 1)) * MLA_ROW + c * 8);
  }
  copies_commit();
}

// One part of the queries. What stands in rows past the last query is never looked at.
template <int QUERIES>
__device__ __forceinline__ void group_fetch_queries(const Attend& job, int part, GroupShared<QUERIES>& s) {
  const int live = min(QUERIES, job.rows * job.heads - job.first);
  u8* to = s.q[part % GroupShared<QUERIES>::BUFFERS];
  for (int i = threadIdx.x; i < live * GROUP_PART; i += ATTEND_THREADS) {
    const int r = i / GROUP_PART, c = i % GROUP_PART;
    copy16(to + c * GroupShared<QUERIES>::COLUMN + r * GROUP_PIECE,
           job.queries + i64(job.first + r) * MLA_ROW + (part * GROUP_PART + c) * 8);
  }
  copies_commit();
}

// Send for one part's products of this group's 64 keys with all queries.
template <int QUERIES>
__device__ __forceinline__ void group_scores(float (&c)[QUERIES / 2], int group, int part, GroupShared<QUERIES>& s) {
  using Shared = GroupShared<QUERIES>;
  const u8* from = s.keys + part * GROUP_PART * GROUP_KEY_COLUMN + group * GROUP_TILE * GROUP_PIECE;
  const GroupMatrix keys = group_matrix(from, GROUP_NEXT, GROUP_KEY_COLUMN);
  const GroupMatrix queries = group_matrix(s.q[part % Shared::BUFFERS], GROUP_NEXT, Shared::COLUMN);
  group_open();
#pragma unroll
  for (int piece = 0; piece < GROUP_PART; piece += 2) {
    group_mma<false, false>(c, keys.moved(piece * GROUP_KEY_COLUMN), queries.moved(piece * Shared::COLUMN));
  }
  group_close();
}

// All scores of the chunk, from copies that are on their way: keys, then as many parts of the queries as have a place.
template <int QUERIES>
__device__ __forceinline__ void group_all_scores(float (&c)[QUERIES / 2], const Attend& job, int group,
                                                 GroupShared<QUERIES>& s) {
  constexpr int BUFFERS = GroupShared<QUERIES>::BUFFERS, WAITING = BUFFERS;  // parts on their way
  auto enter = [&](int part) {
    group_publish();
    __syncthreads();
    if (BUFFERS < GROUP_PARTS && part == GROUP_PARTS - 2) group_fetch_queries(job, GROUP_PARTS - 1, s);
    group_scores(c, group, part, s);
  };
  static_assert(GROUP_PARTS == 4, "parts are waited for one by one");
  copies_wait<WAITING - 1>();
  enter(0);
  copies_wait<WAITING - 2>();
  enter(1);
  copies_wait<WAITING - 3>();
  group_wait<1>();  // the first part is done with
  enter(2);
  copies_wait<0>();
  enter(3);
  group_wait<0>();
}

// Scores to weights, and the running softmax: a lane has keys g, g + 8 of its warp's 16, queries 2t, 2t + 1 of every 8.
// scale: of scores, times log2(e). Ends with a block barrier.
template <int QUERIES>
__device__ __forceinline__ void group_softmax(float (&c)[QUERIES / 2], int first, float scale, GroupShared<QUERIES>& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, t = lane % 4, key = 16 * warp + lane / 4;
#pragma unroll
  for (int n = 0; n < QUERIES / 8; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int query = 8 * n + 2 * t + e, live = s.live[query] - first;
      float &low = c[4 * n + e], &high = c[4 * n + 2 + e];
      low = key < live ? low * scale : -infinity();
      high = key + 8 < live ? high * scale : -infinity();
      float top = fmaxf(low, high);
#pragma unroll
      for (int step = 4; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
      if (lane < 4) s.warp_top[warp][query] = top;
    }
  }
  __syncthreads();
  if (tid < QUERIES) {
    const float before = s.top[tid];
    float top = before;
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) top = fmaxf(top, s.warp_top[w][tid]);
    const float minus = top == -infinity() ? 0.0f : top;
    s.top[tid] = top;
    s.minus[tid] = minus;
    s.rescale[tid] = exp2f(before - minus);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < QUERIES / 8; n++) {
    float low[2], high[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int query = 8 * n + 2 * t + e;
      const float minus = s.minus[query];
      low[e] = exp2f(c[4 * n + e] - minus), high[e] = exp2f(c[4 * n + 2 + e] - minus);
      float sum = low[e] + high[e];
#pragma unroll
      for (int step = 4; step < WARP; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
      if (lane < 4) s.warp_sum[warp][query] = sum;
    }
    u8* to = s.weights() + n * GROUP_KEY_COLUMN + key * GROUP_PIECE + 4 * t;
    *reinterpret_cast<u32*>(to) = pack_bf16(low[0], low[1]);
    *reinterpret_cast<u32*>(to + GROUP_NEXT) = pack_bf16(high[0], high[1]);
  }
  group_publish();
  __syncthreads();
  if (tid < QUERIES) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) sum += s.warp_sum[w][tid];
    s.sum[tid] = fmaf(s.sum[tid], s.rescale[tid], sum);
  }
}

constexpr int GROUP_TILES = MLA_LATENT / GROUP_TILE / (ATTEND_WARPS / GROUP_WARPS);  // of value columns, for each group

// Add values · weights to this group's 256 columns. keys: live ones of the chunk.
template <int QUERIES>
__device__ __forceinline__ void group_mix(float (&acc)[GROUP_TILES][QUERIES / 2], int group, int keys, bool again,
                                          GroupShared<QUERIES>& s) {
  if (again) {
#pragma unroll
    for (int i = 0; i < QUERIES / 2; i++) {
      const float by = s.rescale[i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2];
#pragma unroll
      for (int m = 0; m < GROUP_TILES; m++) acc[m][i] *= by;
    }
  }
  constexpr u32 TILE = GROUP_TILE / 8 * GROUP_KEY_COLUMN;
  const GroupMatrix values = group_matrix(s.keys + group * GROUP_TILES * TILE, GROUP_KEY_COLUMN, GROUP_NEXT);
  const GroupMatrix weights = group_matrix(s.weights(), GROUP_KEY_COLUMN, GROUP_NEXT);
  group_open();
#pragma unroll 1
  for (int k = 0; k < keys; k += 16) {
#pragma unroll
    for (int m = 0; m < GROUP_TILES; m++) {
      group_mma<true, true>(acc[m], values.moved(m * TILE + k * GROUP_PIECE), weights.moved(k * GROUP_PIECE));
    }
  }
  group_close();
  group_wait<0>();
}

// As attend_store; the keys' place is free.
template <int QUERIES>
__device__ __forceinline__ void group_store(float (&acc)[GROUP_TILES][QUERIES / 2], const Attend& job, int split,
                                            int group, bf16* partial, float* stats, GroupShared<QUERIES>& s) {
  const int tid = threadIdx.x, lane = tid % WARP, t = lane % 4;
  const i64 place = i64(split) * ROW_TILE * job.heads + job.first;
  const int queries = min(QUERIES, job.rows * job.heads - job.first);
  bf16* out = reinterpret_cast<bf16*>(s.keys);
  const int matrix = lane / 8, row = tid / WARP % GROUP_WARPS * 16 + 8 * (matrix & 1);  // of a product
  const int column = group * GROUP_TILES * GROUP_TILE + row;
  if (tid < queries && s.sum[tid] > 0.0f) {
    *reinterpret_cast<float2*>(stats + 2 * (place + tid)) = make_float2(s.top[tid], s.sum[tid]);
  }
#pragma unroll
  for (int n = 0; n < QUERIES / 8; n += 2) {
    float by[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) by[i / 2][i % 2] = 1.0f / s.sum[8 * (n + i / 2) + 2 * t + i % 2];
#pragma unroll
    for (int m = 0; m < GROUP_TILES; m++) {
      u32 v[4];  // columns g, g + 8 of queries n, then of n + 1
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int from = 4 * (n + i / 2) + 2 * (i % 2);
        v[i] = pack_bf16(acc[m][from] * by[i / 2][0], acc[m][from + 1] * by[i / 2][1]);
      }
      store_matrices_transposed(out + (8 * (n + (matrix >> 1)) + lane % 8) * GROUP_OUT + column + GROUP_TILE * m, v);
    }
  }
  __syncthreads();
  constexpr int PIECES = MLA_LATENT / 8;
  for (int i = tid; i < queries * PIECES; i += ATTEND_THREADS) {
    const int r = i / PIECES, c = i % PIECES * 8;
    if (!(s.sum[r] > 0.0f)) continue;
    *reinterpret_cast<uint4*>(partial + (place + r) * MLA_LATENT + c) = load16(out + r * GROUP_OUT + c);
  }
}

// attend() for QUERIES / 16 tiles: the same splits, passes and results but for the order of sums.
template <int QUERIES>
__device__ __forceinline__ void attend_by_groups(const Attend& job, int split, float scale, bf16* partial, float* stats,
                                                 GroupShared<QUERIES>& s) {
  constexpr int AT_ONCE = GroupShared<QUERIES>::BUFFERS;
  const int tid = threadIdx.x, group = __shfl_sync(ALL, tid / WARP / GROUP_WARPS, 0);
  const int last = min(job.first + QUERIES, job.rows * job.heads) - 1, limit = job.limit(last);
  const int low = attend_split(job.limit(job.first)), high = attend_split(limit);

  // keys that this step does not write are fetched before the producer has finished
  const int opening = split * low, closing = min(limit, opening + low);
  bool early = opening < closing && min(closing, opening + GROUP_KEYS) <= job.before;
  if (early) group_fetch_keys(job, opening, closing, s);
  wait_for_producer();
  let_next_start();

  if (tid < QUERIES) s.top[tid] = -infinity(), s.sum[tid] = 0.0f;
  float acc[GROUP_TILES][QUERIES / 2] = {};
  bool again = false;
#pragma unroll 1
  for (int size = low; size <= high; size += max(high - low, 1)) {
    const int end = min(limit, (split + 1) * size);
    if (tid < QUERIES) {
      const int own = job.limit(job.first + tid);
      s.live[tid] = attend_split(own) == size ? min(own, end) : 0;
    }
#pragma unroll 1
    for (int first = split * size; first < end; first += GROUP_KEYS) {
      if (again) __syncthreads();  // the chunk before is done with
      if (!early) group_fetch_keys(job, first, end, s);
      early = false;
#pragma unroll
      for (int part = 0; part < AT_ONCE; part++) group_fetch_queries(job, part, s);
      float c[QUERIES / 2] = {};
      group_all_scores(c, job, group, s);
      group_softmax(c, first, scale, s);
      group_mix(acc, group, min(GROUP_KEYS, end - first), again, s);
      again = true;
    }
  }
  if (!again) return;
  __syncthreads();
  group_store(acc, job, split, group, partial, stats, s);
}
#endif
