// The sizes and options of a call, by name. They are FFI attributes when an op runs, and Python's keywords when it is
// traced.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "kernels/op_spec.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// Each function returns nothing if there is no such setting of this type.
class Settings {
 public:
  virtual ~Settings() = default;
  virtual std::optional<int64_t> integer(const char* name) const = 0;
  virtual std::optional<bool> option(const char* name) const = 0;
  virtual std::optional<float> real(const char* name) const = 0;
  virtual std::optional<std::string> text(const char* name) const = 0;
};

class Attributes final : public Settings {
 public:
  explicit Attributes(const ffi::Dictionary& all) : all_(all) {}
  std::optional<int64_t> integer(const char* name) const override { return get<int64_t>(name); }
  std::optional<bool> option(const char* name) const override { return get<bool>(name); }
  std::optional<float> real(const char* name) const override { return get<float>(name); }
  std::optional<std::string> text(const char* name) const override {
    const auto found = get<std::string_view>(name);
    return found ? std::optional(std::string(*found)) : std::nullopt;
  }

 private:
  template <class T>
  std::optional<T> get(const char* name) const {
    const auto found = all_.get<T>(name);
    return found.has_value() ? std::optional<T>(*found) : std::nullopt;
  }
  const ffi::Dictionary& all_;
};

// Reads every setting of an op into its arguments, and keeps the first error.
template <class Args>
class SettingsReader {
 public:
  SettingsReader(const Settings& settings, Args* args) : settings_(settings), args_(*args) {}

  template <class Size, class Base, std::enable_if_t<std::is_integral_v<Size>, int> = 0>
  void operator()(const char* name, const char*, Size Base::* member) {
    static_assert(!std::is_same_v<Size, bool>);
    constexpr int64_t kMost = std::numeric_limits<Size>::max();
    const std::optional<int64_t> size = settings_.integer(name);
    if (size && *size >= 0 && *size <= kMost)
      args_.*member = static_cast<Size>(*size);
    else
      fail(name, concat("an integer of at least 0 and at most ", kMost), size ? concat(*size) : "");
  }
  void operator()(const char* name, const char*, bool Args::* member) {
    take(name, settings_.option(name), "True or False", &(args_.*member));
  }
  void operator()(const char* name, const char*, float Args::* member) {
    take(name, settings_.real(name), "a float", &(args_.*member));
  }
  template <class Enum, class Base, class = std::enable_if_t<std::is_enum_v<Enum>>>
  void operator()(const char* name, const char*, Enum Base::* member) {
    const std::string text = settings_.text(name).value_or("");
    std::string wanted;
    for (const auto& choice : NamesOf<Enum>::all) {
      if (text == choice.name) return static_cast<void>(args_.*member = choice.value);
      const bool is_last = &choice == std::end(NamesOf<Enum>::all) - 1;
      wanted += concat(wanted.empty() ? "" : is_last ? " or " : ", ", choice.name);
    }
    fail(name, wanted, text);
  }

  const std::optional<std::string>& error() const { return error_; }

 private:
  template <class T>
  void take(const char* name, std::optional<T> found, const char* wanted, T* member) {
    if (found)
      *member = *found;
    else
      fail(name, wanted, "");
  }
  void fail(const char* name, const std::string& wanted, const std::string& found) {
    if (!error_) error_ = wrong(name, wanted, found.empty() ? "none" : found);
  }

  const Settings& settings_;
  Args& args_;
  std::optional<std::string> error_;
};

// Sets all of `args` but its pointers, or says what is wrong with the settings. `sends_ahead`: as in OpSpec::complete.
template <class Args>
std::optional<std::string> read_settings(const Settings& settings, int ranks, bool sends_ahead, Args* args) {
  SettingsReader<Args> reader(settings, args);
  OpSpec<Args>::settings([&](const char* name, const char* label, auto member) { reader(name, label, member); });
  if (reader.error()) return reader.error();
  if (std::optional<std::string> error = OpSpec<Args>::validate(*args, ranks)) return error;
  OpSpec<Args>::complete(*args, ranks, sends_ahead);
  return std::nullopt;
}

}  // namespace jax_ep
