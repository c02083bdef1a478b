// Everything that is spelled in PTX or differs between architectures. No other file holds asm or asks for
// __CUDA_ARCH__: tests replace this header by one that runs the kernels on a CPU (tests/kernels/emulator).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// bf16 is carried as its 16 bits.
typedef u16 bf16;

constexpr int WARP = 32;
constexpr int ROW_TILE = 16;  // rows of a window's buffers; the live ones come first
constexpr u32 ALL = 0xffffffffu;

// Dynamic shared memory, 16-byte aligned.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]

// ---- bf16 ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x) << 16); }
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two floats rounded to nearest even; `low` is the element at the lower address.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ __forceinline__ bf16 to_bf16(float x) { return bf16(pack_bf16(x, 0.0f)); }

// ---- matrix product --------------------------------------------------------------------------------------------

// c += a · b for a 16x16 (rows), b 16x8 (columns), bf16 in, fp32 sums. Lane (g = lane / 4, t = lane % 4) holds
// a0: row g, a1: row g+8 at k 2t, 2t+1; a2: row g, a3: row g+8 at k 2t+8, 2t+9; b0: k 2t, 2t+1, b1: k 2t+8, 2t+9 of
// column g; c0, c1: row g, c2, c3: row g+8 at columns 2t, 2t+1.
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- memory ----------------------------------------------------------------------------------------------------

// 16 bytes of weights, which no kernel writes; zeros where `live` is false. Not kept in L1: each is read once.
// L2 fetches the other half of a line, which the warp's next load wants (measured: a step is 5 % slower without, and 2 %
// with 256 bytes).
// Volatile, so that the compiler leaves them in program order, before the wait where they are written before it. Not
// ld.global.nc: for that one the assembler (13.0 and 13.5) moves the wait up over the loads and nothing is
// prefetched.
__device__ __forceinline__ uint4 load_weights(const void* from, bool live) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "  @p ld.global.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4]; }\n"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(int(live)));
  return v;
}

// The same into a register that keeps what it holds where `live` is false, for a condition that all lanes share.
__device__ __forceinline__ void load_weights_into(uint4& to, const void* from, bool live) {
  asm volatile(
      "{ .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  @p ld.global.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4]; }\n"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(int(live)));
}

// 16 bytes that an earlier kernel wrote, through L1, only after the wait; stays where it stands in the program.
__device__ __forceinline__ uint4 load_activations(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// The same into a register that keeps what it holds where `live` is false.
__device__ __forceinline__ void load_activations_into(uint4& to, const void* from, bool live) {
  asm volatile(
      "{ .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  @p ld.global.v4.b32 {%0,%1,%2,%3}, [%4]; }\n"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(int(live)));
}

// The same for four bf16, 8-byte aligned, and for single values.
__device__ __forceinline__ uint2 load_activations4(const bf16* from) {
  uint2 v;
  asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ bf16 load_activation(const bf16* from) {
  bf16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ u32 load_activation(const u32* from) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ i64 load_activation(const i64* from) {
  i64 v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ u64 load_activation(const u64* from) {
  return u64(load_activation(reinterpret_cast<const i64*>(from)));
}
__device__ __forceinline__ u8 load_activation(const u8* from) {
  u16 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(v) : "l"(from));
  return u8(v);
}
__device__ __forceinline__ int load_activation(const int* from) {
  return int(load_activation(reinterpret_cast<const u32*>(from)));
}
__device__ __forceinline__ float load_activation(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}

// A number of the model that many warps want: through L1, or all would queue for it at one place of L2.
__device__ __forceinline__ float load_constant(const float* from) { return load_activation(from); }
__device__ __forceinline__ float4 load_constant(const float4* from) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}

// 16 bytes that an earlier kernel wrote: through L1, only after the wait. Zeros where `live` is false.
__device__ __forceinline__ uint4 load16(const void* from, bool live = true) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (live) v = *static_cast<const uint4*>(from);
  return v;
}

// 16 bytes to global memory by one instruction: the compiler made four of an assignment.
__device__ __forceinline__ void store16(void* to, const uint4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Ask for the line around an address to be in L2 soon.
__device__ __forceinline__ void prefetch_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// The same for more memory. from: 16-byte aligned; bytes: a multiple of 16. Called by one thread.
__device__ __forceinline__ void prefetch_l2(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#else
  const char* line = static_cast<const char*>(from);
#pragma unroll 1
  for (u32 at = 0; at < bytes; at += 128) prefetch_line(line + at);
#endif
}

// Words that are no weights but settled: written several kernels ago and by none that may still run. They may be read
// before the wait, from L2, because L1 may hold them as they were a step ago. Also for small weights that a block reads
// once: they stay before the wait.
__device__ __forceinline__ float load_settled(const float* from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ u32 load_settled(const u32* from) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ i64 load_settled(const i64* from) {
  i64 v;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ bf16 load_settled(const bf16* from) {
  bf16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ u8 load_settled(const u8* from) {
  u16 v;
  asm volatile("ld.global.cg.u8 %0, [%1];" : "=h"(v) : "l"(from));
  return u8(v);
}
__device__ __forceinline__ uint2 load_settled(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.cg.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ float4 load_settled(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ uint4 load_settled16(const void* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Words that a kernel which still runs may be writing, looked at again and again: each is read whole, and anew.
__device__ __forceinline__ u32 load_changing(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// ---- programmatic dependent launch -----------------------------------------------------------------------------
// Every thread of every kernel calls wait_for_producer once, before its first read or write of activations; only
// weights, constants and what is settled may be touched before it. let_next_start comes right after: it permits the
// next grid to be placed on the machine, whose own wait still holds until this grid has finished.

__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same before the wait: the next grid's weights are then on their way while this one still waits for its producer.
// Such a next grid is further ahead of what has finished, the further the more kernels in a row do so: before its wait it
// touches weights, and of what is settled only what was written before the last kernel that called let_next_start.
__device__ __forceinline__ void let_next_start_early() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Have a number or an address worked out where this stands in the program, before the wait, rather than where it is
// first used.
__device__ __forceinline__ void settle_here(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void settle_here(u32& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void settle_here(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void settle_here(bf16& x) { asm volatile("" : "+h"(x)); }
template <class T>
__device__ __forceinline__ void settle_here(T*& x) {
  asm volatile("" : "+l"(x));
}

// For a kernel that loads nothing before its wait: the assembler would move that up to its first line, but not past a way
// out. x: what the way depends on, never all ones.
__device__ __forceinline__ void settle_before_wait(u32 x) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0xffffffff; @p exit; }" ::"r"(x));
}

// ---- warp ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

// Which of a multiprocessor's places for warps this one has; every fourth is the same scheduler's.
__device__ __forceinline__ int warp_slot() {
  int slot;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(slot));
  return slot;
}

__device__ __forceinline__ u32 warp_max(u32 x) { return __reduce_max_sync(ALL, x); }
__device__ __forceinline__ u32 warp_min(u32 x) { return __reduce_min_sync(ALL, x); }

// ---- arithmetic ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// The machine's own 2^x, 1/x and x^-1/2, near enough for what they are used for, without the steps around them that are
// for numbers below 2^-126.
__device__ __forceinline__ float quick_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float quick_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float quick_rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Bits of a float in the order of unsigned integers: a < b as floats <=> ordered(a) < ordered(b).
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// ---- shared memory: copies in the background, matrix fragments --------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, both 16-byte aligned. In flight until copies_wait.
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// The same for 8 bytes.
__device__ __forceinline__ void copy8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` of this thread's youngest groups are in flight; a block barrier makes them visible to all.
template <int pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 bf16 matrices; lane 8i + r gives the address of row r of matrix i. Lane l receives of each the two
// elements (2 (l % 4), +1) of row l / 4, transposed: rows 2 (l % 4), +1 of column l / 4.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared_address(row))
               : "memory");
}

// ---- exchange: memory that several GPUs see ----------------------------------------------------------------------
// A packet is 16 bytes: 8 of data, and beside each half of them the number of the exchange that they belong to. A half
// is written and read whole, so a packet needs no flag after it and no fence: it is there when both numbers are right.

__device__ __forceinline__ void post_packet(void* to, u64 data, u32 number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(u32(data)), "r"(number),
               "r"(u32(data >> 32)), "r"(number)
               : "memory");
}

// Whether the packet of that number is there; then its data.
__device__ __forceinline__ bool take_packet(const void* from, u64& data, u32 number) {
  u32 low, first, high, second;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(low), "=r"(first), "=r"(high), "=r"(second)
               : "l"(from)
               : "memory");
  data = u64(high) << 32 | low;
  return first == number && second == number;
}

// A word that others may change meanwhile, on the device or on the host.
__device__ __forceinline__ u32 load_volatile(const u32* from) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_volatile(u32* to, u32 value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Between two looks at what another GPU is to write.
__device__ __forceinline__ void look_again() {}
