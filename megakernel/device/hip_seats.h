// Which worker a workgroup becomes, so that the workers of a group share an L2: included by hip.h after Worker.
//
// The groups of a schedule are contiguous ranges of workers. Which XCD a workgroup runs on is the dispatcher's business
// and promised by nobody, so it is found at the start of every launch: one lane of each workgroup reads the number of its
// XCD from a hardware register, takes a rank among the workgroups there, and waits until all workgroups have one, which is
// the first roll-call of residency. From the counts alone each then knows its worker. Nothing but speed depends on it:
// where an XCD holds more workgroups than its group has workers, the rest take what is left free elsewhere.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kPlaces = 16;  // values of the register

struct Seats {  // in device memory, zeroed by the host before each launch
  uint32_t count[kPlaces];  // workgroups on each XCD
  uint32_t arrived;
  uint32_t pad[15];
  uint32_t place_of[];  // of each worker, for the host to look at
};

// The number of this workgroup's XCD: bits 0 to 3 of hardware register 20, XCC_ID, of gfx942 and gfx950.
MK_DEVICE uint32_t place_of_group() {
  constexpr int kXccId = 20, kBits = 4;
  return uint32_t(__builtin_amdgcn_s_getreg((kBits - 1) << 11 | 0 << 6 | kXccId)) % kPlaces;
}

// First worker of a group; that of group `groups` is the number of workers. As `group_of` in scheduler/relay.py.
MK_DEVICE uint32_t first_of_group(uint32_t group, uint32_t workers, uint32_t groups) {
  return (group * workers + groups - 1) / groups;
}

// The worker of the workgroup with this rank on this place. The places that hold workgroups get the groups in order.
MK_DEVICE uint32_t seat(const uint32_t* count, uint32_t workers, uint32_t groups, uint32_t place, uint32_t rank) {
  uint32_t group = 0, extra = 0;  // extra: workgroups of the places before that found no seat in their group
  for (uint32_t p = 0; p < kPlaces; ++p) {
    if (count[p] == 0) continue;
    const uint32_t first = group < groups ? first_of_group(group, workers, groups) : 0;
    const uint32_t room = group < groups ? first_of_group(group + 1, workers, groups) - first : 0;
    ++group;
    if (p == place) {
      if (rank < room) return first + rank;
      extra += rank - room;
      break;
    }
    if (count[p] > room) extra += count[p] - room;
  }
  group = 0;
  for (uint32_t p = 0; group < groups; ++p) {  // past the last place: groups that no place got
    const uint32_t there = p < kPlaces ? count[p] : 0;
    if (p < kPlaces && there == 0) continue;
    const uint32_t first = first_of_group(group, workers, groups);
    const uint32_t room = first_of_group(group + 1, workers, groups) - first;
    ++group;
    if (there >= room) continue;
    if (extra < room - there) return first + there + extra;
    extra -= room - there;
  }
  return abi::kNone;  // more workgroups than workers
}

// The worker of this workgroup. Ends the workgroup with a fault record when not all came in time.
MK_DEVICE uint32_t take_seat(uint64_t address) {
  if constexpr (kGroups == 1) {
    return group_index();
  } else {
    auto* seats = (Seats*)(MK_MEMORY Seats*)address;
    const uint32_t workers = lds.args.workers;
    if (thread_index() == 0) {
      const uint32_t place = place_of_group();
      const uint32_t rank = add_acquire_release(&seats->count[place], 1) - 1;
      add_acquire_release(&seats->arrived, 1);
      const uint64_t began = clock_ns();
      uint32_t arrived, worker = abi::kNone;
      while ((arrived = load_relaxed(&seats->arrived)) < workers && clock_ns() - began < lds.args.spin_budget_ns) pause();
      if (arrived >= workers) {
        acquire();
        worker = seat(seats->count, workers, kGroups, place, rank);
      }
      if (worker < workers) seats->place_of[worker] = place;
      lds.word[0] = uint64_t(arrived) << 32 | worker;
    }
    meet();
    const uint32_t worker = uniform(uint32_t(lds.word[0])), arrived = uniform(uint32_t(lds.word[0] >> 32));
    if (worker >= workers) {
      Worker(group_index(), 0, 0).fault(abi::FaultKind::kRollCall, abi::kNone, abi::kNone, arrived, workers);
      __builtin_amdgcn_endpgm();
    }
    return worker;
  }
}

}  // namespace megakernel::dev
