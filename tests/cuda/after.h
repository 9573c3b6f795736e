// The host side of the emulated blocks: included after the kernel.
#pragma once
#include "../emulator/host.h"

namespace megakernel::dev {
thread_local __attribute__((aligned(1024))) unsigned char mk_shared[MEGAKERNEL_SHARED_BYTES];
}

namespace emulator {

inline void run_lane() {
  mk_worker(launched->args);
  end_lane();
}

inline void run_group(uint32_t index) {
  auto* g = new Group{};
  group = g;
  memset(megakernel::dev::mk_shared, 0xff, sizeof megakernel::dev::mk_shared);
  run(*g, index, launched->args.chaos_seed, run_lane);
  delete g;
}

}  // namespace emulator

EMULATOR_EXPORT void mk_leave_out(uint32_t count) { emulator::missing = count; }
EMULATOR_EXPORT void* mk_open(uint32_t workers) { return new emulator::Host{workers}; }
EMULATOR_EXPORT void mk_launch(void* raw, const megakernel::abi::KernelArgs* args) {
  emulator::launch(static_cast<emulator::Host*>(raw), args);
}
EMULATOR_EXPORT void mk_close(void* raw) {
  auto* host = static_cast<emulator::Host*>(raw);
  emulator::wait_end(host, int64_t(60) * 1000000000);
  delete host;
}

// A program that runs what was written to files, for tools that must see every thread from the start.
#ifdef MEGAKERNEL_STANDALONE
namespace megakernel::dev {
struct Host {
  using Run = int;
  emulator::Host host;

  static Host* open(Run, uint32_t workers) { return new Host{{workers}}; }
  static void close(Host* h) { delete h; }
  void launch(const abi::KernelArgs& args) { emulator::launch(&host, &args); }
  bool join(int64_t timeout_ns) { return emulator::wait_end(&host, timeout_ns); }
};
}  // namespace megakernel::dev
#include "megakernel/device/cpu_main.h"

int main(int count, char** values) { return megakernel::dev::run_dump(0, count, values); }
#endif
