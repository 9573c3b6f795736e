// Worker threads, resident from open to close, and the C functions that a host process calls.
//
// Between launches the threads sleep on `begun_`; a host thread that waits for tokens sleeps on `events_`.
#pragma once
#include <errno.h>
#include <pthread.h>

namespace megakernel::dev {

struct InPlace {};

}  // namespace megakernel::dev

// Objects are made in memory of malloc: the kernel needs no C++ runtime library.
inline void* operator new(size_t, megakernel::dev::InPlace, void* memory) noexcept { return memory; }

namespace megakernel::dev {

class Host : public HostLink {
 public:
  using Run = void (*)(Worker&);

  // Null when the system does not start so many threads.
  static Host* open(Run run, uint32_t workers) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignof(Host), sizeof(Host)) != 0) return nullptr;
    Host* host = new (InPlace{}, memory) Host(run, workers);
    if (host->start()) return host;
    close(host);
    return nullptr;
  }

  static void close(Host* host) {
    host->stop();
    free(host);
  }

  void launch(const abi::KernelArgs& args) {
    args_ = args;
    dropped = 0;
    __atomic_store_n(&active_, workers_, __ATOMIC_RELAXED);
    begin();
  }

  bool running() const { return __atomic_load_n(&active_, __ATOMIC_ACQUIRE) != 0; }

  // True when more events than `seen` were written, or the launch ended, before the time ran out.
  bool wait_event(uint64_t seen, int64_t timeout_ns) {
    return sleep_until(timeout_ns, [&] {
      return !running() || load_acquire_system(&reinterpret_cast<abi::TokenRing*>(args_.ring)->written) > seen;
    });
  }

  bool join(int64_t timeout_ns) {
    return sleep_until(timeout_ns, [&] { return !running(); });
  }

 private:
  struct Thread {
    Host* host;
    uint32_t id;
    pthread_t handle;
  };

  Host(Run run, uint32_t workers) : run_(run), workers_(workers) {
    notify = [](HostLink* self) { static_cast<Host*>(self)->event(); };
    if (const long cores = sysconf(_SC_NPROCESSORS_ONLN); cores > 0 && workers > uint32_t(cores)) spins = 32;
  }

  bool start() {
    threads_ = static_cast<Thread*>(calloc(workers_, sizeof(Thread)));
    if (threads_ == nullptr) return false;
    for (; started_ < workers_; ++started_) {
      Thread& thread = threads_[started_];
      thread.host = this;
      thread.id = started_;
      if (pthread_create(&thread.handle, nullptr, &Host::enter, &thread) != 0) return false;
    }
    return true;
  }

  void stop() {
    if (running()) __atomic_store_n(&reinterpret_cast<abi::LaunchState*>(args_.launch)->abort, 1u, __ATOMIC_RELEASE);
    __atomic_store_n(&closing_, 1u, __ATOMIC_RELEASE);
    begin();
    for (uint32_t i = 0; i < started_; ++i) pthread_join(threads_[i].handle, nullptr);
    free(threads_);
  }

  Run run_;
  uint32_t workers_;
  uint32_t started_ = 0;
  Thread* threads_ = nullptr;
  abi::KernelArgs args_{};
  alignas(64) uint32_t begun_ = 0;
  uint32_t closing_ = 0;
  alignas(64) uint32_t active_ = 0;
  alignas(64) uint32_t events_ = 0;
  uint32_t sleepers_ = 0;

  void begin() {
    __atomic_add_fetch(&begun_, 1u, __ATOMIC_RELEASE);
    futex_wake(&begun_);
  }

  void event() {
    __atomic_add_fetch(&events_, 1u, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST) != 0) futex_wake(&events_);
  }

  template <class Done>
  bool sleep_until(int64_t timeout_ns, Done done) {
    const uint64_t deadline = clock_ns() + uint64_t(timeout_ns);
    __atomic_add_fetch(&sleepers_, 1u, __ATOMIC_SEQ_CST);
    bool ended = false;
    for (;;) {
      const uint32_t events = __atomic_load_n(&events_, __ATOMIC_SEQ_CST);
      ended = done();
      const uint64_t now = clock_ns();
      if (ended || now >= deadline) break;
      const timespec left{time_t((deadline - now) / 1000000000u), long((deadline - now) % 1000000000u)};
      futex_wait(&events_, events, &left);
    }
    __atomic_sub_fetch(&sleepers_, 1u, __ATOMIC_SEQ_CST);
    return ended;
  }

  static void* enter(void* raw) {
    const Thread& self = *static_cast<Thread*>(raw);
    self.host->serve(self.id);
    return nullptr;
  }

  void serve(uint32_t id) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t begun;
      while ((begun = __atomic_load_n(&begun_, __ATOMIC_ACQUIRE)) == seen) futex_wait(&begun_, seen, nullptr);
      seen = begun;
      if (__atomic_load_n(&closing_, __ATOMIC_ACQUIRE)) return;
      {
        Worker worker(args_, *this, id);
        run_(worker);
      }
      if (__atomic_sub_fetch(&active_, 1u, __ATOMIC_ACQ_REL) == 0) event();
    }
  }
};

}  // namespace megakernel::dev

#ifdef MEGAKERNEL_STANDALONE
#include "megakernel/device/cpu_main.h"

#define MEGAKERNEL_ENTRY(TASKS)                                                                                        \
  int main(int count, char** values) {                                                                                 \
    return megakernel::dev::run_dump(&megakernel::run_worker<TASKS>, count, values);                                   \
  }
#else
#define MEGAKERNEL_EXPORT extern "C" __attribute__((visibility("default")))

// The entry of a program: `TASKS` is its TaskList.
#define MEGAKERNEL_ENTRY(TASKS)                                                                                        \
  using MegakernelHost = megakernel::dev::Host;                                                                        \
  MEGAKERNEL_EXPORT uint64_t mk_abi_hash() { return megakernel::abi::kAbiHash; }                                       \
  MEGAKERNEL_EXPORT void* mk_open(uint32_t workers) {                                                                  \
    return MegakernelHost::open(&megakernel::run_worker<TASKS>, workers);                                              \
  }                                                                                                                    \
  MEGAKERNEL_EXPORT void mk_launch(void* host, const megakernel::abi::KernelArgs* args) {                              \
    static_cast<MegakernelHost*>(host)->launch(*args);                                                                 \
  }                                                                                                                    \
  MEGAKERNEL_EXPORT int mk_running(void* host) { return static_cast<MegakernelHost*>(host)->running(); }               \
  MEGAKERNEL_EXPORT int mk_join(void* host, int64_t timeout_ns) {                                                      \
    return static_cast<MegakernelHost*>(host)->join(timeout_ns);                                                       \
  }                                                                                                                    \
  MEGAKERNEL_EXPORT int mk_wait_event(void* host, uint64_t seen, int64_t timeout_ns) {                                 \
    return static_cast<MegakernelHost*>(host)->wait_event(seen, timeout_ns);                                           \
  }                                                                                                                    \
  MEGAKERNEL_EXPORT void mk_close(void* host) { MegakernelHost::close(static_cast<MegakernelHost*>(host)); }
#endif
