// A launch with buffers that peers can write into: XLA's own where they can be mapped, staging elsewhere.
#pragma once

#include <type_traits>
#include <vector>

#include "kernels/posted.h"
#include "kernels/signature.h"
#include "runtime/group.h"

namespace jax_ep {

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

template <class Args>
struct Reached {
  Comm comm;
  Args args;
  std::vector<Copy> before, after;  // of the kernel: between XLA's buffers and staging
};

// `site`: of the call, for the flight recorder. Throws std::runtime_error and GroupException.
template <class Args>
Reached<Args> reach(Group& group, Seat seat, const Args& args, int32_t site = 0) {
  Reached<Args> reached{group.comm(seat), args, {}, {}};
  reached.comm.signature = signature_of(args);
  reached.comm.tag = tag_of(reached.comm.signature);
  reached.comm.site = site;
  int slot = 0;
  for_each_posted(reached.args, group.size(), [&](auto& buffer, int64_t size, Use use) {
    using Pointer = std::remove_reference_t<decltype(buffer)>;
    const auto bytes = static_cast<std::size_t>(size);
    void* const own = const_cast<void*>(static_cast<const void*>(buffer));
    void* const mapped = group.reach(seat, slot++, own, bytes, &reached.comm);
    if (mapped == own) return;
    buffer = static_cast<Pointer>(mapped);
    if (use == Use::updated || use == Use::operand) reached.before.push_back({mapped, own, bytes});
    if (use == Use::updated || use == Use::result) reached.after.push_back({own, mapped, bytes});
  });
  return reached;
}

}  // namespace jax_ep
