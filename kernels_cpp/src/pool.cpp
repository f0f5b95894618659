#include "pool.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Default rounding and no flush-to-zero while a piece runs: a library compiled with -ffast-math, or fesetround in the
// calling program, may have left this thread in another mode, and the bits would follow it.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FloatMode() {}
#endif
};

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

Pool* g_pool = nullptr;
std::once_flag g_once;

}  // namespace

Scratch::~Scratch() { std::free(data_); }

float* Scratch::floats(int64_t n) {
  if (n > capacity_) {
    int64_t grown = (n + 1023) / 1024 * 1024;
    void* p = std::aligned_alloc(64, size_t(grown) * sizeof(float));
    if (p == nullptr) throw std::bad_alloc();
    std::free(data_);
    data_ = static_cast<float*>(p);
    capacity_ = grown;
  }
  return data_;
}

Pool& Pool::instance() {
  std::call_once(g_once, [] {
    g_pool = new Pool();
    pthread_atfork(nullptr, nullptr, &Pool::after_fork);
  });
  return *g_pool;
}

// A forked child has none of the threads and perhaps a locked mutex: it starts with a fresh pool of one.
void Pool::after_fork() { g_pool = new Pool(); }

Pool::Pool() : worker_(new Scratch[1]) {}

void Pool::stop() {
  stopping_.store(true);
  ticket_.fetch_add(2);
  futex_wake(&ticket_, INT_MAX);
  for (auto& t : threads_) t.join();
  threads_.clear();
  stopping_.store(false);
}

void Pool::configure(int n, const std::vector<int>& cpus, const std::vector<int>& homes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop();
  homes_ = homes;
  home_count_ = homes.empty() ? 1 : *std::max_element(homes.begin(), homes.end()) + 1;
  worker_.reset(new Scratch[size_t(n)]);
  size_ = n;
  for (int i = 1; i < n; ++i) {
    threads_.emplace_back([this, i] { worker_loop(i); });
    if (!cpus.empty()) {
      int cpu = cpus[size_t(i) % cpus.size()];
      cpu_set_t* set = CPU_ALLOC(size_t(cpu) + 1);
      size_t bytes = CPU_ALLOC_SIZE(size_t(cpu) + 1);
      CPU_ZERO_S(bytes, set);
      CPU_SET_S(size_t(cpu), bytes, set);
      pthread_setaffinity_np(threads_.back().native_handle(), bytes, set);  // a wish: refused in some containers
      CPU_FREE(set);
    }
  }
}

int64_t Pool::scratch_bytes() const {
  int64_t total = 0;
  for (int i = 0; i < size_; ++i) total += worker_[i].bytes();
  for (const Scratch& s : shared_) total += s.bytes();
  return total;
}

void Pool::take_part(int id) {
  FloatMode mode;
  for (int p = 0; p < phase_count_; ++p) {
    const Phase& phase = phases_[p];
    Counter& c = counters_[p];
    int shares = phase.homed ? home_count_ : 1, own = shares > 1 ? homes_[size_t(id)] : 0;
    for (int k = 0; k < shares; ++k) {  // its own share first, then whatever is left of the others'
      int share = (own + k) % shares;
      int64_t begin = phase.pieces * share / shares, end = phase.pieces * (share + 1) / shares;
      for (;;) {
        int64_t piece = begin + c.next[share].fetch_add(1, std::memory_order_relaxed);
        if (piece >= end) break;
        phase.run(phase.context, piece, id);
        c.done.fetch_add(1, std::memory_order_acq_rel);
      }
    }
    for (int spins = 0; c.done.load(std::memory_order_acquire) < phase.pieces; ++spins) {
      relax();
      if (spins > 2000) sched_yield(), spins = 0;  // the one who holds the last piece may need this core
    }
  }
}

void Pool::worker_loop(int id) {
  uint32_t seen = ticket_.load() & ~1u;
  for (;;) {
    // spin briefly: within a token the next job comes in microseconds, between tokens in milliseconds
    auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
    uint32_t now;
    for (;;) {
      now = ticket_.load();
      if (now != seen && (now & 1u)) break;
      if (stopping_.load()) return;
      for (int i = 0; i < 16; ++i) relax();
      if (std::chrono::steady_clock::now() > until) {
        asleep_.fetch_add(1);
        uint32_t current = ticket_.load();
        if (!((current & 1u) && current != seen) && !stopping_.load()) futex_wait(&ticket_, current);
        asleep_.fetch_sub(1);
        until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
      }
    }
    inside_.fetch_add(1);
    if (ticket_.load() == now) {  // still open: the caller now waits for us before it closes the job
      if (id < width_) take_part(id);
    }
    inside_.fetch_sub(1);
    seen = now;
  }
}

void Pool::wake(int workers) {
  if (asleep_.load() > 0) futex_wake(&ticket_, workers);
}

void Pool::run(const Phase* phases, int count, int width) {
  width = width <= 0 || width > size() ? size() : width;
  phases_ = phases;
  phase_count_ = count;
  width_ = width;
  for (int p = 0; p < count; ++p) {
    for (int share = 0; share < home_count_; ++share) counters_[p].next[share].store(0, std::memory_order_relaxed);
    counters_[p].done.store(0, std::memory_order_relaxed);
  }
  if (width == 1) {
    take_part(0);
    return;
  }
  ticket_.fetch_add(1);  // opens
  wake(INT_MAX);
  take_part(0);
  ticket_.fetch_add(1);  // closes: who registers from here on sees it and leaves
  while (inside_.load() != 0) relax();
}

}  // namespace sluice
