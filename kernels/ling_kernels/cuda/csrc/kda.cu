// KDA launches: verify; commit and follow, which take all layers and may move a sequence's words too; the three kernels
// of prefill. _uneven: for projections whose rows are not 8-byte aligned.
#include "kda_prefill.cuh"
#include "kda_window.cuh"
#include "verdict.cuh"

// grid: 8 H blocks. Output without its norm, and sums of squares. At most 128 registers, so that a block finds room early.
#define KDA_VERIFY(name, even)                                                                                     \
  extern "C" __global__ void __launch_bounds__(KDA_THREADS, 2)                                                     \
      name(bf16* out, float* sums, float* records, bf16* raw, const bf16* proj, const bf16* history,               \
           float* state, const bf16* conv, const float* a_log, const float* dt_bias, const bf16* o_norm,           \
           int heads, int rows, float lower_bound, const i64* remaining, const u8* done) {                         \
    __shared__ KdaVerifyShared shared;                                                                             \
    const KdaVerify job{{proj, history, heads, lower_bound}, state, conv, a_log, dt_bias, o_norm, out, sums,       \
                        records, raw, rows, remaining, done};                                                      \
    kda_verify<even>(job, blockIdx.x / KDA_SLICES, blockIdx.x % KDA_SLICES, shared);                               \
  }
KDA_VERIFY(kda_verify_sums, true)
KDA_VERIFY(kda_verify_sums_uneven, false)

// grid: layers * H * 4 blocks, and, where there is a `step`, one before them that moves the sequence's words (verdict.cuh).
// records, raw, history, state: of all layers, one after another. *count: rows to commit.
extern "C" __global__ void __launch_bounds__(KDA_THREADS, 2)
    kda_commit_layers(const float* records, const bf16* raw, bf16* history, float* state, int heads, int layers, int window,
                      ADVANCE_ARGUMENTS) {
  __shared__ KdaCommitShared shared;
  const int block = blockIdx.x - (step != nullptr);
  if (block >= 0) return kda_commit({records, raw, history, state, count, heads, window}, block, layers, shared);
  wait_for_producer();
  let_next_start();
  advance(ADVANCE_JOB);
}

// The same where the states have advanced already. grid: a thread for every four channels of the layers' histories, and
// that one block.
extern "C" __global__ void __launch_bounds__(KDA_THREADS)
    kda_follow_layers(const bf16* raw, bf16* history, int heads, int layers, ADVANCE_ARGUMENTS) {
  const int block = blockIdx.x - (step != nullptr);
  let_next_start_early();
  if (block >= 0) {
    kda_follow({nullptr, raw, history, nullptr, count, heads, 1}, layers, block * KDA_THREADS + threadIdx.x);
    return;
  }
  wait_for_producer();
  advance(ADVANCE_JOB);
}

// grid: (rows / 16 rounded up, H)
#define KDA_INPUTS(name, even)                                                                                     \
  extern "C" __global__ void __launch_bounds__(KDA_TILE_THREADS)                                                   \
      name(float* records, const bf16* proj, const bf16* history, const bf16* conv, const float* a_log,            \
           const float* dt_bias, int heads, int rows, float lower_bound) {                                         \
    kda_inputs<even>({{proj, history, heads, lower_bound}, conv, a_log, dt_bias, records, rows}, blockIdx.x,       \
                     blockIdx.y);                                                                                  \
  }
KDA_INPUTS(kda_prefill_inputs, true)
KDA_INPUTS(kda_prefill_inputs_uneven, false)

// grid: (8, H). Shared memory: KDA_SCAN_STAGES stages, and more, so that no other block shares the multiprocessor.
extern "C" __global__ void __launch_bounds__(KDA_WALKERS)
    kda_prefill_scan(float* o, float* state, bf16* history, const float* records, const bf16* proj, int heads, int rows) {
  DYNAMIC_SHARED(memory);
  kda_scan({records, state, o, proj, history, heads, rows}, blockIdx.y, blockIdx.x,
           reinterpret_cast<KdaScanStage*>(memory));
}

// grid: rows * H / 16, rounded up
extern "C" __global__ void __launch_bounds__(KDA_THREADS)
    kda_prefill_gate(bf16* out, const float* o, const bf16* proj, const bf16* o_norm, int heads, int rows, float eps) {
  wait_for_producer();
  let_next_start();
  const int task = blockIdx.x * (KDA_THREADS / KDA_SLICE) + threadIdx.x / KDA_SLICE;
  // a whole warp stays together for its shuffles: past the end it repeats the last task and writes the same bits
  const int kept = min(task, rows * heads - 1);
  kda_gate({proj, nullptr, heads, 0.0f}, o, o_norm, out, eps, kept / heads, kept % heads);
}
