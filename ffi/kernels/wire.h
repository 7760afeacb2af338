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
// Of a message, at most, where values and scales are apart: half a row of 7168.
constexpr int kApartValues = 3584;

// The factor of a block of tiny values must not be infinite: zero times it would be NaN.
JAX_EP_FN float finite(float x) { return x > 3.4028235e38f ? 3.4028235e38f : x; }

// Values times the factor round to float8, and the scale undoes it.
JAX_EP_FN float factor_for(float largest) { return largest == 0 ? 1.0f : finite(kFloat8Max / largest); }
JAX_EP_FN float scale_for(float largest) { return largest == 0 ? 1.0f : largest / kFloat8Max; }

// What encoder and decoder share: a message is a team's work of up to kPieces pieces, and a block of values that of
// neighbouring lanes, of one where a team has no more.
template <class T, int kMost = kWireValues>
struct Message {
  static constexpr int kBlockLanes = Team::lanes == 1 ? 1 : 8;
  static constexpr int kBlockValues = kScaleBlock / kBlockLanes;
  static constexpr int kPieces = kMost / (Team::lanes * kBlockValues);
  using Values = Piece<T, kBlockValues>;
  using Encoded = Piece<Float8E4M3, kBlockValues>;

  const Team& team;
  const int hidden, first;  // the value with which it begins
  const int most;           // values, of all but the last of a row
  const bool staged;        // in shared memory, where it is always whole: what lies behind its end is never sent

  JAX_EP_FN int values() const { return smaller(most, hidden - first); }
  JAX_EP_FN int at(int piece) const { return (piece * Team::lanes + team.lane) * kBlockValues; }
  JAX_EP_FN bool has(int piece) const { return staged || at(piece) < values(); }
  // Calls visit(piece) for all of its pieces; they are skipped by halves, as a test for each would cost more.
  template <class Visit>
  JAX_EP_FN void for_each_piece(Visit visit) const {
    constexpr int kHalf = (kPieces + 1) / 2;
    for (int i = 0; i < kHalf; ++i) visit(i);
    if (values() > kHalf * Team::lanes * kBlockValues)
      for (int i = kHalf; i < kPieces; ++i) visit(i);
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

// The factors and scales of a message's blocks. Divisions are slow, so the lanes of a block share those of its pieces:
// first all factors, then all scales.
template <class Message>
class Scaling {
 public:
  // `largest`: magnitudes of this lane's pieces. All lanes call together.
  JAX_EP_FN Scaling(const Message& message, uint32_t (&largest)[Message::kPieces])
      : message_(message), place_(message.team.lane % kLanes) {
    for (uint32_t& each : largest) each = message.team.max(each, kLanes);
    for (int i = 0; i < kShare; ++i) {
      uint32_t mine = 0;
      for (int piece = 0; piece < kPieces; ++piece)
        if ((i * kLanes + place_) % kPieces == piece) mine = largest[piece];
      const float most = bit_cast<float>(mine);
      quotients_[i] = i * kLanes + place_ < kPieces ? factor_for(most) : scale_for(most);
    }
  }

  JAX_EP_FN float factor(int piece) const {
    return message_.team.from_lane(quotients_[piece / kLanes], message_.team.lane - place_ + piece % kLanes);
  }
  JAX_EP_FN void store_scales(float* to) const {
    for (int i = 0; i < kShare; ++i) {
      const int piece = i * kLanes + place_ - kPieces, at = message_.at(piece);
      if (piece >= 0 && piece < kPieces && at < message_.values()) to[at / kScaleBlock] = quotients_[i];
    }
  }

 private:
  static constexpr int kPieces = Message::kPieces, kLanes = Message::kBlockLanes;
  static constexpr int kShare = (2 * kPieces + kLanes - 1) / kLanes;

  const Message& message_;
  const int place_;
  float quotients_[kShare];
};

// A message that is encoded when it is stored: short ones from registers, long ones are looked at a second time.
template <class T, class Message>
class EncodedMessage {
 public:
  static constexpr bool kKept = Message::kPieces <= kWireValues / (Team::lanes * Message::kBlockValues);

  JAX_EP_FN EncodedMessage(const Message& message, const char* batch)
      : EncodedMessage(message, reinterpret_cast<const T*>(batch), Read(message, batch)) {}

  JAX_EP_FN void store_values(char* to) const {
    message_.for_each_piece([&](int i) {
      const float factor = scaling_.factor(i);
      if (message_.at(i) >= message_.values()) return;
      typename Message::Values again;
      if constexpr (!kKept) again.load(batch_ + message_.at(i));
      float scaled[kValues];
      to_floats(kKept ? pieces_[kKept ? i : 0].values : again.values, scaled);
      for (int j = 0; j < kValues; ++j) scaled[j] *= factor;
      typename Message::Encoded encoded;
      from_floats(scaled, encoded.values);
      encoded.store(reinterpret_cast<Float8E4M3*>(to) + message_.at(i));
    });
  }
  JAX_EP_FN void store_scales(char* to) const { scaling_.store_scales(reinterpret_cast<float*>(to)); }

 private:
  static constexpr int kPieces = Message::kPieces, kValues = Message::kBlockValues;

  // What is to be encoded.
  struct Read {
    typename Message::Values pieces[kKept ? kPieces : 1];
    uint32_t largest[kPieces] = {};

    JAX_EP_FN Read(const Message& message, const char* batch) {
      message.for_each_piece([&](int i) {
        if (!message.has(i)) return;
        auto& piece = pieces[kKept ? i : 0];
        piece.load(reinterpret_cast<const T*>(batch) + message.at(i));
        largest[i] = largest_magnitude<kValues>(piece.values);
      });
    }
  };

  JAX_EP_FN EncodedMessage(const Message& message, const T* batch, Read read)
      : message_(message), batch_(batch), scaling_(message, read.largest) {
    for (int i = 0; kKept && i < kPieces; ++i) pieces_[i] = read.pieces[i];
  }

  const Message& message_;
  const T* const batch_;
  const Scaling<Message> scaling_;
  typename Message::Values pieces_[kKept ? kPieces : 1];
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

// The places of a row whose values and scales are apart.
template <class Values, class Scales>
struct Apart {
  Values values;
  Scales scales;

  JAX_EP_FN bool cached() const { return values.cached() && scales.cached(); }
  JAX_EP_FN Apart<Held<char>, Held<char>> held() const { return {values.held(), scales.held()}; }
};

template <class Values, class Scales>
JAX_EP_FN Apart<Values, Scales> apart(const Values& values, const Scales& scales) {
  return {values, scales};
}

// From rows to rows of float8 and rows of scales.
template <class T>
struct EncodeApart {
  using Places = Apart<Held<char>, Held<char>>;
  using Unit = Message<T, kApartValues>;
  JAX_EP_FN int message_values() const { return most; }
  JAX_EP_FN int batch_bytes() const { return most * static_cast<int>(sizeof(T)); }
  static JAX_EP_FN int row_bytes(int hidden) { return hidden * static_cast<int>(sizeof(T)); }

  RowWriter& writer;
  const bool words;      // rows of scales are made of 16-byte words
  const int most;        // values of a message
  const int put_values;  // that leave together: of as many messages as a stage holds, or of a row

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Unit& message, const To& places, Release release) const {
    const EncodedMessage<T, Unit> encoded(message, batch);
    const int blocks = message.values() / kScaleBlock, first = message.first / kScaleBlock;
    const auto fill_values = [&](char* to) { encoded.store_values(to); };
    const auto fill_scales = [&](char* to) { encoded.store_scales(to); };
    if (message.staged && words) return gather(message, encoded, places, release);
    writer.put(places.values, message.first, message.values(), fill_values);
    writer.put_directly(places.scales, first * 4, blocks * 4, fill_scales);
    release();
  }

  // Sends the values and scales of several messages when the last of them is encoded.
  template <class To, class Release>
  JAX_EP_FN void gather(const Unit& message, const EncodedMessage<T, Unit>& encoded, const To& places,
                        Release release) const {
    const int begin = message.first / put_values * put_values, at = message.first - begin;
    const int values = smaller(put_values, message.hidden - begin);
    char *const stage = writer.stage(/*fresh=*/at == 0), *const scales = stage + values;
    encoded.store_values(stage + at);
    encoded.store_scales(scales + at / kScaleBlock * 4);
    release();
    if (at + message.values() < values) return;
    writer.seal();
    writer.send(places.values, begin, values, stage);
    writer.send(places.scales, begin / kScaleBlock * 4, values / kScaleBlock * 4, scales);
    writer.commit();
  }
};

// The values of EncodeApart's messages: rows are cut into as few as there can be. There is code for two sizes, and a
// stage must have room for what it looks at.
JAX_EP_FN int apart_message_values(int hidden) {
  const int messages = larger(1, (hidden + kApartValues - 1) / kApartValues);
  return hidden <= messages * kWireValues ? kWireValues : kApartValues;
}

// What leaves as one batch: a whole row, or as many messages as leave room for two to read.
template <class T>
JAX_EP_FN int apart_put_values(const Team& team, int hidden) {
  const int message = apart_message_values(hidden), room = team.shared_bytes - 128 - 2 * message * int(sizeof(T));
  return smaller(hidden, larger(1, room / (wire_message_bytes(message) + 16)) * message);
}

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
