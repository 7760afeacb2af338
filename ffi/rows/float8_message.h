// How a coop quantizes values to float8 and back, in registers, a message at a time. Each block of a message has a
// scale.
#pragma once

#include "comm/float8.h"
#include "comm/integers.h"
#include "rows/numeric.h"
#include "rows/pack.h"

namespace jax_ep {

// Rows in float8 travel as messages: up to kWireValues values, a float32 scale per block, padding to 16-byte words.
constexpr int kWireValues = 2048;
JAX_EP_CONSTANT_FN int wire_message_bytes(int values) { return (values + 4 * (values / kScaleBlock) + 15) / 16 * 16; }
// Where the message that begins with value `first` of a row lies in its landing slot; and the size of a landing slot.
JAX_EP_CONSTANT_FN int64_t wire_offset(int first) {
  return int64_t{first / kWireValues} * wire_message_bytes(kWireValues);
}
JAX_EP_CONSTANT_FN int64_t wire_bytes(int hidden) {
  return wire_offset(hidden) + wire_message_bytes(hidden % kWireValues);
}

JAX_EP_CONSTANT_FN int scale_row_bytes(int hidden) { return hidden / kScaleBlock * 4; }

// A message, for encoder and decoder. A coop works on one message; each lane has up to kPacks packs of it. A block of
// values is in kBlockLanes neighbouring lanes.
template <class T, int kMax = kWireValues>
struct Message {
  static constexpr int kBlockLanes = Coop::lanes == 1 ? 1 : 8;
  static constexpr int kBlockValues = kScaleBlock / kBlockLanes;
  static constexpr int kPacks = kMax / (Coop::lanes * kBlockValues);
  using Values = Pack<T, kBlockValues>;
  using Encoded = Pack<Float8E4M3, kBlockValues>;

  const Coop& coop;
  const int hidden, first;  // values of the row, and the first value of the message
  const int most;           // values of every message of a row but the last
  const bool in_shared;     // memory, which has room for a whole message: what lies past the end is never sent

  JAX_EP_FN int values() const { return smaller(most, hidden - first); }
  JAX_EP_FN int at(int pack) const { return (pack * Coop::lanes + coop.lane) * kBlockValues; }
  JAX_EP_FN bool has(int pack) const { return in_shared || at(pack) < values(); }
  // Calls visit(pack) for all packs. If the message is short, the second half is skipped as a whole, because a test for
  // each pack would cost more.
  template <class Visit>
  JAX_EP_FN void for_each_pack(Visit visit) const {
    constexpr int kHalf = (kPacks + 1) / 2;
    for (int i = 0; i < kHalf; ++i) visit(i);
    if (values() > kHalf * Coop::lanes * kBlockValues)
      for (int i = kHalf; i < kPacks; ++i) visit(i);
  }

  JAX_EP_FN void decode(const char* message, int pack, Values* decoded) const {
    Encoded read;
    read.load(reinterpret_cast<const Float8E4M3*>(message) + at(pack));
    const float scale = reinterpret_cast<const float*>(message + values())[at(pack) / kScaleBlock];
    float scaled[kBlockValues];
    to_floats(read.values, scaled);
    for (int j = 0; j < kBlockValues; ++j) scaled[j] *= scale;
    from_floats(scaled, decoded->values);
  }
};

// The factors and scales of a message's blocks. Divisions are slow, so the lanes of a block share them: first all
// factors, then all scales.
template <class Message>
class Scaling {
 public:
  // `largest`: magnitudes of this lane's packs. All lanes call together.
  JAX_EP_FN Scaling(const Message& message, uint32_t (&largest)[Message::kPacks])
      : message_(message), lane_in_block_(message.coop.lane % kLanes) {
    for (uint32_t& each : largest) each = message.coop.max(each, kLanes);
    for (int i = 0; i < kQuotients; ++i) {
      uint32_t mine = 0;
      for (int pack = 0; pack < kPacks; ++pack)
        if ((i * kLanes + lane_in_block_) % kPacks == pack) mine = largest[pack];
      const float most = bit_cast<float>(mine);
      quotients_[i] = i * kLanes + lane_in_block_ < kPacks ? factor_for(most) : scale_for(most);
    }
  }

  JAX_EP_FN float factor(int pack) const {
    return message_.coop.from_lane(quotients_[pack / kLanes], message_.coop.lane - lane_in_block_ + pack % kLanes);
  }
  JAX_EP_FN void store_scales(float* to) const {
    for (int i = 0; i < kQuotients; ++i) {
      const int pack = i * kLanes + lane_in_block_ - kPacks, at = message_.at(pack);
      if (pack >= 0 && pack < kPacks && at < message_.values()) to[at / kScaleBlock] = quotients_[i];
    }
  }

 private:
  static constexpr int kPacks = Message::kPacks, kLanes = Message::kBlockLanes;
  static constexpr int kQuotients = (2 * kPacks + kLanes - 1) / kLanes;

  const Message& message_;
  const int lane_in_block_;
  float quotients_[kQuotients];
};

// Encodes a message where it is stored. Short messages are kept in registers; long ones are read again.
template <class T, class Message>
class MessageEncoder {
 public:
  static constexpr bool kKept = Message::kPacks <= kWireValues / (Coop::lanes * Message::kBlockValues);

  JAX_EP_FN MessageEncoder(const Message& message, const char* batch)
      : MessageEncoder(message, reinterpret_cast<const T*>(batch), Read(message, batch)) {}

  JAX_EP_FN void store_values(char* to) const {
    message_.for_each_pack([&](int i) {
      const float factor = scaling_.factor(i);
      if (message_.at(i) >= message_.values()) return;
      typename Message::Values again;
      if constexpr (!kKept) again.load(batch_ + message_.at(i));
      float scaled[kValues];
      to_floats(kKept ? packs_[kKept ? i : 0].values : again.values, scaled);
      for (int j = 0; j < kValues; ++j) scaled[j] *= factor;
      typename Message::Encoded encoded;
      from_floats(scaled, encoded.values);
      encoded.store(reinterpret_cast<Float8E4M3*>(to) + message_.at(i));
    });
  }
  JAX_EP_FN void store_scales(char* to) const { scaling_.store_scales(reinterpret_cast<float*>(to)); }

 private:
  static constexpr int kPacks = Message::kPacks, kValues = Message::kBlockValues;

  // What is to be encoded.
  struct Read {
    typename Message::Values packs[kKept ? kPacks : 1];
    uint32_t largest[kPacks] = {};

    JAX_EP_FN Read(const Message& message, const char* batch) {
      message.for_each_pack([&](int i) {
        if (!message.has(i)) return;
        auto& pack = packs[kKept ? i : 0];
        pack.load(reinterpret_cast<const T*>(batch) + message.at(i));
        largest[i] = largest_magnitude<kValues>(pack.values);
      });
    }
  };

  JAX_EP_FN MessageEncoder(const Message& message, const T* batch, Read read)
      : message_(message), batch_(batch), scaling_(message, read.largest) {
    for (int i = 0; kKept && i < kPacks; ++i) packs_[i] = read.packs[i];
  }

  const Message& message_;
  const T* const batch_;
  const Scaling<Message> scaling_;
  typename Message::Values packs_[kKept ? kPacks : 1];
};

}  // namespace jax_ep
