// Texts of errors and plans, on the host.
#pragma once

#include <cstdio>
#include <string>
#include <type_traits>

namespace jax_ep {

// One text of texts, whole numbers, and real numbers with up to 6 digits.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string all;
  const auto add = [&](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_floating_point_v<Part>) {
      char digits[32];
      std::snprintf(digits, sizeof(digits), "%g", part);
      all += digits;
    } else if constexpr (std::is_integral_v<Part>) {
      all += std::to_string(part);
    } else {
      all += part;
    }
  };
  (add(parts), ...);
  return all;
}

}  // namespace jax_ep
