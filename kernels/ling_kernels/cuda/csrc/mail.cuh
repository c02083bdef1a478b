// Mailboxes that the GPUs of one machine write for each other (exchange.cuh), and the push of one row into them.
#pragma once
#include "arch.cuh"

constexpr int MAX_RANKS = 8;

// As `mail_words` in exchange.py fills it. Constant, so it may be read before the wait; what it points to may not.
struct Mail {
  u64 boxes[MAX_RANKS];  // each rank's mailbox as this GPU addresses it: packets [2 parities][ranks][blocks][packets]
  u32* numbers;          // [blocks]: exchanges that each block has finished
  u32* error;            // 0, or 1 + a rank that was waited for in vain; then nobody waits any more
  u32* host_error;       // the same in the host's memory, for it to read without a copy
  u64 patience_ns;
  u64 rank, ranks, blocks, packets;
};

// One row's parts on their way to all ranks, this one too, from the kernel that makes them; exchange_pushed takes them. A
// packet of 8 bytes is a value with the number of the exchange beside it, written whole, so nothing waits for this kernel
// to end: its end is held up by what the next kernel already reads, and by the way over the links. Boxes [2 parities][ranks][blocks: parts][values], in packets of two values.
//
// Two sets of boxes are enough here too: who pushes number n has finished number n - 1, so every rank has posted or
// pushed number n - 1, which it did after the kernel that took number n - 2 had ended.
//
// In shared memory, filled in the background by the first warp, which is also the one that pushes: no thread has a
// register for it, and a block asks for the counter, which all blocks want, once. mail: the address of a Mail, or 0.
struct __align__(16) Push {
  Mail mail;
  u32 numbers[4];
  static constexpr int ASKS = 4;  // the thread that copies Mail's fifth 16 bytes: the counters' address

  // Before the wait.
  __device__ __forceinline__ void ask(i64 from) {
    if (from == 0 || threadIdx.x >= sizeof(Mail) / 16) return;
    copy16(reinterpret_cast<uint4*>(&mail) + threadIdx.x, reinterpret_cast<const uint4*>(from) + threadIdx.x);
    copies_commit();
  }
  // After it: the exchange before this one has ended.
  __device__ __forceinline__ void ask_number(i64 from) {
    if (from == 0 || threadIdx.x != ASKS) return;
    copies_wait<0>();
    copy16(numbers, mail.numbers);
    copies_commit();
  }
  // By all of the first warp, before the first value.
  __device__ __forceinline__ void ready(i64 from) {
    if (from == 0 || threadIdx.x >= WARP) return;
    copies_wait<0>();
    __syncwarp();
  }
  __device__ __forceinline__ void post(int part, int column, float value) const {
    const u32 number = numbers[0] + 1, rank = u32(mail.rank), ranks = u32(mail.ranks);
    const u32 packets = u32(mail.packets), blocks = u32(mail.blocks);
    const u32 way = (((number & 1) * ranks + rank) * blocks + part) * packets * 16 + column * 8;
#pragma unroll 1
    for (u32 to = 0; to < ranks; ++to) post_value(reinterpret_cast<char*>(mail.boxes[to]) + way, value, number);
  }
};
static_assert(sizeof(Mail) % 16 == 0 && sizeof(Mail) / 16 <= WARP, "a thread copies 16 bytes");
