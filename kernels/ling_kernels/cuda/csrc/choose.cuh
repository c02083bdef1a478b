// The lowest value that top-k and top-p keep: a histogram of a row, and a closer look at what it leaves unsure.
#pragma once
#include "sample.cuh"

__device__ __forceinline__ u64 mass_of(float x, float max) { return u64(expf(x - max) * MASS_UNIT); }

constexpr int BINS = 2048;
constexpr float BINS_A_UNIT = 64.0f;

// Larger values never have a higher bin.
__device__ __forceinline__ int bin_of(float x, float max) { return int(fminf((max - x) * BINS_A_UNIT, BINS - 1.0f)); }

// Bins below `low` are kept whole. Which values of low .. high and of kth are kept has to be seen: kth holds the last
// one that top-k keeps (BINS: it cuts nothing), low .. high the last one that top-p keeps.
struct Cut {
  u64 before_low, before_kth, total;  // mass
  u32 count_before;                   // of kth
  int low, high, kth;
};

struct CutShared {
  u64 sums[SAMPLE_WARPS];
  u32 numbers[SAMPLE_WARPS];
  u64 mass_kth;
  Cut cut;
};

// s.cut by a block of SAMPLE_THREADS; masses, counts [BINS] of one row.
__device__ __forceinline__ void find_cut(const u64* masses, const u32* counts, const Filter& filter, int vocab,
                                        CutShared& s) {
  constexpr int EACH = BINS / SAMPLE_THREADS;
  const bool by_count = filter.cuts_count(vocab);
  const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, first = tid * EACH;
  u64 mass[EACH], sum = 0;
  u32 count[EACH], number = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    mass[i] = masses[first + i];
    count[i] = by_count ? counts[first + i] : 0;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += mass[i], number += count[i];
  u64 before = sum;
  u32 before_number = number;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {  // inclusive sums
    const u64 more = __shfl_up_sync(ALL, before, step);
    const u32 more_number = __shfl_up_sync(ALL, before_number, step);
    if (lane >= step) before += more, before_number += more_number;
  }
  if (lane == WARP - 1) s.sums[warp] = before, s.numbers[warp] = before_number;
  __syncthreads();
  before -= sum, before_number -= number;
  u64 total = 0;
  for (int w = 0; w < SAMPLE_WARPS; w++) {
    if (w < warp) before += s.sums[w], before_number += s.numbers[w];
    total += s.sums[w];
  }
  if (tid == 0) s.cut = Cut{0, total, total, 0, 0, 0, BINS}, s.mass_kth = 0;
  __syncthreads();
  const u32 wanted = filter.count(vocab);
  if (by_count && before_number < wanted && wanted <= before_number + number) {
    u64 at = before;
#pragma unroll
    for (int i = 0; i < EACH; at += mass[i], before_number += count[i], i++) {
      if (before_number >= wanted || wanted > before_number + count[i]) continue;
      s.cut.before_kth = at, s.cut.count_before = before_number, s.cut.kth = first + i, s.mass_kth = mass[i];
    }
  }
  __syncthreads();
  const u64 least = filter.needed(s.cut.before_kth), most = filter.needed(s.cut.before_kth + s.mass_kth);
  if (filter.cuts_mass()) {
#pragma unroll
    for (int i = 0; i < EACH; before += mass[i], i++) {
      if (before < least && least <= before + mass[i]) s.cut.low = first + i, s.cut.before_low = before;
      if (before < most && most <= before + mass[i]) s.cut.high = first + i;
    }
  } else if (tid == 0) {
    s.cut.low = s.cut.high = s.cut.kth, s.cut.before_low = s.cut.before_kth;
  }
  __syncthreads();
}

// ---- the closer look ----------------------------------------------------------------------------------------------

constexpr int CHOOSERS = 512, CHOOSER_WARPS = CHOOSERS / WARP, MAX_LISTED = 2048, MAX_WANTED = 1024;

struct ChooseShared {
  u64 list[MAX_LISTED];  // candidates in any order, then from best to last
  u64 sorted[MAX_LISTED];
  u64 warps[CHOOSER_WARPS];
  int wanted[MAX_WANTED];  // spans to look into
  u32 listed, num_wanted, lowest;
};

__device__ __forceinline__ void put_in_list(ChooseShared& s, u64 c, u32 capacity) {
  const u32 place = atomicAdd(&s.listed, 1u);
  if (place < capacity) s.list[place] = c;
}

// FEW: everything in the spans that can hold one of the `count` best, down to a value that these reach for certain.
__device__ __forceinline__ void list_few(const float* logits, const Spans& spans, int row, int vocab,
                                         const Filter& filter, u32 capacity, ChooseShared& s) {
  constexpr int EACH = MAX_SPANS / CHOOSERS;
  const int whole = spans.whole(vocab), count = filter.count(vocab);
  u32 keys[EACH];
  float x[EACH];
  spans.best(x, row, threadIdx.x, CHOOSERS, vocab);
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    keys[j] = int(threadIdx.x) + j * CHOOSERS < whole ? key_of(filter.scaled(x[j])) : 0;
  }
  u32 least = 0;
  for (u32 bit = 1u << 31; bit >= 1u << 16; bit >>= 1) {  // coarse: it only has to bound from below
    int reach = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (j * CHOOSERS < whole) reach += __syncthreads_count(keys[j] >= (least | bit));
    }
    if (reach >= count) least |= bit;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int span = threadIdx.x + j * CHOOSERS;
    if (span >= whole || keys[j] < least) continue;
    const u32 place = atomicAdd(&s.num_wanted, 1u);
    if (place < MAX_WANTED) s.wanted[place] = span;
  }
  __syncthreads();
  const int num = min(s.num_wanted, u32(MAX_WANTED));
  for (int w = threadIdx.x / WARP; w <= num; w += CHOOSER_WARPS) {
    const int begin = (w < num ? s.wanted[w] : whole) * spans.size;  // and the tail
    each_logit(logits, begin, min(begin + spans.size, vocab), threadIdx.x % WARP, WARP, [&](float logit, int id) {
      const float x = filter.scaled(logit);
      if (key_of(x) >= least) put_in_list(s, candidate(x, id), capacity);
    });
  }
  __syncthreads();
}

__device__ __forceinline__ void sort_list(int listed, ChooseShared& s) {
  for (int i = threadIdx.x; i < listed; i += CHOOSERS) {
    const u64 own = s.list[i];
    int place = 0;
    for (int j = 0; j < listed; j++) place += s.list[j] > own;
    s.sorted[place] = own;
  }
  __syncthreads();
}

// Lowest key that is kept, by one warp. The list holds all of `cut`'s unsure bins; FEW: of everything, as if all were
// in bin 0.
__device__ __forceinline__ u32 lowest_kept(const Cut& cut, bool few, int listed, const Filter& filter, int vocab,
                                           float largest, const u64* sorted) {
  const int lane = threadIdx.x % WARP;
  int start = 0, reach = listed;  // of kth's values; where low .. high ends
  if (!few) {
    int less = 0, within = 0;
    for (int i = lane; i < listed; i += WARP) {
      const int bin = bin_of(candidate_value(sorted[i]), largest);
      less += bin < cut.kth, within += bin <= cut.high;
    }
    for (int step = 16; step > 0; step >>= 1) {
      less += __shfl_xor_sync(ALL, less, step), within += __shfl_xor_sync(ALL, within, step);
    }
    start = less, reach = within;
  }
  int end = listed;  // past the count-th best
  u64 mass = cut.total;
  if (filter.cuts_count(vocab)) {
    end = min(listed, start + filter.count(vocab) - int(cut.count_before));
    if (!filter.cuts_mass()) return candidate_key(sorted[max(end - 1, 0)]);
    u64 sum = 0;
    for (int i = start + lane; i < end; i += WARP) sum += mass_of(candidate_value(sorted[i]), largest);
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
    mass = cut.before_kth + sum;
  }
  const u64 target = filter.needed(mass);
  const int last = max(min(end, reach), 1) - 1;
  u64 before = cut.before_low;
  for (int first = 0; first <= last; first += WARP) {
    const int i = min(first + lane, last);
    u64 upto = first + lane <= last ? mass_of(candidate_value(sorted[i]), largest) : 0;
    for (int step = 1; step < WARP; step *= 2) {
      const u64 more = __shfl_up_sync(ALL, upto, step);
      if (lane >= step) upto += more;
    }
    const u32 there = __ballot_sync(ALL, before + upto >= target);
    if (there != 0) return candidate_key(sorted[min(first + __ffs(there) - 1, last)]);
    before += __shfl_sync(ALL, upto, WARP - 1);
  }
  return candidate_key(sorted[last]);
}

__device__ __forceinline__ u64 block_sum(u64 x, u64* warps) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
  __syncthreads();
  x = 0;
  for (u32 w = 0; w < blockDim.x / WARP; w++) x += warps[w];
  __syncthreads();
  return x;
}

// The same where the list is too short for what is unsure (values that are nearly all equal): bit by bit, over the
// whole row each time. Slow, and as exact.
__device__ __noinline__ u32 lowest_kept_slowly(const float* logits, int vocab, const Filter& filter, float max,
                                               u64* warps) {
  auto sum_from = [&](u32 least, bool mass) {
    u64 own = 0;
    each_logit(logits, 0, vocab, threadIdx.x, blockDim.x, [&](float logit, int) {
      const float x = filter.scaled(logit);
      if (key_of(x) >= least) own += mass ? mass_of(x, max) : 1;
    });
    return block_sum(own, warps);
  };
  u32 kth = 0;
  const u64 count = filter.count(vocab);
  if (filter.cuts_count(vocab)) {
    for (u32 bit = 1u << 31; bit > 0; bit >>= 1) {
      if (sum_from(kth | bit, false) >= count) kth |= bit;
    }
  }
  if (!filter.cuts_mass()) return kth;
  u64 mass = sum_from(kth + 1, true);
  if (filter.cuts_count(vocab)) mass += (count - sum_from(kth + 1, false)) * mass_of(from_ordered(kth), max);
  const u64 target = filter.needed(mass);
  u32 lowest = 0;
  for (u32 bit = 1u << 31; bit > 0; bit >>= 1) {
    const u32 tried = lowest | bit;
    if (tried <= kth || sum_from(tried, true) >= target) lowest = tried;
  }
  return lowest;
}
