// Rows that travel in float8 and stay so: values go to one row, their scales to another.
#pragma once

#include "comm/integers.h"
#include "rows/float8_message.h"
#include "rows/movers.h"
#include "rows/terms.h"

namespace jax_ep {

// The most values of a message whose values and scales are apart: half a row of 7168. Tuned with `kernels_bench 2`.
constexpr int kApartValues = 3584;

// The sinks of a row whose values and scales are apart.
template <class Values, class Scales>
struct Apart {
  Values values;
  Scales scales;

  JAX_EP_FN Apart(const Values& values, const Scales& scales) : values(values), scales(scales) {}
  JAX_EP_FN explicit Apart(const Coop& coop) : values(coop), scales(coop) {}

  JAX_EP_FN bool cached() const { return values.cached() && scales.cached(); }
  JAX_EP_FN Apart<LaneTerms<char>, LaneTerms<char>> in_lanes() const { return {values.in_lanes(), scales.in_lanes()}; }
};

template <class Values, class Scales>
JAX_EP_FN Apart<Values, Scales> apart(const Values& values, const Scales& scales) {
  return {values, scales};
}

// From rows to rows of float8 and rows of scales.
template <class T>
struct EncodeApart {
  using Sinks = Apart<LaneTerms<char>, LaneTerms<char>>;
  using Message = jax_ep::Message<T, kApartValues>;
  JAX_EP_FN int message_values() const { return most; }
  JAX_EP_FN int batch_bytes() const { return most * static_cast<int>(sizeof(T)); }
  static JAX_EP_FN int row_bytes(int hidden) { return hidden * static_cast<int>(sizeof(T)); }

  RowWriter& writer;
  const bool words;      // rows of scales are made of 16-byte words
  const int most;        // values of a message
  const int put_values;  // values that leave together: all messages of a stage, or of a row

  template <class To, class Release>
  JAX_EP_FN void operator()(const char* batch, const Message& message, const To& sinks, Release release) const {
    const MessageEncoder<T, Message> encoder(message, batch);
    const int scale_blocks = message.values() / kScaleBlock, first = message.first / kScaleBlock;
    const auto fill_values = [&](char* to) { encoder.store_values(to); };
    const auto fill_scales = [&](char* to) { encoder.store_scales(to); };
    if (message.in_shared && words) return gather(message, encoder, sinks, release);
    writer.put(sinks.values, message.first, message.values(), fill_values);
    writer.put_directly(sinks.scales, first * 4, scale_blocks * 4, fill_scales);
    release();
  }

  // Sends the values and scales of several messages when the last of them is encoded.
  template <class To, class Release>
  JAX_EP_FN void gather(const Message& message, const MessageEncoder<T, Message>& encoder, const To& sinks,
                        Release release) const {
    const int begin = message.first / put_values * put_values, at = message.first - begin;
    const int values = smaller(put_values, message.hidden - begin);
    char *const stage = writer.stage(/*fresh=*/at == 0), *const scales = stage + values;
    encoder.store_values(stage + at);
    encoder.store_scales(scales + at / kScaleBlock * 4);
    release();
    if (at + message.values() < values) return;
    writer.seal();
    writer.send(sinks.values, begin, values, stage);
    writer.send(sinks.scales, begin / kScaleBlock * 4, values / kScaleBlock * 4, scales);
    writer.commit();
  }
};

// How many values a message of EncodeApart has: rows are cut into as few messages as possible. There is code for two
// sizes, and a stage has room for the larger.
JAX_EP_FN int apart_message_values(int hidden) {
  const int messages = larger(1, ceil_div(hidden, kApartValues));
  return hidden <= messages * kWireValues ? kWireValues : kApartValues;
}

// How many values leave as one batch: a row, or the messages that fit into shared memory beside two that are read.
template <class T>
JAX_EP_FN int apart_put_values(const Coop& coop, int hidden) {
  const int message = apart_message_values(hidden),
            room = coop.shared_bytes - kBarrierBytes - 2 * message * int(sizeof(T));
  return smaller(hidden, larger(1, room / (wire_message_bytes(message) + 16)) * message);
}

}  // namespace jax_ep
