// A kernel as a program of its own: runs launches from memory that was written to files, with no Python in the process.
// For tools that must see every thread from the start. Built with MEGAKERNEL_STANDALONE.
//
//   kernel FOLDER LAUNCHES STEPS
//
// FOLDER holds KernelArgs as args.bin, and for each address in it the memory that it points to as NAME.bin; of several
// ranks FOLDER/0, FOLDER/1, ... do, each with its window.bin, and all run at once. Each launch runs at most STEPS steps.
// Of rank 0 it prints one line an event: request, token, position, finish; then how the last launch ended.
// Exit status: 0, 2 for a bad folder, 3 for a fault (its fields on the last line).
#pragma once
#include <stdio.h>

namespace megakernel::dev {

struct AddressField {
  const char* name;
  uint64_t abi::KernelArgs::*field;
};

constexpr AddressField kAddressFields[] = {
    {"weights", &abi::KernelArgs::weights},
    {"workspace", &abi::KernelArgs::workspace},
    {"kv", &abi::KernelArgs::kv},
    {"queues", &abi::KernelArgs::queues},
    {"counters", &abi::KernelArgs::counters},
    {"headers", &abi::KernelArgs::headers},
    {"launch", &abi::KernelArgs::launch},
    {"slots", &abi::KernelArgs::slots},
    {"page_table", &abi::KernelArgs::page_table},
    {"tokens", &abi::KernelArgs::tokens},
    {"seen", &abi::KernelArgs::seen},
    {"mailbox", &abi::KernelArgs::mailbox},
    {"ring", &abi::KernelArgs::ring},
    {"fault", &abi::KernelArgs::fault},
};

// The bytes of FOLDER/NAME.bin in memory that is never freed; null when there is no such file.
inline void* read_file(const char* folder, const char* name, size_t* bytes) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.bin", folder, name);
  FILE* file = fopen(path, "rb");
  if (file == nullptr) return nullptr;
  fseek(file, 0, SEEK_END);
  *bytes = size_t(ftell(file));
  rewind(file);
  void* memory = nullptr;
  if (posix_memalign(&memory, 4096, *bytes + 4096) != 0) memory = nullptr;
  if (memory != nullptr && fread(memory, 1, *bytes, file) != *bytes) memory = nullptr;
  fclose(file);
  return memory;
}

inline bool read_dump(const char* folder, abi::KernelArgs& args) {
  size_t bytes = 0;
  const void* raw = read_file(folder, "args", &bytes);
  if (raw == nullptr || bytes != sizeof args) {
    fprintf(stderr, "%s/args.bin: expected %zu bytes, got %zu\n", folder, sizeof args, bytes);
    return false;
  }
  __builtin_memcpy(&args, raw, sizeof args);
  for (const AddressField& f : kAddressFields) {
    args.*f.field = reinterpret_cast<uint64_t>(read_file(folder, f.name, &bytes));
    if (args.*f.field != 0) continue;
    fprintf(stderr, "%s/%s.bin cannot be read\n", folder, f.name);
    return false;
  }
  return true;
}

inline int report(const abi::KernelArgs& args) {
  const auto& ring = *reinterpret_cast<const abi::TokenRing*>(args.ring);
  const auto& fault = *reinterpret_cast<const abi::FaultRecord*>(args.fault);
  const auto& state = *reinterpret_cast<const abi::LaunchState*>(args.launch);
  const uint64_t first = ring.written > abi::kRingEntries ? ring.written - abi::kRingEntries : 0;
  for (uint64_t i = first; i < ring.written; ++i) {
    const abi::TokenEvent& e = ring.entry[i % abi::kRingEntries];
    printf("event %u %d %u %u\n", e.request, e.token, e.position, e.finish);
  }
  if (fault.kind != 0) {
    printf("fault kind %u worker %u record %u node %u tile %u counter %u ", fault.kind, fault.worker, fault.record,
           fault.node, fault.tile, fault.counter);
    printf("value %llu target %llu step %llu\n", (unsigned long long)fault.value, (unsigned long long)fault.target,
           (unsigned long long)fault.step);
    return 3;
  }
  printf("end exit %u steps %llu\n", state.exit, (unsigned long long)state.steps_run);
  return 0;
}

// A rank of the dump.
struct Dump {
  abi::KernelArgs args;
  Host* host;
};

// Where the windows of the ranks are now.
inline bool connect(Dump* dumps, const char* folder) {
  for (uint32_t rank = 0; rank < abi::kRanks; ++rank) {
    char part[4096];
    snprintf(part, sizeof part, "%s/%u", folder, rank);
    size_t bytes = 0;
    const void* window = read_file(part, "window", &bytes);
    if (window == nullptr) return false;
    for (uint32_t other = 0; other < abi::kRanks; ++other) {
      auto* state = reinterpret_cast<abi::LaunchState*>(dumps[other].args.launch);
      reinterpret_cast<abi::Link*>(state + 1)->window[rank] = reinterpret_cast<uint64_t>(window);
    }
  }
  return true;
}

inline bool read_ranks(Dump* dumps, const char* folder) {
  if constexpr (abi::kRanks == 1) return read_dump(folder, dumps[0].args);
  for (uint32_t rank = 0; rank < abi::kRanks; ++rank) {
    char part[4096];
    snprintf(part, sizeof part, "%s/%u", folder, rank);
    if (!read_dump(part, dumps[rank].args)) return false;
  }
  return connect(dumps, folder);
}

inline int run_dump(Host::Run run, int count, char** values) {
  static Dump dumps[abi::kRanks];
  if (count != 4 || !read_ranks(dumps, values[1])) {
    fprintf(stderr, "usage: %s FOLDER LAUNCHES STEPS\n", values[0]);
    return 2;
  }
  const abi::KernelArgs& first = dumps[0].args;
  const auto& state = *reinterpret_cast<const abi::LaunchState*>(first.launch);
  const auto& fault = *reinterpret_cast<const abi::FaultRecord*>(first.fault);
  for (Dump& d : dumps) {
    d.host = Host::open(run, d.args.workers);
    if (d.host == nullptr) return 2;
  }
  for (int i = 0; i < atoi(values[2]) && fault.kind == 0; ++i) {
    const uint64_t limit = state.step + uint64_t(atoi(values[3]));
    for (Dump& d : dumps) {
      d.args.step_limit = limit;
      d.args.chaos_seed += 1;
      d.host->launch(d.args);
    }
    for (Dump& d : dumps) {
      while (!d.host->join(1000000000)) {
      }
    }
  }
  for (Dump& d : dumps) Host::close(d.host);
  return report(first);
}

}  // namespace megakernel::dev
