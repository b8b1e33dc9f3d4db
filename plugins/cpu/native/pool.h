// One pool of threads per process.
//
// The thread that submits works too and never waits for a worker that has not begun. A second thread that submits
// meanwhile waits for its turn, so that two engines do not run more threads than one. Workers sleep unless work
// came within the last few microseconds. A child of fork starts a pool of its own when it first needs one.
#pragma once

#include <cstdint>
#include <type_traits>

namespace spec {

// Calls task(context, i) for every i in [0, count), on up to threads() threads, each i once.
void parallel(int64_t count, void (*task)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t count, F&& f) {
  using Task = std::remove_reference_t<F>;
  parallel(count, [](void* context, int64_t i) { (*static_cast<Task*>(context))(i); }, &f);
}

int threads();
void set_threads(int n);  // at least 1; waits for running work
int usable_cores();       // of this process's cpuset

}  // namespace spec
