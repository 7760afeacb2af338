#include "runtime/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "comm/text.h"
#include "runtime/posix.h"

namespace jax_ep {
namespace {

std::runtime_error failed(const char* doing) {
  return std::runtime_error(concat("jax_ep: ", doing, " failed: ", std::strerror(errno)));
}

// Makes shared memory of a fixed size. If the file shrank, a process that maps it would die at an access past its
// end.
Descriptor make_descriptor(std::size_t bytes) {
#ifdef MFD_CLOEXEC
  Descriptor descriptor(memfd_create("jax_ep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor) throw failed("creating shared memory");
  if (ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) throw failed("sizing shared memory");
  if (fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) throw failed("sealing shared memory");
  return descriptor;
#else
  (void)bytes;
  throw std::runtime_error("jax_ep: this system has no memfd_create, by which processes share memory");
#endif
}

void check_size(int descriptor, std::size_t bytes) {
  struct stat file;
  if (fstat(descriptor, &file) != 0) throw failed("asking for the size of shared memory");
  if (!S_ISREG(file.st_mode) || static_cast<std::size_t>(file.st_size) != bytes)
    throw FalseRegion(concat("it shared memory of ", file.st_size, " bytes as ", bytes));
#ifdef F_GET_SEALS
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) throw FalseRegion("it shared memory that it can make smaller");
#endif
}

}  // namespace

std::shared_ptr<const Region> allocate_region(int, std::size_t bytes, const std::vector<int>& users, int64_t) {
  static std::atomic<uint64_t> made{0};
  auto descriptor = std::make_shared<Descriptor>(make_descriptor(bytes));
  Region region{nullptr, bytes, ++made, descriptor->get()};
  region.base = map_region(region.descriptor, bytes, users);
  return {new Region(region), [descriptor](const Region* mapped) {
            unmap_region(mapped->base, mapped->bytes);
            delete mapped;
          }};
}

// XLA's own buffers are private memory.
std::optional<Region> find_region(int, const void*, std::size_t) { return std::nullopt; }

char* map_region(int descriptor, std::size_t bytes, const std::vector<int>&) {
  check_size(descriptor, bytes);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) throw failed("mapping shared memory");
  return static_cast<char*>(memory);
}

void allow_users(char*, std::size_t, const std::vector<int>&) {}

bool unmap_region(char* base, std::size_t bytes) {
  munmap(base, bytes);
  return true;
}

}  // namespace jax_ep
