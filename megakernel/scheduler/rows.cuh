// Which rows a step has: slots as who makes its header sees them, and how they share out its rows. What `advance` stands
// on; see tasks/advance.py for the rules.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct StepSlots {
  // Whether the lanes share out the rows and slots of a step, because there may be many.
  template <class W>
  MK_DEVICE static constexpr bool together() {
    if constexpr (requires { W::kWide; }) return W::kWide;
    return false;
  }

  // Some devices prepare for a step of several rows, or of more than `kNarrowRows`, before they know its rows. So the header
  // before says what a step may have; in the first of a launch nobody is ahead.
  template <class W>
  MK_DEVICE static constexpr bool announces() {
    if constexpr (requires { W::kAnnounces; }) return W::kAnnounces;
    return false;
  }

  MK_DEVICE static abi::LaunchState* launch(const Worker& w) { return at<abi::LaunchState>(w.args.launch); }
  MK_DEVICE static abi::SlotState* slots(const Worker& w) { return at<abi::SlotState>(w.args.slots); }

  MK_DEVICE static uint16_t* seen(const Worker& w, uint32_t slot) {
    return at<uint16_t>(w.args.seen) + uint64_t(slot) * w.args.vocab;
  }

  MK_DEVICE static int32_t* tokens(const Worker& w, uint32_t slot) {
    return at<int32_t>(w.args.tokens) + uint64_t(slot) * w.args.max_context;
  }

  MK_DEVICE static bool penalised(const abi::Sampling& o) {
    return (o.repetition_penalty != 1.0f) | (o.presence_penalty != 0.0f) | (o.frequency_penalty != 0.0f);
  }

  // Whether the token of `position` has to wait for an OPEN.
  MK_DEVICE static bool gated(const abi::SlotState& slot, uint32_t position) {
    return slot.gate != 0 && position > slot.gate;
  }

  MK_DEVICE static bool active(const abi::SlotState& slot) { return slot.status == uint32_t(abi::SlotStatus::kActive); }

  // Rows of a slot in a step: those of the step from `place` on.
  struct Given {
    uint32_t slot, place, rows, sample;  // sample: of the last row, as in its Row
  };

  // Where a header is made, at hand of all lanes: the slots lie behind it.
  struct Board {
    abi::StepHeader header;
    struct alignas(16) Quad {
      uint32_t v[4];
    };
    Given given[abi::kMaxRows];
    uint32_t count;     // of what is given
    uint32_t wants[1];  // of each slot: kDecodes, or how many rows of its prompt; then the slots
    static constexpr uint32_t kDecodes = 1u << 31, kMostWanted = 1u << 20;

    MK_DEVICE static uint32_t slots_at(uint32_t count) { return (sizeof(Board) + count * 4 + 127) / 128 * 128; }
    template <class W>
    MK_DEVICE static bool fits(const W&, uint32_t count) {
      return count < 1024 && slots_at(count) + count * uint32_t(sizeof(abi::SlotState)) <= W::kScratchRoom;
    }
    template <class W>
    MK_DEVICE static void copy(const W& w, void* to, const void* from, uint32_t bytes) {
      for (uint32_t i = w.lane(); i < bytes / sizeof(Quad); i += w.lanes()) {
        static_cast<Quad*>(to)[i] = static_cast<const Quad*>(from)[i];
      }
    }
  };
  static_assert(sizeof(abi::SlotState) % 16 == 0 && sizeof(abi::StepHeader) % 16 == 0);

  // The slots, for who makes a header.
  template <class W>
  MK_DEVICE static const abi::SlotState* table(const W& w) {
    if constexpr (together<W>()) {
      auto* board = w.template scratch<uint8_t>(1);
      if (Board::fits(w, w.args.max_slots)) return reinterpret_cast<abi::SlotState*>(board + Board::slots_at(w.args.max_slots));
    }
    return slots(w);
  }

  // Prompt tokens of a slot that the next step may compute.
  MK_DEVICE static uint32_t prompt_rows(const Worker& w, uint32_t index) {
    const abi::SlotState& slot = table(w)[index];
    if (!active(slot) || slot.position >= slot.prompt_length) return 0;
    return slot.prompt_length - slot.position - (gated(slot, slot.prompt_length) ? 1 : 0);
  }
};

struct StepRows : StepSlots {
  // Whether the slot is past its prompt and may go on.
  MK_DEVICE static bool decodes(const abi::SlotState& slot) {
    return active(slot) && slot.position >= slot.prompt_length && !gated(slot, slot.position + 1);
  }

  MK_DEVICE static void decode_row(abi::StepHeader& h, uint32_t index, const abi::SlotState& slot, const uint32_t* wants) {
    uint32_t place = 0;
    for (uint32_t i = 0; i < index; ++i) place += wants[i] == Board::kDecodes;
    h.row[place] = {slot.last_token, index, slot.position, place, slot.position};
    h.sample_row[place] = place;
  }

  template <class W>
  MK_DEVICE static uint32_t rows_wanted(const W& w) {
    uint64_t out = 0;
    for (uint32_t i = 0; i < w.args.max_slots; ++i) {
      if (active(table(w)[i])) out += most(1, prompt_rows(w, i));
    }
    return out > abi::kMaxRows ? abi::kMaxRows : uint32_t(out);
  }

  // What slots want of a step, and the rows that they get, one after the other; as lane 0 looks it up and writes it, or by
  // hand of a board: the rows are then written by all lanes.
  struct Alone {
    Worker& w;
    abi::StepHeader& h;

    MK_DEVICE uint32_t prompt(uint32_t index) const { return prompt_rows(w, index); }
    MK_DEVICE bool decode(uint32_t index) const { return decodes(slots(w)[index]); }
    MK_DEVICE void give(uint32_t index, uint32_t rows) const {
      const abi::SlotState& slot = slots(w)[index];
      const int32_t* prompt = tokens(w, index);
      for (uint32_t p = slot.position; p < slot.position + rows; ++p) {
        add_row(h, index, p < slot.prompt_length ? prompt[p] : slot.last_token, p, slot.position, p + 1 >= slot.prompt_length);
      }
    }
  };
  template <class W>
  struct OnBoard {
    W& w;
    Board& board;

    MK_DEVICE uint32_t prompt(uint32_t index) const { return board.wants[index] == Board::kDecodes ? 0 : board.wants[index]; }
    MK_DEVICE bool decode(uint32_t index) const { return board.wants[index] == Board::kDecodes; }
    MK_DEVICE void give(uint32_t index, uint32_t rows) const {
      if (rows == 0) return;
      abi::StepHeader& h = board.header;
      const abi::SlotState& slot = table(w)[index];
      const bool sampled = slot.position + rows >= slot.prompt_length;
      board.given[board.count++] = {index, h.rows, rows, sampled ? h.sampled : abi::kNone};
      h.rows += rows;
      if (sampled) h.sample_row[h.sampled++] = h.rows - 1;
    }
    // By all lanes.
    MK_DEVICE void write_rows() const {
      for (uint32_t n = 0; n < board.count; ++n) {
        const Given& given = board.given[n];
        const abi::SlotState& slot = table(w)[given.slot];
        const int32_t* prompt = tokens(w, given.slot);
        for (uint32_t i = w.lane(); i < given.rows; i += w.lanes()) {
          const uint32_t p = slot.position + i;
          const int32_t token = p < slot.prompt_length ? prompt[p] : slot.last_token;
          const uint32_t sample = i + 1 == given.rows ? given.sample : abi::kNone;
          board.header.row[given.place + i] = {token, given.slot, p, sample, slot.position};
        }
      }
    }
  };

  // One row for each slot past its prompt, then prompt tokens while there is room.
  MK_DEVICE static void fill_rows(Worker& w, abi::StepHeader& h, uint32_t room) {
    h.rows = 0;
    h.sampled = 0;
    const uint32_t count = w.args.max_slots;
    uint32_t start = 0, decode_room = room;
    if (count > w.args.max_rows) {  // more slots than rows: they take turns, and a prompt is never starved
      start = uint32_t(h.step % count);
      for (uint32_t index = 0; index < count; ++index) {
        if (active(slots(w)[index]) && slots(w)[index].position < slots(w)[index].prompt_length) decode_room = room - 1;
      }
    }
    for (uint32_t i = 0; i < count && h.rows < decode_room; ++i) {
      const uint32_t index = (start + i) % count;
      const abi::SlotState& slot = slots(w)[index];
      if (!active(slot) || slot.position < slot.prompt_length || gated(slot, slot.position + 1)) continue;
      add_row(h, index, slot.last_token, slot.position, slot.position, true);
    }
    for (uint32_t index = 0; index < count && h.rows < room; ++index) {
      const abi::SlotState& slot = slots(w)[index];
      if (!active(slot)) continue;
      const int32_t* prompt = tokens(w, index);
      for (uint32_t p = slot.position; p < slot.prompt_length && h.rows < room; ++p) {
        const bool last = p + 1 == slot.prompt_length;
        if (last && gated(slot, p + 1)) break;
        add_row(h, index, prompt[p], p, slot.position, last);
      }
    }
  }

  // One row for each slot past its prompt, then the prompts share the room that is left.
  template <class Slots>
  MK_DEVICE static void share_rows(const Worker& w, abi::StepHeader& h, uint32_t room, const Slots& slots) {
    h.rows = 0;
    h.sampled = 0;
    const uint32_t count = w.args.max_slots, start = uint32_t(h.step % count);
    uint32_t prompts = 0;
    for (uint32_t i = 0; i < count; ++i) prompts += slots.prompt(i) > 0;
    uint32_t decode_room = room;  // more slots than rows take turns; a prompt is never starved, nor does it starve others
    if (prompts > 0) decode_room = room > 1 ? room - 1 : uint32_t(h.step % 2);
    for (uint32_t i = 0; i < count && h.rows < decode_room; ++i) {
      const uint32_t index = count > room ? (start + i) % count : i;
      if (slots.decode(index)) slots.give(index, 1);
    }
    if (prompts == 0) return;
    uint32_t left = room - h.rows;
    if (h.rows > 0 && w.args.step_budget_ns != 0) left = least(left, chunk_of(w));
    uint32_t level = 0;
    share_out(slots, count, left, prompts, level);
    for (uint32_t i = 0; i < count; ++i) {  // who gets the odd rows changes from step to step
      const uint32_t index = start + i < count ? start + i : start + i - count;
      uint32_t rows = slots.prompt(index);
      if (rows > level) {
        rows = level + (left > 0 ? 1 : 0);
        left -= left > 0 ? 1 : 0;
      }
      slots.give(index, rows);
    }
  }

  // The level to which `left` rows fill the prompts: who wants no more gets all it wants, each of the others gets `level`
  // rows, and `left` of them one more.
  template <class Slots>
  MK_DEVICE static void share_out(const Slots& slots, uint32_t count, uint32_t& left, uint32_t prompts, uint32_t& level) {
    while (prompts > 0 && left >= prompts) {
      const uint32_t more = left / prompts;
      uint32_t waiting = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t wants = slots.prompt(i);
        if (wants > level) left -= least(wants - level, more);
        waiting += wants > level + more;
      }
      level += more;
      prompts = waiting;
    }
    if (prompts == 0) left = 0;
  }

  MK_DEVICE static void add_row(
      abi::StepHeader& h, uint32_t slot, int32_t token, uint32_t position, uint32_t first, bool sampled) {
    abi::Row& row = h.row[h.rows];
    row.token = token;
    row.slot = slot;
    row.position = position;
    row.first = first;
    row.sample = sampled ? h.sampled : abi::kNone;
    if (sampled) h.sample_row[h.sampled++] = h.rows;
    ++h.rows;
  }

  // Rows of this step: tokens of prompts, and of slots past their prompt.
  struct Carried {
    uint32_t prompt = 0, decode = 0;
  };

  MK_DEVICE static Carried carried(const Worker& w) {
    Carried c;
    for (uint32_t r = 0; r < w.header->rows; ++r) count_row(w, w.header->row[r], c);
    return c;
  }
  MK_DEVICE static void count_row(const Worker& w, const abi::Row& row, Carried& c) {
    ++(row.position < slots(w)[row.slot].prompt_length ? c.prompt : c.decode);
  }

  // The chunk follows what steps with decode and prompt rows took.
  MK_DEVICE static void measure(Worker& w) {
    if (w.args.step_budget_ns != 0) adapt(w, carried(w));
  }
  MK_DEVICE static void adapt(Worker& w, const Carried& c) {
    const uint64_t budget = w.args.step_budget_ns;
    abi::LaunchState* state = launch(w);
    if (c.prompt == 0 || c.decode == 0) return;
    const uint64_t took = dev::clock_ns() - state->began_ns;
    const uint32_t chunk = chunk_of(w);
    // Steps get longer as a prompt goes on: a chunk shrinks before one is too long.
    if (took > budget / 16 * 15) {
      const uint64_t fitting = uint64_t(least(chunk, c.prompt)) * (budget / 8 * 7) / took;
      state->chunk = fitting > 1 ? uint32_t(fitting) : 1;
    } else if (took < budget / 4 * 3 && c.prompt >= chunk) {
      state->chunk = least(w.args.max_rows, chunk + chunk / 8 + 1);
    }
  }

  MK_DEVICE static uint32_t chunk_of(const Worker& w) {
    const uint32_t chunk = launch(w)->chunk;
    return chunk != 0 ? chunk : most(1, w.args.first_chunk);
  }
};

}  // namespace megakernel::tasks
