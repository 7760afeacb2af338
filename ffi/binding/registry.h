// The open groups of this process, found by the id that compiled programs carry.
#pragma once

#include <cstdint>
#include <memory>

#include "heap/group.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Registers an open group under the id of its content (devices, mesh, axis) and of how many groups of that content are
// open already, and returns that id. A program finds the group by it, in this process or another, whichever groups were
// opened before. `index`: how many are open, as the processes of a group agreed, or -1 to count. Throws
// std::invalid_argument if that place is taken.
struct Registered {
  int64_t id;
  int index;
};
Registered register_group(const std::shared_ptr<Group>& group, int64_t content, int index = -1);
void forget_group(int64_t id);

// At exit: closes what is still open. Does nothing in a child that was forked, which has none of the groups' threads.
void close_all();

// Null if there is none. The registry alone keeps no group alive: its owner and the programs compiled for it do.
std::shared_ptr<Group> find_group(int64_t id);

xla::ffi::Error to_ffi(const GroupError& error);

}  // namespace jax_ep
