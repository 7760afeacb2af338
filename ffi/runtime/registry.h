// The open groups of this process, found by the id that compiled programs carry; and the stages of XLA's custom calls
// that find them.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/group.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// An open group under its id: a hash of its content (devices, mesh, axis) plus the lowest number that no open group of
// this content has. A program finds the group by this id, in the process that compiled it or in another. The group
// stays open while its owner, or a program that was compiled for it, holds the registration.
class Registration {
 public:
  explicit Registration(int64_t id) : id(id) {}
  ~Registration() { end(); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const int64_t id;

  // Null before it is opened, and when it has ended.
  std::shared_ptr<Group> group() const { return std::atomic_load(&group_); }

  void open(std::shared_ptr<Group> group) { std::atomic_store(&group_, std::move(group)); }

  // Frees the id and the memory of a closed group, even if programs still hold the registration. In a forked child the
  // group is leaked.
  void end();

 private:
  std::shared_ptr<Group> group_;
  bool ended_ = false;  // under the registry's mutex
};

// Registers a group that is about to be opened. `content`: a hash. `number`: of the group among those of this
// content, on which its processes agreed; -1: the lowest free number. Throws std::invalid_argument if it is taken.
std::shared_ptr<Registration> register_group(int64_t content, int number = -1);

// Null if there is none.
std::shared_ptr<Registration> find_registration(int64_t id);
std::shared_ptr<Group> find_group(int64_t id);

// Whether every rank that has called in this run found this group by the id. `group` is null if the rank found none. If
// a group is closed while a run is under way, late ranks of the run may find a new group with its id, where nobody
// joins them.
bool meets_alike(int64_t run, int64_t id, const std::shared_ptr<Group>& group);

// Whether this process is a child of the one that opened the groups. It has none of their threads.
bool is_forked();

// At exit: closes all open groups. Does nothing in a forked child.
void close_all();

xla::ffi::Error to_ffi(const GroupError& error);

// The state that XLA keeps for each custom call of a program, made when the program is compiled or loaded.
struct CallState {
  std::shared_ptr<Registration> group;  // keeps the group open; may be null

  static xla::ffi::TypeId id;
};

// The handler stage that makes CallStates.
XLA_FFI_DECLARE_HANDLER_SYMBOL(call_state_handler);

// The handler stage before each execution on a GPU. It also runs for a captured graph, which calls no op's handler. It
// raises the group's failure, an error of an earlier execution, or that the group is closed.
XLA_FFI_DECLARE_HANDLER_SYMBOL(group_check_handler);

}  // namespace jax_ep
