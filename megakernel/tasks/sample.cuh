// One token for each sampled row. See sample.py for the definition of every mode.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct SampleConfig {};

// Largest value so far in each vector element; the lowest id among equals.
struct Best {
  dev::Vf value = dev::splat(-dev::kInfinity);
  dev::Vi id = dev::splat(int32_t(0x7fffffff));

  template <class Part>
  MK_DEVICE void take(dev::Vf v, dev::Vi i, Part part) {
    const auto better = (dev::where(part, v, -dev::kInfinity) > value);
    value = dev::select(better, v, value);
    id = dev::select(better, i, id);
  }

  MK_DEVICE int32_t reduce(Worker& w, float& top) const {
    top = w.max(value);
    return w.min(dev::select(value == dev::splat(top), id, dev::splat(int32_t(0x7fffffff))));
  }
};

struct Philox {
  uint32_t word[4];

  MK_DEVICE Philox(uint32_t a, uint32_t b, uint32_t low, uint32_t high) : word{a, b, 0, 0} {
    for (int round = 0; round < 10; ++round) {
      const uint64_t p = uint64_t(0xD2511F53u) * word[0], q = uint64_t(0xCD9E8D57u) * word[2];
      const uint32_t first = uint32_t(q >> 32) ^ word[1] ^ low, third = uint32_t(p >> 32) ^ word[3] ^ high;
      word[0] = first, word[1] = uint32_t(q), word[2] = third, word[3] = uint32_t(p);
      low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
  }
};

template <SampleConfig kConfig>
struct Sample {
  using Fields = abi::SampleFields;

  // One row at work.
  struct Row {
    const float* logits;
    float* z;  // penalised and divided by the temperature; from `draw` on exp(z - largest z), 0 for ids below top_k
    uint32_t vocab;
    abi::Sampling options;
  };

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t end = least(record.tile_begin + record.tile_count, w.header->sampled);
    for (uint32_t s = record.tile_begin; s < end; ++s) run(w, f, s);
  }

 private:
  MK_DEVICE static void run(Worker& w, const Fields& f, uint32_t s) {
    const abi::Row& row = w.header->row[w.header->sample_row[s]];
    const abi::Sampling& options = at<const abi::SlotState>(w.args.slots)[row.slot].sampling;
    Row r;
    r.logits = workspace<const float>(w, f.logits) + uint64_t(s) * f.vocab;
    r.z = workspace<float>(w, f.scaled) + uint64_t(s) * f.vocab;
    r.vocab = f.vocab;
    r.options = options;
    float top;
    int32_t token = largest(w, r, top);
    if (token < 0) {
      w.fault(abi::FaultKind::kNanLogits, s, abi::kNone, row.slot, row.position);
      return;
    }
    const float raw_top = top;
    if (penalised(options) || options.biased || options.temperature > 0.0f) token = scale(w, r, row.slot, top);
    if (options.temperature > 0.0f) token = draw(w, r, row.position + 1, top);
    report(w, r, raw_top, token, workspace<abi::SampleResult>(w, f.result)[s]);
  }

  // The id of the largest logit, or -1 when one is not finite.
  MK_DEVICE static int32_t largest(Worker& w, const Row& r, float& top) {
    Best best;
    dev::Vi bad = dev::splat(int32_t(0));
    w.for_each(r.vocab, [&](uint32_t i, auto part) {
      const dev::Vf v = dev::load(r.logits + i, part);
      bad = dev::select(v - v == dev::splat(0.0f), bad, dev::splat(int32_t(1)));
      best.take(v, dev::iota(i), part);
    });
    const int32_t id = best.reduce(w, top);
    return w.max(bad) ? -1 : id;
  }

  MK_DEVICE static bool penalised(const abi::Sampling& o) {
    return o.repetition_penalty != 1.0f || o.presence_penalty != 0.0f || o.frequency_penalty != 0.0f;
  }

  // Fills z and returns the id of the largest.
  MK_DEVICE static int32_t scale(Worker& w, const Row& r, uint32_t slot, float& top) {
    const abi::Sampling& o = r.options;
    const uint16_t* seen = at<const uint16_t>(w.args.seen) + uint64_t(slot) * w.args.vocab;
    const float* bias = at<const float>(w.args.bias) + uint64_t(slot) * w.args.vocab;
    const bool marked = penalised(o), biased = o.biased;
    const float divisor = o.temperature > 0.0f ? dev::max(o.temperature, 1e-5f) : 1.0f;
    Best best;
    w.for_each(r.vocab, [&](uint32_t i, auto part) {
      dev::Vf y = dev::load(r.logits + i, part);
      if (biased) y += dev::load(bias + i, part);
      if (marked) {
        const dev::Vi marks = dev::load_u16(seen + i, part), zero = dev::splat(int32_t(0));
        const dev::Vi count = marks & 0x7fff;
        const dev::Vf a = dev::select(y > dev::splat(0.0f), y / o.repetition_penalty, y * o.repetition_penalty);
        y = dev::select(marks > zero, a, y);
        y -= dev::select(count > zero, dev::splat(o.presence_penalty), dev::splat(0.0f));
        y -= o.frequency_penalty * dev::to_vf(count);
      }
      y = y / divisor;
      dev::store(r.z + i, y, part);
      best.take(y, dev::iota(i), part);
    });
    const int32_t id = best.reduce(w, top);
    w.sync();
    return id;
  }

  // Integers in the order of the floats, so that a threshold can be bisected.
  MK_DEVICE static dev::Vi rank(dev::Vf z) {
    const dev::Vi i = dev::as_vi(z);
    return i ^ ((i >> 31) & 0x7fffffff);
  }

  struct Above {
    int32_t count;
    float sum;
  };

  // How many elements of z have at least this rank, and their sum.
  MK_DEVICE static Above above(Worker& w, const Row& r, int32_t least_rank) {
    dev::Vi count = dev::splat(int32_t(0));
    dev::Vf sum = dev::splat(0.0f);
    w.for_each(r.vocab, [&](uint32_t i, auto part) {
      const dev::Vf z = dev::load(r.z + i, part);
      const auto kept = rank(dev::where(part, z, -dev::kInfinity)) >= dev::splat(least_rank);
      count += dev::select(kept, dev::splat(int32_t(1)), dev::splat(int32_t(0)));
      sum += dev::select(kept, z, dev::splat(0.0f));
    });
    return {w.sum(count), w.sum(sum)};
  }

  // The largest rank at which `enough` holds for what is above it; it holds at `low`.
  template <class Enough>
  MK_DEVICE static int32_t bisect(Worker& w, const Row& r, int32_t low, float top, Enough enough) {
    int64_t lower = low, upper = int64_t(dev::rank_of(top)) + 1;
    int32_t inside = above(w, r, low).count, beyond = 0;
    while (upper - lower > 1 && inside - beyond > 1) {  // one id between the two is the answer
      const int64_t middle = lower + (upper - lower) / 2;
      const Above a = above(w, r, int32_t(middle));
      if (enough(a)) {
        lower = middle;
        inside = a.count;
      } else {
        upper = middle;
        beyond = a.count;
      }
    }
    return int32_t(lower);
  }

  MK_DEVICE static int32_t draw(Worker& w, const Row& r, uint32_t position, float top) {
    const abi::Sampling& o = r.options;
    int32_t least_rank = -0x7fffffff;
    if (o.top_k > 0 && o.top_k < r.vocab) {
      least_rank = bisect(w, r, least_rank, top, [&](const Above& a) { return a.count >= int32_t(o.top_k); });
    }
    w.sync();
    w.for_each(r.vocab, [&](uint32_t i, auto part) {
      const dev::Vf z = dev::load(r.z + i, part);
      const auto kept = rank(z) >= dev::splat(least_rank);
      dev::store(r.z + i, dev::select(kept, dev::exp(z - top), dev::splat(0.0f)), part);
    });
    w.sync();
    float least_weight = o.min_p;
    if (o.top_p < 1.0f) {
      const float wanted = o.top_p * above(w, r, 0).sum;
      const int32_t rank = bisect(w, r, 0, 1.0f, [&](const Above& a) { return a.sum >= wanted; });
      least_weight = dev::max(least_weight, __builtin_bit_cast(float, rank));  // of no negative number: its own bits
    }
    float best = dev::kInfinity;
    int32_t id = 0x7fffffff;
    for (uint32_t block = w.lane(); block * 4 < r.vocab; block += w.lanes()) {
      draw_block(r, position, block, least_weight, best, id);
    }
    const float least_score = w.min(best);
    return w.min(best == least_score ? id : 0x7fffffff);
  }

  MK_DEVICE static void draw_block(
      const Row& r, uint32_t position, uint32_t block, float least_weight, float& best, int32_t& id) {
    constexpr float kLeastDraw = 2.9e-8f;  // below the smallest -log(u)
    const uint32_t first = block * 4, end = least(first + 4, r.vocab);
    const auto wanted = [&](float weight) {
      return weight > 0.0f && weight >= least_weight && !(weight * best < kLeastDraw);
    };
    bool any = false;
    for (uint32_t i = first; i < end; ++i) any |= wanted(r.z[i]);
    if (!any) return;
    const Philox random(position, block, r.options.seed_low, r.options.seed_high);
    for (uint32_t n = 0; n < 4; ++n) {
      const uint32_t i = first + n;
      if (i >= end || !wanted(r.z[i])) continue;
      const float u = (float(random.word[n] >> 8) + 0.5f) * 5.9604644775390625e-8f;
      const float score = -dev::log(u) / r.z[i];
      if (score < best) {
        best = score;
        id = int32_t(i);
      }
    }
  }

  MK_DEVICE static void report(Worker& w, const Row& r, float raw_top, int32_t token, abi::SampleResult& out) {
    float norm = 0.0f;
    const uint32_t top_count = least(least(r.options.top_logprobs, abi::kMaxTop), r.vocab);
    if (r.options.logprobs || top_count) {
      dev::Vf sum = dev::splat(0.0f);
      w.for_each(r.vocab, [&](uint32_t i, auto part) {
        sum += dev::where(part, dev::exp(dev::load(r.logits + i, part) - raw_top), 0.0f);
      });
      norm = raw_top + dev::log(w.sum(sum));
    }
    if (w.lane() == 0) {
      out.token = token;
      out.logprob = r.options.logprobs || top_count ? r.logits[token] - norm : 0.0f;
      out.top_count = top_count;
    }
    float value = dev::kInfinity;
    int32_t id = -1;
    for (uint32_t t = 0; t < top_count; ++t) {
      id = next_largest(w, r, value, id);
      if (w.lane() == 0) {
        out.top_token[t] = id;
        out.top_logprob[t] = value - norm;
      }
    }
  }

  // The first id after (value, id) in the order of falling logits and rising ids.
  MK_DEVICE static int32_t next_largest(Worker& w, const Row& r, float& value, int32_t id) {
    Best best;
    const dev::Vf last = dev::splat(value);
    w.for_each(r.vocab, [&](uint32_t i, auto part) {
      const dev::Vf v = dev::load(r.logits + i, part);
      const auto after = (v < last) | ((v == last) & (dev::iota(i) > dev::splat(id)));
      best.take(dev::select(after, v, dev::splat(-dev::kInfinity)), dev::iota(i), part);
    });
    return best.reduce(w, value);
  }
};

}  // namespace megakernel::tasks
