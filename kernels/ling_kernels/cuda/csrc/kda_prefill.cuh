// KDA over a prompt: inputs of all rows at once, then the same walk as in a window, then norm and gate.
#pragma once
#include "kda.cuh"

// ---- inputs -----------------------------------------------------------------------------------------------------

constexpr int KDA_TILE = 16;            // rows of a block
constexpr int KDA_TILE_THREADS = 512;   // four warps for each of q, k, v and the decay, which have four rows each
constexpr int KDA_EACH = KDA_TILE / 4;  // rows of a warp

struct KdaInputs {
  KdaSource source;
  const bf16* conv;      // [3P, 4]
  const float* a_log;    // [H]
  const float* dt_bias;  // [P]
  float* records;        // [rows, H, KDA_RECORD]
  int rows;

  __device__ float* record(int row, int head) const { return records + (i64(row) * source.heads + head) * KDA_RECORD; }
};

template <bool EVEN>
__device__ __forceinline__ void kda_inputs(const KdaInputs& job, int tile, int head) {
  const KdaSource& source = job.source;
  const int inner = source.inner(), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp / KDA_EACH;
  const int first = tile * KDA_TILE + warp % KDA_EACH * KDA_EACH, channels = head * KDA_HEAD + 4 * lane;
  if (part < 3) {
    const KdaTaps taps = kda_taps(job.conv, part * inner + channels);
    wait_for_producer();
    let_next_start();
    if (first >= job.rows) return;
    uint2 raw[KDA_EACH + 3];
#pragma unroll
    for (int i = 0; i < KDA_EACH + 3; i++) {
      const int row = min(first + i - 3, job.rows - 1);
      const bf16* from = source.raw(row) + part * inner + channels;
      raw[i] = row < 0 ? load_activations4(from) : kda_four<EVEN>(from);
    }
#pragma unroll
    for (int i = 0; i < KDA_EACH; i++) {
      if (first + i >= job.rows) return;
      float4 x = kda_mixed(raw[i], raw[i + 1], raw[i + 2], raw[i + 3], taps);
      if (part < 2) x = kda_unit(x, part == 0 ? KDA_Q_LENGTH : 1.0f);
      float* to = job.record(first + i, head) + (part == 0 ? KDA_Q : part == 1 ? KDA_K : KDA_V);
      *reinterpret_cast<float4*>(to + 4 * lane) = x;
    }
    return;
  }
  const float4 bias = load_settled(reinterpret_cast<const float4*>(job.dt_bias + channels));
  const float rate = expf(load_settled(job.a_log + head));
  wait_for_producer();
  let_next_start();
  uint2 f[KDA_EACH];
#pragma unroll
  for (int i = 0; i < KDA_EACH; i++) {
    f[i] = kda_four<EVEN>(source.projected(min(first + i, job.rows - 1)) + 3 * inner + channels);
  }
#pragma unroll
  for (int i = 0; i < KDA_EACH; i++) {
    if (first + i >= job.rows) return;
    float* to = job.record(first + i, head) + KDA_DECAY + 4 * lane;
    *reinterpret_cast<float4*>(to) = kda_decay(f[i], bias, rate, source.lower_bound);
    if (lane == i) {
      const float beta = to_float(load_activation(source.projected(first + i) + 5 * inner + head));
      job.record(first + i, head)[KDA_BETA] = kda_open(beta);
    }
  }
}

// ---- scan -------------------------------------------------------------------------------------------------------

constexpr int KDA_SCAN_ROWS = 16, KDA_SCAN_STAGES = 3;  // rows of a stage; stages, all but one of them on their way

struct KdaScanStage {
  KdaRow<KDA_SLICE> rows[KDA_SCAN_ROWS + 1];
};

struct KdaScan {
  const float* records;  // [rows, H, KDA_RECORD]
  float* state;          // [H, 128, 128], advanced in place
  float* o;              // [rows, P]
  const bf16* proj;      // [rows, 5P+H]
  bf16* history;         // [3, 3P], advanced in place
  int heads, rows;
};

// Rows `from` .. of one slice into a stage: each thread copies 16 bytes of each row, always the same ones of it.
__device__ __forceinline__ void kda_fetch(const KdaScan& job, int head, int slice, int from, KdaScanStage& stage) {
  constexpr int V = 3 * KDA_HEAD / 4, BETA = V + KDA_SLICE / 4;
  const int tid = threadIdx.x;
  const int place = tid < V ? 4 * tid : tid < BETA ? KDA_V + slice * KDA_SLICE + 4 * (tid - V) : KDA_BETA;
  float* to = stage.rows[0].q + 4 * tid;  // a row has the same parts in the same order
  if (tid <= BETA) {
    const float* source = job.records + (i64(from) * job.heads + head) * KDA_RECORD + place;
    const int left = job.rows - from, step = job.heads * KDA_RECORD;
#pragma unroll
    for (int r = 0; r < KDA_SCAN_ROWS; r++, source += step, to += sizeof(KdaRow<KDA_SLICE>) / sizeof(float)) {
      if (r < left) copy16(to, source);
    }
  }
  copies_commit();  // also where there is nothing more: groups are counted
}

// The recurrence of one slice over any number of rows, by KDA_WALKERS threads.
__device__ __forceinline__ void kda_scan(const KdaScan& job, int head, int slice, KdaScanStage* stages) {
  constexpr int AHEAD_STAGES = KDA_SCAN_STAGES - 1;
  const int inner = job.heads * KDA_HEAD, tid = threadIdx.x;
  float* place = job.state + kda_place(head, slice * KDA_SLICE);
  wait_for_producer();
  let_next_start();
  float state[KDA_KEYS];
  kda_load(state, place);
  for (int i = 0; i < AHEAD_STAGES; i++) kda_fetch(job, head, slice, i * KDA_SCAN_ROWS, stages[i]);
  if (tid < 3 * KDA_SLICE) {  // the inputs are made, so nobody else reads the history any more
    const int column = tid / KDA_SLICE * inner + head * KDA_HEAD + slice * KDA_SLICE + tid % KDA_SLICE;
    bf16 kept[3];
    for (int i = 0; i < 3; i++) {
      const int at = job.rows + i - 3;
      kept[i] = at < 0 ? job.history[(at + 3) * 3 * inner + column] : job.proj[i64(at) * (5 * inner + job.heads) + column];
    }
    for (int i = 0; i < 3; i++) job.history[i * 3 * inner + column] = kept[i];
  }
  int now = 0, filled = AHEAD_STAGES;
  for (int from = 0; from < job.rows; from += KDA_SCAN_ROWS) {
    copies_wait<AHEAD_STAGES - 1>();
    __syncthreads();  // this stage is here, and the one before it has been walked through
    kda_fetch(job, head, slice, from + AHEAD_STAGES * KDA_SCAN_ROWS, stages[filled]);
    float* o = job.o + i64(from) * inner + head * KDA_HEAD + slice * KDA_SLICE + kda_column();
    kda_walk<true>(state, min(KDA_SCAN_ROWS, job.rows - from), stages[now].rows, o, inner);
    now = now + 1 == KDA_SCAN_STAGES ? 0 : now + 1;
    filled = filled + 1 == KDA_SCAN_STAGES ? 0 : filled + 1;
  }
  kda_store(place, state);
}
