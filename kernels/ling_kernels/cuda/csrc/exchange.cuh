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
  static constexpr bool KEPT = N < 8;  // eight ranks' packets leave no registers for their boxes
  const Mail& mail;
  char* boxes[KEPT ? N : 1];  // this block's place in each rank's mailbox: of parity 0, from rank 0
  char* own;                  // that in this rank's: an index that is no constant would put all of them into memory
  u32 bytes, pitch;           // of a block's packets; from one rank's to the next's
  int block;
  u32* counter;
  int rank;
  u32 number;

  // Before the wait: what is constant. As asm, or it would be read after the wait, and the number only when it is there.
  __device__ __forceinline__ Swap(const Mail& mail, int block) : mail(mail), block(block) {
    rank = int(word(&mail.rank));
    bytes = u32(word(&mail.packets)) * 16, pitch = u32(word(&mail.blocks)) * bytes;
    counter = reinterpret_cast<u32*>(word(&mail.numbers)) + block;
    own = place(rank);
    settle_here(counter), settle_here(own);
#pragma unroll
    for (int r = 0; KEPT && r < N; ++r) boxes[r] = place(r), settle_here(boxes[r]);
  }
  __device__ __forceinline__ static i64 word(const void* from) { return load_settled(static_cast<const i64*>(from)); }
  __device__ __forceinline__ char* place(int owner) const {
    return reinterpret_cast<char*>(word(mail.boxes + owner)) + u64(block) * bytes;
  }
  // After it.
  __device__ __forceinline__ void begin() { number = load_volatile(counter) + 1; }

  // From a place above to packet `packet` from rank `from`.
  __device__ __forceinline__ u32 way(int from, int packet) const {
    return ((number & 1) * N + from) * pitch + packet * 16;
  }

  // Give packets `at` and `at + step` to every other rank.
  __device__ __forceinline__ void post(const u64 (&data)[2], int at, int step) const {
#pragma unroll
    for (int other = 0; other < N; ++other) {
      if (other == rank) continue;
      char* box = KEPT ? boxes[KEPT ? other : 0] : place(other);
#pragma unroll
      for (int p = 0; p < 2; ++p) post_packet(box + way(rank, at + p * step), data[p], number);
    }
  }

  // The same packets of every other rank; data of this one stays.
  __device__ __forceinline__ void take(u64 (&data)[N][2], int at, int step) const {
    u64 since = 0;
    for (u32 looks = 1;; ++looks) {
      int missing = -1;
      const char* first = (KEPT ? own : place(rank)) + way(0, at);
#pragma unroll
      for (int other = 0; other < N; ++other) {
        if (other == rank) continue;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          if (!take_packet(first + other * pitch + p * step * 16, data[other][p], number)) missing = other;
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
  __device__ __forceinline__ void finish() const { store_volatile(counter, number); }
};

__device__ __forceinline__ u64 joined(u32 low, u32 high) { return u64(high) << 32 | low; }

// The eight values of two packets added to sum.
__device__ __forceinline__ void add_values(float (&sum)[8], u64 first, u64 second) {
  float value[8];
  unpack(value, make_uint4(u32(first), u32(first >> 32), u32(second), u32(second >> 32)));
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += value[i];
}

// What follows a sum over ranks of one row, `value`: x_out = x + value, and, with `norm`, h = RMSNorm(x_out) · w. x, w: this
// thread's eight values of the residual stream, zeros where there is none, and of the norm's weight. each: 1 / width. All
// threads of the block call it.
__device__ __forceinline__ void add_and_norm(float (&value)[8], bool inside, i64 base, uint4 x, uint4 w, bool norm,
                                             bf16* x_out, bf16* h, float each, float eps, float* warps) {
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
  const float factor = rsqrtf(block_sum(squares, warps) * each + eps);
  float scale[8];
  unpack(scale, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] *= factor * scale[i];
  if (inside) *reinterpret_cast<uint4*>(h + base) = pack(value);
}

// One row's sum over ranks, from this rank's eight values `own`. Grid: rows; block: width / 8 threads, rounded up.
template <int N>
__device__ __forceinline__ void sum_row(uint4 own, bool inside, float (&sum)[8], Swap<N>& swap) {
  const u64 mine[2] = {joined(own.x, own.y), joined(own.z, own.w)};
  u64 data[N][2];
  if (inside) swap.post(mine, threadIdx.x, blockDim.x);
#pragma unroll
  for (int r = 0; r < N; ++r) data[r][0] = mine[0], data[r][1] = mine[1];
  if (inside) swap.take(data, threadIdx.x, blockDim.x);
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
