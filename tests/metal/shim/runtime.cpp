// The fiber runtime: every thread of a threadgroup is a fiber, run in random order until it meets
// the others at a rendezvous. The compiler's thread-sanitizer calls announce each memory access
// *before* it happens; this file checks bounds, races and uninitialised reads, and ends the launch
// with a report at the first fault. Threadgroups run one after another, in random order.
#include "runtime.h"

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;
extern "C" int snprintf(char*, unsigned long, const char*, ...);
extern "C" int vsnprintf(char*, unsigned long, const char*, __builtin_va_list);
extern "C" void* memset(void*, int, unsigned long);

// Generated per kernel: calls it with its buffers for one place in the grid.
extern "C" void msl_call(void* const* buffers, const msl::Place& place);

namespace {
constexpr u32 kMaxThreads = 1024, kStackBytes = 128 << 10;
constexpr u64 kMaxAccesses = 1ul << 32;  // more is an endless loop

// Who touched a byte last. A thread's own moment: threadgroup, thread, barriers passed so far.
struct Moment {
  u64 group : 20, thread : 10, barriers : 17, simd_barriers : 17;  // group 0: nobody yet
};
constexpr u32 kMaxGroups = (1 << 20) - 1, kMaxBarriers = (1 << 17) - 1;
// One writer, and two readers that were not ordered with each other (of two SIMD-groups if any).
struct Cell {
  Moment writer, readers[2];
};

// A bound buffer or the threadgroup memory. Layout shared with execute.py.
struct Region {
  u8* start;
  u64 bytes;
  Cell* cells;  // one per byte, zeroed
  const char* name;
  u32 item_bytes, writable, initialised;
};
struct Launch {
  void* const* buffers;
  const Region* regions;
  char* stacks;
  Cell* shared_cells;
  u64 num_regions, seed;
  u32 grid[3], group[3];
  char report[2048];
};

struct Fiber {
  void* stack_pointer;
  u8* stack;
  msl::Place place;
  const char* waits;  // null while it runs
  int line, column;
  bool done;
  u32 round;       // parity of SIMD-group exchanges
  u32 barriers[2], simd_barriers[2];  // device, threadgroup
};
struct SimdGroup {
  msl::Exchange exchanges[2];
  u32 arrived, lanes;
};

struct State {
  Launch* launch;
  Fiber fibers[kMaxThreads];
  SimdGroup simdgroups[kMaxThreads / 32];
  u32 ready[kMaxThreads], num_ready, num_threads, num_done, at_barrier;
  Fiber* current;
  void* scheduler;
  u64 random, accesses;
  u32 group_serial;
  Region shared;
  const Region* last;
};
State state;

#ifdef __APPLE__
extern "C" u8 tg_start __asm("section$start$__DATA$tgmem");
extern "C" u8 tg_stop __asm("section$end$__DATA$tgmem");
#define TG_START (&tg_start)
#define TG_STOP (&tg_stop)
#else
extern "C" __attribute__((weak, visibility("hidden"))) u8 __start_tgmem[], __stop_tgmem[];
#define TG_START __start_tgmem
#define TG_STOP __stop_tgmem
#endif

u32 random_below(u32 limit) {
  state.random ^= state.random << 13;
  state.random ^= state.random >> 7;
  state.random ^= state.random << 17;
  return u32((state.random >> 11) % limit);
}

// Saves the callee-saved registers on this stack, and goes on with the other one.
__attribute__((naked, noinline)) void switch_stack(void**, void*) {
#if defined(__x86_64__)
  __asm__("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
          "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
          "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
#elif defined(__aarch64__)
  __asm__("sub sp, sp, #160\n"
          "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
          "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
          "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n"
          "stp d14, d15, [sp, #144]\n"
          "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
          "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
          "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
          "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n"
          "ldp d14, d15, [sp, #144]\n add sp, sp, #160\n ret\n");
#else
#error "no fiber switch for this processor"
#endif
}

void to_scheduler() {
  Fiber* fiber = state.current;
  state.current = nullptr;
  switch_stack(&fiber->stack_pointer, state.scheduler);
}

void fiber_main() {
  msl_call(state.launch->buffers, state.current->place);
  state.current->done = true;
  ++state.num_done;
  to_scheduler();
  __builtin_trap();
}

void start_fiber(Fiber& fiber, u32 index) {
  fiber.stack = reinterpret_cast<u8*>(state.launch->stacks) + u64(index) * kStackBytes;
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
#if defined(__x86_64__)
  *--top = nullptr;  // keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = nullptr;
  top[11] = reinterpret_cast<void*>(fiber_main);  // x30
#endif
  fiber.stack_pointer = top;
}

void wake(u32 first, u32 count) {
  for (u32 i = first; i < first + count; ++i) {
    state.fibers[i].waits = nullptr;
    state.ready[state.num_ready++] = i;
  }
}

u32 index_of(const Fiber* fiber) { return u32(fiber - state.fibers); }

// The members of a rendezvous stand at different calls: say who stands where.
void report_divergence(u32 first, u32 count, const char* group) {
  char* out = state.launch->report;
  u32 room = sizeof(Launch::report);
  int used = snprintf(out, room, "divergence|0|threads of one %s don't meet at one call:", group);
  bool told[kMaxThreads] = {};
  u32 lines = 0;
  for (u32 i = first; i < first + count && lines < 8; ++i) {
    if (told[i]) continue;
    const Fiber& a = state.fibers[i];
    u32 same = 0;
    for (u32 j = i; j < first + count; ++j) {
      const Fiber& b = state.fibers[j];
      if (a.done == b.done && (a.done || (a.waits == b.waits && a.line == b.line && a.column == b.column)))
        told[j] = true, ++same;
    }
    ++lines;
    if (a.done)
      used += snprintf(out + used, room - used, " %u ended (thread %u first);", same, i);
    else
      used += snprintf(out + used, room - used, " %u wait in %s, line %d (thread %u first);", same,
                       a.waits, a.line, i);
  }
}

bool same_site(const Fiber& a, const Fiber& b) {
  return a.waits && b.waits && a.line == b.line && a.column == b.column &&
         __builtin_strcmp(a.waits, b.waits) == 0;
}

// Waits at a rendezvous of `count` fibers that starts at `first`; the last to come wakes all.
void meet(const char* what, int line, int column, u32 first, u32 count, u32& arrived,
          const char* group) {
  Fiber* me = state.current;
  me->waits = what, me->line = line, me->column = column;
  if (++arrived == count) {
    for (u32 i = first; i < first + count; ++i)
      if (!same_site(*me, state.fibers[i])) {
        report_divergence(first, count, group);
        to_scheduler();
      }
    arrived = 0;
    wake(first, count);
  }
  to_scheduler();
}

bool ordered(const Moment& before, const Moment& after) {
  if (before.group != after.group) return false;
  if (before.thread == after.thread || before.barriers < after.barriers) return true;
  return before.thread / 32 == after.thread / 32 && before.simd_barriers < after.simd_barriers;
}

void report_race(const Region& region, u64 offset, const Moment& other, const char* did, bool write) {
  u32 group = u32(other.group) - 1, mine = state.group_serial - 1;
  msl::fail("race", state.current->line,
            "%s %s element %lu of %s, which thread %u of threadgroup %u %s (this is threadgroup "
            "%u), with no barrier between",
            "it", write ? "writes" : "reads", offset / region.item_bytes, region.name,
            u32(other.thread), group, did, mine);
}

void mark(const Region& region, u64 offset, u32 size, bool write, const Moment& now) {
  for (u64 i = offset; i < offset + size; ++i) {
    Cell& cell = region.cells[i];
    if (cell.writer.group && !ordered(cell.writer, now))
      report_race(region, i, cell.writer, "wrote", write);
    if (write) {
      for (const Moment& reader : cell.readers)
        if (reader.group && !ordered(reader, now)) report_race(region, i, reader, "read", true);
      cell.writer = now;
      continue;
    }
    if (!cell.writer.group && !region.initialised)
      msl::fail("uninitialised", state.current->line, "it reads element %lu of %s, never written",
                i / region.item_bytes, region.name);
    Moment* readers = cell.readers;
    if (!readers[0].group || ordered(readers[0], now)) {
      readers[0] = now;
      if (readers[1].group && ordered(readers[1], now)) readers[1] = Moment{};
    } else if (!readers[1].group || ordered(readers[1], now) ||
               readers[1].thread / 32 == readers[0].thread / 32) {
      readers[1] = now;
    }
  }
}

void access(const void* pointer, u32 size, bool write) {
  Fiber* me = state.current;
  if (!me) return;
  const u8* address = static_cast<const u8*>(pointer);
  if (address >= me->stack && address + size <= me->stack + kStackBytes) return;
  if (++state.accesses > kMaxAccesses) msl::fail("endless", me->line, "it never ends");
  const Region* found = state.last;
  auto inside = [&](const Region& r) { return address >= r.start && address < r.start + r.bytes; };
  if (!found || !inside(*found)) {
    found = inside(state.shared) ? &state.shared : nullptr;
    for (u64 i = 0; !found && i < state.launch->num_regions; ++i)
      if (inside(state.launch->regions[i])) found = &state.launch->regions[i];
  }
  if (!found) {
    // Buffers lie far apart: the nearest one is the one that was meant.
    const Region* nearest = state.shared.bytes ? &state.shared : state.launch->regions;
    auto distance = [&](const Region& r) {
      return address < r.start ? u64(r.start - address) : u64(address - r.start - r.bytes);
    };
    for (u64 i = 0; i < state.launch->num_regions; ++i)
      if (distance(state.launch->regions[i]) < distance(*nearest))
        nearest = &state.launch->regions[i];
    long offset = address - nearest->start;
    msl::fail("out_of_bounds", me->line, "it %s element %ld of %s, which has %lu",
              write ? "writes" : "reads", offset / long(nearest->item_bytes), nearest->name,
              nearest->bytes / nearest->item_bytes);
  }
  state.last = found;
  u64 offset = u64(address - found->start);
  if (offset + size > found->bytes)
    msl::fail("out_of_bounds", me->line, "its %u bytes at element %lu of %s pass the end", size,
              offset / found->item_bytes, found->name);
  if (write && !found->writable)
    msl::fail("read_only", me->line, "it writes element %lu of input %s",
              offset / found->item_bytes, found->name);
  u32 memory = found == &state.shared;
  Moment now{};
  now.group = state.group_serial, now.thread = index_of(me);
  now.barriers = me->barriers[memory], now.simd_barriers = me->simd_barriers[memory];
  mark(*found, offset, size, write, now);
}

bool run_group(const u32 position[3], const u32 groups[3]) {
  Launch& launch = *state.launch;
  u32 size[3], origin[3];
  state.num_threads = 1;
  for (int axis = 0; axis < 3; ++axis) {
    origin[axis] = position[axis] * launch.group[axis];
    u32 left = launch.grid[axis] - origin[axis];
    size[axis] = left < launch.group[axis] ? left : launch.group[axis];
    state.num_threads *= size[axis];
  }
  ++state.group_serial;
  state.num_done = state.at_barrier = state.num_ready = 0;
  memset(state.shared.start, 0xff, state.shared.bytes);
  memset(state.shared.cells, 0, state.shared.bytes * sizeof(Cell));
  u32 num_simdgroups = (state.num_threads + 31) / 32;
  for (u32 s = 0; s < num_simdgroups; ++s) {
    SimdGroup& group = state.simdgroups[s];
    group.arrived = 0;
    group.lanes = state.num_threads - 32 * s < 32 ? state.num_threads - 32 * s : 32;
    for (msl::Exchange& e : group.exchanges) e.present = group.lanes == 32 ? ~0u : (1u << group.lanes) - 1;
  }
  for (u32 i = 0; i < state.num_threads; ++i) {
    Fiber& fiber = state.fibers[i];
    memset(&fiber, 0, sizeof(fiber));
    msl::Place& p = fiber.place;
    u32 inner[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int axis = 0; axis < 3; ++axis) {
      p.thread_position_in_threadgroup[axis] = inner[axis];
      p.thread_position_in_grid[axis] = origin[axis] + inner[axis];
      p.threadgroup_position_in_grid[axis] = position[axis];
      p.threadgroups_per_grid[axis] = groups[axis];
      p.threads_per_grid[axis] = launch.grid[axis];
      p.threads_per_threadgroup[axis] = size[axis];
      p.dispatch_threads_per_threadgroup[axis] = launch.group[axis];
    }
    p.thread_index_in_threadgroup = i;
    p.thread_index_in_simdgroup = i % 32;
    p.simdgroup_index_in_threadgroup = i / 32;
    p.simdgroups_per_threadgroup = num_simdgroups;
    start_fiber(fiber, i);
  }
  wake(0, state.num_threads);
  while (state.num_ready) {
    u32 pick = random_below(state.num_ready);
    Fiber& fiber = state.fibers[state.ready[pick]];
    state.ready[pick] = state.ready[--state.num_ready];
    state.current = &fiber;
    switch_stack(&state.scheduler, fiber.stack_pointer);
    if (launch.report[0]) return false;
  }
  if (state.num_done < state.num_threads) {
    report_divergence(0, state.num_threads, "threadgroup");
    return false;
  }
  return true;
}
}  // namespace

namespace msl {
unsigned lane() { return state.current ? state.current->place.thread_index_in_simdgroup : 0; }

void fail(const char* kind, int line, const char* format, ...) {
  Fiber* me = state.current;
  char* out = state.launch->report;
  const u32* group = me->place.threadgroup_position_in_grid;
  int used = snprintf(out, sizeof(Launch::report),
                      "%s|%d|thread %u of threadgroup (%u, %u, %u): ", kind, line, index_of(me),
                      group[0], group[1], group[2]);
  __builtin_va_list arguments;
  __builtin_va_start(arguments, format);
  vsnprintf(out + used, sizeof(Launch::report) - used, format, arguments);
  __builtin_va_end(arguments);
  to_scheduler();
  __builtin_trap();
}

const Exchange& exchange(const char* what, int line, int column, const void* value, unsigned size) {
  Fiber* me = state.current;
  SimdGroup& group = state.simdgroups[index_of(me) / 32];
  // Two sets in turn: a lane may leave and meet the next one while others still read the last.
  Exchange& mine = group.exchanges[me->round++ & 1];
  __builtin_memcpy(mine.slots[lane()], value, size);
  meet(what, line, column, index_of(me) / 32 * 32, group.lanes, group.arrived, "SIMD-group");
  return mine;
}

void barrier(bool threadgroup_wide, unsigned memory, int line, int column) {
  Fiber* me = state.current;
  if (threadgroup_wide) {
    meet("threadgroup_barrier", line, column, 0, state.num_threads, state.at_barrier,
         "threadgroup");
  } else {
    SimdGroup& group = state.simdgroups[index_of(me) / 32];
    meet("simdgroup_barrier", line, column, index_of(me) / 32 * 32, group.lanes, group.arrived,
         "SIMD-group");
  }
  for (int i = 0; i < 2; ++i)
    if (memory >> i & 1 && ++(threadgroup_wide ? me->barriers : me->simd_barriers)[i] > kMaxBarriers)
      fail("endless", line, "it passes more barriers than can be told apart");
}
}  // namespace msl

extern "C" {
unsigned long msl_threadgroup_bytes() { return u64(TG_STOP - TG_START); }
unsigned long msl_sizeof(int what) {
  return what == 0 ? sizeof(Cell) : what == 1 ? sizeof(Region) : what == 2 ? sizeof(Launch) : kStackBytes;
}

// Runs a launch; its report is empty when all went well.
void msl_run(Launch* launch) {
  state.launch = launch;
  state.random = launch->seed * 0x9e3779b97f4a7c15ul | 1;
  state.accesses = state.group_serial = 0;
  state.last = nullptr;
  state.shared = Region{TG_START, u64(TG_STOP - TG_START), launch->shared_cells,
                        "threadgroup memory", 1, 1, 0};
  u32 groups[3], count = 1;
  for (int axis = 0; axis < 3; ++axis)
    count *= groups[axis] = (launch->grid[axis] + launch->group[axis] - 1) / launch->group[axis];
  if (count > kMaxGroups) __builtin_trap();
  // A random start and direction is order enough: threadgroups share nothing but device memory.
  u32 start = random_below(count), backwards = random_below(2);
  for (u32 i = 0; i < count; ++i) {
    u32 at = (start + (backwards ? count - i : i)) % count;
    u32 position[3] = {at % groups[0], at / groups[0] % groups[1], at / groups[0] / groups[1]};
    if (!run_group(position, groups)) break;
  }
  state.current = nullptr;
}

#define ACCESS(SIZE)                                                            \
  void __tsan_read##SIZE(void* p) { access(p, SIZE, false); }                   \
  void __tsan_write##SIZE(void* p) { access(p, SIZE, true); }                   \
  void __tsan_unaligned_read##SIZE(void* p) { access(p, SIZE, false); }         \
  void __tsan_unaligned_write##SIZE(void* p) { access(p, SIZE, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  access(from, u32(bytes), false);
  access(to, u32(bytes), true);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  access(to, u32(bytes), true);
  return memset(to, value, bytes);
}

struct Source { const char* file; u32 line, column; };
void __ubsan_handle_out_of_bounds_abort(Source* at, u64 index) {
  msl::fail("out_of_bounds", int(at->line), "index %ld passes the end of its array", long(index));
}
void __ubsan_handle_type_mismatch_v1_abort(Source* at, u64 address) {
  msl::fail("misaligned", int(at->line), "address %#lx is not aligned for its type", address);
}
#define UNDEFINED(NAME, KIND, TEXT)                        \
  void __ubsan_handle_##NAME##_abort(Source* at, u64, u64) { \
    msl::fail(KIND, int(at->line), TEXT);                  \
  }
UNDEFINED(add_overflow, "overflow", "a signed sum overflows")
UNDEFINED(sub_overflow, "overflow", "a signed difference overflows")
UNDEFINED(mul_overflow, "overflow", "a signed product overflows")
UNDEFINED(negate_overflow, "overflow", "a negation overflows")
UNDEFINED(divrem_overflow, "overflow", "a division by zero or overflow")
UNDEFINED(shift_out_of_bounds, "overflow", "a shift by more than the type has bits")

// Conversions that the processor may lack, rounding to nearest even.
typedef unsigned short u16;
float __extendhfsf2(_Float16 value) {
  u32 bits = __builtin_bit_cast(u16, value), sign = (bits & 0x8000u) << 16;
  u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | fraction << 13);
  float magnitude = exponent ? __builtin_bit_cast(float, (exponent + 112) << 23 | fraction << 13)
                             : float(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
_Float16 __truncsfhf2(float value) {
  u32 bits = __builtin_bit_cast(u32, value), sign = bits >> 16 & 0x8000u;
  float magnitude = __builtin_fabsf(value);
  u32 out;
  if (value != value) {
    out = 0x7e00;
  } else if (magnitude >= 65520.0f) {
    out = 0x7c00;
  } else if (magnitude < 0x1p-14f) {
    out = u32(magnitude * 0x1p24f + 0x1.8p23f - 0x1.8p23f);  // the sum rounds to an integer
  } else {
    u32 rest = bits & 0x7fffffffu;
    out = (rest + 0xfffu + (rest >> 13 & 1) - (112u << 23)) >> 13;
  }
  return __builtin_bit_cast(_Float16, u16(sign | out));
}
// Returned in a float's low bits, the register that a __bf16 has: naming that type here would make
// the compiler convert once more, by a call of this very function.
float __truncsfbf2(float value) {
  u32 bits = __builtin_bit_cast(u32, value);
  u32 out = value != value ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return __builtin_bit_cast(float, out);
}
}
