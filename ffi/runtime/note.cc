#include "runtime/note.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace jax_ep {
namespace {

constexpr std::size_t kMaxDescriptors = 253;  // that a message can carry (SCM_MAX_FD)

// The headers of a message with room for `Descriptors` descriptors.
template <std::size_t Descriptors>
struct Envelope {
  alignas(cmsghdr) char control[CMSG_SPACE(Descriptors * sizeof(int))] = {};
  iovec body;
  msghdr header{};

  explicit Envelope(Note* note) : body{note, sizeof(Note)} {
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
};

// Takes all descriptors of a message, so that none stays open.
std::vector<Descriptor> take_descriptors(msghdr* header) {
  std::vector<Descriptor> taken;
  for (cmsghdr* each = CMSG_FIRSTHDR(header); each; each = CMSG_NXTHDR(header, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= each->cmsg_len; at += sizeof(int)) {
      int number;
      std::memcpy(&number, CMSG_DATA(each) + at, sizeof(int));
      taken.emplace_back(number);
    }
  }
  return taken;
}

// The rule that a whole note breaks, or nothing.
std::string breach_of(const Note& note, std::size_t descriptors) {
  const auto kind = static_cast<int32_t>(note.kind);
  if (kind < 0 || note.kind > Note::Kind::goodbye) return concat("it sent a note of an unknown kind ", kind);
  const std::size_t due = note.kind == Note::Kind::share;
  if (descriptors != due) return concat("it sent a note with ", descriptors, " descriptors, not ", due);
  if (!std::memchr(note.text, 0, sizeof(note.text))) return "it sent a text without an end";
  return "";
}

}  // namespace

Sent send_note(int socket, const Note& note, int descriptor) {
  Note copy = note;
  Envelope<1> envelope(&copy);
  if (descriptor < 0) {
    envelope.header.msg_control = nullptr;
    envelope.header.msg_controllen = 0;
  } else {
    cmsghdr* attached = CMSG_FIRSTHDR(&envelope.header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(attached), &descriptor, sizeof(int));
  }
  ssize_t sent;
  do sent = sendmsg(socket, &envelope.header, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(sizeof(Note))) return Sent::sent;
  // ETOOMANYREFS: too many descriptors of this user are on their way
  const bool full = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ETOOMANYREFS;
  return full ? Sent::later : Sent::gone;
}

Received receive_note(int socket) {
  Received received{Received::What::nothing, {}, {}, ""};
  Envelope<kMaxDescriptors> envelope(&received.note);
  ssize_t bytes;
  // A peer that closes before it has read everything leaves ECONNRESET once, before what it wrote.
  do bytes = recvmsg(socket, &envelope.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  while (bytes < 0 && (errno == EINTR || errno == ECONNRESET));
  if (bytes < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK) received.what = Received::What::end;
    return received;
  }
  std::vector<Descriptor> descriptors = take_descriptors(&envelope.header);
  if (bytes == 0) {
    received.what = Received::What::end;
  } else if (bytes != static_cast<ssize_t>(sizeof(Note)) || envelope.header.msg_flags & MSG_TRUNC) {
    received.breach = concat("it sent a message that is no note: ", bytes, " bytes");
  } else if (envelope.header.msg_flags & MSG_CTRUNC) {
    received.breach = "a descriptor that it sent did not arrive; this process may have too many open";
  } else {
    received.breach = breach_of(received.note, descriptors.size());
    received.what = Received::What::note;
    if (received.breach.empty() && !descriptors.empty()) received.descriptor = std::move(descriptors.front());
  }
  if (!received.breach.empty()) received.what = Received::What::breach;
  return received;
}

}  // namespace jax_ep
