// The buffers of an op in its kernel, from its spec: what a failure fills, and what peers use.
#pragma once

#include <type_traits>

#include "comm/result.h"
#include "comm/window.h"
#include "kernels/op_spec.h"

namespace jax_ep {

// The results, for Op::poison and Op::finish.
// Nothing is worked out before it is needed: results are rarely filled, and a kernel has no registers to spare.
template <class Args>
class Results {
 public:
  JAX_EP_FN Results(const Args& args, int ranks) : args_(args), ranks_(ranks) {}

  // Calls visit(buffer) for each. Absent ones have no bytes.
  template <class Visit>
  JAX_EP_FN void each(const Visit& visit) const {
    OpSpec<Args>::buffers(args_, ranks_, VisitResults<Visit>{args_, visit});
  }

 private:
  template <class Visit>
  struct VisitResults {
    const Args& args;
    const Visit& visit;
    template <class T>
    JAX_EP_FN void operator()(const BufferSpec& spec, T* Args::* member) const {
      if constexpr (!std::is_const_v<T>)
        if (spec.is_result()) visit(Buffer{args.*member, spec.bytes(), spec.undelivered});
    }
  };

  const Args& args_;
  const int ranks_;
};

// The addresses that a rank posts.
template <class Args>
JAX_EP_FN Posted posted(const Args& args, int ranks) {
  Posted found{};
  int count = 0;
  OpSpec<Args>::buffers(args, ranks, [&](const BufferSpec& spec, auto member) {
    if (spec.posted) found.buffers[count++] = const_cast<char*>(reinterpret_cast<const char*>(args.*member));
  });
  return found;
}

template <class Args, class T>
struct FindWindow {
  T Args::* wanted;
  int *count, *found;

  JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, T Args::* member) const {
    if (member == wanted) *found = spec.posted ? *count : -1;
    *count += spec.posted;
  }
  template <class Other>
  JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, Other) const {
    *count += spec.posted;
  }
};

template <class Args, class T>
JAX_EP_CONSTANT_FN int find_window(T Args::* member) {
  int count = 0, found = -1;
  OpSpec<Args>::buffers(Args{}, 1, FindWindow<Args, T>{member, &count, &found});
  return found;
}

// The number of a member of an op's arguments that peers use.
template <auto kMember>
struct WindowNumber {
  static constexpr int value = find_window(kMember);
  static_assert(value >= 0 && value < kMailBuffers, "the spec must say for_peers(), of no more than the mail holds");
};
template <auto kMember>
constexpr int kWindow = WindowNumber<kMember>::value;

}  // namespace jax_ep
