// KDA: the recurrence and what surrounds it (ling3-model.md 4.1, dspark.md 9). One order of operations for verify,
// commit and prefill: every product and sum of the update is an explicit intrinsic, so the compiler cannot fuse it
// differently in one of them. A block owns 16 value columns of one head at a time; 16 lanes share a column and hold
// 8 of its 128 keys each, so a row costs two reductions of four shuffles and no barrier.
#pragma once
#include "arch.cuh"

constexpr int KDA_HEAD = 128;  // keys of a head, and values
constexpr int KDA_SLICE = 16;  // value columns that a block works on at a time
constexpr int KDA_SLICES = KDA_HEAD / KDA_SLICE;
constexpr int KDA_LANES = 16;  // lanes that share a column
constexpr int KDA_KEYS = KDA_HEAD / KDA_LANES;
constexpr int KDA_THREADS = KDA_SLICE * KDA_LANES;
constexpr int KDA_SCAN_ROWS = 8;  // rows that the prefill scan loads at a time

// Inputs of the recurrence for one row and head, as floats: q, k, decay, v, then beta.
constexpr int KDA_Q = 0, KDA_K = 128, KDA_DECAY = 256, KDA_V = 384, KDA_BETA = 512, KDA_RECORD = 516;

// What a row's inputs are made of. proj: rows of 5P+H; history [3, 3P]: raw rows before the first.
struct KdaSource {
  const bf16* proj;
  const bf16* history;
  int heads;
  float lower_bound;

  __device__ int inner() const { return heads * KDA_HEAD; }
  __device__ float projected(int row, int column) const {
    return to_float(proj[i64(row) * (5 * inner() + heads) + column]);
  }
  __device__ float raw(int row, int column) const {
    return row < 0 ? to_float(history[(row + 3) * 3 * inner() + column]) : projected(row, column);
  }
};

__device__ __forceinline__ float kda_conv(const KdaSource& source, int row, int column, uint2 taps) {
  float x = source.raw(row - 3, column) * low_float(taps.x);
  x = fmaf(source.raw(row - 2, column), high_float(taps.x), x);
  x = fmaf(source.raw(row - 1, column), low_float(taps.y), x);
  x = fmaf(source.raw(row, column), high_float(taps.y), x);
  return silu(x);
}

// One warp makes a third of one row's inputs: part 0 q, 1 k, 2 the rest. taps [3][128] and dt_bias [128] are this
// head's; v receives columns first .. first + count.
__device__ __forceinline__ void kda_prepare(const KdaSource& source, int head, int row, int part, const uint2* taps,
                                            const float* dt_bias, float rate, int first, int count, float* qk,
                                            float* decay, float* v, float* beta) {
  const int lane = threadIdx.x % WARP, inner = source.inner(), start = head * KDA_HEAD;
  if (part < 2) {
    float x[4], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int c = lane + WARP * i;
      x[i] = kda_conv(source, row, part * inner + start + c, taps[part * KDA_HEAD + c]);
      sum = fmaf(x[i], x[i], sum);
    }
    const float norm = sqrtf(warp_sum(sum) + 1e-6f);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float unit = x[i] / norm;
      qk[lane + WARP * i] = part == 0 ? unit * 0.088388347648318447f : unit;  // 128^-1/2
    }
    return;
  }
  for (int c = lane; c < count; c += WARP) {
    v[c] = kda_conv(source, row, 2 * inner + start + first + c, taps[2 * KDA_HEAD + first + c]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int c = lane + WARP * i;
    const float f = source.projected(row, 3 * inner + start + c);
    decay[c] = expf(source.lower_bound * sigmoid(rate * (f + dt_bias[c])));
  }
  if (lane == 0) *beta = sigmoid(source.projected(row, 5 * inner + head));
}

// Sum over the 16 lanes that share a column; every lane gets the same bits.
__device__ __forceinline__ float kda_sum(float x) {
#pragma unroll
  for (int step = KDA_LANES / 2; step > 0; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

__device__ __forceinline__ float kda_dot(const float (&state)[KDA_KEYS], const float* keys) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i += 2) {
    even = __fmaf_rn(keys[i], state[i], even);
    odd = __fmaf_rn(keys[i + 1], state[i + 1], odd);
  }
  return kda_sum(__fadd_rn(even, odd));
}

// Decay, read, correct, write: this lane's keys of one value column. k, decay: this lane's 8, 16-byte aligned.
__device__ __forceinline__ void kda_update(float (&state)[KDA_KEYS], const float* k, const float* decay, float v,
                                           float beta) {
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) state[i] = __fmul_rn(state[i], decay[i]);
  const float u = __fmul_rn(beta, __fsub_rn(v, kda_dot(state, k)));
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) state[i] = __fmaf_rn(k[i], u, state[i]);
}

__device__ __forceinline__ int kda_column() { return threadIdx.x / KDA_LANES; }
__device__ __forceinline__ int kda_first_key() { return threadIdx.x % KDA_LANES * KDA_KEYS; }

// The 8 keys of this lane, from a row of 128 floats in shared memory.
__device__ __forceinline__ void kda_keys(float (&keys)[KDA_KEYS], const float* row) {
  const float4* from = reinterpret_cast<const float4*>(row + kda_first_key());
  const float4 a = from[0], b = from[1];
  keys[0] = a.x, keys[1] = a.y, keys[2] = a.z, keys[3] = a.w;
  keys[4] = b.x, keys[5] = b.y, keys[6] = b.z, keys[7] = b.w;
}

__device__ __forceinline__ float* kda_place(float* state, int head, int slice) {
  return state + (i64(head) * KDA_HEAD + kda_first_key()) * KDA_HEAD + slice * KDA_SLICE + kda_column();
}

__device__ __forceinline__ void kda_load(float (&state)[KDA_KEYS], const float* from) {
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) state[i] = from[i * KDA_HEAD];
}

__device__ __forceinline__ void kda_store(float* to, const float (&state)[KDA_KEYS]) {
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) to[i * KDA_HEAD] = state[i];
}

// Norm over a head, then the gate. squares: of each slice, 16 apart for each row; the sum goes in slice order.
__device__ __forceinline__ float kda_scale(const float* squares, int stride, float eps) {
  float total = 0.0f;
#pragma unroll
  for (int s = 0; s < KDA_SLICES; s++) total += squares[s * stride];
  return rsqrtf(total / KDA_HEAD + eps);
}

// ---- verify -----------------------------------------------------------------------------------------------------

struct KdaVerifyShared {
  alignas(16) float q[ROW_TILE][KDA_HEAD];
  alignas(16) float k[ROW_TILE][KDA_HEAD];
  alignas(16) float decay[ROW_TILE][KDA_HEAD];
  float v[ROW_TILE][KDA_SLICE];
  float o[ROW_TILE][KDA_SLICE];
  float squares[KDA_SLICES][ROW_TILE];
  float beta[ROW_TILE];
  float dt_bias[KDA_HEAD];
  uint2 taps[3 * KDA_HEAD];
};

struct KdaVerify {
  KdaSource source;
  const float* state;    // [H, 128, 128]
  const bf16* conv;      // [3P, 4]
  const float* a_log;    // [H]
  const float* dt_bias;  // [P]
  const bf16* o_norm;    // [128]
  bf16* out;             // [16, P]
  float* sums;           // [16, H, KDA_SLICES]: of squares, where the norm is left to the projection that follows
  float* records;        // [16, H, KDA_RECORD]: what commit replays
  bf16* raw;             // [16, 3P]: rows that commit puts into the conv history
  int rows;
  float eps;
};

// What commit needs; k, decay and beta of a row are written by one of the head's blocks.
__device__ __forceinline__ void kda_stage(const KdaVerify& job, int head, int slice, const KdaVerifyShared& s) {
  const int inner = job.source.inner(), heads = job.source.heads;
  for (int i = threadIdx.x; i < job.rows * KDA_HEAD; i += KDA_THREADS) {
    const int r = i / KDA_HEAD, c = i % KDA_HEAD;
    float* record = job.records + (i64(r) * heads + head) * KDA_RECORD;
    if (r % KDA_SLICES == slice) {
      record[KDA_K + c] = s.k[r][c];
      record[KDA_DECAY + c] = s.decay[r][c];
      if (c == 0) record[KDA_BETA] = s.beta[r];
    }
    if (c < KDA_SLICE) {
      const int column = head * KDA_HEAD + slice * KDA_SLICE + c;
      record[KDA_V + slice * KDA_SLICE + c] = s.v[r][c];
#pragma unroll
      for (int part = 0; part < 3; part++) {
        job.raw[i64(r) * 3 * inner + part * inner + column] =
            job.source.proj[i64(r) * (5 * inner + heads) + part * inner + column];
      }
    }
  }
}

// Block (head, slice): raw projections to gated output. A head's norm needs the squares of all eight slices: either
// its blocks are a cluster and exchange them, or they are left for the projection that follows, which scales.
template <bool CLUSTERED>
__device__ __forceinline__ void kda_verify(const KdaVerify& job, int head, int slice, KdaVerifyShared& s) {
  const int tid = threadIdx.x, inner = job.source.inner(), row = tid / KDA_LANES, lane = tid % KDA_LANES;
  float state[KDA_KEYS];
  const float* place = kda_place(const_cast<float*>(job.state), head, slice);
#pragma unroll
  for (int i = 0; i < KDA_KEYS; i++) state[i] = load_settled(place + i * KDA_HEAD);  // since the last commit
  const uint2* taps = reinterpret_cast<const uint2*>(job.conv) + head * KDA_HEAD;
  for (int i = tid; i < 3 * KDA_HEAD; i += KDA_THREADS) s.taps[i] = taps[i / KDA_HEAD * inner + i % KDA_HEAD];
  for (int i = tid; i < KDA_HEAD; i += KDA_THREADS) s.dt_bias[i] = job.dt_bias[head * KDA_HEAD + i];
  const float norm = to_float(job.o_norm[slice * KDA_SLICE + lane]), rate = expf(job.a_log[head]);
  if (CLUSTERED) cluster_arrive();  // runs: its shared memory may be written to
  wait_for_producer();
  let_next_start();
  const bool live = row < job.rows;
  const int column = head * KDA_HEAD + slice * KDA_SLICE + lane;
  const float gate = live ? sigmoid(job.source.projected(row, 4 * inner + column)) : 0.0f;
  __syncthreads();
  for (int task = tid / WARP; task < 3 * job.rows; task += KDA_THREADS / WARP) {
    const int r = task / 3, part = task % 3;
    kda_prepare(job.source, head, r, part, s.taps, s.dt_bias, rate, slice * KDA_SLICE, KDA_SLICE,
                part == 0 ? s.q[r] : s.k[r], s.decay[r], s.v[r], &s.beta[r]);
  }
  __syncthreads();
  for (int r = 0; r < job.rows; r++) {
    float q[KDA_KEYS], k[KDA_KEYS], decay[KDA_KEYS];
    kda_keys(q, s.q[r]), kda_keys(k, s.k[r]), kda_keys(decay, s.decay[r]);
    kda_update(state, k, decay, s.v[r][kda_column()], s.beta[r]);
    const float o = kda_dot(state, q);
    if (lane == 0) s.o[r][kda_column()] = o;
  }
  kda_stage(job, head, slice, s);
  if (CLUSTERED) cluster_wait();
  __syncthreads();
  const float o = live ? s.o[row][lane] : 0.0f;
  const float square = kda_sum(__fmul_rn(o, o));
  float scale = 1.0f;
  if (CLUSTERED) {
    if (lane < KDA_SLICES) store_to_peer(&s.squares[slice][row], lane, square);
    cluster_arrive();
    cluster_wait();
    scale = kda_scale(&s.squares[0][row], ROW_TILE, job.eps);
  } else if (lane == 0 && live) {
    job.sums[(row * job.source.heads + head) * KDA_SLICES + slice] = square;
  }
  if (live) job.out[i64(row) * inner + column] = to_bf16(o * scale * norm * gate);
}

// ---- commit -----------------------------------------------------------------------------------------------------

struct KdaCommitShared {
  alignas(16) float k[ROW_TILE][KDA_HEAD];
  alignas(16) float decay[ROW_TILE][KDA_HEAD];
  float v[ROW_TILE][KDA_SLICE];
  float beta[ROW_TILE];
};

// Advance one layer's slice of a head by the first *count staged rows, and its channels of the conv history.
__device__ __forceinline__ void kda_commit(const float* records, const bf16* raw, bf16* history, float* layer_state,
                                           const i64* count, int heads, int head, int slice, KdaCommitShared& s) {
  const int tid = threadIdx.x, inner = heads * KDA_HEAD;
  wait_for_producer();
  let_next_start();
  const int rows = int(*count);
  if (rows == 0) return;
  float* place = kda_place(layer_state, head, slice);
  float state[KDA_KEYS];
  kda_load(state, place);
  for (int i = tid; i < rows * KDA_HEAD; i += KDA_THREADS) {
    const int r = i / KDA_HEAD, c = i % KDA_HEAD;
    const float* record = records + (i64(r) * heads + head) * KDA_RECORD;
    s.k[r][c] = record[KDA_K + c];
    s.decay[r][c] = record[KDA_DECAY + c];
    if (c < KDA_SLICE) s.v[r][c] = record[KDA_V + slice * KDA_SLICE + c];
    if (c == 0) s.beta[r] = record[KDA_BETA];
  }
  if (tid < 3 * KDA_SLICE) {  // new history: rows count .. count + 2 of the old history followed by the window
    const int column = tid / KDA_SLICE * inner + head * KDA_HEAD + slice * KDA_SLICE + tid % KDA_SLICE;
    bf16 kept[3];
    for (int i = 0; i < 3; i++) {
      const int at = rows + i;
      kept[i] = at < 3 ? history[i64(at) * 3 * inner + column] : raw[i64(at - 3) * 3 * inner + column];
    }
    for (int i = 0; i < 3; i++) history[i64(i) * 3 * inner + column] = kept[i];
  }
  __syncthreads();
  for (int r = 0; r < rows; r++) {
    float k[KDA_KEYS], decay[KDA_KEYS];
    kda_keys(k, s.k[r]), kda_keys(decay, s.decay[r]);
    kda_update(state, k, decay, s.v[r][kda_column()], s.beta[r]);
  }
  kda_store(place, state);
}

// ---- prefill ----------------------------------------------------------------------------------------------------

struct KdaScanShared {
  alignas(16) float qkd[2][KDA_SCAN_ROWS][3 * KDA_HEAD];
  alignas(16) float v[2][KDA_SCAN_ROWS][KDA_SLICE];
  alignas(16) float beta[2][KDA_SCAN_ROWS][4];
};

__device__ __forceinline__ void kda_fetch(const float* records, int heads, int head, int slice, int from, int rows,
                                          int buffer, KdaScanShared& s) {
  constexpr int COPIES = 3 * KDA_HEAD / 4 + KDA_SLICE / 4 + 1;  // of 16 bytes for each row
  const int num = min(KDA_SCAN_ROWS, rows - from);
  for (int i = threadIdx.x; i < num * COPIES; i += KDA_THREADS) {
    const int r = i / COPIES, c = i % COPIES * 4;
    const float* record = records + (i64(from + r) * heads + head) * KDA_RECORD;
    if (c < 3 * KDA_HEAD) {
      copy16(&s.qkd[buffer][r][c], record + c);
    } else if (c < 3 * KDA_HEAD + KDA_SLICE) {
      copy16(&s.v[buffer][r][c - 3 * KDA_HEAD], record + KDA_V + slice * KDA_SLICE + c - 3 * KDA_HEAD);
    } else {
      copy16(s.beta[buffer][r], record + KDA_BETA);
    }
  }
  copies_commit();
}

// The recurrence of one slice over any number of rows. o [rows, P] fp32; the state advances in place.
__device__ __forceinline__ void kda_scan(const float* records, float* layer_state, float* o, int heads, int head,
                                         int slice, int rows, KdaScanShared& s) {
  float* place = kda_place(layer_state, head, slice);
  wait_for_producer();
  let_next_start();
  float state[KDA_KEYS];
  kda_load(state, place);
  kda_fetch(records, heads, head, slice, 0, rows, 0, s);
  for (int from = 0, buffer = 0; from < rows; from += KDA_SCAN_ROWS, buffer ^= 1) {
    const bool more = from + KDA_SCAN_ROWS < rows;
    if (more) kda_fetch(records, heads, head, slice, from + KDA_SCAN_ROWS, rows, buffer ^ 1, s);
    if (more) {
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncthreads();
    for (int r = 0; r < min(KDA_SCAN_ROWS, rows - from); r++) {
      float q[KDA_KEYS], k[KDA_KEYS], decay[KDA_KEYS];
      const float* row = s.qkd[buffer][r];
      kda_keys(q, row + KDA_Q), kda_keys(k, row + KDA_K), kda_keys(decay, row + KDA_DECAY);
      kda_update(state, k, decay, s.v[buffer][r][kda_column()], s.beta[buffer][r][0]);
      const float out = kda_dot(state, q);
      if (threadIdx.x % KDA_LANES == 0) {
        o[(i64(from + r) * heads + head) * KDA_HEAD + slice * KDA_SLICE + kda_column()] = out;
      }
    }
    __syncthreads();  // before this buffer is filled again
  }
  kda_store(place, state);
}

// Norm and gate of one row and head by 16 lanes, in the order of verify.
__device__ __forceinline__ void kda_gate(const KdaSource& source, const float* o, const bf16* o_norm, bf16* out,
                                         float eps, int row, int head) {
  const int lane = threadIdx.x % KDA_LANES, start = head * KDA_HEAD;
  const float* from = o + i64(row) * source.inner() + start;
  float squares[KDA_SLICES];
#pragma unroll
  for (int s = 0; s < KDA_SLICES; s++) {
    const float x = from[s * KDA_SLICE + lane];
    squares[s] = kda_sum(__fmul_rn(x, x));
  }
  const float scale = kda_scale(squares, 1, eps);
#pragma unroll
  for (int s = 0; s < KDA_SLICES; s++) {
    const int c = s * KDA_SLICE + lane;
    const float gate = sigmoid(source.projected(row, 4 * source.inner() + start + c));
    out[i64(row) * source.inner() + start + c] = to_bf16(from[c] * scale * to_float(o_norm[c]) * gate);
  }
}
