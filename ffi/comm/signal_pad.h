// The signal pad of a rank, mapped by every peer. Its layout is the same on all ranks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "comm/dtype.h"

namespace jax_ep {

constexpr int kMaxRanks = 64;
constexpr int kMaxFlags = 1024;     // chunks of a source that have a flag each: a matrix has many row blocks
constexpr int kMailNumbers = 4096;  // of each type in a mailbox: bounds what the ranks of an op tell each other
constexpr int kMailBuffers = 5;     // whose addresses a rank posts

enum class OpKind : int32_t;  // kernels/ops.h

// What an op is called with. Ranks that run an op together call it with equal signatures. kernels/signature.h fills one
// in from the op's spec, and checks that the sizes and options of every spec have room here.
constexpr int kSignatureSizes = 12;
constexpr int kSignatureOptions = 32;
struct Signature {
  OpKind op;
  DType dtype, operand_dtype;  // rows, or a product's result; a product's operands
  uint32_t options;            // one bit each
  int64_t sizes[kSignatureSizes];
  int32_t plan[4];  // of a launch that the ranks must agree on; otherwise zero
};
static_assert(std::has_unique_object_representations_v<Signature>, "its bytes are hashed, so it has no padding");

// Failures from `timeout` on end the group.
enum class Failure : int32_t { none, capacity, invalid, timeout, peer_lost, mismatch };
constexpr Failure kFirstFatal = Failure::timeout;

// What a rank reports to the host. The first coop of an op to fail claims the report, and fills it in.
struct Report {
  uint64_t epoch;  // of the op that failed, written last
  Failure failure;
  OpKind op;
  int32_t rank;    // that reports; for `capacity`, the rank that lacks room
  int32_t peer;    // the other rank that the failure is about, or `rank`
  int64_t detail;  // of `invalid`: what the op's spec describes (OpDefaults::describe_invalid), or kElsewhere
  int64_t expected;
  int64_t seen;
};
constexpr int64_t kElsewhere = -1;  // what another rank was called with is invalid

// The buffers of a rank that its peers may use in an op.
struct WindowAddresses {
  void* buffers[kMailBuffers];
};

// What a source rank leaves at a peer when an op begins: where the peer may write, and what the source will send.
struct Mail {
  void* buffers[kMailBuffers];  // as the peer sees them
  int32_t ints[kMailNumbers];   // the op decides what they mean
  float floats[kMailNumbers];
};

// A barrier among some CTAs of a rank. Each such barrier has words of its own.
struct alignas(128) BarrierWords {
  uint64_t arrived, released;
};

// An op in a rank's flight recorder. Op::record_begin() begins it, and the coop that finishes the op ends it. The
// host may read it at any time, word by word.
enum class Outcome : uint64_t { running, delivered, failed };
struct OpRecord {
  uint64_t epoch;
  uint64_t begin_ns, end_ns;  // by the device's clock
  uint64_t outcome;
  uint64_t site;  // of the call: a number of its text
  Signature signature;
};
constexpr int kRecordedOps = 64;

// The most items that senders claim without a ticket (PushItems). A rank has fewer senders.
constexpr int kMaxClaims = 2048;

constexpr int kCounters = 64;  // words that CTAs count in: atomics on one word would wait for each other

// A flag holds the stamp of the last op that raised it. A stamp is the op's epoch, with the tag of its signature in the
// low bits. Epochs only rise, so flags are never reset. A waiter that finds the right epoch with another tag knows that
// the peer runs another op. `acknowledged` alone holds no stamp but 1: a rank gives up once, as that ends the group.
constexpr int kTagBits = 24;

// All ops' flags live in this one struct because other processes map it: its layout is ABI. Only dispatch uses
// `mailed`, `laid_out`, `placed`, `first_ctas` and `first_begun`.
struct alignas(128) SignalPad {
  uint64_t epoch;     // ops finished by this rank
  uint64_t abort;     // raised by any rank if the group has failed: 1 + the rank that did not answer
  uint64_t never;     // an abort word that is never raised, for waits that must not be aborted
  uint64_t reported;  // epoch of the last op that claimed the report
  uint64_t refused;   // epoch of the last op in which a peer did not send what this rank waits for
  uint64_t timeline;  // where this rank's `Timeline` is, during a profile; otherwise 0
  alignas(128) OpRecord ops[kRecordedOps];                     // by epoch
  alignas(128) uint64_t waited_ns[kMaxRanks];                  // by peer: time of long waits for it
  alignas(128) uint64_t received_bytes[kCounters][kMaxRanks];  // by CTA and peer: its rows, over all ops
  alignas(128) uint64_t posted[kMaxRanks];                     // by source: its addresses are here
  alignas(128) uint64_t mailed[kMaxRanks];                     // by source: the rest of its mail is here
  alignas(128) uint64_t laid_out;                              // where the rows of this rank lie is known
  alignas(128) uint64_t placed[kMaxRanks];                     // by source: where its rows go here is known
  alignas(128) uint64_t delivered[kMaxRanks][kMaxFlags];  // by source: its rows of a chunk are here, or can be fetched
  alignas(128) uint64_t acknowledged[kMaxRanks];          // by source: it has given up and writes here no more
  BarrierWords first_ctas, all_ctas;                      // barriers among CTAs of this rank
  alignas(128) uint64_t first_begun, members;             // words of join() (comm/ctas.h): of routing CTAs, of all
  alignas(128) uint64_t exited;                           // coops that are done with the op
  alignas(128) uint64_t ticket;                           // the next item of the work queue
  alignas(128) uint64_t push_ticket;                      // the next row to push
  alignas(128) uint64_t pushed[kMaxFlags];                // how much of a chunk has been pushed
  alignas(128) uint64_t claimed[kMaxClaims];              // by item: epoch of the last op in which it was claimed
  // Two mailboxes per source, by the parity of the epoch. So a peer that is one op ahead never overwrites mail that is
  // still in use.
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

// Handed to every kernel by value. A launch reads its arguments from uncached memory, 64 bytes at a time, so the first
// 64 bytes hold what all coops need at once.
struct Comm {
  int rank;
  int size;
  bool poison;   // debug: fill results and used mail with 0xFF
  uint32_t tag;  // a hash of the signature, of kTagBits
  uint64_t timeout_ns;
  Report* report;  // host memory
  SignalPad* own_signal_pad;
  // The signal pads of all ranks, as this rank sees them. The host asks Group::signal_pad. They are passed by value
  // because a kernel that loaded some of them from memory took 3 % longer over few tokens (`bench moe --shapes T=128`).
  SignalPad* signal_pads[kMaxRanks];
  // For each buffer of the mail: by peer, the distance from the address here to the address there. Null if all ranks
  // are in one process.
  const int64_t* peer_offsets[kMailBuffers];
  // Only the flight recorder reads these, so they come last.
  Signature signature;
  int32_t site;
};

}  // namespace jax_ep
