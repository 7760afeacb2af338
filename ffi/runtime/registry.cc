#include "runtime/registry.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace jax_ep {

namespace ffi = xla::ffi;

namespace {

struct Registry {
  const pid_t process = getpid();
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Registration>> open;
  std::mutex met_mutex;
  std::deque<std::tuple<int64_t, int64_t, std::weak_ptr<Group>>> met;  // by the latest runs and ids
};

Registry& registry() {
  static auto* const registry = new Registry;  // outlives every program that may still run at exit
  return *registry;
}

}  // namespace

bool is_forked() { return getpid() != registry().process; }

void Registration::end() {
  std::shared_ptr<Group> ended = std::atomic_exchange(&group_, {});  // is destroyed after the lock
  if (is_forked()) {  // another thread may have held the lock, and a group is destroyed by joining its threads
    new std::shared_ptr<Group>(std::move(ended));
    return;
  }
  std::lock_guard lock(registry().mutex);
  if (!ended_) registry().open.erase(id);
  ended_ = true;
}

std::shared_ptr<Registration> register_group(int64_t content, int number) {
  std::lock_guard lock(registry().mutex);
  int64_t id = content + std::max(number, 0);  // `content` is a cryptographic hash, so no other content has these ids
  for (; registry().open.count(id); ++id)
    if (number >= 0)
      throw std::invalid_argument(
          concat("group number ", number, " over these devices is open already in this process"));
  auto made = std::make_shared<Registration>(id);
  registry().open.emplace(made->id, made);
  return made;
}

std::shared_ptr<Registration> find_registration(int64_t id) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().open.find(id);
  return found == registry().open.end() ? nullptr : found->second.lock();
}

std::shared_ptr<Group> find_group(int64_t id) {
  const std::shared_ptr<Registration> found = find_registration(id);
  return found ? found->group() : nullptr;
}

bool meets_alike(int64_t run, int64_t id, const std::shared_ptr<Group>& group) {
  constexpr std::size_t kLatest = 256;  // more than XLA has under way
  auto& met = registry().met;
  const std::lock_guard lock(registry().met_mutex);
  for (auto each = met.rbegin(); each != met.rend(); ++each) {
    const auto& [known_run, known_id, known] = *each;
    if (known_run == run && known_id == id) return !known.owner_before(group) && !group.owner_before(known);
  }
  met.emplace_back(run, id, group);
  if (met.size() > kLatest) met.pop_front();
  return true;
}

void close_all() {
  if (is_forked()) return;
  std::vector<std::shared_ptr<Registration>> open;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& [id, registration] : registry().open)
      if (std::shared_ptr<Registration> each = registration.lock()) open.push_back(std::move(each));
  }
  for (const std::shared_ptr<Registration>& each : open) {
    if (const std::shared_ptr<Group> group = each->group()) group->close();
    each->end();
  }
}

xla::ffi::Error to_ffi(const GroupError& error) {
  using xla::ffi::ErrorCode;
  ErrorCode code = ErrorCode::kAborted;
  if (error.kind == ErrorKind::peer_timeout) code = ErrorCode::kDeadlineExceeded;
  if (error.kind == ErrorKind::capacity) code = ErrorCode::kResourceExhausted;
  if (error.kind == ErrorKind::invalid_routing) code = ErrorCode::kOutOfRange;  // jax turns some codes into ValueError
  if (error.kind == ErrorKind::group_closed) code = ErrorCode::kFailedPrecondition;
  return {code, text_of(error)};
}

namespace {

// 0.1 of 0.1.2.
std::string_view minor_of(std::string_view release) { return release.substr(0, release.rfind('.')); }

// `attributes`: of the op. A local op has neither group nor site. The attributes and buffers of every FFI target are
// those of a minor release, so a saved program of another one is rejected before anything of it is read.
ffi::ErrorOr<std::unique_ptr<CallState>> make_call_state(ffi::Dictionary attributes) {
  const auto release = attributes.get<std::string_view>("release");
  const std::string maker(release.has_value() ? *release : "before 0.1");
  if (minor_of(maker) != minor_of(JAX_EP_VERSION))
    return ffi::Unexpected(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "this program was made with jax_ep " + maker +
            ", but jax_ep " JAX_EP_VERSION
            " is installed, whose calls differ: make the program again, or install the jax_ep that made it"));
  auto made = std::make_unique<CallState>();
  if (const auto id = attributes.get<int64_t>("group"); id.has_value()) made->group = find_registration(*id);
  if (const auto site = attributes.get<std::string_view>("site"); site.has_value()) remember_site(*site);
  return made;
}

ffi::Error check_group(int32_t device, ffi::Dictionary attributes) {
  const auto id = attributes.get<int64_t>("group");
  if (!id.has_value()) return ffi::Error::Success();
  const std::shared_ptr<Group> group = find_group(*id);
  if (!group) return to_ffi(group_not_open());
  const std::optional<RankId> rank_id = group->find_rank_id(device);
  if (!rank_id) return ffi::Error::Success();  // the op itself reports it
  const std::optional<GroupError> error = group->error_before(*rank_id);
  return error ? to_ffi(*error) : ffi::Error::Success();
}

}  // namespace

ffi::TypeId CallState::id = {};

XLA_FFI_DEFINE_HANDLER_SYMBOL(call_state_handler, make_call_state, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(group_check_handler, check_group,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());

}  // namespace jax_ep
