#include "queue.hpp"

#include <pthread.h>

#include "driver.hpp"

namespace sluice {

// One for the process, made at first use. Lines with work are served in turn, one job each.
class Leader {
 public:
  static Leader& instance() {
    static std::once_flag once;
    std::call_once(once, [] {
      current() = new Leader();
      pthread_atfork(nullptr, nullptr, [] { current() = new Leader(); });  // a forked child has no thread of ours
    });
    return *current();
  }

  std::mutex mutex;
  std::condition_variable work, done;
  std::deque<ExpertLine*> lines;

  void begin() {  // under the mutex
    if (!started_) {
      started_ = true;
      std::thread([this] { loop(); }).detach();
    }
    work.notify_one();
  }

  void push(ExpertLine& line, ExpertJob job) {
    std::lock_guard<std::mutex> lock(mutex);
    line.jobs_.push_back(std::move(job));
    if (!line.listed_ && !line.running_) {
      lines.push_back(&line);
      line.listed_ = true;
    }
    begin();
  }

  void wait(ExpertLine& line) {
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return line.jobs_.empty() && !line.running_; });
    if (line.failure_) {
      std::exception_ptr failure = line.failure_;
      line.failure_ = nullptr;
      std::rethrow_exception(failure);
    }
  }

  void abandon(ExpertLine& line) {
    std::unique_lock<std::mutex> lock(mutex);
    line.jobs_.clear();
    if (line.listed_) {
      for (auto it = lines.begin(); it != lines.end(); ++it)
        if (*it == &line) {
          lines.erase(it);
          break;
        }
      line.listed_ = false;
    }
    done.wait(lock, [&] { return !line.running_; });
    line.failure_ = nullptr;
  }

  int64_t completed(ExpertLine& line) {
    std::lock_guard<std::mutex> lock(mutex);
    return line.completed_;
  }

 private:
  static Leader*& current() {
    static Leader* leader = nullptr;  // never destroyed: its thread may outlive main
    return leader;
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return !lines.empty(); });
      ExpertLine* line = lines.front();
      lines.pop_front();
      line->listed_ = false;
      ExpertJob job = std::move(line->jobs_.front());
      line->jobs_.pop_front();
      line->running_ = true;
      lock.unlock();
      std::exception_ptr failure;
      try {
        driver::mlp(job.x, job.rows.data(), int64_t(job.rows.size()), job.w1, job.w3, job.w2, job.act, job.slots,
                    job.slot_ids.data(), job.int8, true);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      line->running_ = false;
      ++line->completed_;
      if (failure) line->failure_ = failure;
      if (!line->jobs_.empty() && !line->listed_) {
        lines.push_back(line);
        line->listed_ = true;
      }
      done.notify_all();
    }
  }

  bool started_ = false;
};

void ExpertLine::push(ExpertJob job) { Leader::instance().push(*this, std::move(job)); }
void ExpertLine::wait() { Leader::instance().wait(*this); }
void ExpertLine::abandon() { Leader::instance().abandon(*this); }
int64_t ExpertLine::completed() { return Leader::instance().completed(*this); }

}  // namespace sluice
