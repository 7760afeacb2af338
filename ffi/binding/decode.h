// What the handlers share: the group and seat of a call, dtypes, and shape checks that name the operand.
#pragma once

#include <optional>
#include <string>

#include "binding/registry.h"
#include "launch.h"  // of the platform this library is built for

namespace jax_ep {

using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using U8 = ffi::Buffer<ffi::U8>;

// The group of a call and the seat of its device in it, or why there is none.
struct Caller {
  std::shared_ptr<PlatformGroup> group;
  Seat seat;
  std::optional<ffi::Error> error;
};

inline Caller find_caller(const Call& call, int64_t id) {
  Caller caller{std::static_pointer_cast<PlatformGroup>(find_group(id)), {}, std::nullopt};
  if (!caller.group) {
    caller.error = to_ffi({"GroupClosedError", "the group of this program is closed", true});
  } else if (const std::optional<Seat> seat = caller.group->find_seat(call.device)) {
    caller.seat = *seat;
  } else {
    caller.error = ffi::Error(ffi::ErrorCode::kInvalidArgument,
                              "device " + std::to_string(call.device) + " is not in the group of this program");
  }
  return caller;
}

inline std::optional<DType> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return DType::float32;
    case ffi::BF16:
      return DType::bfloat16;
    case ffi::F16:
      return DType::float16;
    default:
      return std::nullopt;
  }
}

template <class Buffer>
int dim(const Buffer& buffer, size_t axis) {
  return static_cast<int>(buffer.dimensions()[axis]);
}

template <class Buffer>
auto* data_or_null(Buffer& buffer) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

inline const char* bytes_of(ffi::AnyBuffer buffer) { return static_cast<const char*>(buffer.untyped_data()); }
inline char* bytes_of(ffi::Result<ffi::AnyBuffer>& buffer) { return static_cast<char*>(buffer->untyped_data()); }

inline ffi::Error bad_dtype(const char* op) {
  return {ffi::ErrorCode::kInvalidArgument, std::string(op) + ": rows must be bfloat16, float16 or float32"};
}

}  // namespace jax_ep
