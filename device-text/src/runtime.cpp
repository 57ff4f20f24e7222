// Runs the threads of a block as fibers that switch at barriers, one block after another, and judges each access to memory.
//
// The text of the kernels is compiled with calls of `__tsan_*` before each access, as for a sanitizer of races between host
// threads; they are defined here. So each access is known: one that lies outside of all memory of the launch, one of two threads
// that no barrier orders, and one of shared memory that holds nothing yet. For each region of device memory, a flag says of each
// byte whether the launch read it before it wrote it, and whether it wrote it.
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

struct Index3 {
  unsigned x, y, z;
};
#pragma GCC visibility push(hidden)
Index3 threadIdx, blockIdx, blockDim, gridDim;
extern char __start_shared_memory[] __attribute__((weak)), __stop_shared_memory[] __attribute__((weak));
extern char __ehdr_start[], _end[];
#pragma GCC visibility pop

namespace {

typedef unsigned char byte;
typedef uint64_t word;

const unsigned READ = 1, WRITTEN = 2;
const size_t STACK = 256 << 10, PAGE = 4096, MOST_THREADS = 1024;
const byte NOISE = 0xff;

// Who accessed two bytes last, as one number: block, thread, and the barriers before it. 0 is nobody.
struct Cell {
  word write, read;
};

struct Region {
  byte* start;
  size_t size;
  byte* flags;
  Cell* cells;
};

struct Launch {
  void (*call)(const void* kernel, void* const* parameters);
  const void* kernel;
  const char* name;
  void* const* parameters;
  unsigned grid[3], block[3];
  size_t shared;
  Region* regions; // in the order of their places
  size_t count;
  char* fault;
  size_t room;
  unsigned kind;
};

enum Fault { NONE, MEMORY, RACE, UNWRITTEN, DIVERGENCE };
enum State { READY, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool begun;
  State state;
  unsigned mask;
  int line;
  unsigned warp_syncs, exchanges;
  bool orders;
};

Fiber fibers[MOST_THREADS];
byte* stacks;
jmp_buf scheduler;
ucontext_t unused;
Launch* launch;
unsigned self, threads, barriers, block_number;
int votes[2]; // of the next barrier, and of the one before
word now;
Region* last;
byte slots[MOST_THREADS / 32][2][32][32];

byte* dynamic;
size_t dynamic_room;
Cell* shared_cells;

// A stamp: 2 bits that say that several threads read, in one warp or in several; warp barriers, block barriers, thread, block.
const word SEVERAL = 1, SEVERAL_WARPS = 2;
word warp_of(word stamp) { return stamp >> 39 & 31; }
word thread_of(word stamp) { return stamp >> 34 & 1023; }
word barriers_of(word stamp) { return stamp >> 16 & 0x3ffff; }
word syncs_of(word stamp) { return stamp >> 2 & 0x3fff; }
word block_of(word stamp) { return stamp >> 44; }
bool in_same_block(word a, word b) { return block_of(a) == block_of(b); }

void stamp() {
  now = (word)(block_number + 1) << 44 | (word)self << 34 | (word)(barriers & 0x3ffff) << 16 |
        (word)(fibers[self].warp_syncs & 0x3fff) << 2;
}

// Whether nothing orders an access before the present one.
bool races(word earlier) {
  if (earlier == 0 || (earlier & ~(word)3) == now) return (earlier & 3) != 0;
  if (!in_same_block(earlier, now)) return true;
  if (barriers_of(earlier) != barriers_of(now)) return false;
  if (earlier & SEVERAL_WARPS) return true;
  if (warp_of(earlier) != warp_of(now)) return true;
  if (syncs_of(earlier) != syncs_of(now)) return false;
  return (earlier & SEVERAL) || thread_of(earlier) != thread_of(now);
}

[[noreturn]] void to_scheduler() { _longjmp(scheduler, 1); }

void say(Fault kind, const char* format, ...) {
  if (launch->kind != NONE) return;
  launch->kind = kind;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  snprintf(launch->fault, launch->room, "%s: thread (%u, %u, %u) of block (%u, %u, %u) %s", launch->name, threadIdx.x,
           threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z, text);
}

Region* region_of(byte* at) {
  if (last && at >= last->start && at < last->start + last->size) return last;
  size_t low = 0, high = launch->count;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (launch->regions[middle].start <= at) low = middle + 1;
    else high = middle;
  }
  if (low == 0) return nullptr;
  Region* region = &launch->regions[low - 1];
  if (at >= region->start + region->size) return nullptr;
  return last = region;
}

// Notes an access of cells, and judges it by those before.
void note(Cell* cells, size_t first, size_t end, bool writes, bool is_shared) {
  for (size_t i = first; i < end; i++) {
    Cell& cell = cells[i];
    if (is_shared && !writes && (cell.write == 0 || !in_same_block(cell.write, now)))
      say(UNWRITTEN, "reads shared memory that no thread of the block has written, at byte %zu", 2 * i);
    // Shared memory of an earlier block is other memory.
    if (is_shared && cell.write && !in_same_block(cell.write, now)) cell.write = 0;
    if (is_shared && cell.read && !in_same_block(cell.read, now)) cell.read = 0;
    if (cell.write != now && races(cell.write))
      say(RACE, "%s what thread %u of block number %u writes, and no barrier is between", writes ? "writes" : "reads",
          (unsigned)thread_of(cell.write), (unsigned)block_of(cell.write) - 1);
    if (writes) {
      if (races(cell.read))
        say(RACE, "writes what thread %u of block number %u reads, and no barrier is between",
            (unsigned)thread_of(cell.read), (unsigned)block_of(cell.read) - 1);
      cell.write = now;
      continue;
    }
    const word before = cell.read;
    if ((before & ~(word)3) == now) continue;
    const bool together = before && in_same_block(before, now) && barriers_of(before) == barriers_of(now);
    const bool of_warp = together && !(before & SEVERAL_WARPS) && warp_of(before) == warp_of(now);
    if (!together || (of_warp && syncs_of(before) != syncs_of(now))) cell.read = now;
    else cell.read = now | SEVERAL | (of_warp ? 0 : SEVERAL_WARPS);
  }
}

void access(void* place, size_t size, bool writes, bool is_aligned) {
  if (!launch) return;
  byte* at = (byte*)place;
  if (is_aligned && size > 1 && (uintptr_t)at % size != 0) {
    say(MEMORY, "accesses %zu bytes at %p, which is no multiple of their number", size, place);
    to_scheduler();
  }
  if (Region* region = region_of(at)) {
    if (at + size > region->start + region->size) {
      say(MEMORY, "%s %zu bytes at byte %zu of %zu", writes ? "writes" : "reads", size, (size_t)(at - region->start), region->size);
      to_scheduler();
    }
    if (!region->flags) {
      region->flags = (byte*)calloc(region->size, 1);
      region->cells = (Cell*)calloc((region->size + 1) / 2 + 1, sizeof(Cell));
    }
    const size_t offset = (size_t)(at - region->start);
    for (size_t i = offset; i < offset + size; i++) {
      byte& flag = region->flags[i];
      if (writes) flag |= WRITTEN;
      else if (!(flag & WRITTEN)) flag |= READ;
    }
    // Single bytes share a cell, which would accuse neighbors.
    if (size > 1) note(region->cells, offset / 2, (offset + size + 1) / 2, writes, false);
    if (launch->kind != NONE) to_scheduler();
    return;
  }
  if (at >= dynamic && at < dynamic + launch->shared) {
    if (at + size > dynamic + launch->shared) {
      say(MEMORY, "accesses %zu bytes at byte %zu of %zu of shared memory", size, (size_t)(at - dynamic), launch->shared);
      to_scheduler();
    }
    const size_t offset = (size_t)(at - dynamic);
    if (size > 1) note(shared_cells, offset / 2, (offset + size + 1) / 2, writes, true);
    if (launch->kind != NONE) to_scheduler();
    return;
  }
  if (at >= (byte*)__start_shared_memory && at < (byte*)__stop_shared_memory) {
    const size_t offset = (dynamic_room + (size_t)(at - (byte*)__start_shared_memory)) / 2;
    if (size > 1) note(shared_cells, offset, offset + (size + 1) / 2, writes, true);
    if (launch->kind != NONE) to_scheduler();
    return;
  }
  if (at >= stacks && at < stacks + MOST_THREADS * STACK) return;
  if (at >= (byte*)__ehdr_start && at < (byte*)_end) return;
  // The nearest memory before it says where an index went.
  const Region* before = nullptr;
  for (size_t i = 0; i < launch->count && launch->regions[i].start <= at; i++) before = &launch->regions[i];
  if (before)
    say(MEMORY, "%s %zu bytes outside of all memory, %zu bytes behind %zu bytes", writes ? "writes" : "reads", size,
        (size_t)(at - before->start) - before->size, before->size);
  else
    say(MEMORY, "%s %zu bytes at %p, outside of all memory", writes ? "writes" : "reads", size, place);
  to_scheduler();
}

// Runs a fiber until it waits or returns.
__attribute__((noinline)) void resume(Fiber* fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber->begun) _longjmp(fiber->at, 1);
  fiber->begun = true;
  setcontext(&fiber->start);
}

__attribute__((noinline)) void leave(Fiber* fiber) {
  if (_setjmp(fiber->at) == 0) to_scheduler();
}

void fiber_main() {
  for (;;) {
    launch->call(launch->kernel, launch->parameters);
    fibers[self].state = DONE;
    leave(&fibers[self]);
  }
}

void run(unsigned thread) {
  self = thread;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
  stamp();
  resume(&fibers[thread]);
}

// Lets the lanes go on whose masks are complete. Returns whether there are some.
bool release_warp(unsigned first, unsigned end) {
  bool any = false;
  for (unsigned thread = first; thread < end; thread++) {
    if (fibers[thread].state != AT_WARP) continue;
    const unsigned mask = fibers[thread].mask;
    bool complete = true;
    for (unsigned other = first; other < end; other++) {
      const Fiber& fiber = fibers[other];
      if (!(mask >> (other - first) & 1) || fiber.state == DONE) continue;
      if (fiber.state != AT_WARP || fiber.mask != mask) complete = false;
      else if (fiber.line != fibers[thread].line) {
        say(DIVERGENCE, "and others of its warp wait in lines %d and %d", fiber.line, fibers[thread].line);
        return false;
      }
    }
    if (!complete) continue;
    for (unsigned other = first; other < end; other++) {
      Fiber& fiber = fibers[other];
      if (!(mask >> (other - first) & 1) || fiber.state != AT_WARP) continue;
      fiber.state = READY;
      fiber.warp_syncs += fiber.orders;
    }
    any = true;
  }
  return any;
}

// Runs the threads of a block until all have returned. Returns false after a fault.
bool run_block() {
  barriers = 0;
  votes[0] = 0;
  for (unsigned i = 0; i < threads; i++) {
    fibers[i].state = READY;
    fibers[i].warp_syncs = fibers[i].exchanges = 0;
  }
  for (;;) {
    for (unsigned first = 0; first < threads; first += 32) {
      const unsigned end = first + 32 < threads ? first + 32 : threads;
      do {
        for (unsigned thread = first; thread < end; thread++) {
          if (fibers[thread].state != READY) continue;
          run(thread);
          if (launch->kind != NONE) return false;
        }
      } while (release_warp(first, end));
      if (launch->kind != NONE) return false;
    }
    unsigned done = 0, waiting = 0, at_warp = 0;
    int line = 0;
    for (unsigned i = 0; i < threads; i++) {
      const Fiber& fiber = fibers[i];
      done += fiber.state == DONE, waiting += fiber.state == AT_BLOCK, at_warp += fiber.state == AT_WARP;
      if (fiber.state != AT_BLOCK) continue;
      if (line && line != fiber.line) {
        say(DIVERGENCE, "and others wait at the barriers of lines %d and %d", line, fiber.line);
        return false;
      }
      line = fiber.line;
    }
    if (done == threads) return true;
    if (at_warp || done + waiting < threads) {
      say(DIVERGENCE, "and others: %u wait for lanes that do not come, %u at a barrier in line %d, %u have returned",
          at_warp, waiting, line, done);
      return false;
    }
    // A thread that returns without the barrier that others wait at is a fault of most kernels, though hardware counts it out.
    if (done) {
      say(DIVERGENCE, "and others: %u wait at the barrier of line %d, and %u have returned without it", waiting, line, done);
      return false;
    }
    barriers++;
    votes[1] = votes[0], votes[0] = 0;
    for (unsigned i = 0; i < threads; i++) fibers[i].state = READY;
  }
}

void prepare() {
  if (!stacks)
    stacks = (byte*)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.start.uc_stack.ss_sp == nullptr) {
      mprotect(stacks + i * STACK, PAGE, PROT_NONE);
      fiber.begun = false;
    }
    if (fiber.begun) continue;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks + i * STACK + PAGE;
    fiber.start.uc_stack.ss_size = STACK - PAGE;
    fiber.start.uc_link = &unused;
    makecontext(&fiber.start, fiber_main, 0);
  }
  const size_t fixed = (size_t)(__stop_shared_memory - __start_shared_memory);
  if (dynamic_room < launch->shared || !shared_cells) {
    free(dynamic);
    free(shared_cells);
    dynamic_room = (launch->shared + 255) / 256 * 256;
    dynamic = (byte*)aligned_alloc(256, dynamic_room + 256);
    shared_cells = (Cell*)calloc((dynamic_room + fixed) / 2 + 16, sizeof(Cell));
  } else {
    memset(shared_cells, 0, ((dynamic_room + fixed) / 2 + 16) * sizeof(Cell));
  }
}

}  // namespace

#pragma GCC visibility push(hidden)
extern "C" {

void* emulated_dynamic_shared() { return dynamic; }
unsigned emulated_lane() { return self % 32; }

void emulated_block_barrier(int line) {
  Fiber& fiber = fibers[self];
  fiber.state = AT_BLOCK;
  fiber.line = line;
  leave(&fiber);
}

int emulated_block_or(int value, int line) {
  votes[0] |= value != 0;
  emulated_block_barrier(line);
  return votes[1];
}

void emulated_warp_barrier(unsigned mask, int line, bool orders) {
  Fiber& fiber = fibers[self];
  if (!(mask >> self % 32 & 1)) {
    say(DIVERGENCE, "is not in the mask %#x of the exchange in line %d", mask, line);
    to_scheduler();
  }
  fiber.state = AT_WARP;
  fiber.mask = mask;
  fiber.line = line;
  fiber.orders = orders;
  leave(&fiber);
}

const unsigned char* emulated_exchange(unsigned mask, const void* mine, size_t size, int line) {
  Fiber& fiber = fibers[self];
  // Slots take turns: who is at the next exchange has read those of this one.
  byte(*here)[32] = slots[self / 32][fiber.exchanges++ % 2];
  memset(here[self % 32], NOISE, 32);
  memcpy(here[self % 32], mine, size);
  emulated_warp_barrier(mask, line, false);
  return here[0];
}

void emulated_atomic(void* at, size_t size) {
  // Atomic accesses do not race with each other, and no order is known of others.
  Region* region = region_of((byte*)at);
  if (region && (byte*)at + size <= region->start + region->size) {
    if (!region->flags) {
      region->flags = (byte*)calloc(region->size, 1);
      region->cells = (Cell*)calloc((region->size + 1) / 2 + 1, sizeof(Cell));
    }
    const size_t offset = (size_t)((byte*)at - region->start);
    for (size_t i = offset; i < offset + size; i++)
      region->flags[i] |= region->flags[i] & WRITTEN ? WRITTEN : READ | WRITTEN;
    return;
  }
  access(at, size, false, true);
}

#define HOOKS(SIZE)                                                                  \
  void __tsan_read##SIZE(void* at) { access(at, SIZE, false, true); }                \
  void __tsan_write##SIZE(void* at) { access(at, SIZE, true, true); }                \
  void __tsan_unaligned_read##SIZE(void* at) { access(at, SIZE, false, false); }     \
  void __tsan_unaligned_write##SIZE(void* at) { access(at, SIZE, true, false); }     \
  void __tsan_volatile_read##SIZE(void* at) { access(at, SIZE, false, true); }       \
  void __tsan_volatile_write##SIZE(void* at) { access(at, SIZE, true, true); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* at, unsigned long size) { access(at, size, false, false); }
void __tsan_write_range(void* at, unsigned long size) { access(at, size, true, false); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
#pragma GCC visibility pop

// Runs a launch. `kind` and `fault` of the launch say what was wrong.
extern "C" __attribute__((visibility("default"))) void emulated_launch(Launch* given) {
  launch = given;
  launch->kind = NONE;
  last = nullptr;
  blockDim = {launch->block[0], launch->block[1], launch->block[2]};
  gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  threads = blockDim.x * blockDim.y * blockDim.z;
  prepare();
  block_number = 0;
  const size_t fixed = (size_t)(__stop_shared_memory - __start_shared_memory);
  bool fine = true;
  for (unsigned z = 0; z < gridDim.z && fine; z++)
    for (unsigned y = 0; y < gridDim.y && fine; y++)
      for (unsigned x = 0; x < gridDim.x && fine; x++) {
        blockIdx = {x, y, z};
        memset(__start_shared_memory, NOISE, fixed);
        memset(dynamic, NOISE, launch->shared);
        fine = run_block();
        block_number++;
      }
  // Threads that stand inside of a kernel begin anew.
  if (!fine)
    for (Fiber& fiber : fibers) fiber.begun = false;
  launch = nullptr;
}

extern "C" __attribute__((visibility("default"))) void emulated_forget(Region* regions, size_t count) {
  for (size_t i = 0; i < count; i++) {
    free(regions[i].flags);
    free(regions[i].cells);
    regions[i].flags = nullptr, regions[i].cells = nullptr;
  }
}
