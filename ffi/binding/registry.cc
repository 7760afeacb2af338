#include "binding/registry.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace jax_ep {
namespace {

struct Registry {
  const pid_t process = getpid();
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Group>> groups;
};

Registry& registry() {
  static auto* const registry = new Registry;  // outlives every program that may still run at exit
  return *registry;
}

// The content's bits are those of a cryptographic hash, so neighbours of one content meet no other's.
int64_t id_of(int64_t content, int index) { return content + index; }

}  // namespace

Registered register_group(const std::shared_ptr<Group>& group, int64_t content, int index) {
  std::lock_guard lock(registry().mutex);
  const bool counts = index < 0;
  for (index = std::max(index, 0);; ++index) {
    const int64_t id = id_of(content, index);
    std::weak_ptr<Group>& place = registry().groups[id];
    if (place.expired()) {
      place = group;
      return {id, index};
    }
    if (!counts)
      throw std::invalid_argument("group number " + std::to_string(index) +
                                  " over these devices is open already in this process: processes must open and close "
                                  "their groups in one order");
  }
}

void forget_group(int64_t id) {
  std::lock_guard lock(registry().mutex);
  registry().groups.erase(id);
}

void close_all() {
  std::vector<std::shared_ptr<Group>> open;
  {
    std::lock_guard lock(registry().mutex);
    if (getpid() != registry().process) return;
    for (const auto& [id, place] : registry().groups)
      if (std::shared_ptr<Group> group = place.lock()) open.push_back(std::move(group));
    registry().groups.clear();
  }
  for (const std::shared_ptr<Group>& group : open) group->close();
}

std::shared_ptr<Group> find_group(int64_t id) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(id);
  return found == registry().groups.end() ? nullptr : found->second.lock();
}

xla::ffi::Error to_ffi(const GroupError& error) {
  using xla::ffi::ErrorCode;
  ErrorCode code = ErrorCode::kAborted;
  if (error.kind == "PeerTimeoutError") code = ErrorCode::kDeadlineExceeded;
  if (error.kind == "CapacityError") code = ErrorCode::kResourceExhausted;
  if (error.kind == "InvalidRoutingError") code = ErrorCode::kOutOfRange;  // jax turns some codes into ValueError
  if (error.kind == "GroupClosedError") code = ErrorCode::kFailedPrecondition;
  return {code, error.kind + ": " + error.message};
}

}  // namespace jax_ep
