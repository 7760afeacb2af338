// Virtual memory of a GPU that is the host: allocations are anonymous files; a twin of ffi/runtime/cuda/platform/vmm.h.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "platform/runtime.h"

namespace jax_ep::gpu {

struct FakeAllocation {
  int file = -1;
  std::atomic<int> references = 1;
};
using Allocation = FakeAllocation*;
using CaptureMode = int;

constexpr CaptureMode kCaptureRelaxed = 0;

struct FakeMapping {
  std::size_t bytes;
  Allocation allocation;
};
struct FakeMappings {
  std::mutex mutex;
  std::map<char*, FakeMapping> by_base;
};
inline FakeMappings& fake_mappings() {
  static FakeMappings all;
  return all;
}
inline std::optional<std::pair<char*, FakeMapping>> fake_find(void* address) {
  const std::lock_guard lock(fake_mappings().mutex);
  auto& all = fake_mappings().by_base;
  auto at = all.upper_bound(static_cast<char*>(address));
  if (at == all.begin() || address >= std::prev(at)->first + std::prev(at)->second.bytes) return std::nullopt;
  return *std::prev(at);
}

inline Error exchange_capture_mode(CaptureMode*) { return kSuccess; }
inline Error memory_granularity(std::size_t* bytes, int) { return *bytes = 1 << 21, kSuccess; }
inline Error create_memory(Allocation* made, std::size_t bytes, int) {
  *made = new FakeAllocation{memfd_create("fake", MFD_CLOEXEC)};
  return ftruncate((*made)->file, static_cast<off_t>(bytes)) == 0 ? kSuccess : kFailed;
}
inline Error release_memory(Allocation allocation) { return --allocation->references < 0 ? kFailed : kSuccess; }
inline Error reserve_addresses(void** base, std::size_t bytes) {
  *base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *base == MAP_FAILED ? kFailed : kSuccess;
}
inline Error map_memory(void* base, std::size_t bytes, Allocation allocation) {
  struct stat file;
  if (fstat(allocation->file, &file) != 0 || static_cast<std::size_t>(file.st_size) != bytes) return kFailed;
  const std::lock_guard lock(fake_mappings().mutex);
  fake_mappings().by_base[static_cast<char*>(base)] = {bytes, allocation};
  return mmap(base, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->file, 0) == base ? kSuccess : kFailed;
}
inline Error unmap_memory(void* base, std::size_t bytes) {
  const std::lock_guard lock(fake_mappings().mutex);
  fake_mappings().by_base.erase(static_cast<char*>(base));
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;  // still reserved
  return mmap(base, bytes, PROT_NONE, flags, -1, 0) == base ? kSuccess : kFailed;
}
inline Error free_addresses(void* base, std::size_t bytes) { return munmap(base, bytes) == 0 ? kSuccess : kFailed; }
inline Error allow_access(void* base, std::size_t bytes, int) {
  return mprotect(base, bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kFailed;
}
inline Error retain_allocation(Allocation* allocation, void* address) {
  const auto found = fake_find(address);
  if (!found) return kFailed;
  ++(*allocation = found->second.allocation)->references;
  return kSuccess;
}
inline Error address_range(void** base, std::size_t* bytes, void* address) {
  const auto found = fake_find(address);
  if (!found) return kFailed;
  *base = found->first;
  *bytes = found->second.bytes;
  return kSuccess;
}
inline Error export_memory(int* descriptor, Allocation allocation) {
  *descriptor = dup(allocation->file);
  return *descriptor < 0 ? kFailed : kSuccess;
}
inline Error import_memory(Allocation* allocation, int descriptor) {
  *allocation = new FakeAllocation{dup(descriptor)};
  return kSuccess;
}

}  // namespace jax_ep::gpu
