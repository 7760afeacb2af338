// How the bindings of this platform start an op.
#pragma once

#include "runtime/gpu/launch.h"
