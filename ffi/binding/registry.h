// The open groups of this process, found by the id that compiled programs carry.
#pragma once

#include <cstdint>
#include <memory>

#include "heap/group.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

// Under the id that the processes of a group agreed on, or under one of its own if that is zero.
int64_t register_group(const std::shared_ptr<Group>& group, int64_t id);
void forget_group(int64_t id);
std::shared_ptr<Group> find_group(int64_t id);  // null if there is none

xla::ffi::Error to_ffi(const GroupError& error);

}  // namespace jax_ep
