// Rows on the wire in float8: encoded by the sender, decoded where they land. A row travels as messages of up to
// kWireValues values, each followed by the float32 scales of its blocks.
#pragma once

#include "rows/float8_message.h"
#include "rows/movers.h"
#include "rows/row_stream.h"

namespace jax_ep {

// Does work(batch, message, places, release) for every message of a row, where `release` says that the batch has been
// looked at: of one row while the next is on its way, where rows come in bulk. The last one needs finish().
template <class T, class Work>
class MessageStream {
 public:
  using Stream = RowStream<char, typename Work::Places>;

  JAX_EP_FN MessageStream(const Team& team, int hidden, Stream& stream, Work work)
      : team_(team), hidden_(hidden), stream_(stream), work_(work) {}

  template <class Places>
  JAX_EP_FN void begin(const char* row, const Places& places) {
    if (stream_.in_bulk() && places.cached()) {
      const auto rows = line_up<const char>(team_, 1, [row](int) { return Term<const char>{row, 1.0f}; });
      stream_.begin(rows.held(), places.held(), {Work::row_bytes(hidden_), work_.batch_bytes()}, All{this});
      return;
    }
    finish();
    const int most = work_.message_values();
    for (int first = 0; first < hidden_; first += most)
      work_(row + int64_t{first / most} * work_.batch_bytes(), typename Work::Unit{team_, hidden_, first, most, false},
            places, [] {});
  }
  JAX_EP_FN void finish() { stream_.finish(All{this}); }
  // Forgets a row that was begun.
  JAX_EP_FN void drop() { stream_.drop(); }

 private:
  struct All {
    MessageStream* self;
    JAX_EP_FN void operator()(const Held<const char>&, const typename Work::Places& places, int) const {
      const int most = self->work_.message_values();
      for (int first = 0; first < self->hidden_; first += most)
        self->work_(self->stream_.take(), typename Work::Unit{self->team_, self->hidden_, first, most, true}, places,
                    [&] { self->stream_.release(); });
    }
  };

  const Team& team_;
  const int hidden_;
  Stream& stream_;
  Work work_;
};

template <class T>
constexpr int kWireStageBytes = kWireValues * sizeof(T);

// From rows to messages, in slots of wire_bytes each.
template <class T>
struct Encode {
  using Places = Held<char>;
  using Unit = Message<T>;
  static JAX_EP_FN int message_values() { return kWireValues; }
  static JAX_EP_FN int batch_bytes() { return kWireStageBytes<T>; }
  static JAX_EP_FN int row_bytes(int hidden) { return hidden * static_cast<int>(sizeof(T)); }

  RowWriter& writer;

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message<T>& message, const To& places, Release release) const {
    const EncodedMessage<T, Message<T>> encoded(message, batch);
    release();
    writer.put(places, wire_offset(message.first), wire_message_bytes(message.values()), [&](char* to) {
      encoded.store_values(to);
      encoded.store_scales(to + message.values());
    });
  }
};

// From messages to rows.
template <class T>
struct Decode {
  using Places = Held<char>;
  using Unit = Message<T>;
  static JAX_EP_FN int message_values() { return kWireValues; }
  static JAX_EP_FN int batch_bytes() { return wire_message_bytes(kWireValues); }
  static JAX_EP_FN int row_bytes(int hidden) { return static_cast<int>(wire_bytes(hidden)); }

  RowWriter& writer;

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message<T>& message, const To& places, Release release) const {
    typename Message<T>::Values decoded[Message<T>::kPieces];
    message.for_each_piece([&](int i) {
      if (message.has(i)) message.decode(batch, i, &decoded[i]);
    });
    release();
    const int64_t offset = int64_t{message.first} * sizeof(T);
    writer.put(places, offset, message.values() * static_cast<int>(sizeof(T)), [&](char* to) {
      message.for_each_piece([&](int i) {
        if (message.has(i)) decoded[i].store(reinterpret_cast<T*>(to) + message.at(i));
      });
    });
  }
};

}  // namespace jax_ep
