// Latent attention of a window over the cache, split along the keys: partial results, then a merge in order.
//
// The window's queries (row by row, head by head) lie in tiles of 16; a block has one split of the keys and up to TILES
// tiles. How keys are split is a function of the query's own limit, and what a query's sums go through is the same in
// every form, so its bits do not depend on which others run beside it.
#pragma once
#include "arch.cuh"

constexpr int MLA_LATENT = 512, MLA_ROPE = 64;
constexpr int MLA_ROW = MLA_LATENT + MLA_ROPE;  // a cache row, and a query after absorption

constexpr int ATTEND_SPLITS = 66;    // most splits of a query's keys
constexpr int ATTEND_STEP = 32;      // a split is a whole number of these
constexpr int ATTEND_THREADS = 256;  // 8 warps
constexpr int ATTEND_WARPS = ATTEND_THREADS / WARP;
constexpr int ATTEND_PARTS = 3, ATTEND_PART = MLA_ROW / ATTEND_PARTS;  // of a row: fetched and multiplied one by one
constexpr float LOG2_E = 1.4426950408889634f;

// Keys in a split of a query that sees `limit` of them.
__device__ __forceinline__ int attend_split(int limit) {
  return (limit + ATTEND_STEP * ATTEND_SPLITS - 1) / (ATTEND_STEP * ATTEND_SPLITS) * ATTEND_STEP;
}

// Shared memory for chunks of KEYS keys. Rows are 8 elements longer than their values: 16-byte rows of a matrix then
// fall into different banks. Where TILES are many, the third part of the queries takes the place of the first, and the
// weights that of the second.
template <int KEYS, int TILES>
struct AttendShared {
  static constexpr int BUFFERS = TILES > 3 ? 2 : 3;
  alignas(16) bf16 keys[KEYS][MLA_ROW + 8];
  alignas(16) bf16 q[BUFFERS][TILES * 16][ATTEND_PART + 8];
  alignas(16) bf16 own_weights[BUFFERS == 2 ? 1 : TILES * 16][KEYS + 8];
  float warp_top[ATTEND_WARPS][TILES * 16];
  float warp_sum[ATTEND_WARPS][TILES * 16];
  float top[TILES * 16];      // running maximum
  float sum[TILES * 16];      // running sum of weights
  float minus[TILES * 16];    // the maximum, 0 where no key was seen
  float rescale[TILES * 16];  // of what was summed before this chunk
  int live[TILES * 16];       // end of the keys that the query sees in this pass

  __device__ bf16* weights(int row) {
    if constexpr (BUFFERS == 2) return &q[1][0][0] + row * (KEYS + 8);
    return own_weights[row];
  }
};

// What a block works on.
struct Attend {
  const bf16* queries;  // [rows * H, 576]
  const bf16* cache;    // [capacity, 576]
  int heads, rows, capacity;
  int before;  // rows of the cache that stood before the window: row r of the window sees before + r + 1
  int first;   // query of the first tile

  __device__ int limit(int query) const { return query < rows * heads ? before + query / heads + 1 : 0; }
};

// One part of the rows of this warp's own keys, from key `first` on; groups of 16 keys that are all past `end` stay away.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_fetch_keys(const Attend& job, int part, int first, int end,
                                                  AttendShared<KEYS, TILES>& s) {
  constexpr int EACH = KEYS / ATTEND_WARPS, PIECES = ATTEND_PART / 8;
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * EACH;
  if (first + own / 16 * 16 >= end) return;
#pragma unroll 4
  for (int n = 0; n < EACH * PIECES / WARP; n++) {
    const int i = n * WARP + lane, r = own + i / PIECES, c = part * ATTEND_PART + i % PIECES * 8;
    copy16(&s.keys[r][c], job.cache + i64(min(first + r, job.capacity - 1)) * MLA_ROW + c);
  }
}

// One part of the queries, by the whole block. What stands in rows past the last query is never looked at.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_fetch_queries(const Attend& job, int part, AttendShared<KEYS, TILES>& s) {
  constexpr int PIECES = ATTEND_PART / 8;
  const int live = min(TILES * 16, job.rows * job.heads - job.first);
  for (int i = threadIdx.x; i < live * PIECES; i += ATTEND_THREADS) {
    const int r = i / PIECES, c = i % PIECES * 8;
    copy16(&s.q[part % AttendShared<KEYS, TILES>::BUFFERS][r][c], job.queries + i64(job.first + r) * MLA_ROW + part * ATTEND_PART + c);
  }
}

// Add one part's products of all queries with this warp's keys to the scores: rows g, g + 8 of a tile, keys 2t, 2t + 1.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_scores(float (&c)[TILES][KEYS / 64][4], int part, AttendShared<KEYS, TILES>& s) {
  constexpr int EACH = KEYS / ATTEND_WARPS, STEP = EACH == 16 ? 16 : 32;  // of k, for one load of key fragments
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * EACH, matrix = lane / 8, r = lane % 8;
  const int key = EACH == 16 ? own + 8 * (matrix >> 1) + r : own + r;
  const bf16* keys = &s.keys[key][part * ATTEND_PART + 8 * (EACH == 16 ? matrix & 1 : matrix)];
  const bf16* q = &s.q[part % AttendShared<KEYS, TILES>::BUFFERS][8 * (matrix & 1) + r][8 * (matrix >> 1)];
#pragma unroll 4
  for (int k = 0; k < ATTEND_PART; k += STEP) {
    u32 b[4];
    load_matrices(b, keys + k);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      u32 a[4];
      const bf16* from = q + 16 * m * (ATTEND_PART + 8) + k;
      load_matrices(a, from);
      mma_bf16(c[m][0], a[0], a[1], a[2], a[3], b[0], b[1]);
      if constexpr (EACH == 16) {
        mma_bf16(c[m][1], a[0], a[1], a[2], a[3], b[2], b[3]);
      } else {
        load_matrices(a, from + 16);
        mma_bf16(c[m][0], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }
}

// Scores to weights, and the running softmax. scale: of scores, times log2(e). The weights can be read after it.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_softmax(float (&c)[TILES][KEYS / 64][4], int first, float scale,
                                               AttendShared<KEYS, TILES>& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  const int own = first + warp * (KEYS / ATTEND_WARPS) + 2 * t;
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * m + g + 8 * half, live = s.live[row];
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < KEYS / 64; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = c[m][n][2 * half + e];
          x = own + 8 * n + e < live ? x * scale : -infinity();
          top = fmaxf(top, x);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
      if (t == 0) s.warp_top[warp][row] = top;
    }
  }
  __syncthreads();
  if (tid < TILES * 16) {
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
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * m + g + 8 * half;
      const float minus = s.minus[row];
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS / 64; n++) {
        const float low = exp2f(c[m][n][2 * half] - minus), high = exp2f(c[m][n][2 * half + 1] - minus);
        sum += low + high;
        *reinterpret_cast<u32*>(s.weights(row) + warp * (KEYS / ATTEND_WARPS) + 8 * n + 2 * t) = pack_bf16(low, high);
      }
      sum += __shfl_xor_sync(ALL, sum, 1);
      sum += __shfl_xor_sync(ALL, sum, 2);
      if (t == 0) s.warp_sum[warp][row] = sum;
    }
  }
  __syncthreads();
  if (tid < TILES * 16) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) sum += s.warp_sum[w][tid];
    s.sum[tid] = fmaf(s.sum[tid], s.rescale[tid], sum);
  }
}

// Add weights · values to this warp's 64 columns. keys: live ones of the chunk.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_mix(float (&acc)[TILES][8][4], int keys, bool again,
                                           AttendShared<KEYS, TILES>& s) {
  const int lane = threadIdx.x % WARP, column = threadIdx.x / WARP * 64, matrix = lane / 8, r = lane % 8;
  if (again) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const float low = s.rescale[16 * m + lane / 4], high = s.rescale[16 * m + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < 8; n++) acc[m][n][0] *= low, acc[m][n][1] *= low, acc[m][n][2] *= high, acc[m][n][3] *= high;
    }
  }
#pragma unroll 1
  for (int k = 0; k < keys; k += 16) {
    u32 b[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      load_matrices_transposed(b[n], &s.keys[k + 8 * (matrix & 1) + r][column + 16 * n + 8 * (matrix >> 1)]);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      u32 a[4];
      load_matrices(a, s.weights(16 * m + 8 * (matrix & 1) + r) + k + 8 * (matrix >> 1));
#pragma unroll
      for (int n = 0; n < 4; n++) {
        mma_bf16(acc[m][2 * n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
        mma_bf16(acc[m][2 * n + 1], a[0], a[1], a[2], a[3], b[n][2], b[n][3]);
      }
    }
  }
}

// Lane t of four holds word t of each of four items; it gets all words of item t.
__device__ __forceinline__ uint4 turn_words(const u32 (&v)[4]) {
  const int t = threadIdx.x % 4;
  auto of = [&](int i) { return i == 0 ? v[0] : i == 1 ? v[1] : i == 2 ? v[2] : v[3]; };
  const u32 mine = of(t), one = __shfl_xor_sync(ALL, of(t ^ 1), 1), two = __shfl_xor_sync(ALL, of(t ^ 2), 2);
  const u32 three = __shfl_xor_sync(ALL, of(t ^ 3), 3);
  auto from = [&](int lane) { return lane == t ? mine : lane == (t ^ 1) ? one : lane == (t ^ 2) ? two : three; };
  return make_uint4(from(0), from(1), from(2), from(3));
}

// Each query's mean over the split's keys, in bf16, and the maximum and sum of its weights. Queries that saw none are
// left out.
template <int TILES, class Shared>
__device__ __forceinline__ void attend_store(float (&acc)[TILES][8][4], const Attend& job, int split, bf16* partial,
                                             float* stats, Shared& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  const i64 place = i64(split) * ROW_TILE * job.heads + job.first;
  const int queries = job.rows * job.heads - job.first;
  if (tid < min(TILES * 16, queries) && s.sum[tid] > 0.0f) {
    *reinterpret_cast<float2*>(stats + 2 * (place + tid)) = make_float2(s.top[tid], s.sum[tid]);
  }
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * m + g + 8 * half;
      const float sum = s.sum[row], by = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = pack_bf16(acc[m][n + i][2 * half] * by, acc[m][n + i][2 * half + 1] * by);
        const uint4 out = turn_words(v);
        if (row < queries && sum > 0.0f) {
          *reinterpret_cast<uint4*>(partial + (place + row) * MLA_LATENT + 64 * warp + 8 * (n + t)) = out;
        }
      }
    }
  }
}

// One block: split `split` of the tiles from query job.first on. partial [SPLITS, 16 H, 512] bf16, stats [SPLITS, 16 H,
// 2]. scale: of scores, times log2(e). A window has splits of two sizes at most; each size has its own pass, which its
// queries take part in and no others.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend(const Attend& job, int split, float scale, bf16* partial, float* stats,
                                       AttendShared<KEYS, TILES>& s) {
  constexpr bool ALONE = TILES == 1;
  constexpr int BUFFERS = AttendShared<KEYS, TILES>::BUFFERS;
  const int tid = threadIdx.x;
  const int last = min(job.first + TILES * 16, job.rows * job.heads) - 1, limit = job.limit(last);
  const int low = attend_split(job.limit(job.first)), high = attend_split(limit);
  auto fetch_keys = [&](int part, int first, int end) {
    attend_fetch_keys(job, part, first, end, s);
    copies_commit();
  };
  auto fetch_queries = [&](int part) {
    attend_fetch_queries(job, part, s);
    copies_commit();
  };

  // keys that this step does not write are fetched before the producer has finished: all where other blocks are few
  int early = 0;
  const int opening = split * low, closing = min(limit, opening + low);
  if (opening < closing && min(closing, opening + KEYS) <= job.before) {
    for (; early < (ALONE ? ATTEND_PARTS : 1); early++) fetch_keys(early, opening, closing);
  }
  wait_for_producer();
  let_next_start();

  if (tid < TILES * 16) s.top[tid] = -infinity(), s.sum[tid] = 0.0f;
  float acc[TILES][8][4] = {};
  bool again = false;
#pragma unroll 1
  for (int size = low; size <= high; size += max(high - low, 1)) {
    const int end = min(limit, (split + 1) * size);
    if (tid < TILES * 16) {
      const int own = job.limit(job.first + tid);
      s.live[tid] = attend_split(own) == size ? min(own, end) : 0;
    }
#pragma unroll 1
    for (int first = split * size; first < end; first += KEYS) {
      // groups of copies in this order: k0 k1 k2 q0 q1 q2, or k0 q0 k1 q1 k2 and q2, which may have to wait for a place
      if (again) __syncthreads();  // the chunk before is done with
      if constexpr (ALONE) {
        for (int part = early; part < ATTEND_PARTS; part++) fetch_keys(part, first, end);
        for (int part = 0; part < ATTEND_PARTS; part++) fetch_queries(part);
      } else {
        for (int part = 0; part < ATTEND_PARTS; part++) {
          if (part >= early) fetch_keys(part, first, end);
          if (part < BUFFERS) fetch_queries(part);
        }
      }
      early = 0;
      float c[TILES][KEYS / 64][4] = {};
      copies_wait<ALONE ? 2 : BUFFERS == 2 ? 3 : 4>();
      __syncthreads();
      attend_scores(c, 0, s);
      if constexpr (BUFFERS == 2) {
        __syncthreads();
        fetch_queries(2);
      }
      copies_wait<ALONE ? 1 : 2>();
      __syncthreads();
      attend_scores(c, 1, s);
      copies_wait<0>();
      __syncthreads();
      attend_scores(c, 2, s);
      attend_softmax(c, first, scale, s);
      attend_mix(acc, min(KEYS, end - first), again, s);
      again = true;
    }
  }
  if (!again) return;
  __syncthreads();
  attend_store(acc, job, split, partial, stats, s);
}

// The merge takes a query's splits in MERGE_RUNS runs of their own threads, each in order, then the runs in order: which
// split belongs to which run is fixed, and all loads are on their way at once.
constexpr int MERGE_RUNS = 8, MERGE_RUN = (ATTEND_SPLITS + MERGE_RUNS - 1) / MERGE_RUNS;
constexpr int MERGE_COLUMNS = 8 * WARP;  // of a block: a run is a warp
constexpr int MERGE_THREADS = MERGE_RUNS * MERGE_COLUMNS / 8;
constexpr int MERGE_LANES = (ATTEND_SPLITS + WARP - 1) / WARP;  // splits that a lane weighs

struct MergeShared {
  alignas(16) float parts[MERGE_RUNS][MERGE_COLUMNS + 4];
};

// Merge MERGE_COLUMNS values of one query, from `begin` on. limit: the keys that it sees; all: queries that a split has
// room for.
__device__ __forceinline__ void attend_merge(const bf16* partial, const float* stats, int query, int all, int limit,
                                             int begin, bf16* out, MergeShared& s) {
  const int tid = threadIdx.x, lane = tid % WARP, run = tid / (MERGE_COLUMNS / 8), column = tid % (MERGE_COLUMNS / 8) * 8;
  const int size = attend_split(limit), num = (limit + size - 1) / size;
  float2 found[MERGE_LANES];
#pragma unroll
  for (int i = 0; i < MERGE_LANES; i++) {
    const int n = i * WARP + lane;
    const float* from = stats + 2 * (i64(min(n, num - 1)) * all + query);
    const uint2 words = load_activations4(reinterpret_cast<const bf16*>(from));
    const bool live = n < num;
    found[i] = make_float2(live ? __uint_as_float(words.x) : -infinity(), live ? __uint_as_float(words.y) : 0.0f);
  }
  uint4 part[MERGE_RUN];
#pragma unroll
  for (int i = 0; i < MERGE_RUN; i++) {
    const int n = run * MERGE_RUN + i;
    part[i] = load_activations(partial + (i64(min(n, num - 1)) * all + query) * MLA_LATENT + begin + column);
  }
  float top = found[0].x;
#pragma unroll
  for (int i = 1; i < MERGE_LANES; i++) top = fmaxf(top, found[i].x);
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
  float weight[MERGE_LANES], total = 0.0f;
#pragma unroll
  for (int i = 0; i < MERGE_LANES; i++) {
    weight[i] = found[i].y * exp2f(found[i].x - top);
    total += weight[i];
  }
  total = warp_sum(total);
  float acc[8] = {};
#pragma unroll
  for (int i = 0; i < MERGE_RUN; i++) {
    const int n = run * MERGE_RUN + i, place = n / WARP;
    const float by = __shfl_sync(ALL, place == 0 ? weight[0] : place == 1 ? weight[1] : weight[MERGE_LANES - 1], n % WARP);
    const u32 words[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      acc[2 * e] = fmaf(by, low_float(words[e]), acc[2 * e]);
      acc[2 * e + 1] = fmaf(by, high_float(words[e]), acc[2 * e + 1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e += 4) {
    *reinterpret_cast<float4*>(&s.parts[run][column + e]) = make_float4(acc[e], acc[e + 1], acc[e + 2], acc[e + 3]);
  }
  __syncthreads();
  if (tid >= MERGE_COLUMNS / 2) return;
  float low = 0.0f, high = 0.0f;
#pragma unroll
  for (int r = 0; r < MERGE_RUNS; r++) low += s.parts[r][2 * tid], high += s.parts[r][2 * tid + 1];
  *reinterpret_cast<u32*>(out + begin + 2 * tid) = pack_bf16(low / total, high / total);
}
