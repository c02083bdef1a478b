// Latent attention of a window over the cache, split along the keys: partial results, then a merge in order.
//
// The window's queries (row by row, head by head) lie in tiles of 16; a block has one split of the keys and up to TILES
// tiles. How keys are split is a function of the query's own limit, and what a query's sums go through is the same in
// every form, so its bits do not depend on which others run beside it.
#pragma once
#include "arch.cuh"

// A settled word that a whole block wants. By one warp: all warps of all blocks would queue for its line at one place of L2.
__device__ __forceinline__ i64 settled_for_all(const i64* from) {
  __shared__ i64 word;
  if (threadIdx.x == 0) word = load_settled(from);
  __syncthreads();
  return word;
}

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
// fall into different banks. A single tile's queries never come here, their place is that of the weights. Where TILES are
// many, the third part of the queries takes the place of the first, and the weights that of the second.
template <int KEYS, int TILES>
struct AttendShared {
  static constexpr int BUFFERS = TILES == 1 ? 1 : TILES > 3 ? 2 : 3;
  // A warp scores EACH keys against OWN tiles at most: what it fetches for one it multiplies with all of the others. Of a
  // single tile only SCORERS of the warps do: each has all of the queries, and its sums are enough to hide one another.
  static constexpr int GROUPS = TILES > 1 ? 2 : 1, KEY_WARPS = 4, SCORERS = GROUPS * KEY_WARPS;
  static constexpr int EACH = KEYS / KEY_WARPS, OWN = (TILES + GROUPS - 1) / GROUPS;
  static constexpr int SLOT = KEYS / ATTEND_WARPS;  // keys whose weights are summed first, in every form with these KEYS
  static constexpr int SLOTS = KEYS / SLOT;
  alignas(16) bf16 keys[KEYS][MLA_ROW + 8];
  alignas(16) bf16 q[BUFFERS][TILES * 16][ATTEND_PART + 8];
  alignas(16) bf16 own_weights[BUFFERS < 3 ? 1 : TILES * 16][KEYS + 8];
  float slot_top[SLOTS][TILES * 16];
  float slot_sum[SLOTS][TILES * 16];
  float top[TILES * 16];      // running maximum
  float sum[TILES * 16];      // running sum of weights
  float rescale[TILES * 16];  // of what was summed before this chunk
  int live[TILES * 16];       // end of the keys that the query sees in this pass

  __device__ bf16* weights(int row) {
    if constexpr (BUFFERS < 3) return &q[BUFFERS - 1][0][0] + row * (KEYS + 8);
    return own_weights[row];
  }
};

// What a block works on.
struct Attend {
  const bf16* queries;  // [rows * H, 576], or for blocks of one tile: tiles of fragments
  const bf16* cache;    // [capacity, 576]
  int heads, rows, capacity;
  int before;  // rows of the cache that stood before the window: row r of the window sees before + r + 1
  int first, end;  // queries of this block

  __device__ int limit(int query) const { return query < end ? before + query / heads + 1 : 0; }
  __device__ int tiles() const { return (end - first + 15) / 16; }
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
  const int column = threadIdx.x % 8 * 8, live = job.end - job.first;
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

// Queries for blocks of one tile lie as the tensor core takes them: tiles of 16 queries by 16 columns in which lane (g, t)
// finds its 16 bytes, queries g and g + 8 at columns 2t, 2t + 1, then both at 2t + 8, 2t + 9. Such a tile's queries come
// straight into registers.
constexpr int ATTEND_STEPS = MLA_ROW / 16, ATTEND_FRAGMENT = 16 * 16;
__device__ __forceinline__ int attend_place(int query, int column) {
  return (query / 16 * ATTEND_STEPS + column / 16) * ATTEND_FRAGMENT + query % 8 * 32 + column % 8 / 2 * 8 +
         query % 16 / 8 * 2 + column % 16 / 8 * 4 + column % 2;
}

// The tiles that this warp scores: from which one on, and how many.
struct AttendOwn {
  int tile, count;

  template <int KEYS, int TILES>
  static __device__ __forceinline__ AttendOwn of(const Attend& job) {
    using Shared = AttendShared<KEYS, TILES>;
    if constexpr (TILES == 1) return {0, int(threadIdx.x) < Shared::SCORERS * WARP ? 1 : 0};
    const int all = job.tiles(), half = (all + 1) / 2, group = threadIdx.x / WARP / Shared::KEY_WARPS;
    return {group * half, group ? all - half : half};
  }
};

// Scores of this warp's keys against its tiles: rows g, g + 8 of a tile, keys 8n + 2t, 2t + 1.
template <int KEYS, int TILES>
using AttendScores = float[AttendShared<KEYS, TILES>::OWN][AttendShared<KEYS, TILES>::EACH / 8][4];

// This lane's address for fragments of this warp's keys: two instructions' columns in four matrices of 8 keys.
template <int KEYS, int TILES>
__device__ __forceinline__ const bf16* attend_keys(const AttendShared<KEYS, TILES>& s) {
  using Shared = AttendShared<KEYS, TILES>;
  const int lane = threadIdx.x % WARP, matrix = lane / 8;
  const int own = threadIdx.x / WARP % Shared::KEY_WARPS * Shared::EACH;
  return &s.keys[own + 8 * (matrix >> 1) + lane % 8][8 * (matrix & 1)];
}

// All scores of a single tile. AHEAD: steps whose fragments there are registers for.
template <int KEYS, int AHEAD>
__device__ __forceinline__ void attend_scores(AttendScores<KEYS, 1>& c, const uint4 (&q)[ATTEND_STEPS],
                                              AttendShared<KEYS, 1>& s) {
  constexpr int EACH = AttendShared<KEYS, 1>::EACH;
  const bf16* keys = attend_keys<KEYS, 1>(s);
  u32 b[AHEAD][EACH / 16][4];
  auto fetch = [&](int step) {
#pragma unroll
    for (int n = 0; n < EACH / 16; n++) load_matrices(b[step % AHEAD][n], keys + 16 * n * (MLA_ROW + 8) + 16 * step);
  };
#pragma unroll
  for (int step = 0; step < AHEAD - 1; step++) fetch(step);
#pragma unroll
  for (int step = 0; step < ATTEND_STEPS; step++) {
    if (step + AHEAD - 1 < ATTEND_STEPS) fetch(step + AHEAD - 1);
#pragma unroll
    for (int n = 0; n < EACH / 16; n++) {
      const u32(&x)[4] = b[step % AHEAD][n];
      mma_bf16(c[0][2 * n], q[step].x, q[step].y, q[step].z, q[step].w, x[0], x[1]);
      mma_bf16(c[0][2 * n + 1], q[step].x, q[step].y, q[step].z, q[step].w, x[2], x[3]);
    }
  }
}

// Add one part's products to the scores of COUNT tiles. ahead: the next step's fragments are fetched before this one's
// products, where there are registers for them.
template <int KEYS, int TILES, int COUNT, bool ahead>
__device__ __forceinline__ void attend_scores(AttendScores<KEYS, TILES>& c, int tile, int part,
                                              AttendShared<KEYS, TILES>& s) {
  using Shared = AttendShared<KEYS, TILES>;
  constexpr int EACH = Shared::EACH, QUERY = ATTEND_PART + 8, STEPS = ATTEND_PART / 16, SETS = ahead ? 2 : 1;
  const int lane = threadIdx.x % WARP, matrix = lane / 8;
  const bf16* q = &s.q[part % Shared::BUFFERS][16 * tile + 8 * (matrix & 1) + lane % 8][8 * (matrix >> 1)];
  const bf16* keys = attend_keys<KEYS, TILES>(s) + part * ATTEND_PART;
  u32 a[SETS][COUNT][4], b[SETS][EACH / 16][4];
  auto fetch = [&](int step) {
#pragma unroll
    for (int n = 0; n < EACH / 16; n++) load_matrices(b[step % SETS][n], keys + 16 * n * (MLA_ROW + 8) + 16 * step);
#pragma unroll
    for (int m = 0; m < COUNT; m++) load_matrices(a[step % SETS][m], q + 16 * m * QUERY + 16 * step);
  };
  if (ahead) fetch(0);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    if (!ahead) fetch(step);
    if (ahead && step + 1 < STEPS) fetch(step + 1);
#pragma unroll
    for (int m = 0; m < COUNT; m++) {
      const u32(&x)[4] = a[step % SETS][m];
#pragma unroll
      for (int n = 0; n < EACH / 16; n++) {
        const u32(&y)[4] = b[step % SETS][n];
        mma_bf16(c[m][2 * n], x[0], x[1], x[2], x[3], y[0], y[1]);
        mma_bf16(c[m][2 * n + 1], x[0], x[1], x[2], x[3], y[2], y[3]);
      }
    }
  }
}

// The same for as many tiles as this warp has.
template <int KEYS, int TILES, bool ahead>
__device__ __forceinline__ void attend_own_scores(AttendScores<KEYS, TILES>& c, const AttendOwn& own, int part,
                                                  AttendShared<KEYS, TILES>& s) {
  if constexpr (AttendShared<KEYS, TILES>::OWN > 2) {
    if (own.count == 3) attend_scores<KEYS, TILES, 3, ahead>(c, own.tile, part, s);
  }
  if (own.count == 2) attend_scores<KEYS, TILES, 2, ahead>(c, own.tile, part, s);
  if (own.count == 1) attend_scores<KEYS, TILES, 1, ahead>(c, own.tile, part, s);
}

// Scores to weights, and the running softmax: tops, a barrier, weights, a barrier; and for each row a thread that keeps its
// running maximum and sum. Each step is taken for all rows of a warp before the next.
template <int KEYS, int TILES>
struct AttendSoftmax {
  using Shared = AttendShared<KEYS, TILES>;
  using Scores = AttendScores<KEYS, TILES>;
  static constexpr int EACH = Shared::EACH, ROWS = 2 * Shared::OWN, SLOT = Shared::SLOT, WIDE = EACH / SLOT;
  Shared& s;
  int begin, live, key, slot;  // first row, rows, first key, first slot of this thread

  __device__ __forceinline__ AttendSoftmax(const AttendOwn& own, Shared& shared) : s(shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % Shared::KEY_WARPS;
    begin = 16 * own.tile + lane / 4, live = 2 * own.count;
    key = warp * EACH + 2 * (lane % 4), slot = warp * WIDE;
  }
  __device__ int row(int i) const { return begin + 8 * i; }
  __device__ bool lives(int i) const { return TILES == 1 || i < live; }

  // Scores of keys that are not seen become -inf; each slot's maximum, scaled. first: of the chunk's keys.
  __device__ __forceinline__ void tops(Scores& c, int first, float scale) {
    const int t = threadIdx.x % 4;
    float top[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int seen = (lives(i) ? s.live[row(i)] : 0) - first;
      top[i] = -infinity();
#pragma unroll
      for (int n = 0; n < EACH / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = c[i / 2][n][2 * (i % 2) + e];
          x = key + 8 * n + e < seen ? x : -infinity();
          top[i] = fmaxf(top[i], x);
        }
      }
    }
    over_lanes(top);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (t < WIDE && lives(i)) s.slot_top[slot + t][row(i)] = top[i] * scale;
    }
  }
  __device__ __forceinline__ void weights(const Scores& c, float scale) {
    const int t = threadIdx.x % 4;
    float top[ROWS];  // again in each warp, which then needs no other barrier
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int at = lives(i) ? row(i) : 0;
      top[i] = s.top[at];
#pragma unroll
      for (int w = 0; w < Shared::SLOTS; w += 4) top[i] = fmaxf(top[i], s.slot_top[w + t][at]);
    }
    over_lanes(top);
    float sum[ROWS][WIDE];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const float by = top[i] == -infinity() ? 0.0f : -top[i];
#pragma unroll
      for (int w = 0; w < WIDE; w++) {
        sum[i][w] = 0.0f;
#pragma unroll
        for (int n = w * SLOT / 8; n < (w + 1) * SLOT / 8; n++) {
          const float low = quick_exp2(fmaf(c[i / 2][n][2 * (i % 2)], scale, by));
          const float high = quick_exp2(fmaf(c[i / 2][n][2 * (i % 2) + 1], scale, by));
          sum[i][w] += low + high;
          if (lives(i)) *reinterpret_cast<u32*>(s.weights(row(i)) + key + 8 * n) = pack_bf16(low, high);
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
  }
  // For row `at` if there is one, after the first barrier: its maximum from now on.
  __device__ __forceinline__ float keep_top(int at) {
    if (at >= TILES * 16) return 0.0f;
    const float before = s.top[at];
    float all = before;
#pragma unroll
    for (int w = 0; w < Shared::SLOTS; w++) all = fmaxf(all, s.slot_top[w][at]);
    s.rescale[at] = exp2f(before - (all == -infinity() ? 0.0f : all));
    return all;
  }
  // And after the second.
  __device__ __forceinline__ void keep_sum(int at, float top) {
    if (at >= TILES * 16) return;
    float added = 0.0f;
#pragma unroll
    for (int w = 0; w < Shared::SLOTS; w++) added += s.slot_sum[w][at];
    s.sum[at] = fmaf(s.sum[at], s.rescale[at], added);
    s.top[at] = top;
  }

 private:
  static __device__ __forceinline__ void over_lanes(float (&top)[ROWS]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(ALL, top[i], step));
    }
  }
};

// Bring what was summed before this chunk to its maximum, or begin with nothing.
template <bool again, int KEYS, int TILES>
__device__ __forceinline__ void attend_rescale(float (&acc)[TILES][8][4], AttendShared<KEYS, TILES>& s) {
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    const int row = 16 * m + threadIdx.x % WARP / 4;
    const float low = again ? s.rescale[row] : 0.0f, high = again ? s.rescale[row + 8] : 0.0f;
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = again ? acc[m][n][i] * (i < 2 ? low : high) : 0.0f;
    }
  }
}

// Values of this warp's 64 columns, 16 keys from `key` on, as fragments.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend_values(u32 (&v)[4][4], int key, const AttendShared<KEYS, TILES>& s) {
  const int lane = threadIdx.x % WARP, column = threadIdx.x / WARP * 64, matrix = lane / 8;
  const bf16* from = &s.keys[key + 8 * (matrix & 1) + lane % 8][column + 8 * (matrix >> 1)];
#pragma unroll
  for (int n = 0; n < 4; n++) load_matrices_transposed(v[n], from + 16 * n);
}

__device__ __forceinline__ void attend_add(float (&acc)[8][4], const u32 (&a)[4], const u32 (&v)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    mma_bf16(acc[2 * n], a[0], a[1], a[2], a[3], v[n][0], v[n][1]);
    mma_bf16(acc[2 * n + 1], a[0], a[1], a[2], a[3], v[n][2], v[n][3]);
  }
}

// Add weights · values to this warp's 64 columns, for COUNT tiles. keys: live ones of the chunk. ahead: the
// next values are fetched before the products with these.
template <int COUNT, bool ahead, int KEYS, int TILES>
__device__ __forceinline__ void attend_mix(float (&acc)[TILES][8][4], int keys, AttendShared<KEYS, TILES>& s) {
  const int lane = threadIdx.x % WARP, matrix = lane / 8;
  const bf16* weights = s.weights(8 * (matrix & 1) + lane % 8) + 8 * (matrix >> 1);
  u32 v[2][4][4], a[2][4];
  if (ahead) load_matrices(a[0], weights), attend_values<KEYS, TILES>(v[0], 0, s);
#pragma unroll(ahead ? KEYS / 16 : 1)
  for (int step = 0; step < KEYS / 16; step++) {
    const int k = 16 * step, set = ahead ? step % 2 : 0;
    if (k >= keys) break;
    if (!ahead) load_matrices(a[0], weights + k), attend_values<KEYS, TILES>(v[0], k, s);
    if (ahead && k + 16 < KEYS) attend_values<KEYS, TILES>(v[(step + 1) % 2], k + 16, s);
#pragma unroll
    for (int m = 0; m < COUNT; m++) {
      const int now = ahead ? step * COUNT + m : m;  // of all that are multiplied
      if (m + 1 < COUNT) load_matrices(a[(now + 1) % 2], weights + 16 * (m + 1) * (KEYS + 8) + k);
      if (ahead && m + 1 == COUNT && k + 16 < KEYS) load_matrices(a[(now + 1) % 2], weights + k + 16);
      attend_add(acc[m], a[now % 2], v[set]);
    }
  }
}

// All values that a warp multiplies in a chunk, where a block has one tile: there are registers for them, and the warps
// that score nothing fetch them meanwhile.
template <int KEYS>
struct AttendValues {
  u32 v[KEYS / 16][4][4];

  __device__ void load(const AttendShared<KEYS, 1>& s) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) attend_values<KEYS, 1>(v[step], 16 * step, s);
  }
  __device__ void mix(float (&acc)[8][4], int keys, AttendShared<KEYS, 1>& s) const {
    const int lane = threadIdx.x % WARP, matrix = lane / 8;
    const bf16* weights = s.weights(8 * (matrix & 1) + lane % 8) + 8 * (matrix >> 1);
    u32 a[KEYS / 16][4];
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) load_matrices(a[step], weights + 16 * step);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      if (16 * step < keys) attend_add(acc, a[step], v[step]);
    }
  }
};

// Lane t of four holds word t of each of four items; it gets all words of item t.
__device__ __forceinline__ uint4 turn_words(u32 (&v)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool odd = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const u32 got = __shfl_xor_sync(ALL, odd ? v[i] : v[i + step], step);
      v[i] = odd ? got : v[i], v[i + step] = odd ? v[i + step] : got;
    }
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// Each query's mean over the split's keys, in bf16, and the maximum and sum of its weights. Queries that saw none are
// left out.
template <int TILES, class Shared>
__device__ __forceinline__ void attend_store(float (&acc)[TILES][8][4], const Attend& job, int split, bf16* partial,
                                             float* stats, Shared& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  const i64 place = i64(split) * ROW_TILE * job.heads + job.first;
  const int queries = job.end - job.first;
  if (tid < queries && s.sum[tid] > 0.0f) {
    *reinterpret_cast<float2*>(stats + 2 * (place + tid)) = make_float2(s.top[tid], s.sum[tid]);
  }
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    if (16 * m >= queries) break;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * m + g + 8 * half;
      const float sum = s.sum[row], by = __fdividef(1.0f, sum);
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = pack_bf16(acc[m][n + i][2 * half] * by, acc[m][n + i][2 * half + 1] * by);
        const uint4 out = turn_words(v);
        if (row < queries && sum > 0.0f) {
          store16(partial + (place + row) * MLA_LATENT + 64 * warp + 8 * (n + t), out);
        }
      }
    }
  }
}

// Keys `first` .. `end` of a split, KEYS at most: add their part to acc, or begin with it. early: the keys are on their
// way. queries: this lane's part of a single tile's. Where nothing was summed before, the registers of acc are free until
// the products with the values, and hold fragments that are fetched ahead.
template <int KEYS, int TILES, bool again>
__device__ __forceinline__ void attend_chunk(float (&acc)[TILES][8][4], const Attend& job, const AttendOwn& own,
                                             const bf16* queries, bool early, int first, int end, float scale,
                                             AttendShared<KEYS, TILES>& s) {
  constexpr int BUFFERS = AttendShared<KEYS, TILES>::BUFFERS;
  const int keys = min(KEYS, end - first), tid = threadIdx.x;
  AttendScores<KEYS, TILES> c = {};
  AttendSoftmax<KEYS, TILES> softmax(own, s);
  if constexpr (TILES == 1) {
    if (own.count) {  // both ways meet the same three barriers
      uint4 q[ATTEND_STEPS];
#pragma unroll
      for (int step = 0; step < ATTEND_STEPS; step++) q[step] = load_activations(queries + ATTEND_FRAGMENT * step);
      if (!early) attend_fetch_keys(job, first, end, s);
      copies_wait<0>();
      __syncthreads();
      attend_scores<KEYS, again ? 2 : 3>(c, q, s);
      softmax.tops(c, first, scale);
      __syncthreads();
      softmax.weights(c, scale);
      __syncthreads();
      attend_rescale<again>(acc, s);
      attend_mix<1, true>(acc, keys, s);
    } else {
      const int row = tid - AttendShared<KEYS, TILES>::SCORERS * WARP;  // that this thread keeps
      if (!early) attend_fetch_keys(job, first, end, s);
      copies_wait<0>();
      __syncthreads();
      AttendValues<KEYS> values;
      values.load(s);
      __syncthreads();
      const float top = softmax.keep_top(row);
      __syncthreads();
      softmax.keep_sum(row, top);
      attend_rescale<again>(acc, s);
      values.mix(acc[0], keys, s);
    }
  } else {
    if (!early) attend_fetch_keys(job, first, end, s);
#pragma unroll
    for (int part = 0; part < BUFFERS; part++) attend_fetch_queries(job, part, s);
    copies_wait<BUFFERS - 1>();
    __syncthreads();
    attend_own_scores<KEYS, TILES, !again>(c, own, 0, s);
    if constexpr (BUFFERS == 2) {
      __syncthreads();
      attend_fetch_queries(job, 2, s);
    }
    copies_wait<1>();
    __syncthreads();
    attend_own_scores<KEYS, TILES, !again>(c, own, 1, s);
    copies_wait<0>();
    __syncthreads();
    attend_own_scores<KEYS, TILES, !again>(c, own, 2, s);
    softmax.tops(c, first, scale);
    __syncthreads();
    const float top = softmax.keep_top(tid);
    softmax.weights(c, scale);
    __syncthreads();
    softmax.keep_sum(tid, top);
    attend_rescale<again>(acc, s);
    if (job.tiles() == TILES) {
      attend_mix<TILES, !again>(acc, keys, s);
    } else {
      attend_mix<TILES - 1, !again>(acc, keys, s);
    }
  }
}

// One block: split `split` of the queries job.first .. job.end. partial [SPLITS, 16 H, 512] bf16, stats [SPLITS, 16 H,
// 2]. scale: of scores, times log2(e). A window has splits of two sizes at most; each size has its own pass, which its
// queries take part in and no others.
template <int KEYS, int TILES>
__device__ __forceinline__ void attend(const Attend& job, int split, float scale, bf16* partial, float* stats,
                                       AttendShared<KEYS, TILES>& s) {
  const int tid = threadIdx.x, lane = tid % WARP;
  const int limit = job.limit(job.end - 1);
  const int low = attend_split(job.limit(job.first)), high = attend_split(limit);

  // keys that this step does not write are fetched before the producer has finished
  int size = low, first = split * low, end = min(limit, first + low);
  bool early = first < end && min(end, first + KEYS) <= job.before;
  if (early) attend_fetch_keys(job, first, end, s);
  auto begin_pass = [&] {  // which keys each query sees in it: a division, before the wait for the first
    if (tid >= TILES * 16) return;
    const int own = job.limit(job.first + tid);
    s.live[tid] = attend_split(own) == size ? min(own, end) : 0;
  };
  begin_pass();
  if (tid < TILES * 16) s.top[tid] = -infinity(), s.sum[tid] = 0.0f;
  const AttendOwn own = AttendOwn::of<KEYS, TILES>(job);
  auto mine = [&] { return job.queries + i64(job.first) * MLA_ROW + lane * 8; };  // of a single tile's
  const bf16* queries = mine();
  settle_here(queries);
  let_next_start_early();
  wait_for_producer();

  if (first >= end) return;
  float acc[TILES][8][4];
  attend_chunk<KEYS, TILES, false>(acc, job, own, queries, early, first, end, scale, s);
#pragma unroll 1
  while (true) {
    first += KEYS;
    if (first >= end) {
      if (size == high) break;
      size = high, first = split * size, end = min(limit, first + size);
      if (first >= end) break;
      begin_pass();
    }
    __syncthreads();  // the chunk before is done with
    attend_chunk<KEYS, TILES, true>(acc, job, own, mine(), false, first, end, scale, s);
  }
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
  *reinterpret_cast<u32*>(out + 2 * tid) = pack_bf16(__fdividef(low, total), __fdividef(high, total));
}
