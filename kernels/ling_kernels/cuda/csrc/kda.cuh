// KDA: the recurrence and what surrounds it (ling3-model.md 4.1, dspark.md 9). One order of operations for verify,
// commit and prefill: every product and sum is an explicit intrinsic, so the compiler cannot fuse it differently in one
// of them.
//
// A state is [value column][key], so a lane reads and writes 16 bytes of its own keys, whole sectors at a time. A block
// owns KDA_SLICE columns of one head, or a multiple; 8 lanes share a column and hold 16 of its 128 keys each: a row costs
// one chain of a product, 4 fused ones, 3 shuffles and the update, and no barrier. The output's dot product is reduced
// beside the next row's.
#pragma once
#include "arch.cuh"

constexpr int KDA_HEAD = 128;  // keys of a head, and values
constexpr int KDA_SLICE = 16;  // value columns that share a sum of squares
constexpr int KDA_SLICES = KDA_HEAD / KDA_SLICE;
constexpr int KDA_LANES = 8;  // lanes that share a column
constexpr int KDA_KEYS = KDA_HEAD / KDA_LANES;
constexpr int KDA_COLUMNS = WARP / KDA_LANES;  // of a warp
constexpr int KDA_WALKERS = KDA_SLICE * KDA_LANES;  // threads that walk a slice through the rows
constexpr int KDA_THREADS = 256, KDA_WARPS = KDA_THREADS / WARP;

// Inputs of the recurrence for one row and head, as floats: q, k, decay, v, then beta.
constexpr int KDA_Q = 0, KDA_K = 128, KDA_DECAY = 256, KDA_V = 384, KDA_BETA = 512, KDA_RECORD = 516;

// ---- inputs of the recurrence -----------------------------------------------------------------------------------

// What a row's inputs are made of. proj: rows of 5P+H, a few thousand at most (indices have 32 bits); history [3, 3P]:
// raw rows before the first.
struct KdaSource {
  const bf16* proj;
  const bf16* history;
  int heads;
  float lower_bound;

  __device__ int inner() const { return heads * KDA_HEAD; }
  __device__ int width() const { return 5 * inner() + heads; }
  __device__ const bf16* projected(int row) const { return proj + row * width(); }
  __device__ const bf16* raw(int row) const { return row < 0 ? history + (row + 3) * 3 * inner() : projected(row); }
};

// Four channels of a projection. EVEN: its rows are 8-byte aligned, which takes a multiple of four heads.
template <bool EVEN>
__device__ __forceinline__ uint2 kda_four(const bf16* from) {
  if (EVEN) return load_activations4(from);
  const u32 a = load_activation(from), b = load_activation(from + 1), c = load_activation(from + 2);
  return make_uint2(a | b << 16, c | u32(load_activation(from + 3)) << 16);
}

// Taps of the lane's four channels.
struct KdaTaps {
  float4 low, high;
};
__device__ __forceinline__ KdaTaps kda_taps(const bf16* conv, int channel) {
  const float4* from = reinterpret_cast<const float4*>(conv + i64(channel) * 4);
  return {load_settled(from), load_settled(from + 1)};
}

__device__ __forceinline__ float kda_open(float x) {  // sigmoid
  return quick_reciprocal(__fadd_rn(1.0f, quick_exp2(__fmul_rn(x, -1.4426950408889634f))));
}

// One channel: the convolution over four raw rows, then SiLU.
__device__ __forceinline__ float kda_mixed(float a, float b, float c, float d, u32 low, u32 high) {
  float x = __fmul_rn(a, low_float(low));
  x = __fmaf_rn(b, high_float(low), x);
  x = __fmaf_rn(c, low_float(high), x);
  x = __fmaf_rn(d, high_float(high), x);
  return __fmul_rn(x, kda_open(x));
}

// Four channels of one row; raw: rows -3 .. 0.
__device__ __forceinline__ float4 kda_mixed(uint2 a, uint2 b, uint2 c, uint2 d, const KdaTaps& taps) {
  auto bits = [](float x) { return __float_as_uint(x); };
  const float4 low = taps.low, high = taps.high;
  return {kda_mixed(low_float(a.x), low_float(b.x), low_float(c.x), low_float(d.x), bits(low.x), bits(low.y)),
          kda_mixed(high_float(a.x), high_float(b.x), high_float(c.x), high_float(d.x), bits(low.z), bits(low.w)),
          kda_mixed(low_float(a.y), low_float(b.y), low_float(c.y), low_float(d.y), bits(high.x), bits(high.y)),
          kda_mixed(high_float(a.y), high_float(b.y), high_float(c.y), high_float(d.y), bits(high.z), bits(high.w))};
}

// length / sqrt(x), both rounded to nearest, where x is neither tiny nor infinite: what the intrinsics do, without their
// branches for such x, which would keep rows apart that are made side by side.
__device__ __forceinline__ float kda_scale(float x, float length) {
  const float r = quick_rsqrt(x), near = __fmul_rn(x, r);
  const float root = __fmaf_rn(__fmaf_rn(-near, near, x), __fmul_rn(r, 0.5f), near);
  float inverse = quick_reciprocal(root);
  inverse = __fmaf_rn(inverse, __fmaf_rn(inverse, -root, 1.0f), inverse);
  const float ratio = __fmul_rn(length, inverse);
  return __fmaf_rn(inverse, __fmaf_rn(ratio, -root, length), ratio);
}

// A head's 128 channels, four a lane, to length `length`.
__device__ __forceinline__ float4 kda_unit(float4 x, float length) {
  float sum = __fmul_rn(x.x, x.x);
  sum = __fmaf_rn(x.y, x.y, sum);
  sum = __fmaf_rn(x.z, x.z, sum);
  sum = __fmaf_rn(x.w, x.w, sum);
  const float scale = kda_scale(__fadd_rn(warp_sum(sum), 1e-6f), length);
  return {__fmul_rn(x.x, scale), __fmul_rn(x.y, scale), __fmul_rn(x.z, scale), __fmul_rn(x.w, scale)};
}
constexpr float KDA_Q_LENGTH = 0.088388347648318447f;  // 128^-1/2

__device__ __forceinline__ float kda_decay(float f, float bias, float rate, float lower_bound) {
  return expf(__fmul_rn(lower_bound, kda_open(__fmul_rn(rate, __fadd_rn(f, bias)))));
}
__device__ __forceinline__ float4 kda_decay(uint2 f, float4 bias, float rate, float lower_bound) {
  return {kda_decay(low_float(f.x), bias.x, rate, lower_bound), kda_decay(high_float(f.x), bias.y, rate, lower_bound),
          kda_decay(low_float(f.y), bias.z, rate, lower_bound), kda_decay(high_float(f.y), bias.w, rate, lower_bound)};
}

// ---- the recurrence ---------------------------------------------------------------------------------------------

// Lane 4 g + c of a warp has keys 32 j + 4 g + (0..3) of the warp's column c: lanes side by side read the same 16 bytes
// of a row's keys from shared memory, and those of a warp are 128 bytes side by side.
__device__ __forceinline__ int kda_column() { return threadIdx.x / WARP * KDA_COLUMNS + threadIdx.x % KDA_COLUMNS; }
__device__ __forceinline__ int kda_first_key() { return threadIdx.x % WARP / KDA_COLUMNS * 4; }

__device__ __forceinline__ void kda_put(float (&to)[KDA_KEYS], int j, float4 x) {
  to[4 * j] = x.x, to[4 * j + 1] = x.y, to[4 * j + 2] = x.z, to[4 * j + 3] = x.w;
}

// This lane's keys of a row of 128 floats in shared memory.
__device__ __forceinline__ void kda_keys(float (&keys)[KDA_KEYS], const float* row) {
  const float4* from = reinterpret_cast<const float4*>(row + kda_first_key());
#pragma unroll
  for (int j = 0; j < KDA_KEYS / 4; j++) kda_put(keys, j, from[j * WARP / 4]);
}

// Where this lane's part of a state [H, 128, 128] starts; first: the block's first column.
__device__ __forceinline__ i64 kda_place(int head, int first) {
  return (i64(head) * KDA_HEAD + first + kda_column()) * KDA_HEAD + kda_first_key();
}

__device__ __forceinline__ void kda_load(float (&state)[KDA_KEYS], const float* from) {
#pragma unroll
  for (int j = 0; j < KDA_KEYS / 4; j++) kda_put(state, j, load_settled(reinterpret_cast<const float4*>(from + j * WARP)));
}

__device__ __forceinline__ void kda_store(float* to, const float (&state)[KDA_KEYS]) {
#pragma unroll
  for (int j = 0; j < KDA_KEYS / 4; j++) {
    *reinterpret_cast<float4*>(to + j * WARP) = {state[4 * j], state[4 * j + 1], state[4 * j + 2], state[4 * j + 3]};
  }
}

// Sums over the lanes that share a column; every lane gets the same bits. One step of it, and all.
__device__ __forceinline__ float kda_add(float x, int step) { return __fadd_rn(x, __shfl_xor_sync(ALL, x, step)); }
__device__ __forceinline__ float kda_sum(float x) { return kda_add(kda_add(kda_add(x, 16), 8), KDA_COLUMNS); }

// This lane's part of keys · state.
__device__ __forceinline__ float kda_dot(const float (&state)[KDA_KEYS], const float (&keys)[KDA_KEYS]) {
  float part[4];
#pragma unroll
  for (int i = 0; i < 4; i++) part[i] = __fmul_rn(keys[i], state[i]);
#pragma unroll
  for (int i = 4; i < KDA_KEYS; i++) part[i % 4] = __fmaf_rn(keys[i], state[i], part[i % 4]);
  return __fadd_rn(__fadd_rn(part[0], part[1]), __fadd_rn(part[2], part[3]));
}

__device__ __forceinline__ void kda_fade(float (&faded)[KDA_KEYS], const float (&state)[KDA_KEYS],
                                         const float (&decay)[KDA_KEYS]) {
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) faded[i] = __fmul_rn(state[i], decay[i]);
}

// read: what the faded state held for these keys.
__device__ __forceinline__ void kda_correct(float (&state)[KDA_KEYS], const float (&faded)[KDA_KEYS],
                                            const float (&k)[KDA_KEYS], float v, float beta, float read) {
  const float u = __fmul_rn(beta, __fsub_rn(v, read));
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) state[i] = __fmaf_rn(k[i], u, faded[i]);
}

// What the recurrence needs of one row, in shared memory; of the values, those of the block's columns. All of it lies at
// one distance from the row before, so that a walk has one address.
template <int COLUMNS>
struct KdaRow {
  alignas(16) float q[KDA_HEAD], k[KDA_HEAD], decay[KDA_HEAD], v[COLUMNS], beta[4];
};

// `rows` rows, at least 1, from `row` on: decay, read, correct, write; the column's output to `out`, `pitch` values from row
// to row. Without OUT no output is made. The row after the last is read too, for nothing. What a row waits for is the read,
// three steps from lane to lane: the output of the row before and the next row's inputs go beside them.
template <bool OUT, int COLUMNS>
__device__ __forceinline__ void kda_walk(float (&state)[KDA_KEYS], int rows, const KdaRow<COLUMNS>* row,
                                         float* out = nullptr, int pitch = 0) {
  const bool writes = threadIdx.x % WARP < KDA_COLUMNS;
  float k[KDA_KEYS], decay[KDA_KEYS], faded[KDA_KEYS], q[KDA_KEYS];
  kda_keys(k, row->k), kda_keys(decay, row->decay);
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) q[i] = 0.0f;
  kda_fade(faded, state, decay);
#pragma unroll 2
  for (int r = 0; r < rows; r++, row++) {
    const float v = row->v[kda_column()], beta = row->beta[0];
    float next_k[KDA_KEYS], read = kda_dot(faded, k), part = 0.0f;
    read = kda_add(read, 16);
    if (OUT) part = kda_dot(state, q), kda_keys(q, row->q);
    read = kda_add(read, 8);
    if (OUT) part = kda_add(part, 16);
    kda_keys(next_k, row[1].k), kda_keys(decay, row[1].decay);
    read = kda_add(read, 4);
    if (OUT) part = kda_add(part, 8);
    kda_correct(state, faded, k, v, beta, read);
    if (OUT) part = kda_add(part, 4);
    if (OUT && writes && r > 0) *out = part;
    if (OUT && r > 0) out += pitch;
    kda_fade(faded, state, decay);
#pragma unroll
    for (int i = 0; i < KDA_KEYS; i++) k[i] = next_k[i];
  }
  if (!OUT) return;
  const float last = kda_sum(kda_dot(state, q));
  if (writes) *out = last;
}

// ---- a head's norm and gate -------------------------------------------------------------------------------------

// Over the 16 columns of a slice, which lie on 16 lanes.
__device__ __forceinline__ float kda_squares(float o) {
  float x = __fmul_rn(o, o);
#pragma unroll
  for (int step = KDA_SLICE / 2; step > 0; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

// Norm and gate of one row and head by 16 lanes.
__device__ __forceinline__ void kda_gate(const KdaSource& source, const float* o, const bf16* o_norm, bf16* out,
                                         float eps, int row, int head) {
  const int lane = threadIdx.x % KDA_SLICE, start = head * KDA_HEAD + lane;
  const float* from = o + i64(row) * source.inner() + start;
  const bf16* gates = source.projected(row) + 4 * source.inner() + start;
  float x[KDA_SLICES], gate[KDA_SLICES], total = 0.0f;
#pragma unroll
  for (int s = 0; s < KDA_SLICES; s++) {
    x[s] = from[s * KDA_SLICE];
    gate[s] = kda_open(to_float(gates[s * KDA_SLICE]));
  }
#pragma unroll
  for (int s = 0; s < KDA_SLICES; s++) total = __fadd_rn(total, kda_squares(x[s]));
  const float scale = rsqrtf(total / KDA_HEAD + eps);
#pragma unroll
  for (int s = 0; s < KDA_SLICES; s++) {
    const float norm = to_float(o_norm[s * KDA_SLICE + lane]);
    out[i64(row) * source.inner() + start + s * KDA_SLICE] = to_bf16(x[s] * scale * norm * gate[s]);
  }
}
