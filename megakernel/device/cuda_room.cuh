// The input of a product in a step of several rows, up to 16. Part of cuda_input.cuh.
//
// Such a step was announced, and the last stages of the ring are no part of it: they are the room in which the loaders put
// the input, normed, in the type of the weights, as the A operand. A stage has 8 rows of one unit; of more rows each unit
// takes two. A product whose input is in the room as a whole finds it there for every block of tiles; that of a longer one
// passes through, once a block. The work of norms and types is done once for all workers: see cuda_packed.cuh.
// cuda_room_load.cuh has what the loaders do.
//
// Functions of steps of several rows are in a namespace of their own: the compiler puts functions in the order of their full
// names, and what one row runs should lie together.
#pragma once

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ the ring
// Whether a step was announced to have several rows, and no more than a narrow one.
MK_DEVICE bool has_room(uint64_t step) {
  if constexpr (kRooms) return block().header[step & 1 ^ 1].widens == 1;
  return false;
}

// Stages from `slot` to `end` are used with nothing in them. Of the producer and of the consumers, in the same place of the
// order of stages.
MK_DEVICE void pass_stages(Worker& w, uint32_t slot, uint32_t end, uint32_t parity) {
  Block& b = block();
#pragma unroll 1
  for (; slot < end; ++slot) {
    if (w.warp() == kProducerWarp) {
      w.watch_barrier(&b.empty[slot], parity ^ 1);
      b.copying[slot] = uint8_t(2 + parity);
      __syncwarp();
      if (w.warp_lane() < kFullArrivals) barrier_arrive(&b.full[slot]);
    } else {
      w.wait_barrier(&b.full[slot], parity);
      __syncwarp();
      barrier_arrive_warp(&b.empty[slot]);
    }
  }
}

}  // namespace megakernel::dev

namespace megakernel::several {
using namespace dev;

// The ring of the next step gets another length, at its end. The stages of the room come back with the parity of all: they
// are passed once, so that the consumers have left the room before the producer fills them, or twice.
__device__ __noinline__ void turn_ring(uint32_t end) {
  Worker w;
  w.load();
  RoleState& s = w.state();
  RoomState& room = own_room();
  Ring ring = {s.ring, room.end};
  uint32_t left = room.left_parity;
  if (w.warp() == kProducerWarp) {
    Ring tail = {s.tail, room.end};
    for (uint32_t i = s.in_flight; i > 0; --i, tail.next()) w.watch_barrier(&block().full[tail.slot], tail.parity);
  }
  if (ring.slot != 0) {
    pass_stages(w, ring.slot, ring.end, ring.parity);
    ring.slot = 0, ring.parity ^= 1;
  }
  if (end < ring.end) {
    left = ring.parity;
  } else {
    do {
      pass_stages(w, ring.end, end, left);
      left ^= 1;
    } while (left != ring.parity);
  }
  w.state_to_write().ring = ring;
  room.end = end, room.left_parity = uint16_t(left);
  if (w.warp() == kProducerWarp) s.tail = ring, s.in_flight = 0;
  w.save();
}

}  // namespace megakernel::several

namespace megakernel::dev {

// At the begin of a step, by each role.
MK_DEVICE void begin_ring() {
  if constexpr (kRooms) {
    if (threadIdx.x / 32 > kProducerWarp) return;
    const RoleState& s = own_state();
    const uint32_t end = has_room(s.step) ? kRowStages : kStages;
    if (own_room().end != end) several::turn_ring(end);
  }
}

// ------------------------------------------------------------------------------------------------ the room
struct Room {
  uint32_t halves;  // stages of a unit
  bool stays;       // from the first block of tiles to the last

  MK_DEVICE Room(const MatrixFields& f, uint32_t rows) : halves(rows > 8 ? 2 : 1), stays(f.units * halves <= kRoomStages) {}

  MK_DEVICE static uint8_t* stage(uint32_t slot) { return block().ring[kRowStages + slot]; }
  // Of each row and share the sum of squares: below the sums.
  MK_DEVICE static float* squares() { return reinterpret_cast<float*>(block().scratch); }

  // Whether the input of a product comes this way in the step of that header.
  MK_DEVICE static bool takes(const abi::StepHeader& h, const MatrixFields& f, uint32_t rows) {
    if constexpr (!kRooms) return false;
    return h.widened == 1 && rows > 0 && f.k % 8 == 0;
  }
};

// Whether values of the step of that header are given packed to the product that reads them.
MK_DEVICE bool gives(const abi::StepHeader& h) {
  if constexpr (!kRooms) return false;
  return h.widened == 1;
}

// Whether the step at work was announced to have several rows, or comes behind one that was and has left values to clear.
MK_DEVICE bool was_announced() {
  if constexpr (!kRooms && !kWide) return false;
  return block().header[own_state().step & 1].widened != 0;
}

// Whether that of the record at work does.
MK_DEVICE bool input_in_room(bool sampled) {
  const abi::StepHeader& h = block().header[own_state().step & 1];
  return Room::takes(h, *reinterpret_cast<const MatrixFields*>(own_state().record->payload), sampled ? h.sampled : h.rows);
}

}  // namespace megakernel::dev

#include "megakernel/device/cuda_packed.cuh"

#include "megakernel/device/cuda_room_load.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumers
// The input of a consumer when the room has it; kMany: more than 8 rows. What it knows is in one word: registers are short.
template <bool kHalf, bool kMany>
struct RoomInput {
  static constexpr bool kHigh = kMany, kLooks = false;
  static constexpr uint32_t kHalves = kMany ? 2 : 1, kSlotAt = 8, kStays = 1u << 16, kKnown = 1u << 17;
  Worker& w;
  uint32_t word;  // parities of the room's stages; the next of them; whether the input stays, and is there

  MK_DEVICE RoomInput(Worker& worker, uint32_t) : w(worker), word(own_room().parity) {}

  MK_DEVICE void begin(Consumer&, const MatrixFields& f, const Share&, MatrixFlags) {
    if (f.units * kHalves <= kRoomStages) word |= kStays;
  }

  MK_DEVICE void fragments(const Share& share, uint32_t, Fragments<kHigh>& a) {
    const uint32_t slot = word >> kSlotAt & 15;
    if (!(word & kKnown)) {
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h) w.wait_barrier(&block().room_full[slot + h], word >> (slot + h) & 1);
    }
    trace::ready(w, abi::Role::kConsumer);
    const uint8_t* at = Room::stage(slot) + share.first * 512 + w.warp_lane() * 16;
    uint32_t loaded = 0;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      a.low[i] = Quad{0, 0, 0, 0};
      if (i < share.count) a.low[i] = *reinterpret_cast<const Quad*>(at + i * 512);
      loaded |= a.low[i].x;
      if constexpr (kHigh) {
        a.high[i] = Quad{0, 0, 0, 0};
        if (i < share.count) a.high[i] = *reinterpret_cast<const Quad*>(at + kStageBytes + i * 512);
        loaded |= a.high[i].x;
      }
    }
    if (!(word & kStays)) give_back(slot, kHalves, loaded);
    set_slot((slot + kHalves) % kRoomStages);
  }
  MK_DEVICE void fragments(
      Worker&, const MatrixFields&, const Share& share, MatrixFlags, uint32_t unit, Fragments<kHigh>& a) {
    fragments(share, unit, a);
  }

  // Before the next block of tiles.
  MK_DEVICE void restart() {
    if (!(word & kStays)) return;
    set_slot(0);
    word |= kKnown;
  }

  // When all units were read once.
  MK_DEVICE void finish(Consumer& c) {
    c.take_input();  // at once, but for the first block
  }
  MK_DEVICE void end(Consumer&) {}
  MK_DEVICE void put_squares(const Worker&, float* out, uint32_t rows) const {
    if (w.warp_lane() < rows) out[w.warp_lane() * kConsumers] = Room::squares()[w.warp_lane() * kConsumers + w.warp()];
  }
  // When the squares were read, too.
  MK_DEVICE void leave(Consumer& c, const MatrixFields& f) {
    if (word & kStays) give_back(0, f.units * kHalves, 0);  // all was multiplied
    c.free_input();
    __syncwarp();
    own_room().parity = uint16_t(word & ((1u << kRoomStages) - 1));
  }

 private:
  MK_DEVICE void set_slot(uint32_t slot) { word = (word & ~(15u << kSlotAt)) | slot << kSlotAt; }
  MK_DEVICE void give_back(uint32_t from, uint32_t count, uint32_t loaded) {
    __syncwarp();
    uint64_t* empty = beyond(block().room_empty, once_loaded(loaded, own_room().end));
    for (uint32_t i = 0; i < count; ++i) barrier_arrive_warp(empty + from + i);
    word ^= ((1u << count) - 1) << from;
  }
};

template <bool kHalf>
using FewRows = RoomInput<kHalf, false>;

// Whether the consumers do the storer's work for a block of tiles, each for every eighth row: where nothing comes after it that
// the storer could do it beside; and of more than 8 rows, for whose sums there is one place, where the next block takes less
// than the storer does.
constexpr uint32_t kStorerUnits = 3;  // of an input
MK_DEVICE bool consumers_store(uint32_t rows, uint32_t units, bool sampled, bool last) {
  if (rows > 8) return last || sampled || units < kStorerUnits;
  return last && !sampled;
}

}  // namespace megakernel::dev
