// The end of a step and the beginning of the next. See advance.py for the rules.
#pragma once
#include "megakernel/scheduler/rows.cuh"

namespace megakernel::tasks {

struct AdvanceConfig {
  bool inputs = false;
  bool paced = false;
};

template <AdvanceConfig kConfig>
struct Advance : StepRows {
  using Fields = abi::AdvanceFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record&, const Fields& f) {
    if constexpr (announces<Worker>()) return execute_together(w, f);
    const uint64_t reported = launch(w)->ring_written;
    if constexpr (kConfig.paced) {
      if (w.lane() == 0) measure(w);
    }
    if (w.lane() == 0) take_tokens(w, workspace<const abi::SampleResult>(w, f.result));
    w.sync();
    take_commands(w);
    if (given_up(w)) return;
    if (w.lane() == 0) {
      prepare(w, w.step + 1);
      // Every worker has left this step before the next begins: so a header is never overwritten while it is read.
      const uint64_t finished = w.step * w.args.workers - 1;
      if (w.wait(&launch(w)->finished, finished, abi::FaultKind::kHeaderBudget, abi::kNone)) announce(w, w.step + 1);
      report_events(w, reported);
    }
    w.sync();
  }

  // The first header of a launch, made by worker 0 when all have answered the roll-call.
  MK_DEVICE static void begin(Worker& w) {
    if constexpr (announces<Worker>()) return begin_together(w);
    const uint64_t reported = launch(w)->ring_written;
    take_commands(w);
    if (given_up(w)) return;
    if (w.lane() == 0) {
      const uint64_t step = launch(w)->step + 1;
      prepare(w, step);
      announce(w, step);
      report_events(w, reported);
    }
    w.sync();
  }

 private:
  template <class W>
  MK_DEVICE static uint32_t row_room(const W& w, const abi::StepHeader& last, bool first) {
    if constexpr (announces<W>()) {
      if (!first && last.widens == 0) return 1;
    }
    if constexpr (together<W>()) {
      if (!first && last.widens < 2) return least(w.args.max_rows, W::kNarrowRows);
    }
    return w.args.max_rows;
  }

  // What the header of the next step says about it, and about the one after it, which wants so many rows.
  template <class W>
  MK_DEVICE static void say_room(const W& w, abi::StepHeader& h, const abi::StepHeader& last, bool first, uint32_t wanted) {
    if constexpr (announces<W>()) {
      h.widens = w.args.max_rows > 1 && wanted > 1;
      uint32_t own = first ? w.args.max_rows > 1 : last.widens;
      if constexpr (together<W>()) {
        if (wanted > W::kNarrowRows) h.widens = 2;
        if (first) own = 2;
      }
      h.widened = own != 0 ? own : last.widened == 1 ? 3 : 0;
    }
  }

  template <class W>
  MK_DEVICE static void execute_together(W& w, const Fields& f) {
    const uint64_t reported = launch(w)->ring_written;
    if (kConfig.paced && w.args.step_budget_ns != 0) {
      Carried c;
      for (uint32_t r = w.lane(); r < w.header->rows; r += w.lanes()) count_row(w, w.header->row[r], c);
      c.prompt = w.sum(int32_t(c.prompt));
      c.decode = w.sum(int32_t(c.decode));
      if (w.lane() == 0) adapt(w, c);
    }
    take_together(w, f, reported);
    take_commands(w);
    if (given_up(w)) return;
    prepare_together(w, w.step + 1, *w.header, false);
    if (w.lane() == 0) {
      const uint64_t finished = w.step * w.args.workers - 1;
      if (w.wait(&launch(w)->finished, finished, abi::FaultKind::kHeaderBudget, abi::kNone)) announce(w, w.step + 1);
      report_events(w, reported);
    }
    w.sync();
  }

  // The tokens of a step, each row's by a lane.
  template <class W>
  MK_DEVICE static void take_together(W& w, const Fields& f, uint64_t reported) {
    const auto* results = workspace<const abi::SampleResult>(w, f.result);
    for (uint32_t r = w.lane(); r < w.header->rows; r += w.lanes()) {
      const abi::Row& row = w.header->row[r];
      if (r + 1 < w.header->rows && w.header->row[r + 1].slot == row.slot) continue;  // not the last of its slot
      abi::SlotState& slot = slots(w)[row.slot];
      slot.position = row.position + 1;
      if (row.sample != abi::kNone) take_token<true>(w, row, slot, results[row.sample], reported + row.sample);
    }
    w.sync();
    if (w.lane() == 0) {
      launch(w)->steps_run += 1;
      launch(w)->tokens_out += w.header->sampled;
      launch(w)->ring_written = reported + w.header->sampled;
    }
    w.sync();
  }

  template <class W>
  MK_DEVICE static void begin_together(W& w) {
    const uint64_t reported = launch(w)->ring_written, step = launch(w)->step + 1;
    take_commands(w);
    if (given_up(w)) return;
    prepare_together(w, step, at<const abi::StepHeader>(w.args.headers)[step & 1 ^ 1], true);
    if (w.lane() == 0) {
      announce(w, step);
      report_events(w, reported);
    }
    w.sync();
  }

  template <class W>
  MK_DEVICE static void prepare_together(W& w, uint64_t step, const abi::StepHeader& last, bool first) {
    Board& board = *w.template scratch<Board>(1);
    abi::StepHeader& h = board.header;
    const uint32_t count = w.args.max_slots;
    const bool fits = Board::fits(w, count);
    if constexpr (together<W>()) {
      if (fits) Board::copy(w, const_cast<abi::SlotState*>(table(w)), slots(w), count * sizeof(abi::SlotState));
      w.sync();
    }
    uint32_t own = 0;     // of these slots: prompts, active ones, ready to decode; 10 bits each
    uint32_t wanted = 0;  // rows
    for (uint32_t i = w.lane(); i < count && fits; i += w.lanes()) {
      const abi::SlotState& slot = table(w)[i];
      const bool ready = decodes(slot);
      const uint32_t prompt = least(prompt_rows(w, i), Board::kMostWanted);
      own += (prompt > 0) << 20 | active(slot) << 10 | ready;
      wanted += active(slot) ? most(1, prompt) : 0;
      board.wants[i] = ready ? Board::kDecodes : prompt;
    }
    if (w.lane() == 0) board.count = 0;
    const uint32_t all = w.sum(int32_t(own)), ready = all & 1023;
    const uint32_t room = row_room(w, last, first);
    const bool only_decodes = fits && all >> 20 == 0 && count <= w.args.max_rows && ready <= room;
    const bool on_board = kConfig.paced && fits && !only_decodes;
    if (only_decodes) {
      wanted = all >> 10 & 1023;
    } else if (fits) {
      wanted = uint32_t(w.sum(int32_t(least(wanted, abi::kMaxRows))));
    }
    if (only_decodes) {
      for (uint32_t i = w.lane(); i < count; i += w.lanes()) {
        if (board.wants[i] == Board::kDecodes) decode_row(h, i, table(w)[i], board.wants);
      }
    }
    if (w.lane() == 0) {
      h.step = step;
      if (only_decodes) {
        h.rows = h.sampled = ready;
      } else if (on_board) {
        share_rows(w, h, room, OnBoard<W>{w, board});
      } else if constexpr (kConfig.paced) {
        share_rows(w, h, room, Alone{w, h});
      } else {
        fill_rows(w, h, room);
      }
      say_room(w, h, last, first, fits ? wanted : rows_wanted(w));
      h.wide_rows = last.wide_rows + (h.rows > W::kNarrowRows ? h.rows : 0);
      h.wide_sampled = last.wide_sampled + (h.rows > W::kNarrowRows && h.sampled > 1 ? h.sampled : 0);
      if (w.args.step_budget_ns != 0) launch(w)->began_ns = dev::clock_ns();
      begin_or_exit(w, launch(w), h, step);
    }
    w.sync();
    if (on_board) {  // prompts are far away
      OnBoard<W>{w, board}.write_rows();
      w.sync();
    }
    Board::copy(w, at<abi::StepHeader>(w.args.headers) + (step & 1), &h, sizeof(abi::StepHeader));
    w.sync();
  }

  // Rank 0 has not decided: no header.
  template <class W>
  MK_DEVICE static bool given_up(const W& w) {
    if constexpr (abi::kRanks > 1 && requires { w.failed; }) return w.failed;
    return false;
  }

  // Entry for the next event; report_events makes all of them visible.
  MK_DEVICE static abi::TokenEvent* next_event(Worker& w) {
    auto* ring = at<abi::TokenRing>(w.args.ring);
    return &ring->entry[launch(w)->ring_written++ % abi::kRingEntries];
  }

  // `reported`: how many events the host has been told of.
  MK_DEVICE static void report_events(Worker& w, uint64_t reported) {
    auto* ring = at<abi::TokenRing>(w.args.ring);
    const uint64_t written = launch(w)->ring_written;
    if (reported == written) return;
    dev::store_release_system(&ring->written, written);  // orders the entries before the count
    w.notify_host();
  }

  MK_DEVICE static void take_tokens(Worker& w, const abi::SampleResult* results) {
    const abi::StepHeader& h = *w.header;
    for (uint32_t r = 0; r < h.rows; ++r) {
      const abi::Row& row = h.row[r];
      abi::SlotState& slot = slots(w)[row.slot];
      slot.position = row.position + 1;
      if (row.sample != abi::kNone) take_token<false>(w, row, slot, results[row.sample], 0);
    }
    launch(w)->steps_run += 1;
  }

  // `number`: of the event, where others are made at the same time.
  template <bool kTogether>
  MK_DEVICE static void take_token(
      Worker& w, const abi::Row& row, abi::SlotState& slot, const abi::SampleResult& result, uint64_t number) {
    const uint32_t position = row.position + 1;  // of the new token
    // Far away where lanes do this: all are asked for before the first is waited for.
    const int32_t token = result.token;
    const float logprob = result.logprob;
    const uint32_t top_count = result.top_count, limit = slot.limit, stop_count = slot.stop_count, request = slot.request;
    const bool marks = penalised(slot.sampling);
    slot.last_token = token;
    if (position < w.args.max_context) tokens(w, row.slot)[position] = token;
    if (marks) {
      uint16_t& mark = seen(w, row.slot)[token];
      if ((mark & 0x7fff) != 0x7fff) ++mark;
    }
    abi::Finish finish = position + 1 >= limit ? abi::Finish::kLength : abi::Finish::kNone;
    for (uint32_t i = 0; i < stop_count; ++i) {
      if (slot.stop[i] == token) finish = abi::Finish::kStop;
    }
    abi::TokenEvent& event =
        kTogether ? at<abi::TokenRing>(w.args.ring)->entry[number % abi::kRingEntries] : *next_event(w);
    event.kind = uint32_t(abi::EventKind::kToken);
    event.slot = row.slot;
    event.request = request;
    event.token = token;
    event.position = position;
    event.finish = uint32_t(finish);
    event.logprob = logprob;
    event.top_count = top_count;
    event.step = w.step;
    event.time_ns = dev::clock_ns();
    for (uint32_t i = 0; i < top_count; ++i) {
      event.top_token[i] = result.top_token[i];
      event.top_logprob[i] = result.top_logprob[i];
    }
    if constexpr (!kTogether) launch(w)->tokens_out += 1;
    if (finish != abi::Finish::kNone) slot.status = uint32_t(abi::SlotStatus::kFree);
  }

  // A device far from the host's memory may have asked ahead.
  template <class W>
  MK_DEVICE static uint64_t commands_posted(W& w, const abi::Mailbox* mailbox) {
    if constexpr (requires { w.commands_posted(mailbox); }) {
      return w.commands_posted(mailbox);
    } else {
      return dev::load_acquire_system(&mailbox->posted);
    }
  }

  // How many commands the next header follows. Of several ranks the first decides, so that all make the same header.
  template <class W>
  MK_DEVICE static uint64_t commands_now(W& w, const abi::Mailbox* mailbox) {
    if constexpr (abi::kRanks > 1) {
      abi::Link* l = link(w);
      const uint64_t turn = l->turn + 1;
      w.sync();
      if (w.lane() == 0) l->turn = turn;
      if (l->rank == 0) return decide(w, *l, turn, w.broadcast(commands_posted(w, mailbox)));
      const auto* own = at<const abi::Window>(l->window[l->rank]);
      if (!await_peer(w, &own->turn, turn, abi::kNone)) return launch(w)->mailbox_taken;
      if (w.lane() == 0) launch(w)->chunk = own->chunk;
      return own->posted;
    } else {
      return w.broadcast(commands_posted(w, mailbox));
    }
  }

  // The host has given a command to every other rank before it is posted to rank 0.
  MK_DEVICE static uint64_t decide(Worker& w, const abi::Link& l, uint64_t turn, uint64_t posted) {
    for (uint32_t peer = 1; w.lane() == 0 && peer < abi::kRanks; ++peer) {
      auto* window = at<abi::Window>(l.window[peer]);
      window->posted = posted;
      window->chunk = launch(w)->chunk;
      dev::store_release_system(&window->turn, turn);  // orders the decision before its number
    }
    return posted;
  }

  MK_DEVICE static void take_commands(Worker& w) {
    auto* mailbox = at<abi::Mailbox>(w.args.mailbox);
    const uint64_t posted = commands_now(w, mailbox);
    const uint64_t taken = launch(w)->mailbox_taken;
    for (uint64_t i = taken; i < posted; ++i) {
      const abi::Command& command = mailbox->entry[i % abi::kMailboxEntries];
      if (command.kind == uint32_t(abi::CommandKind::kAdmit)) {
        if (penalised(command.state.sampling)) mark_prompt(w, command);
        if (w.lane() == 0) slots(w)[command.slot] = command.state;
      } else if (command.kind == uint32_t(abi::CommandKind::kCancel) && w.lane() == 0) {
        cancel(w, command);
      } else if (command.kind == uint32_t(abi::CommandKind::kOpen) && w.lane() == 0) {
        abi::SlotState& slot = slots(w)[command.slot];
        if (active(slot) && slot.request == command.request) slot.gate = command.state.gate;
      }
      w.sync();
    }
    if (w.lane() == 0 && posted != taken) {
      launch(w)->mailbox_taken = posted;
      dev::store_release_system(&mailbox->taken, posted);
    }
    w.sync();
  }

  MK_DEVICE static void mark_prompt(Worker& w, const abi::Command& command) {
    uint16_t* marks = seen(w, command.slot);
    for (uint32_t i = w.lane(); i < w.args.vocab; i += w.lanes()) marks[i] = 0;
    w.sync();
    const int32_t* prompt = tokens(w, command.slot);
    for (uint32_t i = w.lane(); i < command.state.prompt_length; i += w.lanes()) {
      if constexpr (kConfig.inputs) {
        if (prompt[i] < 0) continue;  // no token
      }
      marks[prompt[i]] = 0x8000;
    }
  }

  MK_DEVICE static void cancel(Worker& w, const abi::Command& command) {
    abi::SlotState& slot = slots(w)[command.slot];
    if (!active(slot) || slot.request != command.request) return;
    slot.status = uint32_t(abi::SlotStatus::kFree);
    abi::TokenEvent& event = *next_event(w);
    event.kind = uint32_t(abi::EventKind::kRetired);
    event.slot = command.slot;
    event.request = command.request;
    event.token = -1;
    event.position = slot.position;
    event.finish = uint32_t(abi::Finish::kCancelled);
    event.logprob = 0.0f;
    event.top_count = 0;
    event.step = launch(w)->step;
    event.time_ns = dev::clock_ns();
  }

  // The header of `step`; nobody reads the one that was in its place.
  MK_DEVICE static void prepare(Worker& w, uint64_t step) {
    abi::LaunchState* state = launch(w);
    const uint32_t room = w.args.max_rows;
    abi::StepHeader& h = at<abi::StepHeader>(w.args.headers)[step & 1];
    h.step = step;
    if constexpr (kConfig.paced) {
      share_rows(w, h, room, Alone{w, h});
      if (w.args.step_budget_ns != 0) state->began_ns = dev::clock_ns();
    } else {
      fill_rows(w, h, room);
    }
    begin_or_exit(w, state, h, step);
  }
  MK_DEVICE static void begin_or_exit(Worker& w, abi::LaunchState* state, abi::StepHeader& h, uint64_t step) {
    abi::ExitReason exit = abi::ExitReason::kRunning;
    if (state->step >= w.args.step_limit) exit = abi::ExitReason::kSteps;
    if (h.rows == 0) exit = abi::ExitReason::kIdle;
    h.exit = uint32_t(exit);
    if (exit == abi::ExitReason::kRunning) state->step = step;
    state->exit = uint32_t(exit);
  }

  MK_DEVICE static void announce(Worker& w, uint64_t step) {
    dev::store_release(&launch(w)->published, step);  // orders the header and the slots before the count
  }
};

}  // namespace megakernel::tasks
