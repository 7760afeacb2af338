#include "runtime/extra.h"

namespace jax_ep {

std::vector<NamedHandler> extra_handlers() { return {}; }
std::optional<std::string> load_extra_kernels() { return std::nullopt; }

}  // namespace jax_ep
