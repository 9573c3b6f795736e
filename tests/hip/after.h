// The host side of the emulated workgroups, with the C functions that the CPU device calls: included after the kernel.
#pragma once

namespace emulator {

struct Host {
  uint32_t workers;
  pthread_t* threads = nullptr;
  uint32_t active = 0;
  megakernel::abi::KernelArgs args;
  uint64_t overflow_bytes = 2 << 20;
  char* overflow;
  megakernel::dev::Seats* seats;
};

struct Start {
  Host* host;
  uint32_t index;
};

inline thread_local Host* launched;

inline void run_lane() {
  mk_worker(launched->args, uint64_t(launched->overflow), launched->overflow_bytes, uint64_t(launched->seats));
  end_lane();
}

inline void* run_group(void* raw) {
  Start* start = static_cast<Start*>(raw);
  launched = start->host;
  auto* g = new Group{};
  group = g;
  g->ring = (char*)megakernel::dev::lds.ring;
  g->random = launched->args.chaos_seed * 97 + start->index + 1;
  g->arguments = &launched->args;
  run(*g, start->index, launched->args.chaos_seed, run_lane);
  for (uint32_t i = 1; i < kLanes; ++i) {
    if (g->barriers[i] != g->barriers[0] && launched->args.fault && !*(const uint32_t*)launched->args.fault) {
      count(seen.uneven_barriers);
    }
    for (Counter& c : g->counter[i]) delete[] c.copy;
  }
  delete g;
  __atomic_sub_fetch(&launched->active, 1u, __ATOMIC_ACQ_REL);
  delete start;
  return nullptr;
}

inline bool wait_end(Host* host, int64_t timeout_ns) {
  const uint64_t until = ticks() + uint64_t(timeout_ns) / 10;
  while (__atomic_load_n(&host->active, __ATOMIC_ACQUIRE) != 0) {
    if (ticks() >= until) return false;
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

// The XCD that workgroup i is on, for i in [0, count), from the next launch on; the last `missing` never start.
EMULATOR_EXPORT void mk_place(const uint32_t* places, uint32_t count, uint32_t missing) {
  for (uint32_t i = 0; i < count && i < 64; ++i) emulator::place[i] = places[i];
  emulator::missing = missing;
}
EMULATOR_EXPORT uint32_t mk_place_of(void* raw, uint32_t worker) {
  return static_cast<emulator::Host*>(raw)->seats->place_of[worker];
}
EMULATOR_EXPORT uint32_t mk_seat(const uint32_t* count, uint32_t workers, uint32_t groups, uint32_t place, uint32_t rank) {
  return megakernel::dev::seat(count, workers, groups, place, rank);
}
EMULATOR_EXPORT uint64_t mk_emulated_abi() { return mk_abi_hash; }
EMULATOR_EXPORT void mk_emulated_seen(emulator::Seen* out) {
  *out = emulator::seen;
  emulator::seen = {};
}
EMULATOR_EXPORT void* mk_open(uint32_t workers) {
  auto* host = new emulator::Host{workers};
  host->overflow = static_cast<char*>(aligned_alloc(4096, workers * host->overflow_bytes));
  host->seats = static_cast<megakernel::dev::Seats*>(calloc(1, sizeof(megakernel::dev::Seats) + workers * 4));
  return host;
}
EMULATOR_EXPORT void mk_launch(void* raw, const megakernel::abi::KernelArgs* args) {
  auto* host = static_cast<emulator::Host*>(raw);
  host->args = *args;
  host->active = host->workers - emulator::missing;
  memset(host->seats, 0, sizeof(megakernel::dev::Seats) + host->workers * 4);
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
  free(host->overflow);
  free(host->seats);
  delete host;
}
