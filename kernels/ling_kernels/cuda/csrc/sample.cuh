// Choosing tokens from logits: argmax, top-k and top-p by radix selection, Gumbel noise keyed by (seed, position,
// token), all without a sort, a float atomic or a host read, so that equal logits always give the same token.
//
// A row of logits is shared out to SAMPLE_BLOCKS blocks. A candidate is 64 bits, the float in unsigned order above the
// complement of the id: the largest candidate is the largest value, and of equal ones the lowest id.
#pragma once
#include "arch.cuh"

constexpr int SAMPLE_BLOCKS = 64, SAMPLE_THREADS = 256, SAMPLE_WARPS = SAMPLE_THREADS / WARP;
// A threshold is found in three digits of its 32 bits, high to low.
constexpr int DIGITS = 3, BINS = 2048;
constexpr float MASS_UNIT = 1099511627776.0f;  // 2^40: probabilities are summed as integers, in any order

__device__ __forceinline__ int digit_shift(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }
__device__ __forceinline__ int digit_of(u32 key, int level) { return key >> digit_shift(level) & (level == 2 ? 1023 : 2047); }

__device__ __forceinline__ u64 candidate(float value, int id) { return u64(ordered(value)) << 32 | u32(~id); }
__device__ __forceinline__ int candidate_id(u64 c) { return int(~u32(c)); }
__device__ __forceinline__ float from_ordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ float candidate_value(u64 c) { return from_ordered(u32(c >> 32)); }

__device__ __forceinline__ u64 warp_best(u64 x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const u64 other = __shfl_xor_sync(ALL, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// Best of a block; every thread gets it. warps: one word a warp.
__device__ __forceinline__ u64 block_best(u64 x, u64* warps) {
  x = warp_best(x);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
  __syncthreads();
  for (u32 w = 0; w < blockDim.x / WARP; w++) x = warps[w] > x ? warps[w] : x;
  __syncthreads();
  return x;
}

// Best of `blocks` candidates, by one warp.
__device__ __forceinline__ u64 best_of(const u64* candidates, int blocks) {
  u64 best = 0;
  for (int b = threadIdx.x % WARP; b < blocks; b += WARP) best = candidates[b] > best ? candidates[b] : best;
  return warp_best(best);
}

// ---- noise ------------------------------------------------------------------------------------------------------

constexpr u64 POSITION_KEY = 0x9e3779b97f4a7c15ull, TOKEN_KEY = 0xc2b2ae3d27d4eb4full;

__device__ __forceinline__ u64 mixed(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ __forceinline__ u64 noise_row(i64 seed, i64 position) {
  return mixed(mixed(u64(seed) + POSITION_KEY) + u64(position) * POSITION_KEY);
}

__device__ __forceinline__ float gumbel(u64 row, int token) {
  const u32 bits = u32(mixed(row + u64(token) * TOKEN_KEY) >> 41);
  return -logf(-logf((float(bits) + 0.5f) * 1.1920928955078125e-07f));
}

// ---- passes over a row ------------------------------------------------------------------------------------------

struct Filter {  // device words of a request
  const float* temperature;
  const i64* top_k;
  const float* top_p;

  __device__ float scaled(float logit) const { return logit / fmaxf(*temperature, 1e-5f); }
  __device__ bool cuts_count(int vocab) const { return *top_k > 0 && *top_k < vocab; }
  __device__ bool cuts_mass() const { return *top_p < 1.0f; }
};

struct Span {
  int begin, end;
};
__device__ __forceinline__ Span span_of(int block, int vocab) {
  const int size = (vocab + SAMPLE_BLOCKS - 1) / SAMPLE_BLOCKS;
  return {min(block * size, vocab), min((block + 1) * size, vocab)};
}

// First look at a part of a row: its best candidate, whether it holds NaN or Inf, and on demand the sum of
// exp(logit - this part's maximum).
__device__ __forceinline__ void sample_scan(const float* logits, Span span, u64* best, u32* bad, float* sum, u64* warps) {
  u64 top = 0;
  bool wrong = false;
  for (int i = span.begin + threadIdx.x; i < span.end; i += SAMPLE_THREADS) {
    const float x = logits[i];
    const u64 c = candidate(x, i);
    top = c > top ? c : top;
    wrong |= (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
  }
  top = block_best(top, warps);
  const u64 any = block_best(wrong, warps);
  if (threadIdx.x == 0) {
    *best = top;
    *bad = u32(any);
  }
  if (sum == nullptr) return;
  const float max = candidate_value(top);
  float part = 0.0f;
  for (int i = span.begin + threadIdx.x; i < span.end; i += SAMPLE_THREADS) part += expf(logits[i] - max);
  part = warp_sum(part);
  float* parts = reinterpret_cast<float*>(warps);
  if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int w = 0; w < SAMPLE_WARPS; w++) total += parts[w];
    *sum = total;
  }
}

// ---- selection of the lowest value that is kept -----------------------------------------------------------------
// Phase 0 finds the k-th largest value, phase 1 the lowest whose strictly larger ones have less than top_p of the mass
// of the first k. Each digit takes one pass, which adds up bins of what matches the digits found before.

struct Found {  // what is known before a pass. target: count or mass still to be reached inside `prefix`
  u64 target;
  u32 prefix;
  u32 last;    // phase 1: no element at or below it can be a threshold but itself (the k-th largest value)
  u64 copies;  // phase 1: how many elements equal to `last` are among the first k
  u32 final;   // phase 1: the threshold is `last`
};

struct SelectShared {
  u64 bins[BINS];
  u64 sums[SAMPLE_THREADS];
  u64 warps[SAMPLE_WARPS];
  u64 above, total;
  int bin;
};

// The bin, counted from the highest, in which the sum reaches target; s.above: the sum of those above it. target >= 1;
// where the whole does not reach it the lowest bin that holds something.
__device__ __forceinline__ void find_bin(const u64* histogram, u64 target, SelectShared& s) {
  constexpr int EACH = BINS / SAMPLE_THREADS;
  const int tid = threadIdx.x, high = BINS - 1 - tid * EACH;  // thread 0 has the highest bins
  u64 own[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += own[i] = histogram[high - i];
  s.sums[tid] = sum;
  if (tid == 0) s.bin = -1;
  __syncthreads();
  for (int step = 1; step < SAMPLE_THREADS; step *= 2) {  // inclusive prefix sums
    const u64 more = tid >= step ? s.sums[tid - step] : 0;
    __syncthreads();
    s.sums[tid] += more;
    __syncthreads();
  }
  const u64 total = s.sums[SAMPLE_THREADS - 1];
  if (tid == 0) s.total = total;
  if (target > total) target = total;
  u64 above = s.sums[tid] - sum;
  if (above < target && target <= s.sums[tid]) {  // true for one thread, if anything is there at all
    for (int i = 0; i < EACH; i++) {
      if (target <= above + own[i]) {
        s.bin = high - i;
        s.above = above;
        break;
      }
      above += own[i];
    }
  }
  __syncthreads();
}

// What the pass before has found; every block of a row does this again from the same numbers.
__device__ __forceinline__ Found after_pass(const Found& before, int phase, int level, const u64* histogram,
                                            const Filter& filter, float max, SelectShared& s) {
  Found found = before;
  if (phase == 1 && level == 0) {
    find_bin(histogram, ~0ull, s);  // only the total
    const float weight = expf(from_ordered(before.last) - max);
    const u64 last = before.copies > 0 ? u64(weight * MASS_UNIT) : 0;
    const double all = double(s.total) + double(last) * double(before.copies);
    const double wanted = ceil(double(*filter.top_p) * all);
    found.target = wanted < 1.0 ? 1 : u64(wanted);
    found.final = s.total < found.target;
    __syncthreads();
  }
  if (found.final) return found;
  find_bin(histogram, found.target, s);
  found.prefix |= u32(s.bin) << digit_shift(level);
  found.target -= s.above;
  __syncthreads();
  return found;
}

// ---- verdict ----------------------------------------------------------------------------------------------------

constexpr int RING_HEADER = 6, MAX_STOP_IDS = 16, STOPPED_EOS = 1, STOPPED_LENGTH = 2, ERROR_NON_FINITE = 1;

struct VerdictJob {
  const i64* drafts;  // [rows - 1] or null
  const i64* remaining;
  const i64* stop_ids;  // [MAX_STOP_IDS]
  const u8* done;
  const i64* step;
  int rows;
};

// One thread. tokens [rows], bad [rows] in; words out: count, anchor; entry [RING_HEADER + ROW_TILE].
__device__ __forceinline__ void decide(const VerdictJob& job, const int* tokens, const u32* bad, i64* count_out,
                                       i64* anchor_out, u8* done_out, i64* entry) {
  i64 count = 1;
  if (job.drafts != nullptr) {
    while (count < job.rows && job.drafts[count - 1] == tokens[count - 1]) count++;
  }
  int first_end = job.rows;
  for (int r = job.rows - 1; r >= 0; r--) {
    for (int i = 0; i < MAX_STOP_IDS; i++) {
      if (job.stop_ids[i] == tokens[r]) first_end = r;
    }
  }
  count = min(min(count, i64(first_end) + 1), *job.remaining);
  bool wrong = false;
  for (int r = 0; r < count; r++) wrong |= bad[r] != 0;
  const bool was_done = *job.done != 0;
  if (was_done || wrong) count = 0;
  const bool eos = count > 0 && first_end + 1 == count;
  const bool length = count > 0 && !eos && count == *job.remaining;
  *count_out = count;
  *anchor_out = tokens[count > 0 ? count - 1 : 0];
  *done_out = was_done || wrong || eos || length;
  entry[0] = *job.step;
  entry[1] = count;
  entry[2] = job.rows - 1;
  entry[3] = count > 0 ? count - 1 : 0;
  entry[4] = eos ? STOPPED_EOS : length ? STOPPED_LENGTH : 0;
  entry[5] = wrong && !was_done ? ERROR_NON_FINITE : 0;
  for (int r = 0; r < ROW_TILE; r++) entry[RING_HEADER + r] = r < job.rows ? tokens[r] : 0;
}
