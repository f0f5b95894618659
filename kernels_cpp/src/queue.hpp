// The experts of one layer, computed while others still arrive: a caller pushes an expert as soon as its weights are
// in memory and goes on waiting for the next; one native thread of ours leads the pool through them in order.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.hpp"

namespace sluice {

struct ExpertJob {
  const float* x;
  std::vector<int32_t> rows, slot_ids;
  Matrix w1, w3, w2;
  Activation act;
  float* slots;
  bool int8;
};

class ExpertLine {
 public:
  void push(ExpertJob job);  // returns at once
  void wait();               // until all pushed jobs are done; rethrows what one of them threw
  void abandon();            // forgets jobs not begun, waits for the one that runs
  int64_t completed();

 private:
  friend class Leader;
  std::deque<ExpertJob> jobs_;  // guarded by the leader's mutex, as all below
  bool running_ = false;
  bool listed_ = false;
  int64_t completed_ = 0;
  std::exception_ptr failure_;
};

}  // namespace sluice
