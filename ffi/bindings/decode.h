// What the handlers share: the group and seat of a call, dtypes, and shape checks that name the operand.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "platform/launch.h"
#include "runtime/registry.h"
#include "runtime/sites.h"

namespace jax_ep {

using I32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;
using U8 = ffi::Buffer<ffi::U8>;

// The group of a call, the seat of its device in it and the number of its site, or why there is none.
struct Caller {
  std::shared_ptr<PlatformGroup> group;
  Seat seat;
  int32_t site;
  std::optional<ffi::Error> error;
};

inline Caller find_caller(const Call& call, int64_t id, std::string_view site) {
  Caller caller{std::static_pointer_cast<PlatformGroup>(find_group(id)), {}, number_of_site(site), std::nullopt};
  if (!caller.group) {
    caller.error = to_ffi(group_not_open());
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

// Compares the shapes of buffers with what they must be in this group. A program that was compiled for another one may
// come here, from a file; keeps the first that is wrong.
class Shapes {
 public:
  explicit Shapes(const char* op) : op_(op) {}

  template <class Buffer>
  Shapes& expect(const char* name, const Buffer& buffer, std::initializer_list<int64_t> wanted) {
    const auto found = buffer.dimensions();
    if (!error_ && !(found.size() == wanted.size() && std::equal(found.begin(), found.end(), wanted.begin())))
      error_ = ffi::Error(ffi::ErrorCode::kInvalidArgument,
                          std::string(op_) + ": " + name + " must be " + text(wanted.begin(), wanted.end()) +
                              " in this group, got " + text(found.begin(), found.end()));
    return *this;
  }
  // A size that no buffer has.
  Shapes& require(const char* what, bool holds) {
    if (!error_ && !holds) error_ = ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(op_) + ": " + what);
    return *this;
  }

  const std::optional<ffi::Error>& error() const { return error_; }

 private:
  template <class Iterator>
  static std::string text(Iterator begin, Iterator end) {
    std::string sizes = "[";
    for (Iterator i = begin; i != end; ++i) sizes += (i == begin ? "" : ", ") + std::to_string(*i);
    return sizes + "]";
  }

  const char* op_;
  std::optional<ffi::Error> error_;
};

inline ffi::Error bad_dtype(const char* op) {
  return {ffi::ErrorCode::kInvalidArgument, std::string(op) + ": rows must be bfloat16, float16 or float32"};
}

}  // namespace jax_ep
