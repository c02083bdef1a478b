// Runs one kernel: fibers, barriers, and the memory that a kernel may touch at each time.
#include "arch.cuh"

#include <csetjmp>
#include <csignal>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

namespace emulator {

constexpr size_t STACK = 64 * 1024, PAGE = 4096;

// Fibers change places millions of times: the compiler's own jump keeps nothing but stack and place.
#ifdef __clang__
typedef jmp_buf Place;
#define MARK(place) _setjmp(place)
[[noreturn]] static void jump(Place& to) { _longjmp(to, 1); }
#else
typedef void* Place[5];
#define MARK(place) __builtin_setjmp(place)
[[noreturn]] __attribute__((noinline)) static void jump(Place& to) { __builtin_longjmp(to, 1); }
#endif

// Where a barrier leaves the choice: threads in turn, the last one first, or each warp as far as it gets.
enum Order : u32 { IN_TURN, BACKWARDS, WARP_BY_WARP };

struct Region {
  u8* base;
  size_t bytes;
  int constant;  // 1: weights and tables, readable at any time, never written; 2: settled, and written after the wait
  u8* before;    // what an early read may find in its place, with room for as much behind it; null: what is there
};

struct Copy {
  void* to;
  const void* from;
  u32 bytes, group;
};

struct Fiber {
  Thread thread;
  ucontext_t context;
  Place at;
  bool started, done;
  const u32* counter;  // it waits until this has passed `passed`; null: for nothing
  u32 passed, groups;
  std::vector<Copy> copies;  // under way
};

Thread* self;
Dim block, grid, threads;
u8* dynamic_shared;

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static u8* stacks;
static const Region* regions;
static int num_regions;
static void (*body)(void**);
static void** arguments;
static Place home;
static sigjmp_buf failed;
static std::string reason;
static u32 order, current, start, turn, living, barrier_arrived, barrier_done, wait_arrived;
static u32 opened;  // 0 or 1
static bool all_early, block_early;  // whether all blocks, or one, let the next kernel start before they waited
static u64 progress;

void fail(const char* why) {
  reason = why;
  reason += ", block " + std::to_string(block.x) + "," + std::to_string(block.y) + " thread " +
            std::to_string(fibers[current].thread.index.x);
  siglongjmp(failed, 1);
}

static void on_fault(int, siginfo_t*, void*) {
  fail(opened ? "memory outside the arguments, or a constant written" : "activations were touched before the wait");
}

static void set_rights(const Region& region, int rights) {
  u8* page = reinterpret_cast<u8*>(uintptr_t(region.base) / PAGE * PAGE);
  mprotect(page, size_t(region.base + region.bytes - page), rights);
}

static void protect(u32 open) {
  opened = open;
  for (int r = 0; r < num_regions; ++r) {
    const Region& region = regions[r];
    if (region.before) {  // until the wait it holds what it held before kernels that may still run
      u8* behind = region.before + region.bytes;
      set_rights(region, PROT_READ | PROT_WRITE);
      if (!open) memcpy(behind, region.base, region.bytes);
      memcpy(region.base, open ? behind : region.before, region.bytes);
    }
    const int early = region.constant ? PROT_READ : PROT_NONE;
    set_rights(region, open && region.constant != 1 ? PROT_READ | PROT_WRITE : early);
  }
}

void let_early() { block_early = true; }

u32 look(const u32* from) {
  if (self->waits > 0 || self->looks++ == 0) return *from;
  const u8* at = reinterpret_cast<const u8*>(from);
  for (int r = 0; r < num_regions; ++r) {
    const Region& region = regions[r];
    const bool within = at >= region.base && at < region.base + region.bytes;
    if (within && region.before) return *reinterpret_cast<const u32*>(region.before + region.bytes + (at - region.base));
  }
  return *from;
}

void check_known(const void* from, u32 bytes) {
  for (int r = 0; r < num_regions; ++r) {
    const u8* at = static_cast<const u8*>(from);
    if (at >= regions[r].base && at + bytes <= regions[r].base + regions[r].bytes) return;
  }
  fail("memory outside the arguments is asked for");
}

static void pause() {
  if (MARK(fibers[current].at) == 0) jump(home);
}

// Threads that wait are not resumed in vain.
static void pause_until(const u32& counter, u32 passed) {
  if (counter > passed) return;
  fibers[current].counter = &counter;
  fibers[current].passed = passed;
  pause();
}

void look_again() {
  ++progress;  // what is waited for comes from outside
  if (current + 1 == threads.x) sched_yield();
  pause();
}

void meet(u32 mask) {
  Warp* warp = self->warp;
  const u32 mine = self->meetings++;
  if (++warp->arrived == (mask == ALL ? u32(WARP) : u32(__builtin_popcount(mask)))) {
    warp->arrived = 0;
    warp->finished = mine + 1;
    ++progress;
  }
  pause_until(warp->finished, mine);
}

static void settle_barriers() {
  if (living == 0) return;
  if (barrier_arrived == living) barrier_arrived = 0, ++barrier_done, ++progress;
  if (wait_arrived == living) {
    wait_arrived = 0;
    protect(1);
    ++progress;
  }
}

void barrier() {
  const u32 mine = self->barriers++;
  ++barrier_arrived;
  settle_barriers();
  pause_until(barrier_done, mine);
}

void wait_for_producer() {
  if (++self->waits > 1) fail("a second wait for the producer");
  ++wait_arrived;
  settle_barriers();
  pause_until(opened, 0);
}

static void finish(const Copy& copy) { memcpy(copy.to, copy.from, copy.bytes); }

void copy(void* to, const void* from, u32 bytes) {
  if ((uintptr_t(to) | uintptr_t(from)) & (bytes - 1)) fail("a copy is not aligned");
  (void)*static_cast<const volatile u8*>(from);  // a touch: it may be early
  Fiber& fiber = fibers[current];
  const Copy made = {to, from, bytes, fiber.groups};
  if (order == IN_TURN) {
    finish(made);
  } else {
    memset(to, 0xff, bytes);  // until it is waited for, it is anything
    fiber.copies.push_back(made);
  }
}

void commit() { ++fibers[current].groups; }

void copies_wait(u32 pending) {
  Fiber& fiber = fibers[current];
  size_t kept = 0;
  for (const Copy& copy : fiber.copies) {
    if (copy.group + pending < fiber.groups) finish(copy);
    else fiber.copies[kept++] = copy;
  }
  fiber.copies.resize(kept);
}

static void run_thread() {
  for (;;) {
    body(arguments);
    if (self->waits != 1) fail("a thread ended without waiting for the producer");
    fibers[current].done = true;
    --living;
    ++progress;
    settle_barriers();
    pause();  // until there is another block
  }
}

// Let a thread run until it meets others.
static void resume(u32 thread) {
  Fiber& fiber = fibers[thread];
  if (fiber.done || (fiber.counter && *fiber.counter <= fiber.passed)) return;
  fiber.counter = nullptr;
  current = thread;
  self = &fiber.thread;
  if (MARK(home) == 0) {
    if (fibers[current].started) jump(fibers[current].at);
    fibers[current].started = true;
    setcontext(&fibers[current].context);
  }
}

static void run_block() {
  const u32 count = threads.x;
  living = count;
  barrier_arrived = barrier_done = wait_arrived = 0;
  block_early = false;
  protect(0);
  for (u32 t = 0; t < count; ++t) {
    Fiber& fiber = fibers[t];
    fiber.thread = {{t, 0, 0}, t % WARP, 0, 0, 0, 0, &warps[t / WARP]};
    fiber.done = false;
    fiber.counter = nullptr;
    fiber.groups = 0;
    fiber.copies.clear();
    if (fiber.started) continue;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + size_t(t) * STACK;
    fiber.context.uc_stack.ss_size = STACK - t % 64 * 1088;  // else all of them would lie in the same sets of a cache
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
  }
  for (auto& warp : warps) warp.arrived = warp.finished = 0;
  while (living > 0) {
    static u64 before;
    before = progress;
    if (order == WARP_BY_WARP) {
      for (start = 0; start < count; start += WARP) {
        static u64 since;
        do {
          since = progress;
          for (turn = start; turn < start + WARP && turn < count; ++turn) resume(turn);
        } while (progress != since);
      }
    } else {
      for (turn = 0; turn < count; ++turn) resume(order == BACKWARDS ? count - 1 - turn : turn);
    }
    if (progress == before) fail("threads wait for each other");
  }
  all_early &= block_early;
}

}  // namespace emulator

// Pages that cost nothing until they are touched.
static u8* fresh_pages(size_t bytes) {
  return static_cast<u8*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

// Memory whose end is the end of a page, with a closed page behind it.
extern "C" u8* emulator_allocate(size_t bytes) {
  using namespace emulator;
  const size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  u8* pages = fresh_pages(size + PAGE);
  mprotect(pages + size, PAGE, PROT_NONE);
  return pages + (size - bytes) / 16 * 16;
}

extern "C" void emulator_free(u8* base, size_t bytes) {
  using namespace emulator;
  const size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  munmap(reinterpret_cast<u8*>(uintptr_t(base) / PAGE * PAGE), size + PAGE);
}

// dims: grid x, y, z, threads, and their order, on which what a kernel leaves must not depend.
// Returns what went wrong, or null.
extern "C" const char* emulator_launch(
    void (*body)(void**), void** arguments, const u32* dims, u32 shared, const emulator::Region* regions, int count) {
  using namespace emulator;
  static std::vector<u8> shared_memory;
  grid = {dims[0], dims[1], dims[2]};
  threads = {dims[3], 1, 1};
  order = dims[4];
  emulator::body = body, emulator::arguments = arguments, emulator::regions = regions, num_regions = count;
  if (fibers.size() < threads.x) {
    if (stacks) munmap(stacks, fibers.size() * STACK);
    fibers.resize(threads.x);
    stacks = fresh_pages(threads.x * STACK);
    for (Fiber& fiber : fibers) fiber.started = false;
  }
  warps.resize((threads.x + WARP - 1) / WARP);
  shared_memory.assign(shared + 16, 0xff);
  dynamic_shared = shared_memory.data() + (-uintptr_t(shared_memory.data()) & 15);
  reason.clear();
  all_early = true;
  struct sigaction handler = {}, old_segv, old_bus;
  handler.sa_sigaction = on_fault;
  handler.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &handler, &old_segv);
  sigaction(SIGBUS, &handler, &old_bus);
  if (sigsetjmp(failed, 1) == 0) {
    for (block.z = 0; block.z < grid.z; ++block.z)
      for (block.y = 0; block.y < grid.y; ++block.y)
        for (block.x = 0; block.x < grid.x; ++block.x) run_block();
  } else {
    for (Fiber& fiber : fibers) fiber.started = false;  // they stand anywhere
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  for (int r = 0; r < num_regions; ++r) set_rights(regions[r], PROT_READ | PROT_WRITE);
  return reason.empty() ? nullptr : reason.c_str();
}

// Whether the last launch let the next kernel start before any of its threads had waited.
extern "C" int emulator_was_early() { return emulator::all_early; }
