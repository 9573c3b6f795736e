// The host side of the emulated workgroups: included after the kernel.
#pragma once
#include "../emulator/host.h"

namespace emulator {

struct HipHost : Host {
  uint64_t overflow_bytes = 2 << 20;
  char* overflow;
  megakernel::dev::Seats* seats;
};

inline void run_lane() {
  const auto& host = *static_cast<HipHost*>(launched);
  mk_worker(host.args, uint64_t(host.overflow), host.overflow_bytes, uint64_t(host.seats));
  end_lane();
}

inline void run_group(uint32_t index) {
  auto* g = new Group{};
  group = g;
  g->ring = (char*)megakernel::dev::lds.ring;
  g->random = launched->args.chaos_seed * 97 + index + 1;
  g->arguments = &launched->args;
  run(*g, index, launched->args.chaos_seed, run_lane);
  for (uint32_t i = 1; i < kLanes; ++i) {
    if (g->barriers[i] != g->barriers[0] && launched->args.fault && !*(const uint32_t*)launched->args.fault) {
      count(seen.uneven_barriers);
    }
    for (Counter& c : g->counter[i]) delete[] c.copy;
  }
  delete g;
}

}  // namespace emulator

// The XCD that workgroup i is on, for i in [0, count), from the next launch on; the last `missing` never start.
EMULATOR_EXPORT void mk_place(const uint32_t* places, uint32_t count, uint32_t missing) {
  for (uint32_t i = 0; i < count && i < 64; ++i) emulator::place[i] = places[i];
  emulator::missing = missing;
}
EMULATOR_EXPORT uint32_t mk_place_of(void* raw, uint32_t worker) {
  return static_cast<emulator::HipHost*>(raw)->seats->place_of[worker];
}
EMULATOR_EXPORT uint32_t mk_seat(const uint32_t* count, uint32_t workers, uint32_t groups, uint32_t place, uint32_t rank) {
  return megakernel::dev::seat(count, workers, groups, place, rank);
}
EMULATOR_EXPORT void mk_emulated_seen(emulator::Seen* out) {
  *out = emulator::seen;
  emulator::seen = {};
}
EMULATOR_EXPORT void* mk_open(uint32_t workers) {
  auto* host = new emulator::HipHost{{workers}};
  host->overflow = static_cast<char*>(aligned_alloc(4096, workers * host->overflow_bytes));
  host->seats = static_cast<megakernel::dev::Seats*>(calloc(1, sizeof(megakernel::dev::Seats) + workers * 4));
  return host;
}
EMULATOR_EXPORT void mk_launch(void* raw, const megakernel::abi::KernelArgs* args) {
  auto* host = static_cast<emulator::HipHost*>(raw);
  memset(host->seats, 0, sizeof(megakernel::dev::Seats) + host->workers * 4);
  emulator::launch(host, args);
}
EMULATOR_EXPORT void mk_close(void* raw) {
  auto* host = static_cast<emulator::HipHost*>(raw);
  emulator::wait_end(host, int64_t(60) * 1000000000);
  free(host->overflow);
  free(host->seats);
  delete host;
}
