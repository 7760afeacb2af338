// Rows on the wire in float8: the sender encodes, and the receiver decodes. A row travels as messages of up to
// kWireValues values, and each message ends with the float32 scales of its blocks.
#pragma once

#include "rows/float8_message.h"
#include "rows/movers.h"
#include "rows/row_stream.h"

namespace jax_ep {

// Calls work(batch, message, sinks, release) for every message of a row. The work calls release() when it has read the
// batch. If rows come in bulk, begin() works on the row before while its own row is under way, and finish() works on
// the last row.
template <class T, class Work>
class MessageStream {
 public:
  using Stream = RowStream<char, typename Work::Sinks>;

  JAX_EP_FN MessageStream(const Coop& coop, int hidden, Stream& stream, Work work)
      : coop_(coop), hidden_(hidden), stream_(stream), work_(work) {}

  // Begins a row, if it is not null, and completes the one before.
  template <class Sinks>
  JAX_EP_FN void begin(const char* row, const Sinks& sinks) {
    const auto rows = terms_of<const char>(coop_, 1, [row](int) { return WeightedRow<const char>{row, 1.0f}; });
    const Cut cut{Work::row_bytes(hidden_), work_.batch_bytes()};
    const bool bulk = row && stream_.in_bulk() && sinks.cached();
    if (bulk) stream_.ask_for(rows.in_lanes(), cut);
    finish();
    if (bulk) return stream_.begin(rows.in_lanes(), sinks.in_lanes(), cut);
    if (!row) return;
    const int most = work_.message_values();
    for (int first = 0; first < hidden_; first += most)
      work_(row + int64_t{first / most} * work_.batch_bytes(),
            typename Work::Message{coop_, hidden_, first, most, false}, sinks, [] {});
  }
  JAX_EP_FN void finish() { stream_.finish(All{this}); }
  JAX_EP_FN void drop() { stream_.drop(); }

 private:
  struct All {
    MessageStream* self;
    JAX_EP_FN void operator()(const LaneTerms<const char>&, const typename Work::Sinks& sinks, int) const {
      const int most = self->work_.message_values();
      for (int first = 0; first < self->hidden_; first += most)
        self->work_(self->stream_.take(), typename Work::Message{self->coop_, self->hidden_, first, most, true}, sinks,
                    [&] { self->stream_.release(); });
    }
  };

  const Coop& coop_;
  const int hidden_;
  Stream& stream_;
  Work work_;
};

template <class T>
constexpr int kWireStageBytes = kWireValues * sizeof(T);

// From rows to messages, in landing slots of wire_bytes each.
template <class T>
struct Encode {
  using Sinks = LaneTerms<char>;
  using Message = jax_ep::Message<T>;
  static JAX_EP_FN int message_values() { return kWireValues; }
  static JAX_EP_FN int batch_bytes() { return kWireStageBytes<T>; }
  static JAX_EP_FN int row_bytes(int hidden) { return hidden * static_cast<int>(sizeof(T)); }

  RowWriter& writer;

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message& message, const To& sinks, Release release) const {
    const MessageEncoder<T, Message> encoder(message, batch);
    release();
    writer.put(sinks, wire_offset(message.first), wire_message_bytes(message.values()), [&](char* to) {
      encoder.store_values(to);
      encoder.store_scales(to + message.values());
    });
  }
};

// From messages to rows.
template <class T>
struct Decode {
  using Sinks = LaneTerms<char>;
  using Message = jax_ep::Message<T>;
  static JAX_EP_FN int message_values() { return kWireValues; }
  static JAX_EP_FN int batch_bytes() { return wire_message_bytes(kWireValues); }
  static JAX_EP_FN int row_bytes(int hidden) { return static_cast<int>(wire_bytes(hidden)); }

  RowWriter& writer;

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message& message, const To& sinks, Release release) const {
    typename Message::Values decoded[Message::kPacks];
    message.for_each_pack([&](int i) {
      if (message.has(i)) message.decode(batch, i, &decoded[i]);
    });
    release();
    const int64_t offset = int64_t{message.first} * sizeof(T);
    writer.put(sinks, offset, message.values() * static_cast<int>(sizeof(T)), [&](char* to) {
      message.for_each_pack([&](int i) {
        if (message.has(i)) decoded[i].store(reinterpret_cast<T*>(to) + message.at(i));
      });
    });
  }
};

}  // namespace jax_ep
