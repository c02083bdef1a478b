// Choosing tokens from logits: argmax, top-k and top-p, Gumbel noise keyed by (seed, position, token), all without a
// sort of the vocabulary, a float atomic or a host read, so that equal logits always give the same token.
//
// A candidate is 64 bits, the float in unsigned order above the complement of the id: the largest candidate is the
// largest value, and of equal ones the lowest id.
#pragma once
#include "arch.cuh"

constexpr int SAMPLE_BLOCKS = 64, SAMPLE_THREADS = 256, SAMPLE_WARPS = SAMPLE_THREADS / WARP;
constexpr int OWN_SPANS = SAMPLE_BLOCKS * SAMPLE_WARPS;  // of a row, whose best values sample_first finds
constexpr float MASS_UNIT = 1099511627776.0f;            // 2^40: probabilities are summed as integers, in any order

__device__ __forceinline__ u32 key_of(float value) { return ordered(value + 0.0f); }  // -0 is 0
__device__ __forceinline__ u64 candidate(float value, int id) { return u64(key_of(value)) << 32 | u32(~id); }
__device__ __forceinline__ int candidate_id(u64 c) { return int(~u32(c)); }
__device__ __forceinline__ u32 candidate_key(u64 c) { return u32(c >> 32); }
__device__ __forceinline__ float candidate_value(u64 c) { return from_ordered(candidate_key(c)); }
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ u64 warp_best(u64 x) {
  const u32 key = warp_max(u32(x >> 32));
  return u64(key) << 32 | warp_max(u32(x >> 32) == key ? u32(x) : 0);
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
  constexpr int TOGETHER = 8;
  u64 best = 0;
#pragma unroll 1
  for (int first = threadIdx.x % WARP; first < blocks; first += TOGETHER * WARP) {
    u64 c[TOGETHER];
#pragma unroll
    for (int j = 0; j < TOGETHER; j++) c[j] = load_activation(candidates + min(first + j * WARP, blocks - 1));
#pragma unroll
    for (int j = 0; j < TOGETHER; j++) best = c[j] > best ? c[j] : best;
  }
  return warp_best(best);
}

// use(value, id) of logits[begin .. end), shared out to `threads`; many loads are under way at once.
constexpr int AT_ONCE = 10;
template <class Use>
__device__ __forceinline__ void each_logit(const float* logits, int begin, int end, int thread, int threads, Use use) {
  for (int first = begin + thread; first < end; first += AT_ONCE * threads) {
    float x[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) x[j] = load_activation(logits + min(first + j * threads, end - 1));
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int i = first + j * threads;
      if (i < end) use(x[j], i);
    }
  }
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

// ---- what is known of a row, and how its token is chosen ----------------------------------------------------------

// Best logits of spans of `size` ids: the head's, or those of sample_first. A span that is not whole below the
// vocabulary's end is not used; what is left of the row past the whole ones is its tail.
struct Spans {
  const float* values;  // [spans, ROW_TILE], NaN where one is not finite; or null
  const u64* own;       // [rows, OWN_SPANS] candidates
  int size;

  __device__ int whole(int vocab) const { return vocab / size; }
  // Of spans `first`, + `step`, ..; past the last comes the last once more. All are asked for at once.
  template <int COUNT>
  __device__ __forceinline__ void best(float (&x)[COUNT], int row, int first, int step, int vocab) const {
    const int last = whole(vocab) - 1;
    if (values != nullptr) {
#pragma unroll
      for (int j = 0; j < COUNT; j++) x[j] = load_activation(values + min(first + j * step, last) * ROW_TILE + row);
    } else {
      u64 c[COUNT];
#pragma unroll
      for (int j = 0; j < COUNT; j++) c[j] = load_activation(own + row * OWN_SPANS + min(first + j * step, last));
#pragma unroll
      for (int j = 0; j < COUNT; j++) x[j] = candidate_value(c[j]);
    }
  }
};

__device__ __forceinline__ int own_size(int vocab) { return (vocab + OWN_SPANS - 1) / OWN_SPANS; }

// Largest logit of a row, by a whole block.
__device__ __forceinline__ float row_top(const float* logits, const Spans& spans, int row, int vocab, u64* warps) {
  constexpr int TOGETHER = 4;
  float top = -infinity();
  const int whole = spans.whole(vocab), threads = blockDim.x;
  for (int s = threadIdx.x; s < whole; s += TOGETHER * threads) {
    float x[TOGETHER];
    spans.best(x, row, s, threads, vocab);
#pragma unroll
    for (int j = 0; j < TOGETHER; j++) top = x[j] > top ? x[j] : top;
  }
  for (int i = whole * spans.size + threadIdx.x; i < vocab; i += blockDim.x) top = logits[i] > top ? logits[i] : top;
  return from_ordered(u32(block_best(key_of(top), warps)));
}

// How the lowest value that is kept is found. FEW: a small count keeps nothing but what at least as large as the
// count-th best of the spans' best, so a few spans hold it all. BINNED: a histogram by distance from the largest
// value says what is certainly kept, and which bins need a closer look. EVERYTHING: nothing is cut.
enum Way { EVERYTHING, BINNED, FEW };
constexpr int MAX_SPANS = 2048;

struct Filter {  // most: keep so many best ones at most, 0 for no such bound
  float heat, inverse, top_p;
  i64 top_k;
  int most;

  __device__ Filter(float temperature, i64 top_k, float top_p, int most)
      : heat(fmaxf(temperature, 1e-5f)), inverse(__fdividef(1.0f, heat)), top_p(top_p), top_k(top_k), most(most) {
    inverse = __fmaf_rn(__fmaf_rn(-inverse, heat, 1.0f), inverse, inverse);
  }

  // logit / heat, rounded as a division is; the division itself has a branch and a call for numbers that no logit is
  __device__ float scaled(float logit) const {
    float x = logit * inverse;
    x = __fmaf_rn(__fmaf_rn(-x, heat, logit), inverse, x);
    return __fmaf_rn(__fmaf_rn(-x, heat, logit), inverse, x);
  }
  __device__ int count(int vocab) const {
    const int kept = top_k > 0 && top_k < vocab ? int(top_k) : vocab;
    return most > 0 ? min(kept, most) : kept;
  }
  __device__ bool cuts_count(int vocab) const { return count(vocab) < vocab; }
  __device__ bool cuts_mass() const { return top_p < 1.0f; }
  __device__ u64 needed(u64 mass) const {  // of the mass, at least one unit
    const double wanted = ceil(double(top_p) * double(mass));
    return wanted < 1.0 ? 1 : u64(wanted);
  }
  __device__ Way way(int vocab, int whole) const {
    if (cuts_count(vocab) && whole <= MAX_SPANS && count(vocab) <= whole / 2) return FEW;
    return cuts_count(vocab) || cuts_mass() ? BINNED : EVERYTHING;
  }
};
