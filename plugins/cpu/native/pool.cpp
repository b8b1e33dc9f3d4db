#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spec {
namespace {

constexpr auto LINGER = std::chrono::microseconds(25);  // a core that is kept busy is one that nobody is woken on

constexpr auto ALONE = std::chrono::microseconds(16);  // of that, without letting others have the core: a layer has no longer pauses

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits a moment without sleeping; whether it was enough has to be looked at again.
template <class Ready>
void linger(Ready&& ready) {
  auto soon = [&](int looks) {
    for (; looks > 0; looks--) {
      if (ready()) return true;
      relax();
    }
    return false;
  };
  if (soon(64)) return;
  const auto begin = std::chrono::steady_clock::now();
  for (auto now = begin; now < begin + LINGER; now = std::chrono::steady_clock::now()) {
    if (now > begin + ALONE) std::this_thread::yield();  // whoever builds the next graph, say
    if (soon(now > begin + ALONE ? 1 : 16)) return;
  }
}

// The core that runs the calling thread, -1 where nobody says.
int core_of_this_thread() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread to another of the cores it may run on; afterwards it may run on all of them again.
void leave_core([[maybe_unused]] int core) {
#if defined(__linux__)
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  others = all;
  CPU_CLR(size_t(core), &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
#endif
}

// Tasks in a row that one thread begins with.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

class Pool {
 public:
  explicit Pool(int threads) : size_(threads), apart_(threads <= usable_cores()), shares_(size_t(threads)) {
    sigset_t all, before;  // signals belong to the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  void run(int64_t count, void (*task)(void*, int64_t), void* context) {
    task_ = task, context_ = context;
    core_.store(core_of_this_thread(), std::memory_order_relaxed);
    for (int64_t i = 0; i < size_; i++) {
      shares_[size_t(i)].next.store(count * i / size_, std::memory_order_relaxed);
      shares_[size_t(i)].end = count * (i + 1) / size_;
    }
    state_.store((state_.load(std::memory_order_relaxed) / RUN + 1) * RUN + OPEN);
    if (asleep_.load() > 0) {
      { std::lock_guard lock(mutex_); }  // whoever has counted itself asleep has looked at the state for the last time
      if (count - 1 < int64_t(workers_.size())) {
        for (int64_t i = 1; i < count; i++) wake_.notify_one();
      } else {
        wake_.notify_all();
      }
    }
    take(0);
    if (state_.fetch_and(~OPEN, std::memory_order_acq_rel) % OPEN == 0) return;
    auto left = [this] { return state_.load(std::memory_order_acquire) % OPEN == 0; };
    linger(left);  // the others are in their last task
    if (left()) return;
    std::unique_lock lock(mutex_);
    waiting_.store(true);
    done_.wait(lock, [this] { return state_.load() % OPEN == 0; });
    waiting_.store(false);
  }

 private:
  // One's own share first, in its order: a thread that reads on where it has been reads ahead. Then the others'.
  void take(int self) {
    for (int k = 0; k < size_; k++) {
      Share& share = shares_[size_t((self + k) % size_)];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) task_(context_, i);
    }
  }

  // A thread that is woken is often put on the core of the one that wakes it, and left there while others idle.
  void keep_apart() {
    const int core = core_.load(std::memory_order_relaxed);
    if (apart_ && core >= 0 && core == core_of_this_thread()) leave_core(core);
  }

  // Whether this worker got into an open run; `seen` is the last run it knows of.
  bool enter(uint64_t& seen) {
    uint64_t now = state_.load(std::memory_order_acquire);
    while (now & OPEN) {
      if (state_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) break;
    }
    seen = now / RUN;
    return now & OPEN;
  }

  void work(int self) {
    uint64_t seen = 0;
    auto news = [&] { return state_.load(std::memory_order_acquire) / RUN != seen; };
    for (;;) {
      keep_apart();
      linger(news);
      if (!news()) {
        std::unique_lock lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return stop_ || state_.load() / RUN != seen; });
        asleep_--;
        if (stop_) return;
      }
      keep_apart();
      if (!enter(seen)) continue;
      take(self);
      if (state_.fetch_sub(1) % (2 * OPEN) == 1 && waiting_.load()) {
        { std::lock_guard lock(mutex_); }  // whoever waits has either seen the zero or sleeps
        done_.notify_one();
      }
    }
  }

  // The number of the run, whether it is open, and the workers inside: who is to enter or to leave needs no lock.
  static constexpr uint64_t OPEN = 1 << 16, RUN = 2 * OPEN;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> waiting_{false};
  const int size_;
  const bool apart_;  // whether there is a core for each
  std::atomic<int> core_{-1};  // of the thread that submitted the last run
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  std::vector<Share> shares_;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

struct State {
  std::mutex submit;  // held while work runs
  Pool* pool = nullptr;
};

// Replaced, never destroyed: a child of fork leaves behind whatever its parent was in the middle of.
std::atomic<State*> state{nullptr};
std::atomic<int> wanted{0};

State& current() {
  State* now = state.load(std::memory_order_acquire);
  if (now) return *now;
  State* fresh = new State;
  if (state.compare_exchange_strong(now, fresh)) return *fresh;
  delete fresh;
  return *now;
}

const int at_fork = pthread_atfork(nullptr, nullptr, [] { state.store(nullptr); });

}  // namespace

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  unsigned n = std::thread::hardware_concurrency();
  return n ? int(n) : 1;
}

int threads() {
  int n = wanted.load();
  return n > 0 ? n : usable_cores();
}

void set_threads(int n) {
  State& s = current();
  std::lock_guard lock(s.submit);
  wanted.store(n < 1 ? 1 : n);
  if (s.pool && s.pool->size() != threads()) {
    delete s.pool;
    s.pool = nullptr;
  }
}

void parallel(int64_t count, void (*task)(void*, int64_t), void* context) {
  State& s = current();
  if (count > 1 && threads() > 1) {
    std::lock_guard lock(s.submit);
    if (!s.pool) s.pool = new Pool(threads());
    s.pool->run(count, task, context);
    return;
  }
  for (int64_t i = 0; i < count; i++) task(context, i);
}

}  // namespace spec
