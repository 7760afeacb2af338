// The signal pad of a rank, mapped by every peer. Its layout is the same on all ranks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "comm/dtype.h"

namespace jax_ep {

constexpr int kMaxRanks = 64;
constexpr int kMaxFlags = 1024;     // per source: a matrix has many row blocks
constexpr int kMailNumbers = 4096;  // of each type in a mailbox
constexpr int kMailBuffers = 5;     // whose addresses a rank posts

enum class OpKind : int32_t;  // kernels/ops.h

// The arguments of a call on which its ranks must agree. kernels/signature.h makes it from the op's spec, and checks
// that every spec has room here.
constexpr int kSignatureSizes = 12;
constexpr int kSignatureOptions = 32;
struct Signature {
  OpKind op;
  DType dtype, operand_dtype;  // of rows or a product's result; of a product's operands
  uint32_t options;            // one bit each
  int64_t sizes[kSignatureSizes];
  int32_t plan[4];  // of a launch on which ranks must agree, or zero
};
static_assert(std::has_unique_object_representations_v<Signature>, "its bytes are hashed, so it has no padding");

// Failures from `timeout` on end the group.
enum class Failure : int32_t { none, capacity, invalid, timeout, peer_lost, mismatch };
constexpr Failure kFirstFatal = Failure::timeout;

// A rank's report to the host. The first coop of an op that fails claims it and fills it in.
struct Report {
  uint64_t epoch;  // of the op that failed, written last
  Failure failure;
  OpKind op;
  int32_t rank;    // the reporting rank; for `capacity`, the rank that lacks room
  int32_t peer;    // the other rank that the failure is about, or `rank`
  int64_t detail;  // for `invalid`: see OpDefaults::describe_invalid; or kElsewhere
  int64_t expected;
  int64_t seen;
};
constexpr int64_t kElsewhere = -1;  // another rank has the invalid argument

// The buffers of a rank that its peers may use in an op.
struct WindowAddresses {
  void* buffers[kMailBuffers];
};

// A source rank writes this at a peer when an op begins: where the peer may write, and what the source will send.
struct Mail {
  void* buffers[kMailBuffers];  // as the peer sees them
  int32_t ints[kMailNumbers];   // the op decides what they mean
  float floats[kMailNumbers];
};

struct alignas(128) BarrierWords {
  uint64_t arrived, released;
};

// An op in a rank's flight recorder. The host may read it at any time, word by word.
enum class Outcome : uint64_t { running, delivered, failed };
struct OpRecord {
  uint64_t epoch;
  uint64_t begin_ns, end_ns;  // by the device's clock
  uint64_t outcome;
  uint64_t site;  // number of the call site's text
  Signature signature;
};
constexpr int kRecordedOps = 64;

// The most items that senders claim without a ticket (PushItems). A rank has fewer senders.
constexpr int kMaxClaims = 2048;

constexpr int kCounters = 64;  // words that CTAs count in: atomics on one word would wait for each other

// A flag holds the stamp of the last op that raised it: the op's epoch, with the tag of its signature in the low bits.
// Epochs only rise, so flags are never reset. The right epoch with another tag means that the peer runs another op.
// Only `acknowledged` holds no stamp: it becomes 1 when the rank gives up, which ends the group.
constexpr int kTagBits = 24;

// Other processes map this struct, so its layout is ABI. Only dispatch uses `mailed`, `laid_out`, `placed`,
// `first_ctas` and `first_begun`.
struct alignas(128) SignalPad {
  uint64_t epoch;                              // ops finished by this rank
  uint64_t abort;                              // if the group has failed: 1 + the rank that did not answer
  uint64_t never;                              // an abort word that is never raised
  uint64_t reported;                           // epoch of the last op that claimed the report
  uint64_t refused;                            // epoch of the last op in which a peer did not send all rows
  uint64_t timeline;                           // address of the `Timeline` during a profile, or 0
  alignas(128) OpRecord ops[kRecordedOps];     // by epoch
  alignas(128) uint64_t waited_ns[kMaxRanks];  // by peer: time of long waits for it
  alignas(128) uint64_t received_bytes[kCounters][kMaxRanks];  // by CTA and peer: its rows, over all ops
  alignas(128) uint64_t posted[kMaxRanks];                     // by source: its addresses are here
  alignas(128) uint64_t mailed[kMaxRanks];                     // by source: the rest of its mail is here
  alignas(128) uint64_t laid_out;                              // the layout of this rank's rows is known
  alignas(128) uint64_t placed[kMaxRanks];                     // by source: the rows of its tokens here are known
  alignas(128) uint64_t delivered[kMaxRanks][kMaxFlags];  // by source: its rows of a chunk are here, or can be fetched
  alignas(128) uint64_t acknowledged[kMaxRanks];          // by source: it has given up and writes here no more
  BarrierWords first_ctas, all_ctas;                      // barriers among CTAs of this rank
  alignas(128) uint64_t first_begun, members;             // words of join() (comm/ctas.h): of routing CTAs, of all
  alignas(128) uint64_t exited;                           // coops that are done with the op
  alignas(128) uint64_t ticket;                           // the next item of the work queue
  alignas(128) uint64_t push_ticket;                      // the next item to push
  alignas(128) uint64_t pushed[kMaxFlags];                // how much of a chunk has been pushed
  alignas(128) uint64_t claimed[kMaxClaims];              // by item: epoch of the last op in which it was claimed
  // By the parity of the epoch, so that a peer that is one op ahead does not overwrite mail in use.
  Mail mail[2][kMaxRanks];
};

// One lane calls, when no other coop is left in the op.
JAX_EP_FN void clear_counts(SignalPad* signal_pad) {
  store_relaxed(&signal_pad->first_ctas.arrived, uint64_t{0});
  store_relaxed(&signal_pad->all_ctas.arrived, uint64_t{0});
  store_relaxed(&signal_pad->exited, uint64_t{0});
  store_relaxed(&signal_pad->first_begun, uint64_t{0});
  store_relaxed(&signal_pad->members, uint64_t{0});
  store_relaxed(&signal_pad->ticket, uint64_t{0});
  store_relaxed(&signal_pad->push_ticket, uint64_t{0});
}

// Passed to every kernel by value. A launch reads its arguments from uncached memory, 64 bytes at a time, so the first
// 64 bytes hold the fields that all coops need first.
struct Comm {
  int rank;
  int size;
  bool poison;   // debug: fill results and used mail with 0xFF
  uint32_t tag;  // a hash of the signature, of kTagBits
  uint64_t timeout_ns;
  Report* report;  // host memory
  SignalPad* own_signal_pad;
  // The signal pads of all ranks, as this rank sees them. Loading some of them from memory took 3 % longer for few
  // tokens (`bench moe --shapes T=128`).
  SignalPad* signal_pads[kMaxRanks];
  // By buffer of the mail and peer: the distance from the address here to the address there. Null in one process.
  const int64_t* peer_offsets[kMailBuffers];
  // Read only by the flight recorder, so last.
  Signature signature;
  int32_t site;
};

}  // namespace jax_ep
