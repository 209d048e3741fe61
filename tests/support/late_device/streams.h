// Streams of the late device: threads that run jobs in order, later than they were put.
//
//   job     what one launch does; it has a cost, in seconds of the device
//   pace    how late jobs are: not at all, at random, or as long as their costs say
//   clock   the time at which a stream's jobs so far end, by their costs. A job's work runs at once
//           and its end waits for the clock: a busy processor makes a stream late, never wrong
//   event   a position in a stream; its time is the stream's clock there
//
// Thread safety: all of it may be called from any thread. Streams live as long as the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <unistd.h>

namespace late {

using Clock = std::chrono::steady_clock;
constexpr int kDevices = 2;
constexpr int kFailedJob = 77;  // exit status: a job has nobody to raise to

struct Pace {
  std::atomic<bool> waits{false};  // each launch waits for its job: a device that is never late
  std::atomic<int> most_us{0};  // a random delay before a job
  std::atomic<double> share{0.0};  // of the jobs that are delayed
  std::atomic<double> link{0.0};  // bytes a second from or to the host; 0: costs do not count
  std::atomic<double> memory{0.0};  // bytes a second of the device's own memory
  std::atomic<double> flops{0.0};  // operations a second
};
inline Pace pace;

struct Counts {
  std::atomic<long> jobs{0};
  std::atomic<long> host_waits{0};  // of the thread that loaded this: the one that trains

  std::atomic<long> aborts{0};  // of collectives, by waits whose limit ended
  std::atomic<bool> refuses_copies{false};  // that the training thread would wait for

  void wait() { host_waits += trains(); }
  bool trains() const { return std::this_thread::get_id() == trains_; }

 private:
  const std::thread::id trains_ = std::this_thread::get_id();
};
inline Counts counts;

class Event {
 public:
  void end(Clock::time_point at) {
    {
      std::lock_guard hold(mutex_);
      done_ = true;
      at_ = at;
    }
    changed_.notify_all();
  }
  Clock::time_point wait() {
    std::unique_lock hold(mutex_);
    changed_.wait(hold, [this] { return done_; });
    return at_;
  }
  bool done() {
    std::lock_guard hold(mutex_);
    return done_;
  }
  bool done_within(std::chrono::milliseconds limit) {
    std::unique_lock hold(mutex_);
    return changed_.wait_for(hold, limit, [this] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point at_;
};
using EventPtr = std::shared_ptr<Event>;

class Stream {
 public:
  Stream(int device, int id) : device(device), id(id), random_(id * 7919 + device + 1) {
    std::thread(&Stream::run, this).detach();
  }

  const int device, id;

  void put(std::function<void()> work, double seconds = 0.0) {
    EventPtr over;
    if (pace.waits && !is_own_thread) {
      over = std::make_shared<Event>();
      work = [work = std::move(work), over] {
        work();
        over->end(Clock::now());
      };
    }
    push({std::move(work), nullptr, nullptr, seconds});
    if (over) over->wait();
  }
  void wait_for(EventPtr event) { push({nullptr, std::move(event), nullptr, 0.0}); }
  EventPtr mark() {
    auto event = std::make_shared<Event>();
    push({nullptr, nullptr, event, 0.0});
    return event;
  }
  void synchronize() {
    counts.wait();
    mark()->wait();
  }
  bool idle() {
    std::lock_guard hold(mutex_);
    return jobs_.empty() && !busy_;
  }

 private:
  struct Job {
    std::function<void()> work;
    EventPtr before, end;
    double seconds;
    Clock::time_point put = Clock::now();
  };

  void push(Job job) {
    {
      std::lock_guard hold(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }
  void run() {
    is_own_thread = true;
    for (;;) {
      Job job = next();
      clock_ = std::max(clock_, job.put);
      if (job.before) clock_ = std::max(clock_, job.before->wait());
      if (job.work) carry_out(job);
      if (job.end) job.end->end(clock_);
    }
  }
  Job next() {
    std::unique_lock hold(mutex_);
    busy_ = false;
    changed_.wait(hold, [this] { return !jobs_.empty(); });
    busy_ = true;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }
  void carry_out(Job& job) {
    if (pace.most_us > 0 && random_() % 1000 < pace.share * 1000) {
      usleep(random_() % pace.most_us);
      clock_ = std::max(clock_, Clock::now());
    }
    try {
      job.work();
      job.work = nullptr;  // what it keeps alive is freed here
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a job failed on stream %d of device %d: %s\n", id, device,
                   error.what());
      _exit(kFailedJob);
    }
    if (pace.link > 0) {
      clock_ +=
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(job.seconds));
      std::this_thread::sleep_until(clock_);
    } else {
      clock_ = std::max(clock_, Clock::now());
    }
    ++counts.jobs;
  }

  static inline thread_local bool is_own_thread = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool busy_ = false;
  std::minstd_rand random_;
  Clock::time_point clock_ = Clock::now();
};

// The streams of all devices. The one numbered 0 is a device's default stream.
class Streams {
 public:
  static Streams& all() {
    static auto* streams = new Streams;  // its threads outlive static destructors
    return *streams;
  }
  Stream* at(int device, int id) {
    std::lock_guard hold(mutex_);
    auto& of_device = streams_[device];
    while (static_cast<int>(of_device.size()) <= id)
      of_device.push_back(new Stream(device, of_device.size()));
    return of_device[id];
  }
  int make(int device) {
    at(device, 0);
    std::lock_guard hold(mutex_);
    streams_[device].push_back(new Stream(device, streams_[device].size()));
    return static_cast<int>(streams_[device].size()) - 1;
  }
  void synchronize(int device) {
    std::vector<Stream*> of_device;
    {
      std::lock_guard hold(mutex_);
      of_device = streams_[device];
    }
    for (auto* stream : of_device) stream->synchronize();
  }

 private:
  std::mutex mutex_;
  std::vector<Stream*> streams_[kDevices];
};

// Of the calling thread.
inline thread_local int current_device = 0;
inline thread_local int current_stream[kDevices] = {};

inline Stream* stream_of(int device) { return Streams::all().at(device, current_stream[device]); }

// Makes ``device`` the current one in a scope; a negative one leaves it.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device) {
    if (device >= 0) current_device = device;
  }
  ~OnDevice() { current_device = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

}  // namespace late
