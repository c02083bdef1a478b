// The kernels' architecture header for a CPU: each thread of a block is a fiber, and warp-wide instructions are meetings
// of 32 of them. Blocks run one after another. It checks what a GPU would not tell: that every thread waits for the
// producer exactly once, that nothing but constants is touched before, that barriers are met by all.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 bf16;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int WARP = 32;
constexpr int ROW_TILE = 16;
constexpr u32 ALL = 0xffffffffu;

struct Dim {
  u32 x, y, z;
};

namespace emulator {

struct Warp {
  u64 slots[2][WARP][4];  // what each lane brought, by parity of the meeting
  u32 arrived, finished;
};

struct Thread {
  Dim index;
  u32 lane, meetings, barriers, waits, looks;
  Warp* warp;
};

extern Thread* self;
extern Dim block, grid, threads;
extern u8* dynamic_shared;

void meet(u32 mask);  // all lanes of the warp
void barrier();       // all threads of the block
void wait_for_producer();
void let_early();            // of one block
u32 look(const u32* from);  // first what may have been there, then what is there
void check_known(const void* from, u32 bytes);  // within one of the arguments
void fail(const char* why);
void copy(void* to, const void* from, u32 bytes);  // 8 or 16
void commit();                                      // copies so far are a group
void copies_wait(u32 pending);                      // for all but the youngest groups
void look_again();    // others may run meanwhile

// Bring a value; then those of all lanes of this meeting may be read, until the next meeting but one.
template <class T>
inline const u64 (*bring(u32 mask, const T& value))[4] {
  static_assert(sizeof(T) <= 32, "too large for a meeting");
  Warp* warp = self->warp;
  const u32 parity = self->meetings & 1;
  std::memcpy(warp->slots[parity][self->lane], &value, sizeof(T));
  meet(mask);
  return warp->slots[parity];
}

template <class T>
inline T taken(const u64 (*from)[4], u32 lane) {
  T value;
  std::memcpy(&value, from[lane & 31], sizeof(T));
  return value;
}

}  // namespace emulator

#define threadIdx (emulator::self->index)
#define blockIdx (emulator::block)
#define gridDim (emulator::grid)
#define blockDim (emulator::threads)
#define DYNAMIC_SHARED(name) u8* name = emulator::dynamic_shared

inline void __syncthreads() { emulator::barrier(); }
inline void __syncwarp(u32 mask = ALL) { emulator::meet(mask); }
inline void __threadfence() {}
inline int __syncthreads_count(bool is) {
  static int sum = 0;
  sum += is;
  emulator::barrier();
  const int all = sum;
  emulator::barrier();
  sum = 0;
  emulator::barrier();
  return all;
}

template <class T>
inline T __shfl_sync(u32 mask, T value, int lane, int width = 32) {
  const int base = int(emulator::self->lane) / width * width;
  return emulator::taken<T>(emulator::bring(mask, value), base + lane % width);
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, int with, int width = 32) {
  (void)width;
  return emulator::taken<T>(emulator::bring(mask, value), emulator::self->lane ^ with);
}
template <class T>
inline T __shfl_up_sync(u32 mask, T value, u32 by) {
  const u32 lane = emulator::self->lane;
  return emulator::taken<T>(emulator::bring(mask, value), lane < by ? lane : lane - by);
}
template <class T>
inline T __shfl_down_sync(u32 mask, T value, u32 by) {
  const u32 lane = emulator::self->lane;
  return emulator::taken<T>(emulator::bring(mask, value), lane + by > 31 ? lane : lane + by);
}
inline u32 __ballot_sync(u32 mask, bool is) {
  auto all = emulator::bring(mask, u32(is));
  u32 bits = 0;
  for (u32 l = 0; l < 32; ++l) bits |= emulator::taken<u32>(all, l) << l;
  return bits;
}
inline bool __any_sync(u32 mask, bool is) { return __ballot_sync(mask, is) != 0; }
inline bool __all_sync(u32 mask, bool is) { return __ballot_sync(mask, is) == ALL; }

template <class T>
inline T atomicOr(T* at, T bits) {
  const T before = *at;
  *at |= bits;
  return before;
}
template <class T>
inline T atomicAdd(T* at, T by) {
  const T before = *at;
  *at += by;
  return before;
}
template <class T>
inline T atomicMax(T* at, T by) {
  const T before = *at;
  if (by > before) *at = by;
  return before;
}

inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }
inline float __uint_as_float(u32 x) { float f; std::memcpy(&f, &x, 4); return f; }
inline u32 __float_as_uint(float x) { u32 u; std::memcpy(&u, &x, 4); return u; }
inline float __int_as_float(int x) { return __uint_as_float(u32(x)); }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __ll2float_rn(i64 x) { return float(x); }
inline u64 __umul64hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
inline i64 min(i64 a, int b) { return a < b ? a : b; }
inline i64 max(i64 a, int b) { return a > b ? a : b; }
inline i64 min(int a, i64 b) { return a < b ? a : b; }
inline i64 max(int a, i64 b) { return a > b ? a : b; }
inline u32 min(u32 a, int b) { return a < u32(b) ? a : u32(b); }
inline u32 min(int a, u32 b) { return u32(a) < b ? u32(a) : b; }
template <class T> inline T __ldg(const T* from) { return *from; }

inline float to_float(bf16 x) { return __uint_as_float(u32(x) << 16); }
inline float low_float(u32 pair) { return __uint_as_float(pair << 16); }
inline float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline bf16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return bf16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_bf16(float low, float high) { return u32(to_bf16(low)) | u32(to_bf16(high)) << 16; }

// The fragments of arch.cuh's comment, as a warp holds them.
inline void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  struct Fragment { u32 a[4], b[2]; } mine = {{a0, a1, a2, a3}, {b0, b1}};
  auto all = emulator::bring(ALL, mine);
  const int lane = int(emulator::self->lane), group = lane / 4, t = lane % 4;
  auto half = [](u32 pair, int which) { return which ? high_float(pair) : low_float(pair); };
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8, column = 2 * t + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const Fragment a = emulator::taken<Fragment>(all, u32(row % 8 * 4 + k % 8 / 2));
      const Fragment b = emulator::taken<Fragment>(all, u32(column * 4 + k % 8 / 2));
      sum += half(a.a[row / 8 + k / 8 * 2], k % 2) * half(b.b[k / 8], k % 2);
    }
    c[i] = sum;
  }
}

inline uint4 load_weights(const void* from, bool live) {
  if (live && (uintptr_t(from) & 15)) emulator::fail("a 16-byte load is not aligned");
  uint4 v = {0, 0, 0, 0};
  if (live) std::memcpy(&v, from, 16);
  return v;
}
inline void load_weights_into(uint4& to, const void* from, bool live) {
  if (live) to = load_weights(from, true);
}
inline uint4 load_activations(const void* from) { return load_weights(from, true); }
inline void load_activations_into(uint4& to, const void* from, bool live) { load_weights_into(to, from, live); }
inline uint4 load16(const void* from, bool live = true) { return load_weights(from, live); }
inline void store16(void* to, const uint4& v) {
  if (uintptr_t(to) & 15) emulator::fail("a 16-byte store is not aligned");
  std::memcpy(to, &v, 16);
}
inline float load_constant(const float* from) { return *from; }
inline float load_settled(const float* from) { return *from; }
inline i64 load_settled(const i64* from) { return *from; }
inline u32 load_settled(const u32* from) { return *from; }
inline u8 load_settled(const u8* from) { return *from; }
inline bf16 load_settled(const bf16* from) { return *from; }
inline uint2 load_settled(const uint2* from) {
  if (uintptr_t(from) & 7) emulator::fail("an 8-byte load is not aligned");
  return *from;
}
inline float4 load_settled(const float4* from) {
  if (uintptr_t(from) & 15) emulator::fail("a 16-byte load is not aligned");
  return *from;
}
inline float4 load_constant(const float4* from) { return load_settled(from); }
inline uint2 load_activations4(const bf16* from) { return load_settled(reinterpret_cast<const uint2*>(from)); }
inline bf16 load_activation(const bf16* from) { return *from; }
inline u32 load_activation(const u32* from) { return *from; }
inline int load_activation(const int* from) { return *from; }
inline i64 load_activation(const i64* from) { return *from; }
inline u64 load_activation(const u64* from) { return *from; }
inline u8 load_activation(const u8* from) { return *from; }
inline float load_activation(const float* from) { return *from; }
inline u32 load_changing(const u32* from) { return emulator::look(from); }
inline uint4 load_settled16(const void* from) { return load_weights(from, true); }
// A hint may come at any time, but within an argument's memory.
inline void prefetch_l2(const void* from, u32 bytes) {
  if ((uintptr_t(from) | bytes) & 15) emulator::fail("a prefetch is not aligned");
  emulator::check_known(from, bytes);
}
inline void prefetch_line(const void* at) { emulator::check_known(at, 1); }

inline void wait_for_producer() { emulator::wait_for_producer(); }
inline void let_next_start() {
  if (emulator::self->waits != 1) emulator::fail("the next kernel was let in before the wait");
}

inline void let_next_start_early() {
  if (emulator::self->waits != 0) emulator::fail("the next kernel was let in after the wait, not early");
  emulator::let_early();
}

inline void settle_here(int&) {}
inline void settle_here(u32&) {}
inline void settle_here(float&) {}
inline void settle_here(bf16&) {}
template <class T>
inline void settle_here(T*&) {}
inline void settle_before_wait(u32 x) {
  if (x == ALL) emulator::fail("the way out before the wait was taken");
}

inline float warp_sum(float x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
  return x;
}
inline int warp_slot() { return int(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP); }
inline u32 warp_max(u32 x) {
  auto all = emulator::bring(ALL, x);
  for (u32 l = 0; l < 32; ++l) x = max(x, emulator::taken<u32>(all, l));
  return x;
}
inline u32 warp_min(u32 x) {
  auto all = emulator::bring(ALL, x);
  for (u32 l = 0; l < 32; ++l) x = min(x, emulator::taken<u32>(all, l));
  return x;
}

inline float infinity() { return INFINITY; }
inline float not_a_number() { return NAN; }
inline float quick_exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline float quick_reciprocal(float x) { return 1.0f / x; }
inline float quick_rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float from_ordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Copies in the background: emulator::copy does them at once or, in other orders, when they are waited for.
inline void copy16(void* to, const void* from) { emulator::copy(to, from, 16); }
inline void copy8(void* to, const void* from) { emulator::copy(to, from, 8); }
inline void copies_commit() { emulator::commit(); }
template <int pending>
inline void copies_wait() { emulator::copies_wait(pending); }

// Lane 8i + r brings the address of row r of matrix i.
inline void load_matrices(u32 (&v)[4], const void* row) {
  if (uintptr_t(row) & 15) emulator::fail("a matrix row is not aligned");
  auto all = emulator::bring(ALL, row);
  const u32 lane = emulator::self->lane;
  for (u32 i = 0; i < 4; ++i) {
    const bf16* from = static_cast<const bf16*>(emulator::taken<const void*>(all, 8 * i + lane / 4));
    v[i] = u32(from[lane % 4 * 2]) | u32(from[lane % 4 * 2 + 1]) << 16;
  }
}
inline void load_matrices_transposed(u32 (&v)[4], const void* row) {
  if (uintptr_t(row) & 15) emulator::fail("a matrix row is not aligned");
  auto all = emulator::bring(ALL, row);
  const u32 lane = emulator::self->lane;
  for (u32 i = 0; i < 4; ++i) {
    u32 pair = 0;
    for (u32 e = 0; e < 2; ++e) {
      const bf16* from = static_cast<const bf16*>(emulator::taken<const void*>(all, 8 * i + lane % 4 * 2 + e));
      pair |= u32(from[lane / 4]) << (16 * e);
    }
    v[i] = pair;
  }
}

// Memory that several ranks see is shared between processes here. A block that waits lets its other threads run.
inline void post_packet(void* to, u64 data, u32 number) {
  if (uintptr_t(to) & 15) emulator::fail("a packet is not aligned");
  if (!emulator::self->waits) emulator::fail("a packet was posted before the wait");
  const u64 halves[2] = {u64(number) << 32 | u32(data), u64(number) << 32 | u32(data >> 32)};
  for (int i = 0; i < 2; ++i) __atomic_store_n(static_cast<u64*>(to) + i, halves[i], __ATOMIC_RELEASE);
}
inline bool take_packet(const void* from, u64& data, u32 number) {
  u64 halves[2];
  for (int i = 0; i < 2; ++i) halves[i] = __atomic_load_n(static_cast<const u64*>(from) + i, __ATOMIC_ACQUIRE);
  data = u64(u32(halves[1])) << 32 | u32(halves[0]);
  return u32(halves[0] >> 32) == number && u32(halves[1] >> 32) == number;
}
inline u32 load_volatile(const u32* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline void store_volatile(u32* to, u32 value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
inline u64 clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000ull + u64(now.tv_nsec);
}
inline void look_again() { emulator::look_again(); }
