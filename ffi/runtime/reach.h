// Makes an op's buffers reachable for peers: XLA's own buffers if they can be mapped, otherwise staging.
#pragma once

#include <vector>

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
  std::vector<Copy> before, after;  // the kernel: copies between XLA's buffers and staging
};

inline void set_signature(Comm* comm, const Signature& signature) {
  comm->signature = signature;
  comm->tag = tag_of(signature);
}

// `site`: of the call, for the flight recorder. Throws std::runtime_error and GroupException.
template <class Args>
Reached<Args> reach(Group& group, RankId rank_id, const Args& args, int32_t site = 0) {
  Reached<Args> reached{group.comm(rank_id), args, {}, {}};
  set_signature(&reached.comm, signature_of(args));
  reached.comm.site = site;
  int mail_index = 0;
  OpSpec<Args>::buffers(args, group.size(), [&](const BufferSpec& spec, auto member) {
    if (!spec.is_window) return;
    const std::size_t bytes = spec.reached ? spec.bytes() : 0;
    void* const own = const_cast<void*>(static_cast<const void*>(args.*member));
    void* const mapped = group.reach(rank_id, mail_index++, own, bytes, &reached.comm);
    if (mapped == own) return;
    set_pointer(&(reached.args.*member), mapped);
    if (spec.use == Use::updated || spec.use == Use::operand) reached.before.push_back({mapped, own, bytes});
    if (spec.is_result()) reached.after.push_back({own, mapped, bytes});
  });
  return reached;
}

}  // namespace jax_ep
