// Makes the signature of a call, on which its ranks must agree, and its text.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kernels/collective_matmul/plan.h"
#include "kernels/moe/args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

// The names of an op, its sizes and its options in errors. Errors leave out a null name.
struct SignatureNames {
  const char* op = "an unknown op";
  const char* sizes[kSignatureSizes] = {};
  const char* options[kSignatureOptions] = {};
  bool has_dtype = false;
};

// Whether a Signature has room for the settings of an op. Dtypes have fields of their own.
template <class Args>
constexpr bool fits_signature() {
  int sizes = 0, options = 0;
  OpSpec<Args>::settings([&](const char*, const char*, auto member) {
    using Value = std::decay_t<decltype(std::declval<Args>().*member)>;
    if constexpr (std::is_same_v<Value, bool>)
      ++options;
    else if constexpr (!std::is_enum_v<Value>)
      ++sizes;
    else if constexpr (!std::is_same_v<Value, DType>)
      options += std::size(NamesOf<Value>::all) - 1;
  });
  return sizes <= kSignatureSizes && options <= kSignatureOptions;
}

// Puts the settings of an op into its signature: numbers as sizes, options as bits. An enum has a bit for each value
// except the first.
template <class Args>
struct SignatureOf {
  const Args& args;
  Signature signature{};
  SignatureNames names{};
  int sizes = 0, options = 0;

  static_assert(
      fits_signature<Args>(),
      "this op has more sizes or options than a Signature holds: enlarge kSignatureSizes (or kSignatureOptions, "
      "with the type of `options`) in comm/signal_pad.h");

  void add(const char* label, int64_t size) {
    names.sizes[sizes] = label;
    signature.sizes[sizes++] = size;
  }
  void operator()(const char*, const char* label, int Args::* member) { add(label, args.*member); }
  void operator()(const char*, const char* label, int64_t Args::* member) { add(label, args.*member); }
  void operator()(const char*, const char* label, float Args::* member) {
    uint32_t bits = 0;
    static_assert(sizeof(bits) == sizeof(args.*member));
    std::memcpy(&bits, &(args.*member), sizeof(bits));
    add(label, bits);
  }
  void operator()(const char*, const char* label, bool Args::* member) {
    names.options[options] = label;
    signature.options |= static_cast<uint32_t>(args.*member) << options++;
  }
  template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
  void operator()(const char*, const char*, Enum Args::* member) {
    for (const Named<Enum>& choice : NamesOf<Enum>::all) {
      if (&choice == NamesOf<Enum>::all) continue;
      names.options[options] = choice.name;
      signature.options |= static_cast<uint32_t>(args.*member == choice.value) << options++;
    }
  }
  void operator()(const char* name, const char*, DType Args::* member) {
    names.has_dtype = true;
    signature.operand_dtype = args.*member;  // the dtype of the operands comes last
    if (std::string_view(name) == "dtype") signature.dtype = args.*member;
  }
};

template <class Args>
SignatureOf<Args> describe_settings(const Args& args) {
  SignatureOf<Args> made{args};
  OpSpec<Args>::settings([&](const char* name, const char* label, auto member) { made(name, label, member); });
  return made;
}

template <class Args>
Signature signature_of(const Args& args) {
  Signature signature = describe_settings(args).signature;
  signature.op = kind_of(args);
  return signature;
}

// Two ranks that exchange the tiles of a product must agree on the plan, because they take the same tiles in the same
// order. Plans differ with the number of SMs and with max_sms.
inline Signature with_plan(Signature signature, const OverlapConfig& config) {
  if (config.communicating > 0) return signature;  // no exchange
  const int plan[] = {config.ctas(), config.block_n, config.band, config.split_k};
  std::copy(std::begin(plan), std::end(plan), signature.plan);
  return signature;
}

// ", 64 CTAs, tiles 128x128, band 4, two a tile" of an exchange.
inline std::string describe_plan(const Signature& signature) {
  const auto& [ctas, block_n, band, split_k] = signature.plan;
  if (ctas == 0) return "";
  return concat(", ", ctas, " CTAs, tiles 128x", block_n, ", band ", band, split_k ? ", two a tile" : "");
}

// Calls run(args, name) with empty arguments of the op of this kind, and the name of the kind.
template <class Run>
void with_op(OpKind op, Run run) {
  const auto run_if = [&](const auto& args) {
    for (const KindName& kind : OpSpec<std::decay_t<decltype(args)>>::kKinds)
      if (kind.kind == op) run(args, kind.name);
  };
#define JAX_EP_RUN_IF(Args) run_if(Args{});
  JAX_EP_ROW_OPS(JAX_EP_RUN_IF)
  JAX_EP_COLLECTIVE_MATMUL_OPS(JAX_EP_RUN_IF)
#undef JAX_EP_RUN_IF
}

inline SignatureNames names_of(OpKind op) {
  SignatureNames names;
  with_op(op, [&](const auto& args, const char* name) {
    names = describe_settings(args).names;
    names.op = name;
  });
  return names;
}

inline std::string describe_invalid(const Report& report) {
  std::string text;
  with_op(report.op, [&](const auto& args, const char*) {
    text = OpSpec<std::decay_t<decltype(args)>>::describe_invalid(report);
  });
  return text;
}

// "dispatch bfloat16 T=64 K=2 H=8192 E=16 capacity=1024 alignment=1, drop".
inline std::string describe(const Signature& signature) {
  const auto dtype_name = [](DType dtype) {
    const bool known = static_cast<std::size_t>(dtype) <= static_cast<std::size_t>(DType::float16);
    return known ? name_of(values_of(dtype)) : "?";  // a peer may die while it writes
  };
  const SignatureNames names = names_of(signature.op);
  std::string text = names.op;
  if (names.has_dtype) text += concat(" ", dtype_name(signature.dtype));
  if (names.has_dtype && signature.operand_dtype != signature.dtype)
    text += concat(" of ", dtype_name(signature.operand_dtype));
  for (int i = 0; i < kSignatureSizes && names.sizes[i]; ++i)
    text += concat(" ", names.sizes[i], "=", signature.sizes[i]);
  for (int i = 0; i < kSignatureOptions; ++i)
    if (names.options[i] && signature.options >> i & 1) text += concat(", ", names.options[i]);
  return text + describe_plan(signature);
}

// FNV-1a.
inline uint64_t hash_of(const void* data, std::size_t size) {
  uint64_t hash = 0xcbf29ce484222325;
  for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  return hash;
}

inline uint32_t tag_of(const Signature& signature) {
  const uint64_t hash = hash_of(&signature, sizeof(signature));
  return static_cast<uint32_t>((hash ^ hash >> kTagBits ^ hash >> 2 * kTagBits) & ((1u << kTagBits) - 1));
}

}  // namespace jax_ep
