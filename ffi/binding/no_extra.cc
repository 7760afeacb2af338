#include "binding/extra.h"

namespace jax_ep {

std::vector<NamedHandler> extra_handlers() { return {}; }

}  // namespace jax_ep
