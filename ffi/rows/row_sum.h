// Sums rows in float32, from wherever they are, to one sink or several.
#pragma once

#include <type_traits>

#include "comm/copy.h"
#include "comm/integers.h"
#include "rows/direct_sum.h"
#include "rows/movers.h"
#include "rows/pack.h"
#include "rows/row_stream.h"
#include "rows/sum_requests.h"
#include "rows/terms.h"

namespace jax_ep {

// Values of a batch: the part of a row that a coop sums at a time.
template <class T, int kPacks = kLanePacks>
constexpr int kSumValues = kPacks * Coop::lanes * kPackValues<T>;

// How many packs of a batch a lane has. A row of `packs` packs per lane is cut into as few batches as possible, of at
// most `most` packs and of about one size.
JAX_EP_CONSTANT_FN int even_packs(int packs, int most) {
  const int batches = ceil_div(packs, most);
  return batches ? ceil_div(packs, batches) : 1;
}

// `kPacks`: the most packs of a batch that a lane has. `kSeveral`: whether a job has several sums.
template <class T, int kPacks = kLanePacks, bool kSeveral = false>
class RowSum {
  struct Nothing {
    JAX_EP_FN void operator()() const {}
  };

 public:
  // `words`: all rows are made of 16-byte words. `width`: values of a typical row.
  JAX_EP_FN RowSum(const Coop& coop, bool words, int width = kSumValues<T, kPacks>)
      : coop_(coop),
        words_(words),
        batch_(even_packs(ceil_div(width, kSumValues<T, 1>), kPacks) * kSumValues<T, 1>),
        stream_(coop, stage_bytes(), words, put_stages() * stage_bytes()),
        writer_(coop, stage_bytes(), words, put_stages()) {}

  // Puts the sum of weight * row over the terms, in their order, into every sink. Rows have `width` values. If rows
  // come in bulk, they come while the sum before is made, so the last sum needs finish().
  template <class Terms, class Sinks>
  JAX_EP_FN void sum(const Terms& terms, const Sinks& sinks, int width) {
    sum_to(terms, [&]() -> const Sinks& { return sinks; }, width, sinks.cached());
  }
  // As sum(), but sink_of() may wait while rows come. It returns one sink or several; `cached` is their cached().
  // If rows come in bulk, after_first() is called when the first batch of the sum before is put.
  template <class Terms, class SinkOf, class AfterFirst = Nothing>
  JAX_EP_FN void sum_to(const Terms& terms, SinkOf sink_of, int width, bool cached = true,
                        AfterFirst after_first = {}) {
    const bool bulk = cached && stream_.in_bulk() && terms.cached();
    if (bulk) stream_.ask_for(terms.in_lanes(), cut(width));
    finish(after_first);
    const auto& sinks = sink_of();
    if (bulk)
      stream_.begin(terms.in_lanes(), sinks.in_lanes(), cut(width));
    else
      sum_directly(terms, sinks, width);
  }
  template <class AfterFirst = Nothing>
  JAX_EP_FN void finish(AfterFirst after_first = {}) {
    stream_.finish([&](const LaneTerms<const T>& terms, const LaneTerms<char>& sinks, int row_bytes) {
      sum_in_bulk(terms, sinks, row_bytes / static_cast<int>(sizeof(T)), after_first);
    });
  }

  // Several sums, each of the terms in terms.stride() lanes, and with its sinks in the same lanes. begin_sums() asks
  // for their rows and finishes the sums before; sums_to() gives the sinks. If rows come in bulk, after_first()
  // is called once, when the first batch of the sums before is put.
  template <class AfterFirst = Nothing>
  JAX_EP_FN void begin_sums(const LaneTerms<const T>& terms, int width, AfterFirst after_first = {}) {
    if (stream_.in_bulk()) stream_.ask_for(terms, cut(width));
    finish(after_first);
  }
  JAX_EP_FN void sums_to(const LaneTerms<const T>& terms, const LaneTerms<char>& sinks, int width) {
    if (stream_.in_bulk()) return stream_.begin(terms, sinks, cut(width));
    for (int first = 0; first < Coop::lanes; first += terms.stride()) {
      const Lanes lanes = first_lanes(terms.stride()) << first;
      if (used_lanes(terms, sinks) & lanes) sum_directly(terms.within(lanes), sinks.within(lanes), width);
    }
  }
  JAX_EP_FN void drop() { stream_.drop(); }

  JAX_EP_FN void acquire() { stream_.acquire(); }
  JAX_EP_FN int puts() const { return writer_.puts(); }
  JAX_EP_FN void complete_to(int puts) { writer_.complete_to(puts); }

 private:
  static constexpr int kDirectPacks = kPacks < kLanePacks ? kPacks : kLanePacks;
  using Total = float[kDirectPacks][kPackValues<T>];
  static constexpr int kDirect = kSumValues<T, kDirectPacks>;
  // Long batches leave room for one stage to write, because reading ahead needs the rest.
  JAX_EP_FN int put_stages() const { return batch_ > kDirect ? 1 : 2; }

  // There is code for batches of kPacks packs, half of them, and so on. Tests inside one version would cost more.
  template <int kUsed>
  static constexpr int kFewer = kUsed > kLanePacks         ? kLanePacks
                                : kUsed > kDirectPacks / 2 ? (kUsed + 1) / 2
                                                           : kUsed;
  // A stage has room for all that this code reads. Values past the end of a row are added, too, but never sent.
  template <int kUsed>
  static JAX_EP_FN int stage_values(int values) {
    if constexpr (kFewer<kUsed> < kUsed)
      if (values <= kSumValues<T, kFewer<kUsed>>) return stage_values<kFewer<kUsed>>(values);
    return kSumValues<T, kUsed>;
  }
  JAX_EP_FN int stage_bytes() const { return stage_values<kPacks>(batch_) * static_cast<int>(sizeof(T)); }
  JAX_EP_FN Cut cut(int width) const {
    return {width * static_cast<int>(sizeof(T)), batch_ * static_cast<int>(sizeof(T))};
  }

  template <class AfterFirst>
  JAX_EP_FN void sum_in_bulk(const LaneTerms<const T>& terms, const LaneTerms<char>& sinks, int width,
                             AfterFirst after_first) {
    if constexpr (kSeveral) {
      bool called = false;
      for (int first = 0; first < Coop::lanes; first += terms.stride()) {
        const Lanes lanes = first_lanes(terms.stride()) << first;
        if (!(used_lanes(terms, sinks) & lanes)) continue;
        sum_one(terms.within(lanes), sinks.within(lanes), width, [&] {
          if (!called) after_first();
          called = true;
        });
      }
    } else {
      sum_one(terms, sinks, width, after_first);
    }
  }
  template <class AfterFirst>
  JAX_EP_FN void sum_one(const LaneTerms<const T>& terms, const LaneTerms<char>& sinks, int width,
                         AfterFirst after_first) {
    for (int first = 0; first < width; first += batch_) {
      sum_batch<kPacks>(terms, sinks, first, smaller(batch_, width - first));
      if (first == 0) after_first();
    }
  }
  JAX_EP_FN Lanes used_lanes(const LaneTerms<const T>& terms, const LaneTerms<char>& sinks) const {
    return terms.holders() | sinks.holders();
  }

  // One of several sums may have a single row, and a release for each would cost more than it brings.
  JAX_EP_FN bool release_is_due(bool last) const {
    if constexpr (kSeveral)
      return stream_.taken() >= 3 || stream_.spent();
    else
      return last || stream_.spent();
  }

  template <int kUsed>
  JAX_EP_FN void sum_batch(const LaneTerms<const T>& terms, const LaneTerms<char>& sinks, int first, int values) {
    if constexpr (kFewer<kUsed> < kUsed)
      if (values <= kSumValues<T, kFewer<kUsed>>) return sum_batch<kFewer<kUsed>>(terms, sinks, first, values);
    float total[kUsed][kPackValues<T>] = {};
    for (auto left = terms.holders(); left;) {
      add_batch(reinterpret_cast<const T*>(stream_.take()), terms.weight_in(lowest_bit(left)), total);
      left &= left - 1;
      if (release_is_due(!left)) stream_.release();
    }
    writer_.put(sinks, int64_t{first} * sizeof(T), values * static_cast<int>(sizeof(T)), [&](char* to) {
      for (int i = 0; i < kUsed; ++i) rounded(total[i]).store(reinterpret_cast<T*>(to) + at(i));
    });
  }

  template <int kUsed>
  JAX_EP_FN void add_batch(const T* batch, float weight, float (&total)[kUsed][kPackValues<T>]) const {
    constexpr int kAtOnce = (kUsed + 1) / 2;  // they must fit into registers
    for (int first = 0; first < kUsed; first += kAtOnce) {
      Pack<T> pack[kAtOnce];
      for (int i = 0; i < kAtOnce && first + i < kUsed; ++i) pack[i].load(batch + at(first + i));
      for (int i = 0; i < kAtOnce && first + i < kUsed; ++i) add(pack[i], weight, total[first + i]);
    }
  }

  template <class Terms, class Sinks>
  JAX_EP_FN void sum_directly(const Terms& terms, const Sinks& sinks, int width) {
    if constexpr (Coop::lanes == 1) return sum_alone(terms, sinks, width);
    if (!words_) return sum_values_of(terms, sinks, width);
    for (int first = 0; first < width; first += kDirect) {
      Total total = {};
      for_each_term(terms, [&](const auto& term) { add(term.row + first, width - first, term.weight, total); });
      put(sinks, first, width - first, total);
    }
  }

  template <class Terms, class Sinks>
  JAX_EP_FN void sum_alone(const Terms& terms, const Sinks& sinks, int width) const {
    const FewRows<const T> rows(terms);
    const FewRows<char> outs(sinks);
    if (rows.all() && outs.all())
      sum_few_rows<T, T>(rows, outs, width);
    else
      sum_values_of(terms, sinks, width);
  }

  template <class Terms, class Sinks>
  JAX_EP_FN void sum_values_of(const Terms& terms, const Sinks& sinks, int width) const {
    sum_by_value<T>(coop_, sinks, width, [&](int at) {
      float total = 0;
      for_each_term(terms, [&](const auto& term) { total += term.weight * to_float(term.row[at]); });
      return total;
    });
  }

  JAX_EP_FN int at(int pack) const { return (pack * Coop::lanes + coop_.lane) * kPackValues<T>; }

  JAX_EP_FN void add(const Pack<T>& pack, float weight, float (&total)[kPackValues<T>]) const {
    float values[kPackValues<T>];
    to_floats(pack.values, values);
    for (int j = 0; j < kPackValues<T>; ++j) total[j] += weight * values[j];
  }

  // At most `values` of the row are left.
  JAX_EP_FN void add(const T* batch, int values, float weight, Total& total) const {
    Pack<T> pack[kDirectPacks];
    for (int i = 0; i < kDirectPacks; ++i) pack[i].load(batch + at(i), values - at(i));
    for (int i = 0; i < kDirectPacks; ++i) add(pack[i], weight, total[i]);
  }

  template <class Sinks>
  JAX_EP_FN void put(const Sinks& sinks, int first, int values, const Total& total) {
    Pack<T> pack[kDirectPacks];  // rounded once for all sinks
    for (int i = 0; i < kDirectPacks; ++i) pack[i] = rounded(total[i]);
    writer_.put(sinks, int64_t{first} * sizeof(T), smaller(values, kDirect) * static_cast<int>(sizeof(T)),
                [&](char* to) {
                  for (int i = 0; i < kDirectPacks; ++i)
                    pack[i].store(reinterpret_cast<T*>(to) + at(i), values - at(i));
                });
  }
  JAX_EP_FN Pack<T> rounded(const float (&total)[kPackValues<T>]) const {
    Pack<T> pack;
    from_floats(total, pack.values);
    return pack;
  }

  const Coop& coop_;
  const bool words_;
  const int batch_;  // values
  RowStream<T, LaneTerms<char>, std::conditional_t<kSeveral, SumRequests, RowRequests>> stream_;
  RowWriter writer_;
};

}  // namespace jax_ep
