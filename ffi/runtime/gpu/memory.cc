#include "runtime/memory.h"

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "runtime/gpu/device_scope.h"
#include "runtime/gpu/kernel_launch.h"

namespace jax_ep {
namespace {

// Asks for the time once more. Returns the time of clock_ns(), here the host's, or 0 if no answer came in time.
uint64_t ask_for_time(ClockRequest* request, uint64_t question) {
  constexpr uint64_t kTimeoutNs = 10'000'000'000;
  store_release(&request->asked, question);
  for (const uint64_t deadline = clock_ns() + kTimeoutNs; clock_ns() < deadline;)
    if (load_acquire(&request->answered) == question) return clock_ns();
  store_release(&request->cancelled, uint64_t{1});
  return 0;
}

// Freed memory of groups, for the next group of the same owner. It is never given back: a captured graph of a closed
// group may still be launched, and must find its abort word.
class FreeList {
 public:
  using Key = std::tuple<int64_t, int, std::size_t>;  // owner, device or kHost, and bytes
  static constexpr int kHost = -1;

  // The memory that was freed first, or null.
  void* take(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = free_.lower_bound(key);
    if (found == free_.end() || found->first != key) return nullptr;
    void* const memory = found->second;
    free_.erase(found);
    return memory;
  }

  std::shared_ptr<void> until_let_go(const Key& key, void* memory) {
    return {memory, [this, key](void* done) {
              const std::lock_guard lock(mutex_);
              free_.emplace(key, done);
            }};
  }

 private:
  std::mutex mutex_;
  std::multimap<Key, void*> free_;
};

FreeList& free_list() {
  static auto* const list = new FreeList;
  return *list;
}

// Host memory that kernels can write.
void* make_on_host(std::size_t bytes) {
  void* memory = nullptr;
  gpu::check(gpu::allocate_host(&memory, bytes), "allocating host memory");
  return memory;
}

}  // namespace

std::shared_ptr<void> allocate_on_device(int ordinal, std::size_t bytes, int64_t owner) {
  const gpu::DeviceScope scope(ordinal);
  void* memory = free_list().take({owner, ordinal, bytes});
  if (!memory) gpu::check(gpu::allocate(&memory, bytes), "allocating device memory");
  std::shared_ptr<void> kept = free_list().until_let_go({owner, ordinal, bytes}, memory);
  clear_on_device(ordinal, memory, bytes);
  return kept;
}

void clear_on_device(int ordinal, void* memory, std::size_t bytes) {
  const gpu::DeviceScope scope(ordinal);
  gpu::check(gpu::synchronize(), "clearing device memory");  // kernels of its last group may still run
  gpu::check(gpu::fill(memory, 0, bytes), "clearing device memory");
  gpu::check(gpu::synchronize(), "clearing device memory");
}

void await_devices(const std::vector<int>& ordinals) {
  for (const int ordinal : ordinals) {
    const gpu::DeviceScope scope(ordinal);
    gpu::check(gpu::synchronize(), "waiting for a device");
  }
}

std::shared_ptr<void> allocate_on_host(std::size_t bytes, int64_t owner) {
  void* memory = free_list().take({owner, FreeList::kHost, bytes});
  if (!memory) memory = make_on_host(bytes);
  std::memset(memory, 0, bytes);
  return free_list().until_let_go({owner, FreeList::kHost, bytes}, memory);
}

// On a stream of its own, as work on other streams may wait for peers.
void copy_whole_words(int ordinal, void* to, const void* from, std::size_t words) {
  static std::mutex mutex;
  static auto* const streams = new std::map<int, gpu::Stream>;  // by device
  const gpu::DeviceScope scope(ordinal);
  const gpu::CaptureAllowsAll capture;
  const std::lock_guard lock(mutex);
  const auto [found, first] = streams->try_emplace(ordinal);
  if (first) {
    const gpu::Error error = gpu::create_stream(&found->second);
    if (error != gpu::kSuccess) streams->erase(found);
    gpu::check(error, "creating a stream");
  }
  gpu::check(gpu::copy_anywhere(to, from, words * sizeof(uint64_t), found->second), "copying between host and device");
  gpu::check(gpu::synchronize_stream(found->second), "copying between host and device");
}

// Takes the quickest of several answers. The device read its clock about half way between question and answer.
ClockSample read_clock(int ordinal) {
  constexpr int kQuestions = 32;
  static std::mutex mutex;
  static ClockRequest* request = nullptr;
  const std::lock_guard lock(mutex);
  if (!request) request = static_cast<ClockRequest*>(make_on_host(sizeof(ClockRequest)));
  *request = {};
  const gpu::DeviceScope scope(ordinal);
  gpu::check(launch_clock(request, kQuestions), "asking a device for its time");
  ClockSample best{};
  uint64_t quickest = ~uint64_t{0};
  for (int question = 1; question <= kQuestions; ++question) {
    const uint64_t before = clock_ns(), after = ask_for_time(request, question);
    if (!after) {
      request = nullptr;  // the kernel may still begin, and must find `cancelled`
      throw std::runtime_error(concat("jax_ep: GPU ", ordinal, " did not tell its time: it is busy"));
    }
    if (after - before >= quickest) continue;
    quickest = after - before;
    best = {request->ns, before + quickest / 2};
  }
  gpu::check(gpu::synchronize_stream(nullptr), "asking a device for its time");
  return best;
}

void connect_devices(const std::vector<int>& ordinals) {
  for (const int device : ordinals) {
    const gpu::DeviceScope scope(device);
    for (const int peer : ordinals) {
      if (peer == device) continue;
      int can = 0;
      gpu::check(gpu::can_access_peer(&can, device, peer), "asking for peer access");
      if (!can)
        throw std::runtime_error(
            concat("GPU ", device, " cannot write to GPU ", peer, ": the group needs peer-to-peer links"));
      const gpu::Error error = gpu::enable_peer(peer);
      if (error == gpu::kPeerAlreadyEnabled)
        gpu::ignore(gpu::take_last_error());  // by XLA, whose next call must not see the error
      else
        gpu::check(error, "enabling peer access");
    }
  }
}

}  // namespace jax_ep
