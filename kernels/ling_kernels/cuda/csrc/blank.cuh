// Results that the next kernel takes before the one that makes them has ended. A kernel's end reaches the next one some 1.1
// us after its last store, and then comes the trip to memory for its results; by then they have been in L2 for long.
//
// Where they are to stand everything is blank beforehand: bits that no arithmetic leaves, for a NaN that the machine makes is
// 0x7fffffff, and 0x7fff in bf16. So each word says by itself whether it is there, in any order of their coming, and
// nothing is fenced or flagged. A kernel that looks for them waits for its producer all the same, but later: before its
// first store, so that nothing which may still be read is written over, and so that when it has ended, all before it have.
// The memory is made blank by a kernel that has ended when the one that looks begins.
#pragma once
#include "arch.cuh"

constexpr u32 BLANK = 0xffffffffu;

__device__ __forceinline__ bool is_blank(float x) { return __float_as_uint(x) == BLANK; }
// Whether one of the fp32 values is.
__device__ __forceinline__ bool any_blank(const uint4& v) {
  return (v.x == BLANK) | (v.y == BLANK) | (v.z == BLANK) | (v.w == BLANK);
}

// The same for two bf16 values a word: a half of the word is all ones where it is none of what is left.
__device__ __forceinline__ u32 blank_halves(u32 pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; }
__device__ __forceinline__ bool is_blank(bf16 x) { return x == bf16(BLANK); }
__device__ __forceinline__ bool any_blank_half(const uint2& v) { return (blank_halves(v.x) | blank_halves(v.y)) != 0; }
__device__ __forceinline__ bool any_blank_half(const uint4& v) {
  return (blank_halves(v.x) | blank_halves(v.y) | blank_halves(v.z) | blank_halves(v.w)) != 0;
}

// Memory for the results of later kernels, `words` times 16 bytes, made blank by all threads of all blocks: of a kernel
// that has waited.
struct Blank {
  uint4* at;
  int words;

  __device__ __forceinline__ void make(int block, int blocks) const {
    for (int i = block * blockDim.x + threadIdx.x; i < words; i += blocks * blockDim.x) {
      store16(at + i, make_uint4(BLANK, BLANK, BLANK, BLANK));
    }
  }
};
