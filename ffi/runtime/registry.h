// The open groups of this process, found by the id that compiled programs carry; and the stages of XLA's custom calls
// that find them.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/group.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// An open group under the id of its content (devices, mesh, axis) and of how many groups of that content were open
// before it. A program finds the group by that id, in this process or another, whichever groups were opened before. The
// group stays open while its owner, or a program that was compiled for it, holds the registration.
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

  // The group was closed. Its id and its memory are free, whoever still holds the registration.
  void end();

 private:
  std::shared_ptr<Group> group_;
  bool ended_ = false;  // under the registry's mutex
};

// Registers a group that is about to be opened. `content`: a hash. `index`: how many groups of this content are open,
// as their processes agreed; -1 counts them. Throws std::invalid_argument if that number is taken.
std::shared_ptr<Registration> register_group(int64_t content, int index = -1);

// Null if there is none.
std::shared_ptr<Registration> find_registration(int64_t id);
std::shared_ptr<Group> find_group(int64_t id);

// At exit: closes what is still open. Does nothing in a child that was forked, which has none of the groups' threads.
void close_all();

// The error of a program whose group find_group does not find.
GroupError group_not_open();

xla::ffi::Error to_ffi(const GroupError& error);

// The state that XLA keeps for each custom call of a program, made when the program is compiled or loaded.
struct CallSite {
  std::shared_ptr<Registration> group;  // stays open as long as programs that were compiled for it; may be null

  static xla::ffi::TypeId id;
};

// The stage that makes CallSites.
XLA_FFI_DECLARE_HANDLER_SYMBOL(call_site_handler);

// The stage before each execution on a GPU. It also runs for a captured graph, for which no op's handler is called. It
// raises the group's failure, that the group is closed, or an error of an earlier execution.
XLA_FFI_DECLARE_HANDLER_SYMBOL(group_check_handler);

}  // namespace jax_ep
