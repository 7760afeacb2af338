// The kernels of all ops.
#pragma once

#include "kernels/matmul/gather.h"
#include "kernels/matmul/reduce.h"
#include "kernels/moe/combine.h"
#include "kernels/moe/dispatch.h"
#include "kernels/moe/scatter.h"
#include "kernels/ragged/ragged_all_to_all.h"
#include "kernels/sparse/reduce.h"
#include "kernels/sparse/union.h"
