#include "attending.h"

#include <algorithm>

#include "arrays.h"
#include "linear.h"
#include "pool.h"

namespace spec {
namespace {

constexpr int64_t HAND_OVER = 20'000;    // multiply-adds in the time it takes to share work and to wait for its end
constexpr int64_t SHARES = 8;             // pieces a thread should find
constexpr int64_t FEWEST_KEYS = 32;       // in a piece
constexpr int64_t KEYS_AT_ONCE = 16;      // that kernels bring into lanes together

thread_local Buffer scratch_buffer;

void attend_alone(const Kernels& k, Attention& a) {
  a.scratch = scratch_buffer.floats(size_t(k.attention_floats(a)));
  k.begin(a);
  k.score(a, 0, a.count);
  k.weigh(a, 0, a.rows);
  k.gather(a, 0, a.rows, 0, a.value_D);
}

// Too few for the threads: each is divided, by keys, by rows, and then by rows and elements of its results.
void attend_in_pieces(const Kernels& k, std::vector<Attention>& tasks) {
  int64_t floats = 0, most = 0;
  int rows = 0;
  for (auto& a : tasks) floats += k.attention_floats(a), most = std::max(most, a.count), rows = std::max(rows, a.rows);
  float* scratch = scratch_buffer.floats(size_t(floats));
  for (auto& a : tasks) {
    a.scratch = scratch;
    scratch += k.attention_floats(a);
    k.begin(a);
  }
  const int64_t count = int64_t(tasks.size()), shares = (SHARES * threads() + count - 1) / count;
  const int64_t keys = std::max<int64_t>((most / shares + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE * KEYS_AT_ONCE, FEWEST_KEYS), pieces = (most + keys - 1) / keys;
  parallel_for(count * pieces, [&](int64_t i) {
    const Attention& a = tasks[size_t(i / pieces)];
    k.score(a, i % pieces * keys, (i % pieces + 1) * keys);
  });
  const int64_t sets = (rows + AT_ONCE - 1) / AT_ONCE;
  auto upto = [](const Attention& a, int row) { return std::min(row + AT_ONCE, a.rows); };
  parallel_for(count * sets, [&](int64_t i) {
    const Attention& a = tasks[size_t(i / sets)];
    const int row = int(i % sets) * AT_ONCE;
    k.weigh(a, row, upto(a, row));
  });
  const int64_t apart = k.gathered_apart(tasks[0]), parts = (tasks[0].value_D + apart - 1) / apart;
  parallel_for(count * parts * sets, [&](int64_t i) {
    const Attention& a = tasks[size_t(i / sets / parts)];
    const int row = int(i % sets) * AT_ONCE;
    const int64_t first = i / sets % parts * apart;
    k.gather(a, row, upto(a, row), first, std::min(first + apart, a.value_D));
  });
}

}  // namespace

void attend_all(std::vector<Attention>& tasks, int64_t work) {
  const Kernels& k = kernels();
  const int64_t count = int64_t(tasks.size());
  if (count == 0) return;
  // what the busiest thread has to do, one way and the other
  const int64_t whole = (count + threads() - 1) / threads() * (work / count) + HAND_OVER;
  const int64_t in_pieces = tasks[0].value_D > 0 ? work / threads() + 3 * HAND_OVER : work;
  if (work <= std::min(whole, in_pieces)) {
    for (auto& a : tasks) attend_alone(k, a);
  } else if (in_pieces < whole) {
    attend_in_pieces(k, tasks);
  } else {
    parallel_for(count, [&](int64_t i) { attend_alone(k, tasks[size_t(i)]); });
  }
}

}  // namespace spec
