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
constexpr int ATTEND_PARTS = 3, ATTEND_PART = MLA_ROW / ATTEND_PARTS;  // of a query: fetched and multiplied one by one

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
  // A warp scores EACH keys against OWN tiles: what it fetches for one it multiplies with all of the others.
  static constexpr int GROUPS = TILES > 1 ? 2 : 1, KEY_WARPS = ATTEND_WARPS / GROUPS;
  static constexpr int EACH = KEYS / KEY_WARPS, OWN = (TILES + GROUPS - 1) / GROUPS;
  static constexpr int SLOT = KEYS / ATTEND_WARPS;  // keys whose weights are summed first, in every form with these KEYS
  static constexpr int SLOTS = KEYS / SLOT;
  alignas(16) bf16 keys[KEYS][MLA_ROW + 8];
  alignas(16) bf16 q[BUFFERS][TILES * 16][ATTEND_PART + 8];
  alignas(16) bf16 own_weights[BUFFERS == 2 ? 1 : TILES * 16][KEYS + 8];
  float slot_top[SLOTS][TILES * 16];
  float slot_sum[SLOTS][TILES * 16];
  float top[TILES * 16];      // running maximum
  float sum[TILES * 16];      // running sum of weights
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

// Rows of the cache from key `first` on, by the whole block; groups of 16 keys that are all past `end` stay away. Eight
// lanes share a row.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_fetch_keys(const Attend& job, int first, int end, AttendShared<KEYS, TILES>& s) {
  const int column = threadIdx.x % 8 * 8;
#pragma unroll 1
  for (int r = threadIdx.x / 8; r < KEYS && first + r / 16 * 16 < end; r += ATTEND_THREADS / 8) {
    const bf16* from = job.cache + i64(min(first + r, job.capacity - 1)) * MLA_ROW + column;
#pragma unroll
    for (int c = 0; c < MLA_ROW; c += 64) copy16(&s.keys[r][column + c], from + c);
  }
  copies_commit();
}

// One part of the queries, likewise. What stands in rows past the last query is never looked at.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_fetch_queries(const Attend& job, int part, AttendShared<KEYS, TILES>& s) {
  const int column = threadIdx.x % 8 * 8, live = min(TILES * 16, job.rows * job.heads - job.first);
#pragma unroll
  for (int n = 0; n < (TILES * 16 + ATTEND_THREADS / 8 - 1) / (ATTEND_THREADS / 8); n++) {
    const int r = threadIdx.x / 8 + ATTEND_THREADS / 8 * n;
    if (r >= live) break;
    const bf16* from = job.queries + i64(job.first + r) * MLA_ROW + part * ATTEND_PART + column;
    bf16* to = &s.q[part % AttendShared<KEYS, TILES>::BUFFERS][r][column];
#pragma unroll
    for (int c = 0; c < ATTEND_PART; c += 64) copy16(to + c, from + c);
  }
  copies_commit();
}

// The tiles that this warp scores, from the first on.
template <int KEYS, int TILES>
__device__ __forceinline__ int attend_first_tile() {
  using Shared = AttendShared<KEYS, TILES>;
  return threadIdx.x / WARP / Shared::KEY_WARPS * Shared::OWN;
}

// Scores of this warp's keys against its tiles: rows g, g + 8 of a tile, keys 8n + 2t, 2t + 1.
template <int KEYS, int TILES>
using AttendScores = float[AttendShared<KEYS, TILES>::OWN][AttendShared<KEYS, TILES>::EACH / 8][4];

// Add one part's products to the scores.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_scores(AttendScores<KEYS, TILES>& c, int part, AttendShared<KEYS, TILES>& s) {
  using Shared = AttendShared<KEYS, TILES>;
  constexpr int EACH = Shared::EACH, OWN = Shared::OWN, QUERY = ATTEND_PART + 8;
  const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP % Shared::KEY_WARPS * EACH, matrix = lane / 8, r = lane % 8;
  const int tile = attend_first_tile<KEYS, TILES>();
  const bf16* q = &s.q[part % Shared::BUFFERS][16 * tile + 8 * (matrix & 1) + r][8 * (matrix >> 1)];
  auto lives = [&](int m) { return m + OWN * (Shared::GROUPS - 1) < TILES || tile + m < TILES; };
  if constexpr (EACH == 8) {
    const bf16* keys = &s.keys[own + r][part * ATTEND_PART + 8 * matrix];
#pragma unroll
    for (int k = 0; k < ATTEND_PART; k += 32) {
      u32 a[4], b[4];
      load_matrices(b, keys + k);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        load_matrices(a, q + k + 16 * half);
        mma_bf16(c[0][0], a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]);
      }
    }
  } else {
    const bf16* keys = &s.keys[own + 8 * (matrix >> 1) + r][part * ATTEND_PART + 8 * (matrix & 1)];
#pragma unroll
    for (int k = 0; k < ATTEND_PART; k += 16) {
      u32 a[OWN][4], b[EACH / 16][4];
#pragma unroll
      for (int n = 0; n < EACH / 16; n++) load_matrices(b[n], keys + 16 * n * (MLA_ROW + 8) + k);
#pragma unroll
      for (int m = 0; m < OWN; m++) {
        if (lives(m)) load_matrices(a[m], q + 16 * m * QUERY + k);
      }
#pragma unroll
      for (int m = 0; m < OWN; m++) {
        if (!lives(m)) continue;
#pragma unroll
        for (int n = 0; n < EACH / 16; n++) {
          mma_bf16(c[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[n][0], b[n][1]);
          mma_bf16(c[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[n][2], b[n][3]);
        }
      }
    }
  }
}

// Scores to weights, and the running softmax. scale: of scores, times log2(e). The weights can be read after it. Each
// step is taken for all rows before the next.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_softmax(AttendScores<KEYS, TILES>& c, int first, float scale,
                                               AttendShared<KEYS, TILES>& s) {
  using Shared = AttendShared<KEYS, TILES>;
  constexpr int EACH = Shared::EACH, ROWS = 2 * Shared::OWN, SLOT = Shared::SLOT, WIDE = EACH / SLOT;
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  const int own = warp % Shared::KEY_WARPS * EACH + 2 * t, slot = warp % Shared::KEY_WARPS * WIDE;
  const int begin = 16 * attend_first_tile<KEYS, TILES>() + g;
  auto row = [&](int i) { return begin + 8 * i; };
  auto lives = [&](int i) { return begin - g + 8 * i < TILES * 16; };
  float top[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int live = (lives(i) ? s.live[row(i)] : 0) - first;
    top[i] = -infinity();
#pragma unroll
    for (int n = 0; n < EACH / 8; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = c[i / 2][n][2 * (i % 2) + e];
        x = own + 8 * n + e < live ? x * scale : -infinity();
        top[i] = fmaxf(top[i], x);
      }
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(ALL, top[i], step));
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (t < WIDE && lives(i)) s.slot_top[slot + t][row(i)] = top[i];
  }
  __syncthreads();
  float all = 0.0f;  // of this thread's row
  if (tid < TILES * 16) {
    const float before = s.top[tid];
    all = before;
#pragma unroll
    for (int w = 0; w < Shared::SLOTS; w++) all = fmaxf(all, s.slot_top[w][tid]);
    s.rescale[tid] = exp2f(before - (all == -infinity() ? 0.0f : all));
  }
  // and again in each warp, which then needs no other barrier
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int at = lives(i) ? row(i) : 0;
    top[i] = s.top[at];
#pragma unroll
    for (int w = 0; w < Shared::SLOTS; w += 4) top[i] = fmaxf(top[i], s.slot_top[w + t][at]);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(ALL, top[i], step));
  }
  float sum[ROWS][WIDE];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const float minus = top[i] == -infinity() ? 0.0f : top[i];
#pragma unroll
    for (int w = 0; w < WIDE; w++) {
      sum[i][w] = 0.0f;
#pragma unroll
      for (int n = w * SLOT / 8; n < (w + 1) * SLOT / 8; n++) {
        const float low = exp2f(c[i / 2][n][2 * (i % 2)] - minus), high = exp2f(c[i / 2][n][2 * (i % 2) + 1] - minus);
        sum[i][w] += low + high;
        if (lives(i)) *reinterpret_cast<u32*>(s.weights(row(i)) + own + 8 * n) = pack_bf16(low, high);
      }
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
      for (int w = 0; w < WIDE; w++) sum[i][w] += __shfl_xor_sync(ALL, sum[i][w], step);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
#pragma unroll
    for (int w = 0; w < WIDE; w++) {
      if (t == w && lives(i)) s.slot_sum[slot + w][row(i)] = sum[i][w];
    }
  }
  __syncthreads();
  if (tid < TILES * 16) {
    float added = 0.0f;
#pragma unroll
    for (int w = 0; w < Shared::SLOTS; w++) added += s.slot_sum[w][tid];
    s.sum[tid] = fmaf(s.sum[tid], s.rescale[tid], added);
    s.top[tid] = all;
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
  const bf16* values = &s.keys[8 * (matrix & 1) + r][column + 8 * (matrix >> 1)];
  const bf16* weights = s.weights(8 * (matrix & 1) + r) + 8 * (matrix >> 1);
#pragma unroll(TILES == 1 ? 2 : 1)
  for (int k = 0; k < keys; k += 16) {
    u32 a[2][4], b[4][4];
    load_matrices(a[0], weights + k);
#pragma unroll
    for (int n = 0; n < 4; n++) load_matrices_transposed(b[n], values + k * (MLA_ROW + 8) + 16 * n);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      if (m + 1 < TILES) load_matrices(a[(m + 1) % 2], weights + 16 * (m + 1) * (KEYS + 8) + k);
      const u32(&x)[4] = a[m % 2];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        mma_bf16(acc[m][2 * n], x[0], x[1], x[2], x[3], b[n][0], b[n][1]);
        mma_bf16(acc[m][2 * n + 1], x[0], x[1], x[2], x[3], b[n][2], b[n][3]);
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
  constexpr int BUFFERS = AttendShared<KEYS, TILES>::BUFFERS;
  const int tid = threadIdx.x;
  const int last = min(job.first + TILES * 16, job.rows * job.heads) - 1, limit = job.limit(last);
  const int low = attend_split(job.limit(job.first)), high = attend_split(limit);

  // keys that this step does not write are fetched before the producer has finished
  const int opening = split * low, closing = min(limit, opening + low);
  bool early = opening < closing && min(closing, opening + KEYS) <= job.before;
  if (early) attend_fetch_keys(job, opening, closing, s);
  auto begin_pass = [&](int size, int end) {  // which keys each query sees in it: a division, before the wait for the first
    if (tid >= TILES * 16) return;
    const int own = job.limit(job.first + tid);
    s.live[tid] = attend_split(own) == size ? min(own, end) : 0;
  };
  begin_pass(low, min(limit, (split + 1) * low));
  if (tid < TILES * 16) s.top[tid] = -infinity(), s.sum[tid] = 0.0f;
  let_next_start_early();
  wait_for_producer();
  auto fetch_queries = [&] {
#pragma unroll
    for (int part = 0; part < BUFFERS; part++) attend_fetch_queries(job, part, s);
  };
  if (early) fetch_queries();  // before all else

  float acc[TILES][8][4] = {};
  bool again = false;
#pragma unroll 1
  for (int size = low; size <= high; size += max(high - low, 1)) {
    const int end = min(limit, (split + 1) * size);
    if (size > low) begin_pass(size, end);
#pragma unroll 1
    for (int first = split * size; first < end; first += KEYS) {
      if (again) __syncthreads();  // the chunk before is done with
      if (!early) attend_fetch_keys(job, first, end, s), fetch_queries();
      early = false;
      AttendScores<KEYS, TILES> c = {};
      copies_wait<BUFFERS - 1>();
      __syncthreads();
      attend_scores<KEYS, TILES>(c, 0, s);
      if constexpr (BUFFERS == 2) {
        __syncthreads();
        attend_fetch_queries(job, 2, s);
      }
      copies_wait<1>();
      __syncthreads();
      attend_scores<KEYS, TILES>(c, 1, s);
      copies_wait<0>();
      __syncthreads();
      attend_scores<KEYS, TILES>(c, 2, s);
      attend_softmax<KEYS, TILES>(c, first, scale, s);
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
constexpr int MERGE_COLUMNS = 8 * WARP;  // of a block that merges and no more: a run is a warp
constexpr int MERGE_LANES = (ATTEND_SPLITS + WARP - 1) / WARP;  // splits that a lane weighs

template <int COLUMNS>
constexpr int MERGE_THREADS = MERGE_RUNS * COLUMNS / 8;

template <int COLUMNS>
struct MergeShared {
  alignas(16) float parts[MERGE_RUNS][COLUMNS + 4];
  uint2 stats[ATTEND_SPLITS];  // maximum and sum of weights of each split
};

// Where a thread of a merge reads: worked out before the wait, a division among it. limit: keys that the query sees; all:
// queries that a split has room for; begin: first column.
template <int COLUMNS>
struct MergePlaces {
  int num;  // splits
  const bf16 *stats, *part[MERGE_RUN];

  __device__ __forceinline__ MergePlaces(const bf16* partial, const float* all_stats, int query, int all, int limit,
                                         int begin) {
    const int tid = threadIdx.x, size = attend_split(limit), first = tid / (COLUMNS / 8) * MERGE_RUN;
    num = (limit + size - 1) / size;
    stats = reinterpret_cast<const bf16*>(all_stats + 2 * (min(tid, num - 1) * all + query));
    settle_here(num), settle_here(stats);
#pragma unroll
    for (int i = 0; i < MERGE_RUN; i++) {
      const int split = min(first + i, num - 1);
      part[i] = partial + (split * all + query) * MLA_LATENT + begin + tid % (COLUMNS / 8) * 8;
      settle_here(part[i]);
    }
  }
};

// Merge COLUMNS values of one query into as many of `out`, by MERGE_THREADS<COLUMNS> threads.
template <int COLUMNS>
__device__ __forceinline__ void attend_merge(const MergePlaces<COLUMNS>& from, bf16* out, MergeShared<COLUMNS>& s) {
  const int tid = threadIdx.x, lane = tid % WARP, run = tid / (COLUMNS / 8), column = tid % (COLUMNS / 8) * 8;
  const int num = from.num;
  if (tid < ATTEND_SPLITS) copy8(&s.stats[tid], from.stats);  // a store would come before the last of the loads
  copies_commit();
  uint4 part[MERGE_RUN];
#pragma unroll
  for (int i = 0; i < MERGE_RUN; i++) part[i] = load_activations(from.part[i]);
  if (tid < ATTEND_SPLITS) copies_wait<0>();  // in a branch: otherwise it is waited for before the last of the loads
  __syncthreads();  // also for the assembler: without it most means are asked for only when the maxima are there
  float2 found[MERGE_LANES];
#pragma unroll
  for (int i = 0; i < MERGE_LANES; i++) {
    const int n = i * WARP + lane;
    const uint2 words = s.stats[min(n, ATTEND_SPLITS - 1)];
    const bool live = n < num;
    found[i] = make_float2(live ? __uint_as_float(words.x) : -infinity(), live ? __uint_as_float(words.y) : 0.0f);
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
  if (tid >= COLUMNS / 2) return;
  float low = 0.0f, high = 0.0f;
#pragma unroll
  for (int r = 0; r < MERGE_RUNS; r++) low += s.parts[r][2 * tid], high += s.parts[r][2 * tid + 1];
  *reinterpret_cast<u32*>(out + 2 * tid) = pack_bf16(low / total, high / total);
}
