// Rows on the wire in float8: encoded by the sender, decoded where they land. A row travels as messages of up to
// kWireValues values, each followed by the float32 scales of its blocks.
#pragma once

#include "device/copy.h"
#include "device/layout.h"
#include "device/rows.h"
#include "kernels/piece.h"
#include "kernels/row_stream.h"

namespace jax_ep {

constexpr float kFloat8Max = 448.0f;

// The inverse of a block of tiny values must not be infinite: zero times it would be NaN.
JAX_EP_FN float finite(float x) { return x > 3.4028235e38f ? 3.4028235e38f : x; }

// What encoder and decoder share: a message is a team's work of kPieces pieces, and a block of values that of
// neighbouring lanes, of one where a team has no more.
template <class T>
struct Message {
  static constexpr int kBlockLanes = Team::lanes == 1 ? 1 : 16;
  static constexpr int kBlockValues = kScaleBlock / kBlockLanes;
  static constexpr int kPieces = kWireValues / (Team::lanes * kBlockValues);
  using Values = Piece<T, kBlockValues>;
  using Encoded = Piece<Float8E4M3, kBlockValues>;

  const Team& team;
  const int hidden, first;  // the value with which it begins
  const bool staged;        // in shared memory, where it is always whole: what lies behind its end is never sent

  JAX_EP_FN int values() const { return smaller(kWireValues, hidden - first); }
  JAX_EP_FN int at(int piece) const { return (piece * Team::lanes + team.lane) * kBlockValues; }
  JAX_EP_FN bool has(int piece) const { return staged || at(piece) < values(); }
  // Calls visit(piece) for all of its pieces; they are skipped by halves, as a test for each would cost more.
  template <class Visit>
  JAX_EP_FN void for_each_piece(Visit visit) const {
    constexpr int kHalf = kPieces / 2;
    for (int i = 0; i < kHalf; ++i) visit(i);
    if (values() > kWireValues / 2)
      for (int i = kHalf; i < kPieces; ++i) visit(i);
  }

  // x * (448 / largest) rounds to float8; largest / 448, which is returned, undoes it. All lanes call together.
  JAX_EP_FN float encode(const T* batch, int piece, Encoded* encoded) const {
    Values read;
    float scaled[kBlockValues];
    uint32_t largest = 0;
    if (has(piece)) {
      read.load(batch + at(piece));
      to_floats(read.values, scaled);
      for (int j = 0; j < kBlockValues; ++j) {
        const uint32_t magnitude = bit_cast<uint32_t>(scaled[j]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;  // as integers, NaN is the largest
      }
    }
    const float most = team.max(bit_cast<float>(largest), kBlockLanes);
    if (!has(piece)) return 0;
    const float inverse = most == 0 ? 1.0f : finite(kFloat8Max / most);
    for (int j = 0; j < kBlockValues; ++j) scaled[j] *= inverse;
    from_floats(scaled, encoded->values);
    return most == 0 ? 1.0f : most / kFloat8Max;
  }

  JAX_EP_FN void decode(const char* message, int piece, Values* decoded) const {
    Encoded read;
    read.load(reinterpret_cast<const Float8E4M3*>(message) + at(piece));
    const float scale = reinterpret_cast<const float*>(message + values())[at(piece) / kScaleBlock];
    float scaled[kBlockValues];
    to_floats(read.values, scaled);
    for (int j = 0; j < kBlockValues; ++j) scaled[j] *= scale;
    from_floats(scaled, decoded->values);
  }
};

// A message in the registers of a team.
template <class T>
class EncodedMessage {
 public:
  JAX_EP_FN EncodedMessage(const Message<T>& message, const char* batch) : message_(message) {
    message.for_each_piece(
        [&](int i) { scales_[i] = message.encode(reinterpret_cast<const T*>(batch), i, &values_[i]); });
  }
  JAX_EP_FN void store_values(char* to) const {
    message_.for_each_piece([&](int i) {
      if (message_.has(i)) values_[i].store(reinterpret_cast<Float8E4M3*>(to) + message_.at(i));
    });
  }
  JAX_EP_FN void store_scales(char* to) const {
    message_.for_each_piece([&](int i) {
      if (message_.at(i) < message_.values() && message_.at(i) % kScaleBlock == 0)
        reinterpret_cast<float*>(to)[message_.at(i) / kScaleBlock] = scales_[i];
    });
  }

 private:
  const Message<T>& message_;
  typename Message<T>::Encoded values_[Message<T>::kPieces];
  float scales_[Message<T>::kPieces];
};

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
      stream_.begin(rows.held(), places.held(), {Work::row_bytes(hidden_), Work::kBatchBytes}, All{this});
      return;
    }
    finish();
    for (int first = 0; first < hidden_; first += kWireValues)
      work_(row + int64_t{first / kWireValues} * Work::kBatchBytes, Message<T>{team_, hidden_, first, false}, places,
            [] {});
  }
  JAX_EP_FN void finish() { stream_.finish(All{this}); }
  // Forgets a row that was begun.
  JAX_EP_FN void drop() { stream_.drop(); }

 private:
  struct All {
    MessageStream* self;
    JAX_EP_FN void operator()(const Held<const char>&, const typename Work::Places& places, int) const {
      for (int first = 0; first < self->hidden_; first += kWireValues)
        self->work_(self->stream_.take(), Message<T>{self->team_, self->hidden_, first, true}, places,
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
  static constexpr int kBatchBytes = kWireStageBytes<T>;
  static JAX_EP_FN int row_bytes(int hidden) { return hidden * static_cast<int>(sizeof(T)); }

  RowWriter& writer;

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message<T>& message, const To& places, Release release) const {
    const EncodedMessage<T> encoded(message, batch);
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
  static constexpr int kBatchBytes = wire_message_bytes(kWireValues);
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
