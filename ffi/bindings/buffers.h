// Compares the buffers of a call with those of the op's spec, and sets them in its arguments.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/op_spec.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// Float8 arrives as uint8: jax_ep/_kit/float8.py says why.
inline ffi::DataType ffi_type(Values values) {
  static constexpr ffi::DataType kTypes[] = {
      ffi::F32, ffi::BF16, ffi::F16, ffi::U8, ffi::S32, ffi::U8, ffi::DataType::INVALID};
  return kTypes[static_cast<int>(values)];
}

// "int32[4, 2]".
inline std::string describe(const std::string& type, const int64_t* begin, const int64_t* end) {
  std::string sizes;
  for (const int64_t* size = begin; size != end; ++size) sizes += concat(size == begin ? "" : ", ", *size);
  return type + "[" + sizes + "]";
}

inline std::string describe(ffi::AnyBuffer buffer) {
  std::string type = concat("type ", static_cast<int>(buffer.element_type()));
  for (int i = 0; i < static_cast<int>(Values::any); ++i)
    if (buffer.element_type() == ffi_type(static_cast<Values>(i))) type = name_of(static_cast<Values>(i));
  const auto sizes = buffer.dimensions();
  return describe(type, sizes.begin(), sizes.end());
}

// What is wrong with a buffer. A program from a file may have been compiled for another group. `where` follows the type
// in the error.
inline std::optional<std::string> compare(const BufferSpec& spec, ffi::AnyBuffer buffer, const char* where) {
  const auto sizes = buffer.dimensions();
  const bool any = spec.values == Values::any;
  const bool fits =
      any ? sizes.size() > 0 && sizes[0] == spec.sizes[0] && static_cast<int64_t>(buffer.size_bytes()) == spec.bytes()
          : buffer.element_type() == ffi_type(spec.values) &&
                std::equal(sizes.begin(), sizes.end(), spec.sizes, spec.sizes + spec.ndim);
  if (fits) return std::nullopt;
  const std::string wanted = any ? concat(spec.sizes[0], " rows of ", spec.sizes[1], " bytes")
                                 : describe(name_of(spec.values), spec.sizes, spec.sizes + spec.ndim);
  return wrong(spec.name, wanted + where, describe(buffer));
}

// All buffers of a call. The operands of the spec come first, then the operands that updated results begin as. The
// workspace, if there is one, follows the results.
struct CallBuffers {
  std::vector<ffi::AnyBuffer> operands, results;

  CallBuffers(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& returned) {
    for (size_t i = 0; i < arguments.size(); ++i) operands.push_back(arguments.get<ffi::AnyBuffer>(i).value());
    for (size_t i = 0; i < returned.size(); ++i) results.push_back(*returned.get<ffi::AnyBuffer>(i).value());
  }
};

// What is wrong if a result is not in the memory of the operand whose values it begins as.
inline std::optional<std::string> compare_places(const char* name, ffi::AnyBuffer operand, ffi::AnyBuffer result) {
  if (operand.untyped_data() == result.untyped_data() || result.size_bytes() == 0) return std::nullopt;
  return concat(name, " must be the operand that it updates, in place: the program has no such alias");
}

struct BufferCounts {
  size_t operands, results;
  size_t updated = 0;  // the last operands: what updated results begin as
};
inline std::optional<std::string> compare(const BufferCounts& counts, const CallBuffers& call) {
  if (call.operands.size() == counts.operands && call.results.size() == counts.results) return std::nullopt;
  return concat("there must be ", counts.operands, " operands and ", counts.results, " results, got ",
                call.operands.size(), " and ", call.results.size());
}
template <class Args>
BufferCounts count_buffers(const Args& args, int ranks, int64_t workspace_bytes) {
  BufferCounts counts{0, workspace_bytes > 0};
  OpSpec<Args>::buffers(args, ranks, [&](const BufferSpec& spec, auto) {
    if (!spec.present) return;
    counts.operands += spec.use == Use::operand || spec.use == Use::updated;
    counts.updated += spec.use == Use::updated;
    counts.results += spec.is_result();
  });
  return counts;
}

// Sets the pointers of `args`, whose sizes are set already; or says which buffer does not fit them.
template <class Args>
std::optional<std::string> set_pointers(const CallBuffers& call, int ranks, Args* args) {
  const int64_t workspace_bytes = for_each_part(*args, ranks, [](auto, int64_t) {});
  const BufferCounts counts = count_buffers(*args, ranks, workspace_bytes);
  if (auto miscount = compare(counts, call)) return miscount;
  const char* const where = kIsLocal<Args> ? "" : " in this group";
  auto operand = call.operands.begin(), result = call.results.begin();
  auto origin = call.operands.end() - counts.updated;
  std::optional<std::string> error;
  OpSpec<Args>::buffers(*args, ranks, [&](const BufferSpec& spec, auto member) {
    if (!spec.present || spec.use == Use::scratch) return;
    const ffi::AnyBuffer buffer = spec.use == Use::operand ? *operand++ : *result++;
    if (!error) error = compare(spec, buffer, where);
    if (spec.use == Use::updated && !error) error = compare_places(spec.name, *origin, buffer);
    origin += spec.use == Use::updated;
    set_pointer(&(args->*member), buffer.untyped_data());
  });
  if (error || workspace_bytes == 0) return error;
  char* const workspace = static_cast<char*>(result->untyped_data());
  for_each_part(*args, ranks, [&](auto member, int64_t offset) { set_pointer(&(args->*member), workspace + offset); });
  return compare(jax_ep::result("the workspace", Values::uint8, workspace_bytes), *result, where);
}

}  // namespace jax_ep
