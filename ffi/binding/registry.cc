#include "binding/registry.h"

#include <map>
#include <mutex>

namespace jax_ep {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Group>> groups;
  int64_t next = 1;
};

Registry& registry() {
  static auto* const registry = new Registry;  // outlives every program that may still run at exit
  return *registry;
}

}  // namespace

int64_t register_group(const std::shared_ptr<Group>& group, int64_t id) {
  std::lock_guard lock(registry().mutex);
  if (id == 0) id = registry().next++;
  registry().groups.emplace(id, group);
  return id;
}

void forget_group(int64_t id) {
  std::lock_guard lock(registry().mutex);
  registry().groups.erase(id);
}

std::shared_ptr<Group> find_group(int64_t id) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(id);
  return found == registry().groups.end() ? nullptr : found->second;
}

xla::ffi::Error to_ffi(const GroupError& error) {
  using xla::ffi::ErrorCode;
  ErrorCode code = ErrorCode::kAborted;
  if (error.kind == "PeerTimeoutError") code = ErrorCode::kDeadlineExceeded;
  if (error.kind == "CapacityError") code = ErrorCode::kResourceExhausted;
  if (error.kind == "InvalidRoutingError") code = ErrorCode::kInvalidArgument;
  if (error.kind == "GroupClosedError") code = ErrorCode::kFailedPrecondition;
  return {code, error.kind + ": " + error.message};
}

}  // namespace jax_ep
