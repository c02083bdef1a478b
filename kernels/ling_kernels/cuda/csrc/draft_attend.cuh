// Attention of a DSpark block over its context and itself (dspark.md section 4). Memory is all it waits for: each warp
// walks its own keys, 16 at a time, through its own ring, with no barrier until the block's warps are added up.
#pragma once
#include "arch.cuh"

constexpr int DRAFT_HEAD = 128;
constexpr int DRAFT_WARPS = 4, DRAFT_THREADS = DRAFT_WARPS * WARP;
constexpr int DRAFT_KEYS = 16;    // of a step
constexpr int DRAFT_STAGES = 2;   // steps of a warp on their way
constexpr int DRAFT_SPLITS = 64;  // most splits of the context
constexpr int DRAFT_PITCH = DRAFT_HEAD + 8;

// A lane's four values of a head's norm; a small weight that is cold at each step, so it is asked for before the wait.
struct DraftNorm {
  bf16 x[4];

  __device__ void load(const bf16* norm) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = load_settled(norm + threadIdx.x % WARP * 4 + i);
  }
};

// Heads' vectors, four values a lane, normed.
template <int COUNT>
__device__ __forceinline__ void draft_scale(float (&x)[COUNT][4], const DraftNorm (&norm)[COUNT], float eps) {
  float sum[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum[i] = (x[i][0] * x[i][0] + x[i][1] * x[i][1]) + (x[i][2] * x[i][2] + x[i][3] * x[i][3]);
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum[i] += __shfl_xor_sync(ALL, sum[i], step);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float scale = rsqrtf(sum[i] / DRAFT_HEAD + eps);
#pragma unroll
    for (int e = 0; e < 4; e++) x[i][e] = x[i][e] * scale * to_float(norm[i].x[e]);
  }
}

// And turned by the angles of their positions, tables cos‖sin. Values past rope_dim stay.
template <bool NEOX, int COUNT>
__device__ __forceinline__ void draft_turn_as(float (&x)[COUNT][4], const float* const (&tables)[COUNT], int rope_dim) {
  const int lane = threadIdx.x % WARP, first = 4 * lane, half = rope_dim / 2;
  const bool second = NEOX && first >= half, turns = first < rope_dim;
  const int partner = (second ? lane - half / 4 : lane + half / 4) & (WARP - 1);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float other[4], turned[4];
#pragma unroll
    for (int e = 0; e < 4; e++) other[e] = NEOX ? __shfl_sync(ALL, x[i][e], partner) : x[i][e ^ 1];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int pair = turns ? NEOX ? first + e - (second ? half : 0) : (first + e) / 2 : 0;
      const bool behind = NEOX ? second : e % 2 == 1;
      turned[e] = x[i][e] * tables[i][pair] + (behind ? other[e] : -other[e]) * tables[i][half + pair];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) x[i][e] = turns ? turned[e] : x[i][e];
  }
}

template <int COUNT>
__device__ __forceinline__ void draft_turn(float (&x)[COUNT][4], const float* const (&tables)[COUNT], int rope_dim,
                                           bool neox) {
  if (neox) {
    draft_turn_as<true>(x, tables, rope_dim);
  } else {
    draft_turn_as<false>(x, tables, rope_dim);
  }
}

__device__ __forceinline__ void draft_unpack(float (&x)[4], uint2 v) {
  x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
}

__device__ __forceinline__ uint2 draft_pack(const float (&x)[4]) {
  return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

struct DraftStage {
  alignas(16) bf16 keys[DRAFT_KEYS][DRAFT_PITCH];
  alignas(16) bf16 values[DRAFT_KEYS][DRAFT_PITCH];
};

struct DraftShared {
  DraftStage ring[DRAFT_WARPS][DRAFT_STAGES];  // in the end each warp's sums, float [16][DRAFT_PITCH]
  DraftStage own;                              // the block's rows
  alignas(16) bf16 q[16][DRAFT_PITCH];
  alignas(16) float angles[ROW_TILE][DRAFT_HEAD];
  float top[DRAFT_WARPS][16];
  float sum[DRAFT_WARPS][16];
};

// What a block works on: one key head's queries, a tile of 16 of them (head by head, row by row), and a split of the
// context.
struct Draft {
  const bf16* proj;  // [rows, (Hq + 2 Hkv) * 128], heads q‖k‖v
  const bf16* q_norm;
  const bf16* k_norm;
  const float* rope;   // [C, rope_dim]
  const bf16* keys;    // [C, Hkv, 128]; values likewise
  const bf16* values;
  int rope_dim, query_heads, kv_heads, rows, capacity;
  int context;         // rows that the block sees beside its own
  int kv, tile;
  bool neox;
  float eps;
  float scale;         // of scores, times log2(e)

  __device__ int each() const { return query_heads / kv_heads; }
  __device__ int queries() const { return min(16, each() * rows - 16 * tile); }
  __device__ int stride() const { return (query_heads + 2 * kv_heads) * DRAFT_HEAD; }
};

// Keys in a split of a context: whole steps of a block, as few as `splits` of them allow.
__device__ __forceinline__ int draft_split(int context, int splits) {
  return (context + splits * DRAFT_KEYS - 1) / (splits * DRAFT_KEYS) * DRAFT_KEYS;
}

__device__ __forceinline__ void draft_fetch(const Draft& job, int first, int end, DraftStage& stage) {
  const int lane = threadIdx.x % WARP, c = lane % 16 * 8;
  if (first < end) {
#pragma unroll
    for (int n = 0; n < DRAFT_KEYS / 2; n++) {
      const int r = 2 * n + lane / 16;
      const i64 at = (i64(min(first + r, job.capacity - 1)) * job.kv_heads + job.kv) * DRAFT_HEAD + c;
      copy16(&stage.keys[r][c], job.keys + at);
      copy16(&stage.values[r][c], job.values + at);
    }
  }
  copies_commit();
}

// Queries of the tile, and the block's own keys and values if `own`, from the projection to shared memory. A warp takes
// several vectors side by side: what each goes through is one long chain.
__device__ __forceinline__ void draft_inputs(const Draft& job, bool own, const DraftNorm& q_norm, const DraftNorm& k_norm,
                                             DraftShared& s) {
  constexpr int AT_ONCE = 4;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, queries = job.queries();
  const int jobs = queries + (own ? job.rows : 0);
  const u32 by_rows = 65536 / u32(job.rows) + 1;  // query * by_rows >> 16 is query / rows for these small numbers
  for (int base = 0; base < jobs; base += AT_ONCE * DRAFT_WARPS) {  // uniform, so that the chains stay side by side
    const int first = base + warp;
    uint2 found[AT_ONCE];
    int rows[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = min(first + i * DRAFT_WARPS, jobs - 1), query = 16 * job.tile + at;  // those past the end: the last again
      const int of = int(u32(query) * by_rows >> 16);
      rows[i] = at < queries ? query - of * job.rows : at - queries;
      const int head = at < queries ? job.kv * job.each() + of : job.query_heads + job.kv;
      found[i] = load_activations4(job.proj + i64(rows[i]) * job.stride() + head * DRAFT_HEAD + 4 * lane);
    }
    float x[AT_ONCE][4];
    DraftNorm norm[AT_ONCE];
    const float* tables[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const bool asks = first + i * DRAFT_WARPS < queries;
#pragma unroll
      for (int e = 0; e < 4; e++) norm[i].x[e] = asks ? q_norm.x[e] : k_norm.x[e];
      draft_unpack(x[i], found[i]);
      tables[i] = s.angles[rows[i]];
    }
    draft_scale(x, norm, job.eps);
    draft_turn(x, tables, job.rope_dim, job.neox);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = first + i * DRAFT_WARPS;
      bf16* to = at < queries ? s.q[at] : s.own.keys[at - queries];
      if (at < jobs) *reinterpret_cast<uint2*>(to + 4 * lane) = draft_pack(x[i]);
    }
  }
  if (!own) return;
  for (int i = threadIdx.x; i < DRAFT_KEYS * DRAFT_HEAD / 8; i += DRAFT_THREADS) {
    const int row = i / (DRAFT_HEAD / 8), c = i % (DRAFT_HEAD / 8) * 8;
    const int column = (job.query_heads + job.kv_heads + job.kv) * DRAFT_HEAD + c;
    const uint4 v = load16(job.proj + i64(row) * job.stride() + column, row < job.rows);
    *reinterpret_cast<uint4*>(&s.own.values[row][c]) = v;  // zeros past the last row: their weight is zero
  }
}

// A warp's part of 16 queries: rows g and g + 8 of a lane.
struct DraftSums {
  float acc[DRAFT_HEAD / 8][4];
  float top[2], sum[2];

  // keys: how many of the stage's are seen, one at least
  __device__ __forceinline__ void add(const u32 (&q)[DRAFT_HEAD / 16][4], const DraftStage& stage, int keys, float scale) {
    const int lane = threadIdx.x % WARP, t = lane % 4, matrix = lane / 8, r = lane % 8;
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < DRAFT_HEAD / 16; k++) {
      u32 b[4];
      load_matrices(b, &stage.keys[8 * (matrix >> 1) + r][16 * k + 8 * (matrix & 1)]);
      mma_bf16(c[0], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
      mma_bf16(c[1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
    }
    u32 a[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float p[2][2], high = -infinity();
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          p[n][e] = 8 * n + 2 * t + e < keys ? c[n][2 * half + e] * scale : -infinity();
          high = fmaxf(high, p[n][e]);
        }
      }
      high = fmaxf(high, __shfl_xor_sync(ALL, high, 1));
      high = fmaxf(fmaxf(high, __shfl_xor_sync(ALL, high, 2)), top[half]);
      const float by = exp2f(top[half] - high);
      top[half] = high;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        p[n][0] = exp2f(p[n][0] - high), p[n][1] = exp2f(p[n][1] - high);
        a[2 * n + half] = pack_bf16(p[n][0], p[n][1]);
      }
      sum[half] = fmaf(sum[half], by, (p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
#pragma unroll
      for (int n = 0; n < DRAFT_HEAD / 8; n++) acc[n][2 * half] *= by, acc[n][2 * half + 1] *= by;
    }
#pragma unroll
    for (int n = 0; n < DRAFT_HEAD / 8; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, &stage.values[8 * (matrix & 1) + r][8 * n + 8 * (matrix >> 1)]);
      mma_bf16(acc[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_bf16(acc[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
};

// One block: split `split` of `splits`; the last one has the block's own rows too. sums [splits, Hq * rows, 128], stats
// [splits, Hq * rows, 2] (maximum, weight) fp32, queries key head by key head.
__device__ __forceinline__ void draft_mix(const Draft& job, int split, int splits, float* sums, float* stats,
                                             DraftShared& s) {
  const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
  const int size = draft_split(job.context, splits), end = min((split + 1) * size, job.context);
  const bool own = split == splits - 1;
  auto first_key = [&](int step) { return split * size + (step * DRAFT_WARPS + warp) * DRAFT_KEYS; };
  for (int i = tid; i < job.rows * job.rope_dim / 4; i += DRAFT_THREADS) {
    const int row = i / (job.rope_dim / 4), c = i % (job.rope_dim / 4) * 4;
    copy16(&s.angles[row][c], job.rope + i64(job.context + row) * job.rope_dim + c);
  }
  copies_commit();
#pragma unroll
  for (int step = 0; step < DRAFT_STAGES; step++) draft_fetch(job, first_key(step), end, s.ring[warp][step]);
  DraftNorm q_norm, k_norm;
  q_norm.load(job.q_norm), k_norm.load(job.k_norm);
  copies_wait<DRAFT_STAGES>();
  __syncthreads();
  wait_for_producer();
  let_next_start();

  draft_inputs(job, own, q_norm, k_norm, s);
  __syncthreads();
  u32 q[DRAFT_HEAD / 16][4];
#pragma unroll
  for (int k = 0; k < DRAFT_HEAD / 16; k++) {
    load_matrices(q[k], &s.q[8 * (lane / 8 & 1) + lane % 8][16 * k + 8 * (lane / 16)]);
  }
  DraftSums part = {{}, {-infinity(), -infinity()}, {}};
  if (own && warp == 0) part.add(q, s.own, job.rows, job.scale);
  int stage = 0;
  for (int step = 0; first_key(step) < end; step++) {
    copies_wait<DRAFT_STAGES - 1>();
    __syncwarp();
    part.add(q, s.ring[warp][stage], end - first_key(step), job.scale);
    __syncwarp();
    draft_fetch(job, first_key(step + DRAFT_STAGES), end, s.ring[warp][stage]);
    stage = stage + 1 == DRAFT_STAGES ? 0 : stage + 1;
  }
  copies_wait<0>();
  __syncwarp();
  float* mine = reinterpret_cast<float*>(&s.ring[warp][0]);
#pragma unroll
  for (int n = 0; n < DRAFT_HEAD / 8; n++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* to = mine + (g + 8 * half) * DRAFT_PITCH + 8 * n + 2 * t;
      *reinterpret_cast<float2*>(to) = make_float2(part.acc[n][2 * half], part.acc[n][2 * half + 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    part.sum[half] += __shfl_xor_sync(ALL, part.sum[half], 1);
    part.sum[half] += __shfl_xor_sync(ALL, part.sum[half], 2);
    if (t == 0) s.top[warp][g + 8 * half] = part.top[half], s.sum[warp][g + 8 * half] = part.sum[half];
  }
  __syncthreads();

  const int row = tid / 8;
  if (row >= job.queries()) return;
  float top = s.top[0][row], by[DRAFT_WARPS], sum = 0.0f;
#pragma unroll
  for (int w = 1; w < DRAFT_WARPS; w++) top = fmaxf(top, s.top[w][row]);
  if (top == -infinity()) return;  // nothing to see, and the merge knows
#pragma unroll
  for (int w = 0; w < DRAFT_WARPS; w++) {
    by[w] = exp2f(s.top[w][row] - top);
    sum = fmaf(s.sum[w][row], by[w], sum);
  }
  const i64 place = i64(split) * job.query_heads * job.rows + job.kv * job.each() * job.rows + 16 * job.tile + row;
  if (tid % 8 == 0) *reinterpret_cast<float2*>(stats + 2 * place) = make_float2(top, sum);
#pragma unroll
  for (int j = 0; j < DRAFT_HEAD / 32; j++) {
    const int c = 32 * j + tid % 8 * 4;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < DRAFT_WARPS; w++) {
      const float* from = reinterpret_cast<const float*>(&s.ring[w][0]) + row * DRAFT_PITCH + c;
      const float4 x = *reinterpret_cast<const float4*>(from);
      total.x = fmaf(x.x, by[w], total.x), total.y = fmaf(x.y, by[w], total.y);
      total.z = fmaf(x.z, by[w], total.z), total.w = fmaf(x.w, by[w], total.w);
    }
    *reinterpret_cast<float4*>(sums + place * DRAFT_HEAD + c) = total;
  }
}

// Merge one query's splits into 128 values, four a thread, by runs of splits that are added in order.
constexpr int DRAFT_RUNS = 4, DRAFT_RUN = DRAFT_SPLITS / DRAFT_RUNS;
constexpr int DRAFT_MERGERS = DRAFT_RUNS * DRAFT_HEAD / 4;

struct DraftMergeShared {
  float top[DRAFT_RUNS];
  float sum[DRAFT_RUNS];
  alignas(16) float parts[DRAFT_RUNS][DRAFT_HEAD];
};

__device__ __forceinline__ void draft_combine(const float* sums, const float* stats, int query, int queries, int context,
                                            int splits, bf16* out, DraftMergeShared& s) {
  const int run = threadIdx.x / (DRAFT_HEAD / 4), column = threadIdx.x % (DRAFT_HEAD / 4) * 4;  // a warp is a run
  const int size = draft_split(context, splits);
  float4 part[DRAFT_RUN];
  float2 stat[DRAFT_RUN];
#pragma unroll
  for (int i = 0; i < DRAFT_RUN; i++) {
    const int n = run + DRAFT_RUNS * i;
    const i64 place = i64(n) * queries + query;
    const bool live = n < splits && (n * size < context || n == splits - 1);
    stat[i] = make_float2(-infinity(), 0.0f);
    part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!live) continue;
    stat[i] = *reinterpret_cast<const float2*>(stats + 2 * place);
    part[i] = *reinterpret_cast<const float4*>(sums + place * DRAFT_HEAD + column);
  }
  float top = stat[0].x;
#pragma unroll
  for (int i = 1; i < DRAFT_RUN; i++) top = fmaxf(top, stat[i].x);
  const float minus = top == -infinity() ? 0.0f : top;  // of a run without a split
  float sum = 0.0f;
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < DRAFT_RUN; i++) {
    const float by = exp2f(stat[i].x - minus);
    sum = fmaf(stat[i].y, by, sum);
    acc.x = fmaf(part[i].x, by, acc.x), acc.y = fmaf(part[i].y, by, acc.y);
    acc.z = fmaf(part[i].z, by, acc.z), acc.w = fmaf(part[i].w, by, acc.w);
  }
  *reinterpret_cast<float4*>(&s.parts[run][column]) = acc;
  if (column == 0) s.top[run] = top, s.sum[run] = sum;
  __syncthreads();
  if (run > 0) return;
  float high = s.top[0], total = 0.0f;
#pragma unroll
  for (int r = 1; r < DRAFT_RUNS; r++) high = fmaxf(high, s.top[r]);
  acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int r = 0; r < DRAFT_RUNS; r++) {
    const float by = exp2f(s.top[r] - high);
    const float4 x = *reinterpret_cast<const float4*>(&s.parts[r][column]);
    total = fmaf(s.sum[r], by, total);
    acc.x = fmaf(x.x, by, acc.x), acc.y = fmaf(x.y, by, acc.y);
    acc.z = fmaf(x.z, by, acc.z), acc.w = fmaf(x.w, by, acc.w);
  }
  const float x[4] = {acc.x / total, acc.y / total, acc.z / total, acc.w / total};
  *reinterpret_cast<uint2*>(out + column) = draft_pack(x);
}
