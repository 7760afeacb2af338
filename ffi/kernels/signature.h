// What the ranks must agree on when they run an op together: its signature, from the arguments of this rank.
#pragma once

#include <cstring>
#include <string>

#include "kernels/matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"

namespace jax_ep {

// What an op's sizes and flags are called in errors; an op has as many as it has names.
struct SignatureNames {
  const char* op;
  const char* sizes[kSignatureSizes];
  const char* flags[4];
  bool rows;  // whether it looks at the dtype of rows
};

inline const SignatureNames& names_of(OpKind op) {
  static constexpr SignatureNames kNames[] = {
      {"dispatch", {"T", "K", "H", "E", "capacity", "alignment"}, {"drop", "float8 wire", "float8 rows"}, true},
      {"combine's backward pass", {"T", "K", "H", "E / R", "capacity", "alignment"}, {}, true},
      {"combine", {"T", "K", "H", "capacity"}, {"weights", "scalars"}, true},
      {"ragged_all_to_all", {"slices", "operand rows", "output rows", "row bytes"}, {}, false},
      {"sparse_all_reduce", {"N", "table rows", "capacity"}, {"sharded"}, false},
      {"sparse_all_reduce", {"N", "D", "capacity", "slots", "scale bits"}, {"sharded", "drop", "by count"}, true},
      {"matmul_all_reduce", {"M", "N", "K"}, {"transposed b"}, true},
      {"matmul_reduce_scatter", {"M", "N", "K"}, {"transposed b"}, true},
      {"all_gather_matmul", {"M", "N", "K"}, {"transposed b"}, true}};
  static constexpr SignatureNames kUnknown{"an unknown op", {}, {}, false};
  const auto index = static_cast<std::size_t>(op);
  return index < sizeof(kNames) / sizeof(*kNames) ? kNames[index] : kUnknown;
}

// "dispatch bfloat16 T=64 K=2 H=8192 E=16 capacity=1024 alignment=1 drop".
inline std::string describe(const Signature& signature) {
  static constexpr const char* kDTypes[] = {"float32", "bfloat16", "float16"};
  const auto dtype_name = [](DType dtype) {
    const auto index = static_cast<std::size_t>(dtype);
    return std::string(index < 3 ? kDTypes[index] : "?");
  };
  const SignatureNames& names = names_of(signature.op);
  std::string text = names.op;
  if (names.rows) text += " " + dtype_name(signature.dtype);
  if (names.rows && signature.other_dtype != signature.dtype) text += " of " + dtype_name(signature.other_dtype);
  for (int i = 0; i < kSignatureSizes && names.sizes[i]; ++i)
    text += std::string(" ") + names.sizes[i] + "=" + std::to_string(signature.sizes[i]);
  for (int i = 0; i < 4 && names.flags[i]; ++i)
    if (signature.flags >> i & 1) text += std::string(", ") + names.flags[i];
  return text;
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

inline uint32_t flag_bits(bool a, bool b = false, bool c = false) { return a | b << 1 | c << 2; }

inline Signature signature_of(const DispatchArgs& a) {
  return {kind_of(a),
          a.dtype,
          a.dtype,
          flag_bits(a.drop, a.wire_float8, a.rows_float8),
          {a.num_tokens, a.top_k, a.hidden, a.num_experts, a.capacity, a.alignment}};
}
inline Signature signature_of(const ScatterArgs& a) {
  return {kind_of(a), a.dtype, a.dtype, 0, {a.num_tokens, a.top_k, a.hidden, a.local_experts, a.capacity, a.alignment}};
}
inline Signature signature_of(const CombineArgs& a) {
  return {kind_of(a),
          a.dtype,
          a.dtype,
          flag_bits(a.weights != nullptr, a.scalars != nullptr),
          {a.num_tokens, a.top_k, a.hidden, a.capacity}};
}
inline Signature signature_of(const RaggedArgs& a) {
  return {kind_of(a), DType::float32, DType::float32, 0, {a.slices, a.operand_rows, a.result_rows, a.row_bytes}};
}
inline Signature signature_of(const SparseUnionArgs& a) {
  return {kind_of(a), DType::float32, DType::float32, flag_bits(a.sharded), {a.entries, a.num_rows, a.capacity}};
}
inline Signature signature_of(const SparseReduceArgs& a) {
  uint32_t scale = 0;
  static_assert(sizeof(scale) == sizeof(a.scale));
  std::memcpy(&scale, &a.scale, sizeof(scale));
  return {kind_of(a),
          a.dtype,
          a.dtype,
          flag_bits(a.sharded, a.drop, a.by_count),
          {a.entries, a.hidden, a.capacity, a.slots_kept, scale}};
}
inline Signature signature_of(const MatmulReduceArgs& a) {
  return {kind_of(a), a.dtype, a.operand_dtype, flag_bits(a.transpose_b), {a.m, a.n, a.k}};
}
inline Signature signature_of(const GatherMatmulArgs& a) {
  return {kind_of(a), a.dtype, a.operand_dtype, flag_bits(a.transpose_b), {a.m, a.n, a.k}};
}

}  // namespace jax_ep
