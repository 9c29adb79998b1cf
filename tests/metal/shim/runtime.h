// What a kernel's code asks of the fiber runtime: its place in the grid, and the rendezvous points.
#pragma once

namespace msl {
// Place of the running thread, by the names of the language's attributes (unit: threads).
struct Place {
  unsigned thread_position_in_grid[3], thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3], threadgroups_per_grid[3], threads_per_grid[3];
  unsigned threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3];
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup;
  unsigned simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
};

constexpr unsigned kLanes = 32, kSlotBytes = 32;

// What the lanes of a SIMD-group brought to one rendezvous; bit i of `present`: lane i exists.
struct Exchange {
  alignas(16) unsigned char slots[kLanes][kSlotBytes];
  unsigned present;
};

// Waits until every lane of the SIMD-group is at this very call, then shows what all brought.
const Exchange& exchange(const char* what, int line, int column, const void* value, unsigned size);
// Waits for the whole threadgroup or SIMD-group. `memory`: bit 0 device, bit 1 threadgroup.
void barrier(bool threadgroup_wide, unsigned memory, int line, int column);
// Ends the launch with a report; never returns.
[[noreturn]] void fail(const char* kind, int line, const char* format, ...);
unsigned lane();
}  // namespace msl
