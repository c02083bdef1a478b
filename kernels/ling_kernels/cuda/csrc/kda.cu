// KDA launches: verify (with and without clusters), commit over all layers, and the three kernels of prefill.
#include "kda.cuh"

template <bool CLUSTERED>
__device__ __forceinline__ void kda_verify_block(bf16* out, float* sums, float* records, bf16* raw, const bf16* proj,
                                                 const bf16* history, const float* state, const bf16* conv,
                                                 const float* a_log, const float* dt_bias, const bf16* o_norm,
                                                 int heads, int rows, float lower_bound, float eps) {
  __shared__ KdaVerifyShared shared;
  const KdaVerify job{{proj, history, heads, lower_bound}, state, conv, a_log, dt_bias, o_norm, out, sums, records, raw,
                      rows, eps};
  kda_verify<CLUSTERED>(job, blockIdx.x / KDA_SLICES, blockIdx.x % KDA_SLICES, shared);
}

// grid: 8 H blocks. Output without its norm, and sums of squares.
extern "C" __global__ void __launch_bounds__(KDA_THREADS)
    kda_verify_sums(bf16* out, float* sums, float* records, bf16* raw, const bf16* proj, const bf16* history,
                    const float* state, const bf16* conv, const float* a_log, const float* dt_bias,
                    const bf16* o_norm, int heads, int rows, float lower_bound, float eps) {
  kda_verify_block<false>(out, sums, records, raw, proj, history, state, conv, a_log, dt_bias, o_norm, heads, rows,
                          lower_bound, eps);
}

// grid: 8 H blocks, in clusters (sm_90 and later). Normed output.
extern "C" __global__ void CLUSTER(8) __launch_bounds__(KDA_THREADS)
    kda_verify_normed(bf16* out, float* sums, float* records, bf16* raw, const bf16* proj, const bf16* history,
                      const float* state, const bf16* conv, const float* a_log, const float* dt_bias,
                      const bf16* o_norm, int heads, int rows, float lower_bound, float eps) {
  kda_verify_block<true>(out, sums, records, raw, proj, history, state, conv, a_log, dt_bias, o_norm, heads, rows,
                         lower_bound, eps);
}

// grid: (8, H, layers). records, raw: of all layers, one after another; history [layers, 3, 3P]; state [layers, ...].
extern "C" __global__ void __launch_bounds__(KDA_THREADS)
    kda_commit_layers(const float* records, const bf16* raw, bf16* history, float* state, const i64* count,
                      int heads) {
  __shared__ KdaCommitShared shared;
  const i64 layer = blockIdx.z, inner = heads * KDA_HEAD;
  kda_commit(records + layer * ROW_TILE * heads * KDA_RECORD, raw + layer * ROW_TILE * 3 * inner,
             history + layer * 3 * 3 * inner, state + layer * inner * KDA_HEAD, count, heads, blockIdx.y, blockIdx.x,
             shared);
}

// grid: (rows, H); three warps
extern "C" __global__ void __launch_bounds__(3 * WARP)
    kda_prefill_inputs(float* records, const bf16* proj, const bf16* history, const bf16* conv, const float* a_log,
                       const float* dt_bias, int heads, float lower_bound) {
  const int row = blockIdx.x, head = blockIdx.y, part = threadIdx.x / WARP;
  __shared__ uint2 taps[3 * KDA_HEAD];
  const uint2* from = reinterpret_cast<const uint2*>(conv) + head * KDA_HEAD;
  for (int i = threadIdx.x; i < 3 * KDA_HEAD; i += 3 * WARP) {
    taps[i] = from[i / KDA_HEAD * heads * KDA_HEAD + i % KDA_HEAD];
  }
  wait_for_producer();
  let_next_start();
  __syncthreads();
  float* record = records + (i64(row) * heads + head) * KDA_RECORD;
  kda_prepare({proj, history, heads, lower_bound}, head, row, part, taps, dt_bias + head * KDA_HEAD,
              expf(a_log[head]), 0, KDA_HEAD, record + (part == 0 ? KDA_Q : KDA_K), record + KDA_DECAY,
              record + KDA_V, record + KDA_BETA);
}

// grid: (8, H)
extern "C" __global__ void __launch_bounds__(KDA_THREADS)
    kda_prefill_scan(float* o, float* state, const float* records, int heads, int rows) {
  __shared__ KdaScanShared shared;
  kda_scan(records, state, o, heads, blockIdx.y, blockIdx.x, rows, shared);
}

// grid: rows * H / 16, rounded up
extern "C" __global__ void __launch_bounds__(KDA_THREADS)
    kda_prefill_gate(bf16* out, const float* o, const bf16* proj, const bf16* o_norm, int heads, int rows, float eps) {
  wait_for_producer();
  let_next_start();
  const int task = blockIdx.x * (KDA_THREADS / KDA_LANES) + threadIdx.x / KDA_LANES;
  // a whole warp stays together for its shuffles: past the end it repeats the last task and writes the same bits
  const int kept = min(task, rows * heads - 1);
  kda_gate({proj, nullptr, heads, 0.0f}, o, o_norm, out, eps, kept / heads, kept % heads);
}
