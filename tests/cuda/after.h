// The host side of the emulated blocks, with the C functions that the CPU device calls: included after the kernel.
#pragma once

namespace megakernel::dev {
thread_local __attribute__((aligned(1024))) unsigned char mk_shared[MEGAKERNEL_SHARED_BYTES];
}

namespace emulator {

struct Host {
  uint32_t workers;
  pthread_t* threads = nullptr;
  uint32_t active = 0;
  megakernel::abi::KernelArgs args;
};

inline uint32_t missing = 0;  // blocks that never start, the last ones

struct Start {
  Host* host;
  uint32_t index;
};

inline thread_local Host* launched;

inline void run_lane() {
  mk_worker(launched->args);
  end_lane();
}

inline void* run_group(void* raw) {
  Start* start = static_cast<Start*>(raw);
  launched = start->host;
  auto* g = new Group{};
  group = g;
  memset(megakernel::dev::mk_shared, 0xff, sizeof megakernel::dev::mk_shared);
  run(*g, start->index, launched->args.chaos_seed, run_lane);
  delete g;
  __atomic_sub_fetch(&launched->active, 1u, __ATOMIC_ACQ_REL);
  delete start;
  return nullptr;
}

inline bool wait_end(Host* host, int64_t timeout_ns) {
  const uint64_t until = now_ns() + uint64_t(timeout_ns);
  while (__atomic_load_n(&host->active, __ATOMIC_ACQUIRE) != 0) {
    if (now_ns() >= until) return false;
    const timespec nap{0, 1000000};
    nanosleep(&nap, nullptr);
  }
  if (host->threads) {
    for (uint32_t i = 0; i < host->workers - missing; ++i) pthread_join(host->threads[i], nullptr);
    delete[] host->threads;
    host->threads = nullptr;
  }
  return true;
}

}  // namespace emulator

#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

EMULATOR_EXPORT void mk_leave_out(uint32_t count) { emulator::missing = count; }
EMULATOR_EXPORT uint64_t mk_emulated_abi() { return mk_abi_hash; }
EMULATOR_EXPORT void* mk_open(uint32_t workers) { return new emulator::Host{workers}; }
EMULATOR_EXPORT void mk_launch(void* raw, const megakernel::abi::KernelArgs* args) {
  auto* host = static_cast<emulator::Host*>(raw);
  host->args = *args;
  host->active = host->workers - emulator::missing;
  host->threads = new pthread_t[host->workers];
  for (uint32_t i = 0; i < host->workers - emulator::missing; ++i) {
    pthread_create(&host->threads[i], nullptr, emulator::run_group, new emulator::Start{host, i});
  }
}
EMULATOR_EXPORT int mk_running(void* raw) {
  return __atomic_load_n(&static_cast<emulator::Host*>(raw)->active, __ATOMIC_ACQUIRE) != 0;
}
EMULATOR_EXPORT int mk_join(void* raw, int64_t timeout_ns) {
  return emulator::wait_end(static_cast<emulator::Host*>(raw), timeout_ns);
}
EMULATOR_EXPORT int mk_wait_event(void* raw, uint64_t, int64_t timeout_ns) {
  return emulator::wait_end(static_cast<emulator::Host*>(raw), timeout_ns);
}
EMULATOR_EXPORT void mk_close(void* raw) {
  auto* host = static_cast<emulator::Host*>(raw);
  emulator::wait_end(host, int64_t(60) * 1000000000);
  delete host;
}
