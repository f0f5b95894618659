// A pool of native threads that share one job at a time. The caller of a job works too, and a job never waits for a
// thread that has not taken part of it: pieces are taken from a counter, so a sleeping or descheduled thread costs
// its help, not its absence. Results never depend on who computes what, because a piece is whole rows or heads.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sluice {

// Memory that only grows, 64-byte aligned: allocation happens the first times, never in a steady state.
class Scratch {
 public:
  ~Scratch();
  float* floats(int64_t n);  // throws std::bad_alloc; call it before a job starts, never inside a piece
  int64_t bytes() const { return capacity_ * 4; }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

class Pool {
 public:
  static constexpr int kMaxThreads = 1024;
  static constexpr int kMaxPhases = 4;
  static constexpr int kMaxHomes = 8;

  static Pool& instance();

  // n threads in all, the caller included; worker i (1..n-1) is pinned to cpus[i] when cpus is not empty. homes, when
  // not empty, says for each thread which share of a homed phase's pieces it takes first.
  void configure(int n, const std::vector<int>& cpus, const std::vector<int>& homes);
  int size() const { return size_; }
  void set_spin_us(int us) { spin_us_ = us; }
  int spin_us() const { return spin_us_; }
  int64_t scratch_bytes() const;

  using Piece = void (*)(void* context, int64_t piece, int worker);
  struct Phase {
    int64_t pieces;
    Piece run;
    void* context;
    bool homed;  // pieces lie in memory in their order, shared out over the homes' nodes
  };

  // Holds the pool for one operation: its scratch may be used from construction to destruction.
  class Lease {
   public:
    Lease() : lock_(instance().mutex_), pool_(instance()) {}
    Pool& pool() { return pool_; }

   private:
    std::unique_lock<std::mutex> lock_;
    Pool& pool_;
  };

  // All pieces of a phase are done before the next begins. `width` caps the threads (0: all). Needs a Lease.
  void run(const Phase* phases, int count, int width = 0);

  // shared: slots of caller-filled memory; worker: one per thread.
  float* shared(int slot, int64_t n) { return shared_[slot].floats(n); }
  float* worker(int id, int64_t n) { return worker_[id].floats(n); }
  void reserve_workers(int64_t n) {
    for (int i = 0; i < size_; ++i) worker_[i].floats(n);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next[kMaxHomes] = {}, done{0};
  };
  Pool();
  ~Pool() = delete;  // lives as long as the process: exit must not join threads that a fork did not copy
  void worker_loop(int id);
  void take_part(int id);
  void wake(int workers);
  void stop();
  static void after_fork();

  std::mutex mutex_;
  std::vector<std::thread> threads_;
  std::atomic<int> size_{1};
  std::atomic<int> spin_us_{50};
  std::vector<int> homes_;  // of each thread; empty where there is one
  int home_count_ = 1;
  std::unique_ptr<Scratch[]> worker_;
  Scratch shared_[8];

  const Phase* phases_ = nullptr;
  int phase_count_ = 0, width_ = 1;
  Counter counters_[kMaxPhases];
  alignas(64) std::atomic<uint32_t> ticket_{0};  // odd: a job is open; also the futex word
  alignas(64) std::atomic<int> inside_{0};       // workers that may still touch the job
  std::atomic<int> asleep_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace sluice
