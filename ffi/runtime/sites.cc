#include "runtime/sites.h"

#include <map>
#include <mutex>

#include "kernels/signature.h"

namespace jax_ep {
namespace {

struct Sites {
  std::mutex mutex;
  std::map<int32_t, std::string> texts;
};

Sites& sites() {
  static auto* const sites = new Sites;  // outlives every program that may still run at exit
  return *sites;
}

}  // namespace

int32_t number_of_site(std::string_view text) {
  return static_cast<int32_t>(hash_of(text.data(), text.size()) & 0x7fffffff);
}

void remember_site(std::string_view text) {
  std::lock_guard lock(sites().mutex);
  sites().texts.emplace(number_of_site(text), text);
}

std::string text_of_site(int32_t number) {
  std::lock_guard lock(sites().mutex);
  const auto found = sites().texts.find(number);
  return found == sites().texts.end() ? "" : found->second;
}

}  // namespace jax_ep
