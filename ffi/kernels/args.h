// What all ops are called with.
#pragma once

#include "kernels/matmul/args.h"
#include "kernels/moe/args.h"
#include "kernels/ragged/args.h"
#include "kernels/sparse/args.h"
