// Attention of up to 16 query rows a tile over many keys, split along the keys: partial sums, then a merge in order.
//
// A tile's rows share one limit: they see the keys 0 .. limit-1. How keys are split is a function of the limit alone,
// so a row's bits do not depend on which other tiles or rows run beside it. A block owns one split of up to TILES
// tiles and brings each chunk of 64 keys to shared memory once for all of them.
#pragma once
#include "arch.cuh"

constexpr int ATTEND_KEYS = 64;      // a chunk
constexpr int ATTEND_SPLITS = 64;    // most splits of a tile
constexpr int ATTEND_THREADS = 256;  // 8 warps
constexpr int ATTEND_WARPS = ATTEND_THREADS / WARP;

// Keys in a split: chunks, doubled until the splits suffice.
__device__ __forceinline__ int attend_split(int limit) {
  int size = ATTEND_KEYS;
  while (size * ATTEND_SPLITS < limit) size *= 2;
  return size;
}

// Shared memory. Rows are 8 elements longer than their values: 16-byte rows of a matrix then fall into different banks.
template <int KD, int VD, int TILES, int STAGES, bool SAME>
struct AttendShared {
  alignas(16) bf16 keys[STAGES][ATTEND_KEYS][KD + 8];
  alignas(16) bf16 values[SAME ? 1 : STAGES][SAME ? 1 : ATTEND_KEYS][SAME ? 8 : VD + 8];
  alignas(16) bf16 q[TILES][16][KD + 8];
  alignas(16) float scores[16][ATTEND_KEYS + 4];
  alignas(16) bf16 weights[16][ATTEND_KEYS + 8];
  float top[TILES][16];
  float sum[TILES][16];
  float rescale[16];
};

template <int KD, int VD, int TILES, int STAGES, bool SAME, class View>
__device__ __forceinline__ void attend_fetch(const View& view, int first, int stage,
                                             AttendShared<KD, VD, TILES, STAGES, SAME>& s) {
  for (int i = threadIdx.x; i < ATTEND_KEYS * (KD / 8); i += ATTEND_THREADS) {
    const int r = i / (KD / 8), c = i % (KD / 8) * 8;
    copy16(&s.keys[stage][r][c], view.key(min(first + r, view.capacity - 1)) + c);
  }
  if constexpr (!SAME) {
    for (int i = threadIdx.x; i < ATTEND_KEYS * (VD / 8); i += ATTEND_THREADS) {
      const int r = i / (VD / 8), c = i % (VD / 8) * 8;
      copy16(&s.values[stage][r][c], view.value(min(first + r, view.capacity - 1)) + c);
    }
  }
}

// Scores of one tile against a chunk, 8 keys a warp, scaled and masked, into shared memory.
template <int KD, int VD, int TILES, int STAGES, bool SAME>
__device__ __forceinline__ void attend_scores(int tile, int stage, int first, int end, float scale,
                                              AttendShared<KD, VD, TILES, STAGES, SAME>& s) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, matrix = lane / 8, r = lane % 8;
  float even[4] = {}, odd[4] = {};
#pragma unroll 6
  for (int k = 0; k < KD; k += 32) {
    u32 key[4], a[4], b[4];
    load_matrices(key, &s.keys[stage][8 * warp + r][k + 8 * matrix]);
    load_matrices(a, &s.q[tile][8 * (matrix & 1) + r][k + 8 * (matrix >> 1)]);
    load_matrices(b, &s.q[tile][8 * (matrix & 1) + r][k + 16 + 8 * (matrix >> 1)]);
    mma_bf16(even, a[0], a[1], a[2], a[3], key[0], key[1]);
    mma_bf16(odd, b[0], b[1], b[2], b[3], key[2], key[3]);
  }
  const int g = lane / 4, column = 8 * warp + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float2 out;
    out.x = first + column < end ? (even[2 * half] + odd[2 * half]) * scale : -infinity();
    out.y = first + column + 1 < end ? (even[2 * half + 1] + odd[2 * half + 1]) * scale : -infinity();
    *reinterpret_cast<float2*>(&s.scores[g + 8 * half][column]) = out;
  }
}

__device__ __forceinline__ float max16(float x) {
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

__device__ __forceinline__ float sum16(float x) {
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

// Running softmax: 16 threads a row, 4 keys each. Every chunk holds a visible key, so the maximum is finite.
template <int KD, int VD, int TILES, int STAGES, bool SAME>
__device__ __forceinline__ void attend_softmax(int tile, AttendShared<KD, VD, TILES, STAGES, SAME>& s) {
  const int row = threadIdx.x / 16, part = threadIdx.x % 16;
  const float4 score = *reinterpret_cast<const float4*>(&s.scores[row][4 * part]);
  const float before = s.top[tile][row];
  const float top = fmaxf(before, max16(fmaxf(fmaxf(score.x, score.y), fmaxf(score.z, score.w))));
  const float p0 = expf(score.x - top), p1 = expf(score.y - top);
  const float p2 = expf(score.z - top), p3 = expf(score.w - top);
  const float sum = sum16((p0 + p1) + (p2 + p3));
  *reinterpret_cast<uint2*>(&s.weights[row][4 * part]) = make_uint2(pack_bf16(p0, p1), pack_bf16(p2, p3));
  __syncwarp();  // all 16 have read the old maximum
  if (part == 0) {
    const float rescale = expf(before - top);
    s.rescale[row] = rescale;
    s.sum[tile][row] = s.sum[tile][row] * rescale + sum;
    s.top[tile][row] = top;
  }
}

// Add weights · values to the sums of this warp's VD / 8 columns.
template <int KD, int VD, int TILES, int STAGES, bool SAME>
__device__ __forceinline__ void attend_mix(float (&acc)[VD / 64][4], int stage,
                                           AttendShared<KD, VD, TILES, STAGES, SAME>& s) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, matrix = lane / 8, r = lane % 8;
  const float low = s.rescale[lane / 4], high = s.rescale[lane / 4 + 8];
#pragma unroll
  for (int n = 0; n < VD / 64; n++) {
    acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
  }
#pragma unroll
  for (int k = 0; k < ATTEND_KEYS; k += 16) {
    u32 a[4];
    load_matrices(a, &s.weights[8 * (matrix & 1) + r][k + 8 * (matrix >> 1)]);
#pragma unroll
    for (int n = 0; n < VD / 64; n += 2) {
      const int key = k + 8 * (matrix & 1) + r, column = warp * (VD / 8) + 8 * n + 8 * (matrix >> 1);
      u32 b[4];
      const bf16* from = &s.keys[stage][key][column];
      if constexpr (!SAME) from = &s.values[stage][key][column];
      load_matrices_transposed(b, from);
      mma_bf16(acc[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_bf16(acc[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// View: num_tiles; capacity: key rows that exist; limit(tile); settled(): keys below it were written long before the
// producer ran; key(i), value(i): their rows; q(tile, row): KD values or null; scale.
// sums [tile][ATTEND_SPLITS][16][VD] and stats [tile][ATTEND_SPLITS][16][2] (maximum, weight); tile counts from base.
template <int KD, int VD, int TILES, int STAGES, bool SAME, class View>
__device__ __forceinline__ void attend(const View& view, int split, int group, int base, float* sums, float* stats,
                                       AttendShared<KD, VD, TILES, STAGES, SAME>& s) {
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP;
  int begin[TILES], end[TILES], low = 1 << 30, high = 0;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int tile = group * TILES + t;
    const int limit = tile < view.num_tiles ? view.limit(tile) : 0;
    begin[t] = split * attend_split(limit);
    end[t] = min(begin[t] + attend_split(limit), limit);
    if (begin[t] < end[t]) low = min(low, begin[t]), high = max(high, end[t]);
  }
  const int chunks = low < high ? (high - low + ATTEND_KEYS - 1) / ATTEND_KEYS : 0;
  // chunks of keys that this step does not write may be fetched before the producer has finished
  int early = 0;
  while (early < STAGES && early < chunks && low + (early + 1) * ATTEND_KEYS <= view.settled()) {
    attend_fetch(view, low + early * ATTEND_KEYS, early, s);
    copies_commit();
    early++;
  }
  wait_for_producer();
  let_next_start();
  if (chunks == 0) return;
  for (int n = early; n < STAGES; n++) {
    if (n < chunks) attend_fetch(view, low + n * ATTEND_KEYS, n, s);
    copies_commit();
  }
  for (int i = tid; i < TILES * 16 * (KD / 8); i += ATTEND_THREADS) {
    const int t = i / (16 * (KD / 8)), row = i / (KD / 8) % 16, c = i % (KD / 8) * 8, tile = group * TILES + t;
    const bf16* from = tile < view.num_tiles ? view.q(tile, row) : nullptr;
    *reinterpret_cast<uint4*>(&s.q[t][row][c]) = load16(from + c, from != nullptr);
  }
  for (int i = tid; i < TILES * 16; i += ATTEND_THREADS) {
    s.top[i / 16][i % 16] = -infinity();
    s.sum[i / 16][i % 16] = 0.0f;
  }
  float acc[TILES][VD / 64][4] = {};
  for (int n = 0; n < chunks; n++) {
    const int first = low + n * ATTEND_KEYS, stage = n % STAGES;
    copies_wait<STAGES - 1>();
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (first < begin[t] || first >= end[t]) continue;  // bounds of splits are whole chunks
      attend_scores(t, stage, first, end[t], view.scale, s);
      __syncthreads();
      attend_softmax(t, s);
      __syncthreads();
      attend_mix(acc[t], stage, s);
    }
    __syncthreads();  // before this stage is filled again
    if (n + STAGES < chunks) attend_fetch(view, first + STAGES * ATTEND_KEYS, stage, s);
    copies_commit();
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    if (begin[t] >= end[t]) continue;
    const i64 place = i64(base + group * TILES + t) * ATTEND_SPLITS + split;
    if (tid < 16) {
      stats[(place * 16 + tid) * 2] = s.top[t][tid];
      stats[(place * 16 + tid) * 2 + 1] = s.sum[t][tid];
    }
#pragma unroll
    for (int n = 0; n < VD / 64; n++) {
      float* to = sums + (place * 16 + lane / 4) * VD + warp * (VD / 8) + 8 * n + 2 * (lane % 4);
      *reinterpret_cast<float2*>(to) = make_float2(acc[t][n][0], acc[t][n][1]);
      *reinterpret_cast<float2*>(to + 8 * VD) = make_float2(acc[t][n][2], acc[t][n][3]);
    }
  }
}

// The merge takes a tile row's splits in MERGE_GROUPS runs of their own threads, each in order, then the runs in order:
// which split belongs to which run is fixed, and all loads of a run are on their way at once.
constexpr int MERGE_GROUPS = 4, MERGE_RUN = ATTEND_SPLITS / MERGE_GROUPS;

template <int VD>
struct MergeShared {
  float top[ATTEND_SPLITS];
  float sum[ATTEND_SPLITS];
  float weight[ATTEND_SPLITS];
  alignas(16) float parts[MERGE_GROUPS][VD];
};

// Merge one tile row's splits into VD values, by MERGE_GROUPS * VD / 4 threads.
template <int VD>
__device__ __forceinline__ void attend_merge(const float* sums, const float* stats, int tile, int row, int limit,
                                             bf16* out, MergeShared<VD>& s) {
  const int tid = threadIdx.x, group = tid / (VD / 4), column = tid % (VD / 4) * 4;
  const int num = (limit + attend_split(limit) - 1) / attend_split(limit);
  const i64 first = i64(tile) * ATTEND_SPLITS * 16 + row;
  float4 part[MERGE_RUN];
#pragma unroll
  for (int i = 0; i < MERGE_RUN; i++) {
    const int n = group * MERGE_RUN + i;
    part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (n < num) part[i] = *reinterpret_cast<const float4*>(sums + (first + n * 16) * VD + column);
  }
  if (tid < ATTEND_SPLITS) {
    float2 found = make_float2(-infinity(), 0.0f);
    if (tid < num) found = *reinterpret_cast<const float2*>(stats + (first + tid * 16) * 2);
    s.top[tid] = found.x;
    s.sum[tid] = found.y;
  }
  __syncthreads();
  if (tid < ATTEND_SPLITS) {
    float top = -infinity();
    for (int n = 0; n < num; n++) top = fmaxf(top, s.top[n]);
    s.weight[tid] = expf(s.top[tid] - top);
  }
  __syncthreads();
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < MERGE_RUN; i++) {
    const float weight = s.weight[group * MERGE_RUN + i];
    acc.x = fmaf(weight, part[i].x, acc.x);
    acc.y = fmaf(weight, part[i].y, acc.y);
    acc.z = fmaf(weight, part[i].z, acc.z);
    acc.w = fmaf(weight, part[i].w, acc.w);
  }
  *reinterpret_cast<float4*>(&s.parts[group][column]) = acc;
  __syncthreads();
  if (group > 0) return;
  float total = 0.0f;
  for (int n = 0; n < num; n++) total = fmaf(s.weight[n], s.sum[n], total);
#pragma unroll
  for (int g = 1; g < MERGE_GROUPS; g++) {
    const float4 more = *reinterpret_cast<const float4*>(&s.parts[g][column]);
    acc.x += more.x, acc.y += more.y, acc.z += more.z, acc.w += more.w;
  }
  *reinterpret_cast<uint2*>(out + column) =
      make_uint2(pack_bf16(acc.x / total, acc.y / total), pack_bf16(acc.z / total, acc.w / total));
}
