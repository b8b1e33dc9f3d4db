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

constexpr auto LINGER = std::chrono::microseconds(80);  // a wake-up costs about as much

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
  const auto begin = std::chrono::steady_clock::now();
  for (auto now = begin; !ready() && now < begin + LINGER; now = std::chrono::steady_clock::now()) {
    if (now > begin + ALONE) {  // whoever builds the next graph, say
      std::this_thread::yield();
    } else {
      for (int i = 0; i < 16; i++) relax();
    }
  }
}

// Tasks in a row that one thread begins with.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

class Pool {
 public:
  explicit Pool(int threads) : size_(threads), shares_(size_t(threads)) {
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
      version_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  void run(int64_t count, void (*task)(void*, int64_t), void* context) {
    {
      std::lock_guard lock(mutex_);
      task_ = task, context_ = context;
      for (int64_t i = 0; i < size_; i++) {
        shares_[size_t(i)].next.store(count * i / size_, std::memory_order_relaxed);
        shares_[size_t(i)].end = count * (i + 1) / size_;
      }
      open_ = true;
      version_.fetch_add(1, std::memory_order_release);
    }
    if (count - 1 < int64_t(workers_.size())) {
      for (int64_t i = 1; i < count; i++) wake_.notify_one();
    } else {
      wake_.notify_all();
    }
    take(0);
    auto left = [this] { return inside_.load(std::memory_order_acquire) == 0; };
    {
      std::lock_guard lock(mutex_);
      open_ = false;
    }
    linger(left);  // the others are in their last task
    std::unique_lock lock(mutex_);
    done_.wait(lock, left);
  }

 private:
  // One's own share first, in its order: a thread that reads on where it has been reads ahead. Then the others'.
  void take(int self) {
    for (int k = 0; k < size_; k++) {
      Share& share = shares_[size_t((self + k) % size_)];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) task_(context_, i);
    }
  }

  void work(int self) {
    uint64_t seen = 0;
    for (;;) {
      linger([&] { return version_.load(std::memory_order_acquire) != seen; });
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return version_.load(std::memory_order_relaxed) != seen; });
      seen = version_.load(std::memory_order_relaxed);
      if (stop_) return;
      if (!open_) continue;
      inside_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      take(self);
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        lock.lock();  // whoever waits has either seen the zero or sleeps
        done_.notify_one();
      }
    }
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> version_{0};
  std::atomic<int> inside_{0};
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  std::vector<Share> shares_;
  bool open_ = false, stop_ = false;
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
