// The host side of emulated groups, with the C functions of it that the CPU device calls: included after the kernel. An
// after.h says what one group does (`run_group`).
#pragma once

namespace emulator {

struct Host {
  uint32_t workers;
  pthread_t* threads = nullptr;
  uint32_t active = 0;
  megakernel::abi::KernelArgs args;
};

struct Start {
  Host* host;
  uint32_t index;
};

inline uint32_t missing = 0;  // groups that never start, the last ones
inline thread_local Host* launched;

void run_group(uint32_t index);

inline void* begin_group(void* raw) {
  Start* start = static_cast<Start*>(raw);
  launched = start->host;
  run_group(start->index);
  __atomic_sub_fetch(&launched->active, 1u, __ATOMIC_ACQ_REL);
  delete start;
  return nullptr;
}

inline void launch(Host* host, const megakernel::abi::KernelArgs* args) {
  host->args = *args;
  host->active = host->workers - missing;
  host->threads = new pthread_t[host->workers];
  for (uint32_t i = 0; i < host->workers - missing; ++i) {
    pthread_create(&host->threads[i], nullptr, begin_group, new Start{host, i});
  }
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

EMULATOR_EXPORT uint64_t mk_emulated_abi() { return mk_abi_hash; }
EMULATOR_EXPORT int mk_running(void* raw) {
  return __atomic_load_n(&static_cast<emulator::Host*>(raw)->active, __ATOMIC_ACQUIRE) != 0;
}
EMULATOR_EXPORT int mk_join(void* raw, int64_t timeout_ns) {
  return emulator::wait_end(static_cast<emulator::Host*>(raw), timeout_ns);
}
EMULATOR_EXPORT int mk_wait_event(void* raw, uint64_t, int64_t timeout_ns) {
  return emulator::wait_end(static_cast<emulator::Host*>(raw), timeout_ns);
}
