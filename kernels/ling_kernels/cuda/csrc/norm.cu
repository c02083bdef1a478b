// Embedding, and residual add with RMSNorm.
#include "norm.cuh"

// One row: x_out = x + partial, h = RMSNorm(x_out) · weight. A thread has 8 values, so width <= 8192 and the shape of
// the block depends on the width alone. partial null: only the norm, x_out is not written. With a partial x is settled,
// for the kernel that wrote the partial came after the one that wrote x, and has done its own waiting: x is read early.
__device__ __forceinline__ void exchange_norm_row(
    int row, const Partial& partial, const bf16* x, const bf16* weight, bf16* x_out, bf16* h, int width, float eps,
    bool early) {
  __shared__ __align__(16) float warps[WARP];
  const int at = threadIdx.x * 8;
  const bool inside = at < width;
  const i64 base = i64(row) * width + at;
  const uint4 w = load_weights(weight + at, inside);
  float each = 1.0f / float(width);
  settle_here(each);
  const Partial::Places places = partial.places(base, inside);
  uint4 old = make_uint4(0, 0, 0, 0);
  if (inside && partial.at != nullptr) old = load_settled16(x + base);
  if (early) let_next_start_early();
  wait_for_producer();
  if (!early) let_next_start();
  float add[8];
  if (partial.at != nullptr) partial.read(add, places, base, inside);
  if (partial.at == nullptr) old = load16(x + base, inside);
  float value[8];
  unpack(value, old);
  if (partial.at != nullptr) {
    const uint4 total = added(value, add);
    if (inside) *reinterpret_cast<uint4*>(x_out + base) = total;
  }
  const uint4 out = normed(value, inside, w, each, eps, warps);
  if (inside) *reinterpret_cast<uint4*>(h + base) = out;
}

// partial: bf16 [rows, width], or fp32 [parts, .., width] with `pitch` values from part to part. Grid: rows. Block:
// width / 8 threads, rounded up to a warp. early: let the next kernel start before the wait.
extern "C" __global__ void __launch_bounds__(1024, 1) exchange_norm(
    const void* partial, int parts, int pitch, const bf16* x, const bf16* weight, bf16* x_out, bf16* h, int width,
    float eps, int early) {
  exchange_norm_row(blockIdx.x, {partial, parts, pitch}, x, weight, x_out, h, width, eps, early != 0);
}

// x[row] = table[ids[row]], and its norm. Grid and block: as exchange_norm.
extern "C" __global__ void __launch_bounds__(1024, 1)
    embed_norm(const i64* ids, const bf16* table, const bf16* weight, bf16* x, bf16* h, int width, float eps) {
  __shared__ __align__(16) float warps[WARP];
  const int at = threadIdx.x * 8;
  const bool inside = at < width;
  const uint4 scale = load_weights(weight + at, inside);
  float each = 1.0f / float(width);
  settle_here(each);
  let_next_start_early();
  wait_for_producer();
  const uint4 row = load_weights(table + load_activation(ids + blockIdx.x) * width + at, inside);
  float value[8];
  unpack(value, row);
  if (inside) *reinterpret_cast<uint4*>(x + i64(blockIdx.x) * width + at) = row;
  const uint4 out = normed(value, inside, scale, each, eps, warps);
  if (inside) *reinterpret_cast<uint4*>(h + i64(blockIdx.x) * width + at) = out;
}

// x[row] = table[ids[row]]. Grid: rows. Block: as exchange_norm.
extern "C" __global__ void embed(const i64* ids, const bf16* table, bf16* x, int width) {
  wait_for_producer();
  let_next_start();
  const int at = threadIdx.x * 8;
  if (at < width) {
    const uint4 value = load_weights(table + ids[blockIdx.x] * width + at, true);
    *reinterpret_cast<uint4*>(x + i64(blockIdx.x) * width + at) = value;
  }
}
