// Attention of many rows, divided among the threads.
#pragma once

#include <vector>

#include "kernels.h"

namespace spec {

// Runs them all; `work` is the multiply-adds they have together. What is set but for scratch is read.
void attend_all(std::vector<Attention>& tasks, int64_t work);

}  // namespace spec
