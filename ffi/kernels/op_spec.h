// The specs of ops. A spec is a specialisation of OpSpec for the op's arguments, in args.h of its family.
// docs/adding-an-op.md lists what follows from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "comm/dtype.h"
#include "comm/platform.h"
#include "comm/result.h"
#include "comm/signal_pad.h"
#include "comm/text.h"
#include "kernels/ops.h"

namespace jax_ep {

// Calls run(value) with a value of the format of a dtype.
template <class Run>
auto with_format(DType dtype, Run run) {
  switch (dtype) {
    case DType::float32:
      return run(float{});
    case DType::bfloat16:
      return run(BFloat16{});
    case DType::float16:
      break;
  }
  return run(Float16{});
}

// For byte-wise kernels, which read no values.
struct NoFormat {};

// The dtype of a buffer. `any`: the op moves rows of bytes of any dtype.
enum class Values : uint8_t { float32, bfloat16, float16, float8, int32, uint8, any };

// The name in jax; float8 values travel as uint8.
inline const char* name_of(Values values) {
  static constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "uint8", "int32", "uint8", "any"};
  return kNames[static_cast<int>(values)];
}

enum class Use : uint8_t {
  operand,
  result,
  updated,  // a result that starts as the operand of the same name
  scratch,  // a part of the workspace, which nobody reads after the op
};

struct BufferSpec {
  const char* name;
  Use use;
  Values values;
  int ndim;          // of `any`: 1
  int64_t sizes[3];  // of `any`: rows, and the bytes of a row
  bool present = true;
  bool is_window = false;  // peers may use it; its address is in the mail, in the order of the spec
  bool reached = false;    // whether peers use it in this call
  Undelivered undelivered = Undelivered::nan;
  bool is_replicated = false;  // a result that is the same on all ranks

  // Absent buffers are null, and neither operands nor results of the call.
  JAX_EP_CONSTANT_FN BufferSpec when(bool is_present) const {
    BufferSpec spec = *this;
    spec.present = is_present;
    return spec;
  }
  JAX_EP_CONSTANT_FN BufferSpec for_peers(bool is_reached = true) const {
    BufferSpec spec = *this;
    spec.is_window = true;
    spec.reached = is_reached;
    return spec;
  }
  JAX_EP_CONSTANT_FN BufferSpec undelivered_as(Undelivered fill) const {
    BufferSpec spec = *this;
    spec.undelivered = fill;
    return spec;
  }

  JAX_EP_CONSTANT_FN BufferSpec replicated(bool on_all_ranks = true) const {
    BufferSpec spec = *this;
    spec.is_replicated = on_all_ranks;
    return spec;
  }

  JAX_EP_CONSTANT_FN bool is_result() const { return use == Use::result || use == Use::updated; }
  JAX_EP_CONSTANT_FN int64_t bytes() const {
    if (!present) return 0;
    return size_of_value() * sizes[0] * (ndim > 1 ? sizes[1] : 1) * (ndim > 2 ? sizes[2] : 1);  // no loop on a device
  }

 private:
  JAX_EP_CONSTANT_FN int64_t size_of_value() const {
    switch (values) {
      case Values::float32:
      case Values::int32:
        return 4;
      case Values::bfloat16:
      case Values::float16:
        return 2;
      case Values::any:
        return sizes[1];
      default:
        return 1;
    }
  }
};

template <class... Sizes>
JAX_EP_CONSTANT_FN BufferSpec operand(const char* name, Values values, Sizes... sizes) {
  return {name, Use::operand, values, sizeof...(sizes), {static_cast<int64_t>(sizes)...}};
}
template <class... Sizes>
JAX_EP_CONSTANT_FN BufferSpec result(const char* name, Values values, Sizes... sizes) {
  return {name, Use::result, values, sizeof...(sizes), {static_cast<int64_t>(sizes)...}};
}
template <class... Sizes>
JAX_EP_CONSTANT_FN BufferSpec scratch(const char* name, Values values, Sizes... sizes) {
  return {name, Use::scratch, values, sizeof...(sizes), {static_cast<int64_t>(sizes)...}};
}
JAX_EP_CONSTANT_FN BufferSpec any_rows(const char* name, Use use, int64_t rows, int64_t row_bytes) {
  return {name, use, Values::any, 1, {rows, row_bytes}};
}

JAX_EP_CONSTANT_FN Values values_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return Values::float32;
    case DType::bfloat16:
      return Values::bfloat16;
    case DType::float16:
      break;
  }
  return Values::float16;
}

// The launch on a GPU depends on this: the number of items to send (tokens, entries) or of rows to zero, whichever is
// larger.
struct WorkSize {
  int items = 0;
  bool in_float8 = false;  // how rows travel
  int top_k = 0;           // of an op with a routing
  int64_t row_bytes = 0;
};

// Sender warps of a CTA: all, or the number from the rates of dispatch or combine (kernels/hardware_model.h).
enum class Senders : uint8_t { all, by_dispatch_rates, by_combine_rates };
// CTAs of a launch: as many as allowed, at most one per item, or by the entries of a union.
enum class Ctas : uint8_t { all, one_an_item, by_union_rates };

struct LaunchPolicy {
  Senders senders = Senders::all;
  Ctas ctas = Ctas::all;
};

struct KindName {
  OpKind kind;
  const char* name;  // in errors and profiles
};

// The members that a spec may leave out. The others are:
//
//   static constexpr const char* kFfiTarget                without prefix
//   static constexpr KindName kKinds[]                     its kinds; several if a setting decides
//   template <class Visit> static void settings(visit)     calls visit(name, label, member) for sizes and options: FFI
//                                                          attributes, and part of the signature. Errors show the
//                                                          label, if it is not null.
//   template <class Visit> static void buffers(args, ranks, visit)
//                                                          calls visit(spec, member) for each: operands and results in
//                                                          the order of the call, parts of the workspace anywhere
//
// An op with several kinds also overloads kind_of(args).
struct OpDefaults {
  static constexpr LaunchPolicy kLaunch{};
  template <class Args>
  static WorkSize work_size(const Args&) {
    return {};
  }
  // Sets fields that follow from the settings. `sends_ahead`: on this platform a sparse_reduce pushes partial sums;
  // otherwise their owner fetches them.
  template <class Args>
  static void complete(Args&, int, bool) {}
  // What is wrong with the settings, for `ranks`. Python has checked them, but a program may come from a file.
  template <class Args>
  static std::optional<std::string> validate(const Args&, int) {
    return std::nullopt;
  }
  // The text of a report of Failure::invalid, by its `detail`. This one is for kElsewhere.
  static std::string describe_invalid(const Report&) { return "the routing of another rank is out of bounds"; }
};

// "alignment must be positive, got 0".
template <class Got>
std::string wrong(const std::string& setting, const std::string& must, const Got& got) {
  return concat(setting, " must be ", must, ", got ", got);
}

template <class Args>
struct OpSpec;

template <class Args, class = decltype(OpSpec<Args>::kKinds)>
JAX_EP_CONSTANT_FN OpKind kind_of(const Args&) {
  static_assert(sizeof(OpSpec<Args>::kKinds) == sizeof(KindName), "an op with several kinds overloads kind_of");
  constexpr OpKind kind = OpSpec<Args>::kKinds[0].kind;
  return kind;
}

// The defaults of a local op. Its spec has no kinds and no launch policy, `ranks` is 1, and errors name its FFI target.
struct LocalDefaults : OpDefaults {};
template <class Args>
constexpr bool kIsLocal = std::is_base_of_v<LocalDefaults, OpSpec<Args>>;

// The values of a setting that is an enum, with their names in Python.
template <class Enum>
struct Named {
  const char* name;
  Enum value;
};
template <class Enum>
struct NamesOf;
template <>
struct NamesOf<DType> {
  static constexpr Named<DType> all[] = {
      {"bfloat16", DType::bfloat16}, {"float16", DType::float16}, {"float32", DType::float32}};
};

// The defaults of collective matmuls, whose launch follows from kernels/collective_matmul/plan.cc.
struct CollectiveMatmulDefaults : OpDefaults {};
template <class Args>
constexpr bool kIsCollectiveMatmul = std::is_base_of_v<CollectiveMatmulDefaults, OpSpec<Args>>;

// Whether kernels can count this many rows, in int32 and in steps of all threads of a GPU.
constexpr const char* kCountable = "2**31 - 2**20";
constexpr bool is_countable(int64_t count) { return count < (int64_t{1} << 31) - (1 << 20); }

// What is wrong with a row of `hidden` values. Kernels count its bytes in int32.
inline std::optional<std::string> validate_row(int hidden) {
  return hidden < 1 << 28 ? std::nullopt : std::optional(wrong("hidden", "below 2**28", hidden));
}

template <class T>
void set_pointer(T** member, void* buffer) {
  *member = static_cast<T*>(buffer);
}

// The parts of a workspace follow each other, aligned as XLA aligns its own buffers.
constexpr int64_t kWorkspaceAlignment = 256;

// Calls visit(member, offset) for each part of the workspace. Returns its bytes.
template <class Args, class Visit>
int64_t for_each_part(const Args& args, int ranks, Visit visit) {
  int64_t end = 0;
  OpSpec<Args>::buffers(args, ranks, [&](const BufferSpec& spec, auto member) {
    if (spec.use != Use::scratch) return;
    visit(member, end);
    end += (spec.bytes() + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  });
  return end;
}

// In a kernel: the results, for Op::poison and Op::finish. Addresses are computed only for a fill, because kernels have
// no registers to spare.
template <class Args>
class Results {
 public:
  JAX_EP_FN Results(const Args& args, int ranks) : args_(args), ranks_(ranks) {}

  // Calls visit(buffer) for each result. Absent results have no bytes.
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

template <class Args>
JAX_EP_FN WindowAddresses window_addresses(const Args& args, int ranks) {
  WindowAddresses found{};
  int count = 0;
  OpSpec<Args>::buffers(args, ranks, [&](const BufferSpec& spec, auto member) {
    if (spec.is_window) found.buffers[count++] = const_cast<char*>(reinterpret_cast<const char*>(args.*member));
  });
  return found;
}

template <class Args, class T>
struct FindWindow {
  T Args::* wanted;
  int *count, *found;

  JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, T Args::* member) const {
    if (member == wanted) *found = spec.is_window ? *count : -1;
    *count += spec.is_window;
  }
  template <class Other>
  JAX_EP_CONSTANT_FN void operator()(const BufferSpec& spec, Other) const {
    *count += spec.is_window;
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
