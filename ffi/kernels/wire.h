// Rows on the wire in float8: encoded by the sender, decoded where they land. A row travels as messages of up to
// kWireValues values, each followed by the float32 scales of its blocks.
#pragma once

#include "device/copy.h"
#include "device/layout.h"
#include "device/rows.h"
#include "kernels/piece.h"

namespace jax_ep {

constexpr float kFloat8Max = 448.0f;

// The inverse of a block of tiny values must not be infinite: zero times it would be NaN.
JAX_EP_FN float finite(float x) { return x > 3.4028235e38f ? 3.4028235e38f : x; }

template <class T>
class WireCodec {
 public:
  JAX_EP_FN WireCodec(const Team& team, int hidden)
      : team_(team),
        hidden_(hidden),
        reader_(team, kWireValues * sizeof(T), true),
        writer_(team, kWireValues * sizeof(T), true) {}

  // Encodes a row into the slots `places`. x * (448 / largest) rounds to float8; largest / 448 undoes it.
  template <class Places>
  JAX_EP_FN void encode(const T* row, const Places& places) {
    read_ahead([&](int first) { reader_.ask(1, row + first, values(first) * static_cast<int>(sizeof(T))); },
               [&](int first) {
                 const T* batch = reinterpret_cast<const T*>(reader_.take());
                 Piece<Float8E4M3, kBlockValues> encoded[kPieces];
                 float scales[kPieces];
                 for (int i = 0; i < kPieces; ++i) scales[i] = encode_piece(batch, at(i), values(first), &encoded[i]);
                 reader_.release();
                 writer_.put(places, wire_offset(first), wire_message_bytes(values(first)), [&](char* to) {
                   for (int i = 0; i < kPieces; ++i) {
                     if (at(i) >= values(first)) continue;
                     encoded[i].store(reinterpret_cast<Float8E4M3*>(to) + at(i), kBlockValues, true);
                     if (at(i) % kScaleBlock == 0)
                       reinterpret_cast<float*>(to + values(first))[at(i) / kScaleBlock] = scales[i];
                   }
                 });
               });
  }

  // Decodes a slot into the rows `places`.
  template <class Places>
  JAX_EP_FN void decode(const char* wire, const Places& places) {
    read_ahead([&](int first) { reader_.ask(1, wire + wire_offset(first), wire_message_bytes(values(first))); },
               [&](int first) {
                 const char* message = reader_.take();
                 Piece<T, kBlockValues> decoded[kPieces];
                 for (int i = 0; i < kPieces; ++i)
                   if (at(i) < values(first)) decode_piece(message, at(i), values(first), &decoded[i]);
                 reader_.release();
                 const auto fill = [&](char* to) {
                   for (int i = 0; i < kPieces; ++i)
                     if (at(i) < values(first))
                       decoded[i].store(reinterpret_cast<T*>(to) + at(i), kBlockValues, in_words(to, to, 0));
                 };
                 writer_.put(places, int64_t{first} * sizeof(T), values(first) * static_cast<int>(sizeof(T)), fill);
               });
  }

  JAX_EP_FN void acquire() { reader_.acquire(); }
  JAX_EP_FN int mark() const { return writer_.mark(); }
  JAX_EP_FN void complete_to(int mark) { writer_.complete_to(mark); }

 private:
  // A block is the work of neighbouring lanes, of one where a team has no more.
  static constexpr int kBlockLanes = Team::lanes == 1 ? 1 : 16;
  static constexpr int kBlockValues = kScaleBlock / kBlockLanes;
  static constexpr int kPieces = kWireValues / (Team::lanes * kBlockValues);

  JAX_EP_FN int values(int first) const { return smaller(kWireValues, hidden_ - first); }
  JAX_EP_FN int at(int piece) const { return (piece * Team::lanes + team_.lane) * kBlockValues; }

  template <class Ask, class Use>
  JAX_EP_FN void read_ahead(Ask ask, Use use) {
    int ahead = 0;
    for (; ahead < hidden_ && ahead < reader_.depth() * kWireValues; ahead += kWireValues) ask(ahead);
    for (int first = 0; first < hidden_; first += kWireValues) {
      use(first);
      if (ahead < hidden_) ask(ahead);
      ahead += kWireValues;
    }
  }

  // Returns the scale of the block. All lanes call together.
  JAX_EP_FN float encode_piece(const T* batch, int begin, int count, Piece<Float8E4M3, kBlockValues>* encoded) const {
    Piece<T, kBlockValues> piece;
    const bool present = begin < count;
    float scaled[kBlockValues];
    uint32_t largest = 0;
    if (present) {
      piece.load(batch + begin, kBlockValues, in_words(batch, batch, 0));
      to_floats(piece.values, scaled);
      for (int j = 0; j < kBlockValues; ++j) {
        const uint32_t magnitude = bit_cast<uint32_t>(scaled[j]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;  // as integers, NaN is the largest
      }
    }
    const float most = team_.max(bit_cast<float>(largest), kBlockLanes);
    if (!present) return 0;
    const float inverse = most == 0 ? 1.0f : finite(kFloat8Max / most);
    for (int j = 0; j < kBlockValues; ++j) scaled[j] *= inverse;
    from_floats(scaled, encoded->values);
    return most == 0 ? 1.0f : most / kFloat8Max;
  }

  JAX_EP_FN void decode_piece(const char* message, int begin, int count, Piece<T, kBlockValues>* decoded) const {
    Piece<Float8E4M3, kBlockValues> piece;
    piece.load(reinterpret_cast<const Float8E4M3*>(message) + begin, kBlockValues, true);
    const float scale = reinterpret_cast<const float*>(message + count)[begin / kScaleBlock];
    float scaled[kBlockValues];
    to_floats(piece.values, scaled);
    for (int j = 0; j < kBlockValues; ++j) scaled[j] *= scale;
    from_floats(scaled, decoded->values);
  }

  const Team& team_;
  const int hidden_;
  RowReader reader_;
  RowWriter writer_;
};

}  // namespace jax_ep
