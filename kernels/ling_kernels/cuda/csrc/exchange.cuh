// Exchange between the GPUs of one machine by one-shot push: each rank writes its part into a mailbox on every other
// GPU, and takes theirs from its own. Sums and choices are then taken on each rank in rank order: the same bits
// everywhere, whatever arrives first.
//
// Exchanges are numbered block by block, in memory, so that a replayed graph goes on counting: block b of every exchange
// kernel uses the words and boxes of block b, and its n-th exchange the boxes of parity n. Two sets of boxes are
// enough: who posts number n has finished number n - 1, so every rank has posted number n - 1, which it did after the
// kernel that took number n - 2 had ended.
#pragma once
#include "norm.cuh"

constexpr int MAX_RANKS = 8;

// As `mail_words` in exchange.py fills it. Constant, so it may be read before the wait; what it points to may not.
struct Mail {
  u64 boxes[MAX_RANKS];  // each rank's mailbox as this GPU addresses it: packets [2 parities][ranks][blocks][packets]
  u32* numbers;          // [blocks]: exchanges that each block has finished
  u32* error;            // 0, or 1 + a rank that was waited for in vain; then nobody waits any more
  u32* host_error;       // the same in the host's memory, for it to read without a copy
  u64 patience_ns;
  u64 rank, blocks, packets;
};

// One block's exchange: N ranks, two packets a thread and round.
template <int N>
struct Swap {
  const Mail& mail;
  int block;
  u32 number;

  // After the wait.
  __device__ Swap(const Mail& mail, int block) : mail(mail), block(block), number(load_volatile(mail.numbers + block) + 1) {}

  __device__ __forceinline__ char* box(int owner, int from, int packet) const {
    const u64 place = ((number & 1) * N + from) * mail.blocks + block;
    return reinterpret_cast<char*>(mail.boxes[owner]) + (place * mail.packets + packet) * 16;
  }

  // Give packets `at` and `at + step` to every other rank.
  __device__ __forceinline__ void post(const u64 (&own)[2], int at, int step) const {
    const int rank = int(mail.rank);
#pragma unroll
    for (int other = 0; other < N; ++other) {
      if (other == rank) continue;
#pragma unroll
      for (int p = 0; p < 2; ++p) post_packet(box(other, rank, at + p * step), own[p], number);
    }
  }

  // The same packets of every other rank; data of this one stays.
  __device__ __forceinline__ void take(u64 (&data)[N][2], int at, int step) const {
    const int rank = int(mail.rank);
    u64 since = 0;
    for (u32 looks = 1;; ++looks) {
      int missing = -1;
#pragma unroll
      for (int other = 0; other < N; ++other) {
        if (other == rank) continue;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          if (!take_packet(box(rank, other, at + p * step), data[other][p], number)) missing = other;
        }
      }
      if (missing < 0) return;
      if (looks % 64 == 0 && given_up(missing, since)) return;
      look_again();
    }
  }

  // Whether waiting has an end: this rank's patience, or another wait that failed before.
  __device__ __forceinline__ bool given_up(int missing, u64& since) const {
    if (load_volatile(mail.error) != 0) return true;
    const u64 now = clock_ns();
    if (since == 0) since = now;
    if (now - since < mail.patience_ns) return false;
    store_volatile(mail.error, 1 + missing);
    store_volatile(mail.host_error, 1 + missing);
    return true;
  }

  // By one thread, when all threads of the block have read the number.
  __device__ __forceinline__ void finish() const { store_volatile(mail.numbers + block, number); }
};

__device__ __forceinline__ u64 joined(u32 low, u32 high) { return u64(high) << 32 | low; }

// The eight values of two packets added to sum.
__device__ __forceinline__ void add_values(float (&sum)[8], u64 first, u64 second) {
  float value[8];
  unpack(value, make_uint4(u32(first), u32(first >> 32), u32(second), u32(second >> 32)));
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += value[i];
}

// What follows a sum over ranks of one row: x_out = x + sum (x null: the sum), and h = RMSNorm(x_out) · weight unless
// weight is null. All threads of the block call it; w: this thread's weights.
__device__ __forceinline__ void add_and_norm(float (&value)[8], bool inside, i64 base, uint4 x, uint4 w, bool norm,
                                             bf16* x_out, bf16* h, int width, float eps, float* warps) {
  add_values(value, joined(x.x, x.y), joined(x.z, x.w));
  const uint4 rounded = pack(value);
  if (inside) *reinterpret_cast<uint4*>(x_out + base) = rounded;
  if (!norm) {
    __syncthreads();
    return;
  }
  unpack(value, rounded);  // the norm sees what the residual stream holds
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += inside ? value[i] * value[i] : 0.0f;
  const float factor = rsqrtf(block_sum(squares, warps) * (1.0f / float(width)) + eps);
  float scale[8];
  unpack(scale, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] *= factor * scale[i];
  if (inside) *reinterpret_cast<uint4*>(h + base) = pack(value);
}

// One row's sum over ranks, from this rank's eight values `own`. Grid: rows; block: width / 8 threads, rounded up.
template <int N>
__device__ __forceinline__ void sum_row(const Mail& mail, uint4 own, bool inside, float (&sum)[8], Swap<N>& swap) {
  const u64 mine[2] = {joined(own.x, own.y), joined(own.z, own.w)};
  u64 data[N][2];
#pragma unroll
  for (int r = 0; r < N; ++r) data[r][0] = mine[0], data[r][1] = mine[1];
  if (inside) {
    swap.post(mine, threadIdx.x, blockDim.x);
    swap.take(data, threadIdx.x, blockDim.x);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < N; ++r) add_values(sum, data[r][0], data[r][1]);
}

// What one rank found in a row of its logits: its best candidate with an id of the whole vocabulary, whether any logit
// was not finite, and the sum of exp(logit - best). Every lane of one warp calls it; sums may be null.
struct RowBest {
  u64 best;
  u64 rest;  // bad, and the bits of the sum above it

  __device__ __forceinline__ static RowBest of(const u64* best, const u32* bad, const float* sums, int blocks, int first);
  __device__ __forceinline__ void write(u64* best_out, u32* bad_out, float* sums_out, int at) const {
    best_out[at] = best;
    if (bad_out != nullptr) bad_out[at] = u32(rest);
    if (sums_out != nullptr) sums_out[at] = __uint_as_float(u32(rest >> 32));
  }
};
