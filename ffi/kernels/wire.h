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

// The factor of a block of tiny values must not be infinite: zero times it would be NaN.
JAX_EP_FN float finite(float x) { return x > 3.4028235e38f ? 3.4028235e38f : x; }

// Values times the factor round to float8, and the scale undoes it.
JAX_EP_FN float factor_for(float largest) { return largest == 0 ? 1.0f : finite(kFloat8Max / largest); }
JAX_EP_FN float scale_for(float largest) { return largest == 0 ? 1.0f : largest / kFloat8Max; }

// What encoder and decoder share: a message is a team's work of kPieces pieces, and a block of values that of
// neighbouring lanes, of one where a team has no more.
template <class T>
struct Message {
  static constexpr int kBlockLanes = Team::lanes == 1 ? 1 : 8;
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
template <class T>
class Scaling {
 public:
  // `largest`: magnitudes of this lane's pieces. All lanes call together.
  JAX_EP_FN Scaling(const Message<T>& message, uint32_t (&largest)[Message<T>::kPieces])
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
  static constexpr int kPieces = Message<T>::kPieces, kLanes = Message<T>::kBlockLanes;
  static constexpr int kShare = (2 * kPieces + kLanes - 1) / kLanes;

  const Message<T>& message_;
  const int place_;
  float quotients_[kShare];
};

// A message in the registers of a team.
template <class T>
class EncodedMessage {
 public:
  JAX_EP_FN EncodedMessage(const Message<T>& message, const char* batch)
      : EncodedMessage(message, Read(message, batch)) {}

  JAX_EP_FN void store_values(char* to) const {
    message_.for_each_piece([&](int i) {
      if (message_.at(i) < message_.values()) values_[i].store(reinterpret_cast<Float8E4M3*>(to) + message_.at(i));
    });
  }
  JAX_EP_FN void store_scales(char* to) const { scaling_.store_scales(reinterpret_cast<float*>(to)); }

 private:
  static constexpr int kPieces = Message<T>::kPieces, kValues = Message<T>::kBlockValues;

  // What is to be encoded.
  struct Read {
    typename Message<T>::Values pieces[kPieces];
    uint32_t largest[kPieces] = {};

    JAX_EP_FN Read(const Message<T>& message, const char* batch) {
      message.for_each_piece([&](int i) {
        if (!message.has(i)) return;
        pieces[i].load(reinterpret_cast<const T*>(batch) + message.at(i));
        largest[i] = largest_magnitude<kValues>(pieces[i].values);
      });
    }
  };

  JAX_EP_FN EncodedMessage(const Message<T>& message, Read read) : message_(message), scaling_(message, read.largest) {
    message.for_each_piece([&](int i) {
      const float factor = scaling_.factor(i);
      if (!message.has(i)) return;
      float scaled[kValues];
      to_floats(read.pieces[i].values, scaled);
      for (int j = 0; j < kValues; ++j) scaled[j] *= factor;
      from_floats(scaled, values_[i].values);
    });
  }

  const Message<T>& message_;
  const Scaling<T> scaling_;
  typename Message<T>::Encoded values_[kPieces];
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
  static constexpr int kBatchBytes = kWireStageBytes<T>;
  static JAX_EP_FN int row_bytes(int hidden) { return hidden * static_cast<int>(sizeof(T)); }

  RowWriter& writer;
  const bool words;      // rows of scales are made of 16-byte words
  const int put_values;  // that leave together: of as many messages as a stage holds, or of a row

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message<T>& message, const To& places, Release release) const {
    const EncodedMessage<T> encoded(message, batch);
    release();
    const int blocks = message.values() / kScaleBlock, first = message.first / kScaleBlock;
    const auto fill_values = [&](char* to) { encoded.store_values(to); };
    const auto fill_scales = [&](char* to) { encoded.store_scales(to); };
    if (message.staged && words) return gather(message, encoded, places);
    writer.put(places.values, message.first, message.values(), fill_values);
    writer.put_directly(places.scales, first * 4, blocks * 4, fill_scales);
  }

  // Sends the values and scales of several messages when the last of them is encoded.
  template <class To>
  JAX_EP_FN void gather(const Message<T>& message, const EncodedMessage<T>& encoded, const To& places) const {
    const int begin = message.first / put_values * put_values, at = message.first - begin;
    const int values = smaller(put_values, message.hidden - begin);
    char *const stage = writer.stage(/*fresh=*/at == 0), *const scales = stage + values;
    encoded.store_values(stage + at);
    encoded.store_scales(scales + at / kScaleBlock * 4);
    if (at + message.values() < values) return;
    writer.seal();
    writer.send(places.values, begin, values, stage);
    writer.send(places.scales, begin / kScaleBlock * 4, values / kScaleBlock * 4, scales);
    writer.commit();
  }
};

// The bytes of a writer's stage for EncodeApart: a row and its scales, or as many messages as leave room to read ahead.
template <class T>
JAX_EP_FN int apart_stage_bytes(const Team& team, int hidden) {
  constexpr int kMessage = wire_message_bytes(kWireValues);
  const int room = (team.shared_bytes - 2 * kWireStageBytes<T>) / 2 - 128;
  return align_up(smaller(wire_message_bytes(hidden), larger(1, room / kMessage) * kMessage), 128);
}

// What leaves as one batch: a whole row, or as many messages as a stage holds.
JAX_EP_FN int apart_put_values(int stage_bytes, int hidden) {
  return stage_bytes >= wire_message_bytes(hidden) ? hidden
                                                   : stage_bytes / wire_message_bytes(kWireValues) * kWireValues;
}

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
