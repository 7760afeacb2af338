// Where in the user's program the ops are called: a text per call site, and a number for it that fits a flight record.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ep {

// The number of a text: the same in every process.
int32_t number_of_site(std::string_view text);

// From now on the number's text is known in this process.
void remember_site(std::string_view text);

// Empty where the number was met in another process only.
std::string text_of_site(int32_t number);

}  // namespace jax_ep
