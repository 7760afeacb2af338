// How a team turns values into float8 and back, in registers: a message at a time, whose blocks have a scale each.
#pragma once

#include "comm/layout.h"
#include "rows/numeric.h"
#include "rows/piece.h"

namespace jax_ep {

constexpr float kFloat8Max = 448.0f;

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

}  // namespace jax_ep
